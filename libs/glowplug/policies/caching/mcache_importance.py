"""Importance-aware caching: evict first the least cost to reload, per byte and per second until the next request.

Paper: mCache section 4.3, Eq. 1-2 and Algorithm 1, with P the penalty of a miss (seconds), S the size, T the time until
the next request, C the models cached:

    utility = P / S  1 / T                                     (1)
    rank_i  = log( sum over j != i of [u_i > u_j]  + b0 )      (2)

Departures:
- T is one over the request rate, a moving average (errata E25, E27). The paper leaves its window open: short ones
  forget rare models, long ones react late. Three are averaged, with half-lives `half_life_s` over, as it is and times
  `spread`; `spread=1` is a single one. A model requested once has one request per half-life, and is always let in.
- The paper counts invocations. Here the cache is used at starts and prewarmings, so routers' reports of requests are
  counted (`requested`), from the weights' first use on this node, itself worth one request until the first. With
  `counts=uses` each use is one: the paper's cache, which M1 and M2 of bench/papers have, and the rate of starts where a
  node does not read the reports.
- The paper's cache is one GPU's memory above a disk. Here host memory and disk are two tiers: a miss of the first costs
  a read of the disk, or else a fetch; a miss of the second the difference. GPUs belong to the kinds "eviction" and
  "prewarming".
- The rank is monotone in the utility, so it changes neither order nor victims; only ties, and scores renewed every
  `renew_s`, tell the two apart (erratum E24). b0 is 1, so that the least rank is 0, not minus infinity. Victims leave
  by (rank, utility, last use).
- Between renewals the paper's queue is read-only and a shadow is built; here old scores are recomputed at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from glowplug.domain.bounds import Count, Positive
from glowplug.policies.caching.ordering import Ordering, Resident


@dataclass(frozen=True, slots=True, kw_only=True)
class RateParams:
    half_life_s: Positive = 300.0
    spread: Positive = 10.0
    max_names: Count = 4096  # beyond it, the least recently requested is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceParams(RateParams):
    renew_s: float = 0.0  # 0 computes scores at each use
    counts: Literal["uses", "requests"] = "uses"  # events counted by the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """`penalty_s` is P of mCache Eq. 1: (name, bytes) -> seconds of a miss."""

    penalty_s: Callable[[str, int], float]
    importance: ImportanceParams = field(default_factory=ImportanceParams)


@dataclass(slots=True)
class _Rate:
    weights: tuple[float, ...]
    since_s: float
    is_floor: bool = False  # no request is counted yet


class Importance:
    """mCache's order. `penalty_s`: (name, bytes) -> seconds of a miss."""

    name = "least important"
    rule = "the cheapest to bring back, weighted by use, leaves first"
    unit = "rank"

    def __init__(self, penalty_s: Callable[[str, int], float], params: ImportanceParams = ImportanceParams()) -> None:
        self._penalty_s, self._params = penalty_s, params
        half_life_s, spread = params.half_life_s, params.spread
        self._half_lives_s = (half_life_s / spread, half_life_s, half_life_s * spread) if spread > 1 else (half_life_s,)
        self._rates: dict[str, _Rate] = {}
        self._scores: dict[str, float] = {}
        self._scored_at = -math.inf

    @property
    def counts_requests(self) -> bool:
        """Whether `requested` has to be called."""
        return self._params.counts == "requests"

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        if not self.counts_requests:
            self._count(name, 1, now_s)
        elif name not in self._rates:
            self._count(name, 1, now_s, is_floor=True)

    def requested(self, name: str, num_requests: int, now_s: float) -> None:
        """Count requests, except for weights never used on this node."""
        if name in self._rates:
            self._count(name, num_requests, now_s)

    def _count(self, name: str, num: int, now_s: float, *, is_floor: bool = False) -> None:
        rate = self._rates.pop(name, None)
        is_new = rate is None or rate.is_floor
        decayed = (0.0,) * len(self._half_lives_s) if rate is None or is_new else self._decayed(rate, now_s)
        self._rates[name] = _Rate(tuple(weight + num for weight in decayed), now_s, is_floor)  # ordered by last use
        while len(self._rates) > self._params.max_names:
            del self._rates[next(iter(self._rates))]

    def left(self, name: str) -> None:
        """Keep the history for the weights' return."""

    def rate_per_s(self, name: str, now_s: float) -> float:
        """Return remembered requests a second."""
        rate = self._rates.get(name)
        if rate is None:
            return 0.0
        rates = zip(self._decayed(rate, now_s), self._half_lives_s, strict=True)
        return sum(weight / half_life_s for weight, half_life_s in rates) * math.log(2) / len(self._half_lives_s)

    def utility(self, resident: Resident, now_s: float) -> float:
        """Eq. 1: seconds saved per byte and second."""
        penalty = self._penalty_s(resident.name, resident.num_bytes)
        return penalty / max(1, resident.num_bytes) * self.rate_per_s(resident.name, now_s)

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        if now_s - self._scored_at >= self._params.renew_s:
            self._scores = {r.name: self.utility(r, now_s) for r in present}
            self._scored_at = now_s
        known = [(self._scores.get(r.name, self.utility(r, now_s)), r) for r in present]
        known.sort(key=lambda entry: (entry[0], entry[1].last_used_at, entry[1].name))
        return [(rank, resident) for rank, (_, resident) in zip(ranks([u for u, _ in known]), known, strict=True)]

    def _decayed(self, rate: _Rate, now_s: float) -> tuple[float, ...]:
        seconds = max(0.0, now_s - rate.since_s)
        counts = zip(rate.weights, self._half_lives_s, strict=True)
        return tuple(weight * float(0.5 ** (seconds / half_life_s)) for weight, half_life_s in counts)


def ranks(sorted_utilities: Sequence[float]) -> list[float]:
    """Eq. 2 with b0 = 1, for utilities in ascending order."""
    out: list[float] = []
    below = 0
    for at, utility in enumerate(sorted_utilities):
        if at and utility > sorted_utilities[at - 1]:
            below = at
        out.append(math.log(below + 1.0))
    return out


def request_counter(order: Ordering) -> Importance | None:
    return order if isinstance(order, Importance) and order.counts_requests else None


def mcache(cache: CacheFacts) -> Ordering:
    """Options are the fields of `ImportanceParams`, which override `cache`."""
    return Importance(cache.penalty_s, cache.importance)
