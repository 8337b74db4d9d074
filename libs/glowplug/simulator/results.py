"""What came of a run: counts, and quantiles that take the same memory for a thousand requests and for a billion."""

import math
from dataclasses import dataclass, field

_BASE = 1.01  # neighbouring buckets differ by 1 %
_LOG = math.log(_BASE)
_LEAST = 1e-6


class Quantiles:
    """A histogram over buckets that grow by 1 %: any quantile within 0.5 % of its value, above a microsecond."""

    __slots__ = ("_buckets", "count", "highest", "lowest", "total")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.lowest, self.highest = math.inf, -math.inf

    def add(self, value: float) -> None:
        """One more value, 0 or above."""
        at = math.ceil(math.log(value / _LEAST) / _LOG) if value > _LEAST else 0
        self._buckets[at] = self._buckets.get(at, 0) + 1
        self.count += 1
        self.total += value
        self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)

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
        last = math.ceil(math.log(value / _LEAST) / _LOG) if value > _LEAST else 0
        return sum(num for at, num in self._buckets.items() if at <= last) / self.count

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def merge(self, other: "Quantiles") -> None:
        """Take in everything of `other`."""
        for at, num in other._buckets.items():
            self._buckets[at] = self._buckets.get(at, 0) + num
        self.count += other.count
        self.total += other.total
        self.lowest, self.highest = min(self.lowest, other.lowest), max(self.highest, other.highest)


@dataclass(slots=True)
class ModelResult:
    """What came of one model's requests. Times in seconds."""

    num_arrived: int = 0
    num_finished: int = 0
    num_cold: int = 0
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    num_refused: dict[str, int] = field(default_factory=dict)  # by error code
    prompt_tokens: int = 0
    response_tokens: int = 0
    num_preempted: int = 0
    ttft: Quantiles = field(default_factory=Quantiles)
    tpot: Quantiles = field(default_factory=Quantiles)
    e2e: Quantiles = field(default_factory=Quantiles)
    normalised: Quantiles = field(default_factory=Quantiles)  # E2E per response token (PreServe section 2)


@dataclass(slots=True)
class Results:
    """What came of a whole run."""

    by_model: dict[str, ModelResult] = field(default_factory=dict)
    num_starts: int = 0
    num_evictions: int = 0
    bytes_fetched: float = 0.0
    bytes_loaded: float = 0.0
    gpu_seconds: float = 0.0  # GPUs whose ledger holds anything, over time
    seconds: float = 0.0

    def of(self, model_key: str) -> ModelResult:
        found = self.by_model.get(model_key)
        if found is None:
            found = self.by_model[model_key] = ModelResult()
        return found

    def total(self) -> ModelResult:
        """All models as one."""
        whole = ModelResult()
        for one in self.by_model.values():
            for name in ("num_arrived", "num_finished", "num_cold", "num_ttft_met", "num_tpot_met", "num_preempted"):
                setattr(whole, name, getattr(whole, name) + getattr(one, name))
            whole.prompt_tokens += one.prompt_tokens
            whole.response_tokens += one.response_tokens
            for code, num in one.num_refused.items():
                whole.num_refused[code] = whole.num_refused.get(code, 0) + num
            for name in ("ttft", "tpot", "e2e", "normalised"):
                getattr(whole, name).merge(getattr(one, name))
        return whole
