"""Results of a run and their plain numbers. Seconds and bytes."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Final

from glowplug.domain.hardware import GrantOwner, Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Slo

_BASE = 1.01
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
    """A histogram whose quantiles are within 0.5 %, above a microsecond."""

    __slots__ = ("_buckets", "count", "highest", "lowest", "total")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, value: float) -> None:
        self._buckets[_bucket(value)] += 1
        self.count += 1
        self.total += value
        if value < self.lowest:
            self.lowest = value
        if value > self.highest:
            self.highest = value

    def at(self, share: float) -> float:
        """Nan if empty."""
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
        """By whole buckets; nan if empty."""
        if not self.count:
            return math.nan
        last = _bucket(value)
        return sum(num for at, num in self._buckets.items() if at <= last) / self.count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def merge(self, other: "Quantiles") -> None:
        self._buckets.update(other._buckets)
        self.count += other.count
        self.total += other.total
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)


def _bucket(value: float) -> int:
    return math.ceil(math.log(value / _LEAST) / _LOG) if value > _LEAST else 0


@dataclass(slots=True)
class ModelResult:
    """Of one model or tenant. Times in seconds."""

    num_arrived: int = 0
    num_finished: int = 0
    num_cold: int = 0
    num_ttft_asked: int = 0
    num_tpot_asked: int = 0
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    num_refused: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    response_tokens: int = 0
    num_preempted: int = 0
    ttft: Quantiles = field(default_factory=Quantiles)
    tpot: Quantiles = field(default_factory=Quantiles)
    e2e: Quantiles = field(default_factory=Quantiles)
    normalised: Quantiles = field(default_factory=Quantiles)  # E2E per response token (PreServe section 2)

    @property
    def ttft_attainment(self) -> float:
        """Of requests with an objective, refused ones included; nan if none."""
        return self.num_ttft_met / self.num_ttft_asked if self.num_ttft_asked else math.nan

    @property
    def tpot_attainment(self) -> float:
        return self.num_tpot_met / self.num_tpot_asked if self.num_tpot_asked else math.nan

    def arrived(self, slo: Slo) -> None:
        """An objective of 0 is none."""
        self.num_arrived += 1
        self.num_ttft_asked += bool(slo.ttft_s)
        self.num_tpot_asked += bool(slo.tpot_s)

    def answered(
        self,
        slo: Slo,
        tokens: tuple[int, int],
        *,
        cold: bool,
        ttft_s: float,
        decode_s: float,
        e2e_s: float,
        cached_tokens: int = 0,
    ) -> None:
        """Seconds to the first token, from first to last (`decode_s`), and in all (`e2e_s`)."""
        prompt, response = tokens
        tpot_s = 0.0
        self.num_finished += 1
        self.num_cold += cold
        self.prompt_tokens += prompt
        self.cached_tokens += cached_tokens
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
    """Highest mean of time buckets with at least `least` values. Times must not go back."""

    width_s: float = 60.0
    least: int = 1
    highest: float = math.nan
    at_s: float = math.nan
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
        if self._count >= max(1, self.least):
            mean = self._total / self._count
            if not mean <= self.highest:
                self.highest, self.at_s = mean, self._bucket * self.width_s


@dataclass(slots=True)
class Results:
    """`*_seconds` are held time, exact to the event."""

    by_model: dict[str, ModelResult] = field(default_factory=lambda: defaultdict(ModelResult))
    by_tenant: dict[str, ModelResult] = field(default_factory=lambda: defaultdict(ModelResult))
    starts: Counter[str] = field(default_factory=Counter)  # by the start's Origin
    num_prewarms: int = 0
    num_evictions: int = 0
    num_consolidated: int = 0
    bytes_fetched: float = 0.0
    bytes_loaded: float = 0.0
    bytes_prewarmed: float = 0.0
    bytes_migrated: float = 0.0
    bytes_swapped: float = 0.0
    load_seconds: float = 0.0
    fetch_seconds: float = 0.0
    gpu_seconds: float = 0.0  # holding anything
    gpu_serving_seconds: float = 0.0  # holding more than replicas
    instance_seconds: float = 0.0
    instances_peak: int = 0
    normalised_peak: Peak = field(default_factory=Peak)  # over minutes (PreServe section 5.3)
    seconds: float = 0.0

    @property
    def num_starts(self) -> int:
        return self.starts.total()

    @property
    def hit_ratio(self) -> float:
        """Share of starts on a replica, loaded or loading; nan if none."""
        hits = self.starts["prewarmed"] + self.starts["prewarming"]
        return hits / self.num_starts if self.starts else math.nan

    @property
    def load_s_per_request(self) -> float:
        """Fetching and loading per arrived request (mCache section 6)."""
        arrived = sum(one.num_arrived for one in self.by_model.values())
        return (self.load_seconds + self.fetch_seconds) / arrived if arrived else math.nan

    @property
    def normalised_peak_s(self) -> float:
        """Mean of the worst minute; nan if none finished."""
        return self.normalised_peak.highest

    def total(self) -> ModelResult:
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
    __slots__ = ("now", "since_s", "total")

    def __init__(self, since_s: float) -> None:
        self.now, self.since_s, self.total = 0, since_s, 0.0

    def add(self, change: int, at_s: float) -> float:
        """Return the integral up to `at_s`."""
        at_s = max(at_s, self.since_s)  # earlier changes set the initial level
        self.total += self.now * (at_s - self.since_s)
        self.since_s = at_s
        self.now += change
        return self.total


class Accounts:
    """Time before `since_s` does not count."""

    def __init__(self, since_s: float) -> None:
        self.gpus, self.serving_gpus, self.instances = (Integral(since_s) for _ in range(3))
        self.peak = 0
        self._of_node: dict[str, tuple[int, int]] = {}
        self._serving: set[str] = set()

    def saved(self, table: str, row: Any, now_s: float) -> None:
        if table == "nodes":
            self._node(row, now_s)
        elif table == "instances":
            self._instance(row, now_s)

    def close(self, results: Results, now_s: float) -> None:
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


def row_of(name: str, one: ModelResult, kind: str = "model") -> Row:
    """Refused and unfinished requests miss their objective; attainment is None without one."""
    refused = one.num_refused.total()
    return {
        kind: name,
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
    """`total`, `models`, `tenants` if any, `fleet`, and `curves` of all requests."""
    total = results.total()
    tenants = [row_of(name, one, "tenant") for name, one in sorted(results.by_tenant.items())]
    return {
        **({"tenants": tenants} if tenants else {}),
        "total": row_of("total", total),
        "models": [row_of(name, one) for name, one in sorted(results.by_model.items())],
        "fleet": fleet_of(results),
        "curves": {"ttft_s": curve(total.ttft), "tpot_s": curve(total.tpot), "e2e_s": curve(total.e2e)},
    }


def fleet_of(results: Results) -> Row:
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
    """(value, cumulative share), denser towards the tail."""
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
    return value if math.isfinite(value) else None
