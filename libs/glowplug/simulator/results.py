"""What came of a run: counts, quantiles that take the same memory for a thousand requests and for a billion, and who
held what for how long; then the plain numbers that the table, results.json and the report show. Seconds, bytes."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Final

from glowplug.domain.hardware import GrantOwner, Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Slo

_BASE = 1.01  # neighbouring buckets differ by 1 %
_LOG = math.log(_BASE)
_LEAST = 1e-6
SHARES: Final = (
    *(n / 200 for n in range(1, 198)),
    *(n / 1000 for n in range(990, 1000)),
    0.9995,
    1.0,
)
Row = dict[str, Any]


class Quantiles:
    """A histogram over buckets that grow by 1 %: any quantile within 0.5 % of its value, above a microsecond."""

    __slots__ = ("_buckets", "count", "highest", "lowest", "total")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, value: float) -> None:
        """One more value, 0 or above."""
        self._buckets[_bucket(value)] += 1
        self.count += 1
        self.total += value
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value

    def at(self, share: float) -> float:
        """The smallest value that at least `share` of all do not exceed; nan when there is none."""
        if not self.count:
            return math.nan
        wanted, seen = max(1, math.ceil(share * self.count)), 0
        for at in sorted(self._buckets):
            seen += self._buckets[at]
            if seen >= wanted:
                middle = _LEAST * _BASE ** (at - 0.5) if at else _LEAST
                return min(max(middle, self.lowest), self.highest)
        return self.highest

    def share_upto(self, value: float) -> float:
        """Share of all values that do not exceed `value`, by whole buckets; nan when there is none."""
        if not self.count:
            return math.nan
        last = _bucket(value)
        return sum(num for at, num in self._buckets.items() if at <= last) / self.count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def merge(self, other: "Quantiles") -> None:
        """Take in everything of `other`."""
        self._buckets.update(other._buckets)
        self.count += other.count
        self.total += other.total
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)


def _bucket(value: float) -> int:
    return math.ceil(math.log(value / _LEAST) / _LOG) if value > _LEAST else 0


@dataclass(slots=True)
class ModelResult:
    """What came of one model's requests. Times in seconds."""

    num_arrived: int = 0
    num_finished: int = 0
    num_cold: int = 0
    num_ttft_asked: int = 0  # that came for a model with an objective for it
    num_tpot_asked: int = 0
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)  # by error code, or what happened to the client
    prompt_tokens: int = 0
    response_tokens: int = 0
    num_preempted: int = 0
    ttft: Quantiles = field(default_factory=Quantiles)
    tpot: Quantiles = field(default_factory=Quantiles)
    e2e: Quantiles = field(default_factory=Quantiles)
    normalised: Quantiles = field(default_factory=Quantiles)  # E2E per response token (PreServe section 2)

    @property
    def ttft_attainment(self) -> float:
        """Requests whose first token came in time, of all that came for a model with an objective; nan when there is
        none. Refused ones missed it."""
        return self.num_ttft_met / self.num_ttft_asked if self.num_ttft_asked else math.nan

    @property
    def tpot_attainment(self) -> float:
        return self.num_tpot_met / self.num_tpot_asked if self.num_tpot_asked else math.nan

    def arrived(self, slo: Slo) -> None:
        """One more request; an objective of 0 is none."""
        self.num_arrived += 1
        self.num_ttft_asked += bool(slo.ttft_s)
        self.num_tpot_asked += bool(slo.tpot_s)

    def answered(
        self, slo: Slo, tokens: tuple[int, int], *, cold: bool, ttft_s: float, decode_s: float, e2e_s: float
    ) -> None:
        """One that was answered: `tokens` of its prompt and response, seconds to its first token, from there to its
        last, and to its end."""
        prompt, response = tokens
        tpot_s = 0.0
        self.num_finished += 1
        self.num_cold += cold
        self.prompt_tokens += prompt
        self.response_tokens += response
        self.ttft.add(ttft_s)
        self.e2e.add(e2e_s)
        self.normalised.add(e2e_s / max(1, response))
        if response > 1:
            tpot_s = decode_s / (response - 1)
            self.tpot.add(tpot_s)
        self.num_ttft_met += bool(slo.ttft_s) and ttft_s <= slo.ttft_s
        self.num_tpot_met += bool(slo.tpot_s) and tpot_s <= slo.tpot_s


@dataclass(slots=True)
class Peak:
    """The highest mean of any bucket of time that had at least `least` values. Times may not go back."""

    width_s: float = 60.0
    least: int = 1
    highest: float = math.nan
    at_s: float = math.nan  # where its bucket began
    _bucket: int = -1
    _count: int = 0
    _total: float = 0.0

    def add(self, at_s: float, value: float) -> None:
        bucket = int(at_s // self.width_s)
        if bucket != self._bucket:
            self.close()
            self._bucket, self._count, self._total = bucket, 0, 0.0
        self._count += 1
        self._total += value

    def close(self) -> None:
        """Take the bucket under way into account."""
        if self._count >= max(1, self.least):
            mean = self._total / self._count
            if not mean <= self.highest:
                self.highest, self.at_s = mean, self._bucket * self.width_s


@dataclass(slots=True)
class Results:
    """What came of a whole run. `*_seconds` of GPUs and instances are held time, exact to the event."""

    by_model: dict[str, ModelResult] = field(default_factory=lambda: defaultdict(ModelResult))
    starts: Counter[str] = field(default_factory=Counter)  # engines that serve, by what their start found (Origin)
    num_prewarms: int = 0  # replicas begun
    num_evictions: int = 0
    num_consolidated: int = 0
    bytes_fetched: float = 0.0
    bytes_loaded: float = 0.0
    bytes_prewarmed: float = 0.0  # of those loaded, the ones of replicas
    bytes_migrated: float = 0.0  # KV cache between engines
    bytes_swapped: float = 0.0  # in and out
    load_seconds: float = 0.0  # host memory to GPU, summed over loads
    fetch_seconds: float = 0.0
    gpu_seconds: float = 0.0  # GPUs whose ledger holds anything, over time
    gpu_serving_seconds: float = 0.0  # ... anything but replicas
    instance_seconds: float = 0.0  # instances that serve, from their start to their end
    instances_peak: int = 0
    normalised_peak: Peak = field(default_factory=Peak)  # over minutes (PreServe section 5.3)
    seconds: float = 0.0

    @property
    def num_starts(self) -> int:
        return self.starts.total()

    @property
    def hit_ratio(self) -> float:
        """Starts that found a replica, whole or on its way, of all starts; nan when there was none."""
        hits = self.starts["prewarmed"] + self.starts["prewarming"]
        return hits / self.num_starts if self.starts else math.nan

    @property
    def load_s_per_request(self) -> float:
        """Seconds of fetching and loading, over every request that came (mCache section 6)."""
        arrived = sum(one.num_arrived for one in self.by_model.values())
        return (self.load_seconds + self.fetch_seconds) / arrived if arrived else math.nan

    @property
    def normalised_peak_s(self) -> float:
        """The worst minute's mean normalised latency; nan when nothing has finished."""
        return self.normalised_peak.highest

    def total(self) -> ModelResult:
        """All models as one."""
        whole = ModelResult()
        for one in self.by_model.values():
            for name in (one.name for one in fields(whole)):
                mine, more = getattr(whole, name), getattr(one, name)
                if isinstance(mine, Quantiles):
                    mine.merge(more)
                else:
                    setattr(whole, name, mine + more)
        return whole


class Integral:
    """A count over time."""

    __slots__ = ("now", "since_s", "total")

    def __init__(self, since_s: float) -> None:
        self.now, self.since_s, self.total = 0, since_s, 0.0

    def add(self, change: int, at_s: float) -> float:
        """The count changes. Returns its sum over the time until then."""
        at_s = max(at_s, self.since_s)  # what changes before the count begins is only the level it begins with
        self.total += self.now * (at_s - self.since_s)
        self.since_s = at_s
        self.now += change
        return self.total


class Accounts:
    """Integrates over every row that is saved. What was held before `since_s` does not count."""

    def __init__(self, since_s: float) -> None:
        self.gpus, self.serving_gpus, self.instances = (Integral(since_s) for _ in range(3))
        self.peak = 0
        self._of_node: dict[str, tuple[int, int]] = {}
        self._serving: set[str] = set()

    def saved(self, table: str, row: Any, now_s: float) -> None:
        """One row as it is now."""
        if table == "nodes":
            self._node(row, now_s)
        elif table == "instances":
            self._instance(row, now_s)

    def close(self, results: Results, now_s: float) -> None:
        """Write what has come together."""
        results.gpu_seconds = self.gpus.add(0, now_s)
        results.gpu_serving_seconds = self.serving_gpus.add(0, now_s)
        results.instance_seconds = self.instances.add(0, now_s)
        results.instances_peak = self.peak

    def _node(self, node: Node, now_s: float) -> None:
        used = sum(bool(gpu.grants) for gpu in node.gpus)
        serving = sum(any(g.owner is not GrantOwner.PREWARM for g in gpu.grants) for gpu in node.gpus)
        before = self._of_node.get(node.node_id, (0, 0))
        if (used, serving) != before:
            self._of_node[node.node_id] = (used, serving)
            self.gpus.add(used - before[0], now_s)
            self.serving_gpus.add(serving - before[1], now_s)

    def _instance(self, row: Instance, now_s: float) -> None:
        counts = row.serves and not row.state.is_gone
        if counts == (row.instance_id in self._serving):
            return
        self._serving ^= {row.instance_id}
        self.instances.add(1 if counts else -1, now_s)
        self.peak = max(self.peak, self.instances.now)


def row_of(name: str, one: ModelResult) -> Row:
    """One model's figures. Attainment counts every request that came for a model with an objective: refused and
    unfinished ones missed it. None where there is no objective."""
    refused = one.num_refused.total()
    return {
        "model": name,
        "num_arrived": one.num_arrived,
        "num_finished": one.num_finished,
        "num_refused": refused,
        "refused_by": dict(sorted(one.num_refused.items())),
        "num_unfinished": one.num_arrived - one.num_finished - refused,
        "num_cold": one.num_cold,
        "warm_ratio": _ratio(one.num_finished - one.num_cold, one.num_finished),
        "ttft_attainment": _ratio(one.num_ttft_met, one.num_ttft_asked),
        "tpot_attainment": _ratio(one.num_tpot_met, one.num_tpot_asked),
        "num_preempted": one.num_preempted,
        "prompt_tokens": one.prompt_tokens,
        "response_tokens": one.response_tokens,
        **_quantiles("ttft_s", one.ttft),
        **_quantiles("tpot_s", one.tpot),
        **_quantiles("e2e_s", one.e2e),
        **_quantiles("normalised_s", one.normalised),
    }


def summary(results: Results) -> dict[str, Any]:
    """`total`, `models` by name, `fleet` with whatever the run counted as a whole, and `curves` of all requests."""
    total = results.total()
    return {
        "total": row_of("total", total),
        "models": [row_of(name, one) for name, one in sorted(results.by_model.items())],
        "fleet": fleet_of(results),
        "curves": {"ttft_s": curve(total.ttft), "tpot_s": curve(total.tpot), "e2e_s": curve(total.e2e)},
    }


def fleet_of(results: Results) -> Row:
    """Every plain number and every count by name that a run keeps, and its own ratios."""
    row: Row = {}
    for name in (*(one.name for one in fields(results)), "num_starts", "hit_ratio", "load_s_per_request",
                 "normalised_peak_s"):  # fmt: skip
        value = getattr(results, name)
        if isinstance(value, int | float):
            row[name] = _finite(value)
        elif name == "starts":
            row[name] = dict(sorted(value.items()))
    return row | {"normalised_s_peak": _finite(results.normalised_peak.highest)}


def curve(values: Quantiles) -> list[tuple[float, float]]:
    """(value, share of all that do not exceed it), denser towards the tail; empty when there is none."""
    points = [(round(values.at(share), 6), share) for share in SHARES] if values.count else []
    return [one for one, after in pairwise(points) if one[0] != after[0]] + points[-1:]


def _quantiles(name: str, values: Quantiles) -> Row:
    return {
        f"{name}_p50": _finite(values.at(0.50)),
        f"{name}_p95": _finite(values.at(0.95)),
        f"{name}_p99": _finite(values.at(0.99)),
        f"{name}_mean": _finite(values.mean),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _finite(value: float) -> float | None:
    """JSON has no nan: where there is no figure there is null."""
    return value if math.isfinite(value) else None
