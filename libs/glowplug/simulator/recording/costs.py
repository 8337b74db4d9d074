"""What the steps of a recorded engine cost, read off its answered requests.

- Prefill: a line through the seconds to the first token over the prompt's tokens, of requests that found an idle
  engine: nothing waited there, so it is the work alone.
- A later token: a line through its seconds over how many others were decoded at the same time, once the prompts that
  were read in between are taken out, which the simulation charges by itself.
- Pace: what each request took over what these two lines say of it. It is kept request by request, because engines are
  not as fast every time; the n-th request of a replay is as slow as the n-th that was recorded.

Both slopes are medians (Theil's method), for a machine that was busy elsewhere for a while makes a few requests many
times as slow; the paces bring them back, each where it was. The pace of prompts that waited for others is not known:
the line of prefill is as high as the mean.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Any, Final

Row = dict[str, Any]
LEAST_S: Final = 1e-4
FEW: Final = 3  # requests that found an idle engine: with fewer the others are read as well
TOGETHER_S: Final = 0.05  # what waited for a start is sent to its engine within this time
PACES: Final = (0.05, 100.0)  # what is outside is not the engine's pace: a machine that slept, a clock that jumped
EVEN: Final = 0.03  # mean distance of the paces from 1 below which they tell nothing


class Busy:
    """How many requests one engine decoded, over time."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        self._times = [at_s for at_s, _ in changes]
        self._counts = list(accumulate(change for _, change in changes))
        widths = [after - at_s for at_s, after in zip(self._times, self._times[1:], strict=False)]
        self._areas = [0.0, *accumulate(w * n for w, n in zip(widths, self._counts, strict=False))]

    def mean(self, begin: float, end: float) -> float:
        """Requests under way between two times, on average."""
        return (self._area(end) - self._area(begin)) / (end - begin) if end > begin else 0.0

    def _area(self, at_s: float) -> float:
        number = bisect_left(self._times, at_s)
        if number == 0:
            return 0.0
        return self._areas[number - 1] + (at_s - self._times[number - 1]) * self._counts[number - 1]


class Costs:
    """The costs of one model: `tree` as a scenario writes them, and `pace` of its requests in the order they came."""

    def __init__(self, rows: Sequence[Row], prompt_tokens: int) -> None:
        """`prompt_tokens`: of requests whose own number is not known."""
        self._rows = sorted(rows, key=lambda r: r["arrived_at"])
        sound = [r for r in self._rows if not r.get("error_code") and r["ttft_s"] > 0]
        self._prompt = prompt_tokens
        self._sound = sound
        self._streamed = [r for r in sound if _is_streamed(r)]
        self._by_instance: dict[str, list[Row]] = {}
        for row in self._streamed:
            self._by_instance.setdefault(row["instance_id"], []).append(row)
        self._sent = {name: sorted(_sent_at(row) for row in mine) for name, mine in self._by_instance.items()}
        self._busy = {name: Busy([_decoded(row) for row in mine]) for name, mine in self._by_instance.items()}
        self._whole_s = 0.0 if self._streamed else _slope_of_whole(sound)
        self.prefill_base_s, self.prefill_s = self._prefill()
        self.decode_base_s, self.decode_s = self._decode()

    @property
    def tree(self) -> Row:
        """Milliseconds, as `costs` of a model has them."""
        return {
            "prefill_ms": [round(self.prefill_base_s * 1e3, 4), round(self.prefill_s * 1e3, 6)],
            "decode_ms": [round(self.decode_base_s * 1e3, 4), round(self.decode_s * 1e3, 6)],
        }

    @property
    def pace(self) -> list[list[float]]:
        """Of its prompt and of its later tokens, two numbers a request; empty where all are as fast as the costs
        say."""
        paces = [
            [self._prompt_pace(row) if self._is_typical(row) else 1.0, self._later_pace(row)]
            if row.get("ttft_s") and not row.get("error_code") and _is_streamed(row)
            else [1.0, 1.0]
            for row in self._rows
        ]
        if not paces or max(sum(abs(one[n] - 1) for one in paces) / len(paces) for n in (0, 1)) < EVEN:
            return []
        return [[round(pace, 4) for pace in one] for one in paces]

    def first_s(self, instance_id: str) -> float:
        """What the first prefill of an engine took beyond what the others do, of all that it was sent at first."""
        mine = sorted(self._by_instance.get(instance_id, ()), key=_sent_at)
        together = [row for row in mine if _sent_at(row) <= _sent_at(mine[0]) + TOGETHER_S]
        if not together:
            return 0.0
        usual = self.prefill_base_s + self.prefill_s * sum(self._tokens(row) for row in together)
        return max(0.0, float(min(row["ttft_s"] - row["queue_s"] for row in together)) - usual)

    def _tokens(self, row: Row) -> int:
        return int(row["prompt_tokens"] or self._prompt)

    def _prefill(self) -> tuple[float, float]:
        if not self._streamed:
            later = [(self._tokens(r), r["e2e_s"] - r["queue_s"] - self._whole_s * (r["response_tokens"] - 1))
                     for r in self._sound]  # fmt: skip
            return _line([(tokens, max(LEAST_S, seconds)) for tokens, seconds in later]) if later else (0.02, 1e-4)
        warm = [row for row in self._streamed if not row["cold"]] or self._streamed
        alone = [row for row in warm if self._was_alone(row)]
        some = alone if len(alone) >= FEW else warm
        return _line([(self._tokens(row), max(LEAST_S, row["ttft_s"] - row["queue_s"])) for row in some], mean=True)

    def _was_alone(self, row: Row) -> bool:
        """Whether nothing else ran on its engine from when it was sent there until its first token."""
        name, sent_at = row["instance_id"], _sent_at(row)
        begin, _ = _decoded(row)
        in_between = bisect_left(self._sent[name], begin) - bisect_left(self._sent[name], sent_at)
        return in_between <= 1 and self._busy[name].mean(sent_at, begin) < 0.01

    def _decode(self) -> tuple[float, float]:
        if not self._streamed:
            return self._whole_s or 0.03, 0.0
        points = []
        for row in self._streamed:
            begin, end = _decoded(row)
            seconds = (end - begin - self._read_meanwhile(row)) / (row["response_tokens"] - 1)
            points.append((self._busy[row["instance_id"]].mean(begin, end), max(LEAST_S, seconds)))
        return _line(points)

    def _read_meanwhile(self, row: Row) -> float:
        """Seconds for which its engine read other prompts while it decoded this one."""
        begin, end = _decoded(row)
        sent = self._sent[row["instance_id"]]
        num = bisect_left(sent, end) - bisect_left(sent, begin)
        typical = self.prefill_base_s + self.prefill_s * self._prompt
        return min(num * typical, 0.5 * (end - begin))

    def _is_first(self, row: Row) -> bool:
        """Whether it is of the first that its engine was sent, whose pages were cold: that is `first_s`."""
        return _sent_at(row) <= self._sent[row["instance_id"]][0] + TOGETHER_S

    def _is_typical(self, row: Row) -> bool:
        """Whether its time to the first token is that of its own prompt."""
        return not row["cold"] and not self._is_first(row) and self._was_alone(row)

    def _prompt_pace(self, row: Row) -> float:
        return _bounded((row["ttft_s"] - row["queue_s"]) / (self.prefill_base_s + self.prefill_s * self._tokens(row)))

    def _later_pace(self, row: Row) -> float:
        begin, end = _decoded(row)
        num = max(1.0, self._busy[row["instance_id"]].mean(begin, end))
        steps_s = (row["response_tokens"] - 1) * (self.decode_base_s + self.decode_s * num)
        return _bounded((end - begin - self._read_meanwhile(row)) / steps_s)


def _bounded(pace: float) -> float:
    return float(min(max(pace, PACES[0]), PACES[1]))


def _is_streamed(row: Row) -> bool:
    """Whether its tokens came one after the other."""
    return row["response_tokens"] > 1 and bool(row.get("stream") or row["e2e_s"] > row["ttft_s"] * 1.01)


def _sent_at(row: Row) -> float:
    return float(row["arrived_at"] + row["queue_s"])


def _decoded(row: Row) -> tuple[float, float]:
    """From its first token to its last."""
    return float(row["arrived_at"] + row["ttft_s"]), float(row["arrived_at"] + row["e2e_s"])


def _slope_of_whole(rows: Sequence[Row]) -> float:
    """Seconds of a token of requests that do not stream: the slope of the whole answer's over its tokens, or all of
    their time where they are all as long."""
    whole = [(row["response_tokens"], max(LEAST_S, row["e2e_s"] - row["queue_s"])) for row in rows]
    return (slope(whole) or min(seconds / max(1, tokens) for tokens, seconds in whole)) if whole else 0.0


def _line(points: Sequence[tuple[float, float]], *, mean: bool = False) -> tuple[float, float]:
    """(what it is at 0, what each more adds), neither below 0: Theil's line, of the slopes between each point of the
    lower half and its counterpart of the upper; as high as the median of the points, or as their mean."""
    some = sorted(points)
    half = (len(some) + 1) // 2
    pairs = [(a, b) for a, b in zip(some, some[half:], strict=False) if b[0] > a[0]]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
    typical_x, typical_y = median(x for x, _ in some), median(y for _, y in some)
    per = min(max(0.0, median(slopes)), typical_y / typical_x) if len(slopes) >= FEW and typical_x > 0 else 0.0
    rests = [y - per * x for x, y in some]
    return max(LEAST_S, fmean(rests) if mean else median(rests)), per


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of least squares, from 0 up to the line through 0 and the means."""
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    per = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return min(max(0.0, per), mean_y / mean_x) if mean_x else 0.0
