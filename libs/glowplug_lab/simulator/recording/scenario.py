"""A recorded fleet as a scenario: nodes, arrivals, and models with estimated costs and starts.

KV bytes per token come from an engine's reported cache, else KV memory over admitted tokens; paces include the recorded
slowdown by neighbours, so the replay must not repeat it. Other times are a live fleet's defaults.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from glowplug.policies.systems import DEFAULT, system
from glowplug_lab.simulator.recording.read import Recording, Row
from glowplug_lab.simulator.recording.starts import (
    DRAIN_QUIET_S,
    TICK_S,
    ModelStarts,
    alone,
    drain_quiet_s,
    pooled,
    trees_of,
)
from glowplug_lab.simulator.scenario.tree import Tree, merge, with_system
from glowplug_lab.simulator.setup import ABILITIES

# Step costs, estimated from answered requests:
# - Prefill: a line of seconds to the first token over prompt tokens, from requests that found an idle engine.
# - A later token: a line of seconds over concurrent decodes, less prefills in between (simulated separately).
# - Pace: each request's time over these lines, kept for the n-th request of a replay.
# Slopes are medians (Theil's method), against outliers of a busy machine. Waiting prompts have no known pace, so the
# prefill's line goes through the mean.

LEAST_S: Final = 1e-4
FEW: Final = 3  # with fewer, use requests on busy engines too
TOGETHER_S: Final = 0.05  # in which a started engine is sent the requests that waited
HELD: Final = 0.9  # decode spent on other prompts, hiding its pace
PACES: Final = (0.05, 100.0)  # beyond: suspended machine or clock jump
EVEN: Final = 0.03  # mean deviation that is noise


class Busy:
    """`spans`: (begin, end) of decodes."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
        self._times = [at_s for at_s, _ in changes]
        self._counts = list(accumulate(change for _, change in changes))
        widths = [after - at_s for at_s, after in zip(self._times, self._times[1:], strict=False)]
        self._areas = [0.0, *accumulate(w * n for w, n in zip(widths, self._counts, strict=False))]

    def mean(self, begin: float, end: float) -> float:
        return (self._area(end) - self._area(begin)) / (end - begin) if end > begin else 0.0

    def _area(self, at_s: float) -> float:
        number = bisect_left(self._times, at_s)
        if number == 0:
            return 0.0
        return self._areas[number - 1] + (at_s - self._times[number - 1]) * self._counts[number - 1]


class Costs:
    """`tree` for a scenario, and `pace` in order of arrival."""

    def __init__(self, rows: Sequence[Row], prompt_tokens: int) -> None:
        """`prompt_tokens` replaces unknown numbers."""
        self._rows = sorted(rows, key=lambda r: r["arrived_at"])
        sound = [r for r in self._rows if not r.get("error_code") and r["ttft_s"] > 0]
        self._prompt = prompt_tokens
        self._sound = sound
        self._streamed = [r for r in sound if _is_streamed(r)]
        self._by_instance: dict[str, list[Row]] = {}
        for row in self._streamed:
            self._by_instance.setdefault(row["instance_id"], []).append(row)
        self._sent = {name: sorted(_sent_at(row) for row in mine) for name, mine in self._by_instance.items()}
        self._firsts = {name: sorted(_decoded(row)[0] for row in mine) for name, mine in self._by_instance.items()}
        self._busy = {name: Busy([_decoded(row) for row in mine]) for name, mine in self._by_instance.items()}
        self._together = {  # each engine's first requests, by first token
            name: sorted(filter(self._is_first, mine), key=_decoded) for name, mine in self._by_instance.items()
        }
        self._whole_s = 0.0 if self._streamed else _slope_of_whole(sound)
        self.prefill_base_s, self.prefill_s = self._prefill()
        self.decode_base_s, self.decode_s = self._decode()

    @property
    def tree(self) -> Row:
        """Milliseconds."""
        return {
            "prefill_ms": [round(self.prefill_base_s * 1e3, 4), round(self.prefill_s * 1e3, 6)],
            "decode_ms": [round(self.decode_base_s * 1e3, 4), round(self.decode_s * 1e3, 6)],
        }

    @property
    def pace(self) -> list[list[float]]:
        """[prompt pace, later tokens' pace] per request; empty if near the costs."""
        paces = [
            [self._prompt_pace(row), self._later_pace(row)]
            if row.get("ttft_s") and not row.get("error_code") and _is_streamed(row)
            else [1.0, 1.0]
            for row in self._rows
        ]
        if not paces or max(sum(abs(one[n] - 1) for one in paces) / len(paces) for n in (0, 1)) < EVEN:
            return []
        return [[round(pace, 4) for pace in one] for one in paces]

    def first_s(self, instance_id: str) -> float:
        """Extra seconds of an engine's first prefill, of one prompt; the rest of a first group follow together
        (`_rest_pace`)."""
        if instance_id not in self._together:
            return 0.0
        first = self._together[instance_id][0]
        usual_s = self.prefill_base_s + self.prefill_s * self._tokens(first)
        return max(0.0, float(first["ttft_s"] - first["queue_s"]) - usual_s)

    def _rest_pace(self, row: Row) -> float:
        first, *rest = self._together[row["instance_id"]]
        if row is first:
            return 1.0
        usual_s = self.prefill_base_s + self.prefill_s * sum(self._tokens(one) for one in rest)
        return _bounded((_decoded(row)[0] - _decoded(first)[0]) / usual_s)

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
        name, sent_at = row["instance_id"], _sent_at(row)
        begin, _ = _decoded(row)
        in_between = bisect_left(self._sent[name], begin) - bisect_left(self._sent[name], sent_at)
        return in_between <= 1 and self._busy[name].mean(sent_at, begin) < 0.01

    def _decode(self) -> tuple[float, float]:
        if not self._streamed:
            return self._whole_s or 0.03, 0.0
        points = []
        for row in [row for row in self._streamed if not self._was_held(row)] or self._streamed:
            begin, end = _decoded(row)
            seconds = (end - begin - self._read_meanwhile(row)) / (row["response_tokens"] - 1)
            points.append((self._busy[row["instance_id"]].mean(begin, end), max(LEAST_S, seconds)))
        return _line(points)

    def _read_meanwhile(self, row: Row) -> float:
        """Usual prefill time, or the actual time for a started engine's first group (`_rest_pace`)."""
        begin, end = _decoded(row)
        firsts = self._firsts[row["instance_id"]]
        num = bisect_right(firsts, end) - bisect_right(firsts, begin)
        typical = self.prefill_base_s + self.prefill_s * self._prompt
        counted_s = min(num * typical, 0.5 * (end - begin))
        if not self._is_first(row):
            return counted_s
        all_read_at, _ = _decoded(self._together[row["instance_id"]][-1])
        return max(counted_s, min(end, all_read_at) - begin)

    def _was_held(self, row: Row) -> bool:
        begin, end = _decoded(row)
        return self._read_meanwhile(row) > HELD * (end - begin)

    def _is_first(self, row: Row) -> bool:
        return _sent_at(row) <= self._sent[row["instance_id"]][0] + TOGETHER_S

    def _is_typical(self, row: Row) -> bool:
        return not row["cold"] and not self._is_first(row) and self._was_alone(row)

    def _prompt_pace(self, row: Row) -> float:
        if self._is_first(row):
            return self._rest_pace(row)
        if not self._is_typical(row):
            return 1.0
        return _bounded((row["ttft_s"] - row["queue_s"]) / (self.prefill_base_s + self.prefill_s * self._tokens(row)))

    def _later_pace(self, row: Row) -> float:
        if self._was_held(row):
            return 1.0
        begin, end = _decoded(row)
        num = max(1.0, self._busy[row["instance_id"]].mean(begin, end))
        steps_s = (row["response_tokens"] - 1) * (self.decode_base_s + self.decode_s * num)
        return _bounded((end - begin - self._read_meanwhile(row)) / steps_s)


def _bounded(pace: float) -> float:
    return float(min(max(pace, PACES[0]), PACES[1]))


def _is_streamed(row: Row) -> bool:
    return row["response_tokens"] > 1 and bool(row.get("stream") or row["e2e_s"] > row["ttft_s"] * 1.01)


def _sent_at(row: Row) -> float:
    return float(row["arrived_at"] + row["queue_s"])


def _decoded(row: Row) -> tuple[float, float]:
    """Times of the first and last token."""
    return float(row["arrived_at"] + row["ttft_s"]), float(row["arrived_at"] + row["e2e_s"])


def _slope_of_whole(rows: Sequence[Row]) -> float:
    whole = [(row["response_tokens"], max(LEAST_S, row["e2e_s"] - row["queue_s"])) for row in rows]
    return (slope(whole) or min(seconds / max(1, tokens) for tokens, seconds in whole)) if whole else 0.0


def _line(points: Sequence[tuple[float, float]], *, mean: bool = False) -> tuple[float, float]:
    """Theil's (intercept, slope): median slope between counterparts of the two halves, through the points' median or
    mean."""
    some = sorted(points)
    half = (len(some) + 1) // 2
    pairs = [(a, b) for a, b in zip(some, some[half:], strict=False) if b[0] > a[0]]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs]
    typical_x, typical_y = median(x for x, _ in some), median(y for _, y in some)
    per = min(max(0.0, median(slopes)), typical_y / typical_x) if len(slopes) >= FEW and typical_x > 0 else 0.0
    rests = [y - per * x for x, y in some]
    return max(LEAST_S, fmean(rests) if mean else median(rests)), per


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares, bounded by 0 and by the line through the origin and the means."""
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    per = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return min(max(0.0, per), mean_y / mean_x) if mean_x else 0.0


ARRIVALS = "arrivals.csv"
KIND = "recorded"
PCIE_BYTES_PER_S: Final = 32e9  # not recorded: no bound
LIVE: Final[Tree] = {
    "agent_tick_s": TICK_S,
    "agent": {"drain_quiet_s": DRAIN_QUIET_S},
    "autoscaler": {"rest_s": 5.0},
    "placer": {"evict_grace_s": 300.0, "sleeper_patience": 1.0},
}
"""Defaults of the services' settings that are others than the simulator's own."""
_KEPT = (
    "engine", "weights_bytes", "kv_bytes", "context_tokens", "max_concurrency", "max_queue", "max_wait_s",
    "keep_alive_s", "min_instances", "max_instances", "on_cold", "pinned", "preload", "priority", "slo", "num_gpus",
    "asleep",
)  # fmt: skip


def scenario_of(recording: Recording) -> Tree:
    """`arrivals.csv` beside the scenario is its workload."""
    emulated = any(row.get("emulated") for row in recording.finished)
    cores, by_model = (0.0, recording.starts.by_model) if emulated else alone(recording.starts.by_model)
    quiet_s = drain_quiet_s({model.get("engine", "") for model in recording.models.values()})
    params: Tree = merge(LIVE, {"share_compute": False, "agent": {"drain_quiet_s": quiet_s}})
    if recording.starts.bus:
        params["bus_s"] = round(max(1e-4, median(recording.starts.bus)), 5)
    tree = {
        "name": "replay",
        "title": f"Replay of {Path(recording.source).name}",
        "seconds": recording.seconds,
        "servers": _servers(recording, cores),
        "models": [_model(recording, key, model, by_model) for key, model in sorted(recording.models.items())],
        "policies": _policies(recording.policy_names()),
        "params": params,
        "workload": {"source": ARRIVALS},
    }
    return with_system(tree)


def _policies(named: Mapping[str, str]) -> str | Mapping[str, str]:
    """The default system adds the missing kinds."""
    return DEFAULT if named.items() <= system(DEFAULT).policies.items() else named


def write_arrivals(recording: Recording, path: Path) -> None:
    lines = [f"{at_s:.6f},{key},{prompt},{response}" for at_s, key, prompt, response in recording.arrivals()]
    path.write_text("\n".join(["t_s,model,prompt_tokens,response_tokens", *lines]) + "\n", encoding="utf-8")


def _servers(recording: Recording, start_cores: float) -> list[Row]:
    """Without recorded fetches, weights count as in host memory: emulated engines need none, others had fetched
    them."""
    sizes_of_weights = [_weights(model) for model in recording.models.values()]
    in_host = not recording.rates
    least = sum(sizes_of_weights) if in_host else 2 * max(sizes_of_weights, default=0)
    shapes: dict[tuple[Any, ...], int] = {}
    for node in recording.nodes.values():
        sizes = [gpu["total_bytes"] for gpu in node["gpus"]]
        if not sizes:
            continue
        links = [link for link in node.get("links") or () if link["link_id"].endswith("/nic")]
        reported = max((link["bytes_per_s"] for link in links), default=0.0)
        rate = reported or (float(f"{median(recording.rates):.4g}") if recording.rates else 2e9)
        cache = max(node.get("host_cache_bytes") or 0, least)
        abilities = tuple(sorted(a for a in node.get("abilities") or () if a.rpartition(":")[2] in ABILITIES))
        shape = (len(sizes), min(sizes), rate, cache, abilities)
        shapes[shape] = shapes.get(shape, 0) + 1
    return [
        {
            "name": "node" if len(shapes) == 1 else f"node{number}",
            "num_servers": num,
            "num_gpus": num_gpus,
            "gpu_bytes": gpu_bytes,
            "gpu_kind": KIND,
            "network_bytes_per_s": rate,
            "pcie_bytes_per_s": PCIE_BYTES_PER_S,
            "host_cache_bytes": cache,
            "weights_in_host": in_host,
            "start_cores": start_cores,
            "abilities": list(abilities),
        }
        for number, ((num_gpus, gpu_bytes, rate, cache, abilities), num) in enumerate(shapes.items(), start=1)
    ]


def _weights(model: Row) -> int:
    return int(model.get("weights_bytes") or (model.get("weights") or {}).get("num_bytes") or 1)


def _model(recording: Recording, key: str, model: Row, by_model: Mapping[str, ModelStarts]) -> Row:
    kept = {name: model[name] for name in _KEPT if model.get(name) is not None}
    kept |= {"weights_shared": True} if model.get("weights_shared") else {}
    weights = _weights(model)
    kv_bytes = model.get("kv_bytes") or 1
    tokens = recording.kv_tokens.get(key) or model.get("context_tokens", 2048) * model.get("max_concurrency", 8)
    own = [row for row in recording.finished if row["model_key"] == key]
    costs = Costs(own, recording.typical(key)[0])
    models = recording.models
    alike = {name: one for name, one in by_model.items() if models.get(name, {}).get("engine") == model.get("engine")}
    others = pooled(alike, {name: _weights(other) for name, other in models.items()}, weights)
    found = {
        "name": key,
        "weights_bytes": weights,
        "kv_bytes": kv_bytes,
        "kv_bytes_per_token": max(1, kv_bytes // max(1, tokens)),
        "costs": costs.tree,
        "pace": costs.pace,
    }
    return kept | found | trees_of(by_model.get(key, ModelStarts()), others, weights, costs.first_s)
