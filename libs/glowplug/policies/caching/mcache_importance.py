"""Importance-aware caching: evict first what costs least to bring back, per byte and per second until it is asked for.

Paper: mCache section 4.3, Eq. 1-2 and Algorithm 1, with P the penalty of a miss (seconds), S the size, T the time until
the next request, C the models cached:

    utility = P / S  1 / T                                     (1)
    rank_i  = log( sum over j != i of [u_i > u_j]  + b0 )      (2)

Departures:
- T is not known; it is one over the request rate, a moving average (errata E25, E27). The paper leaves its window open:
  a short one forgets a model that is asked for rarely but for ever, a long one reacts late to one in demand now. Three
  are averaged, with half-lives `half_life_s` over, as it is and times `spread`; `spread=1` is a single one. A model
  asked for once has the rate of one request per half-life, so that it is worth something; it is always let in, since it
  must be loaded to run.
- The paper counts invocations, each of which looks into the cache. Here the cache is asked when an engine starts or is
  prewarmed, so requests are counted beside it (`requested`), from what routers report of their arrivals. They count
  from when the weights were first asked for on this node, which itself is worth one request until the first comes: so
  weights that are fetched ahead of demand are worth something. With `counts=uses` each use counts as one request: the
  paper's cache, which M1 and M2 of bench/papers have, and the rate of starts where a node does not read the reports.
- The paper's cache is the memory of one GPU, and a miss is a load from a disk. Here there are two tiers, a node's host
  memory and its disk: a miss of the first costs a read of the disk where the weights lie there, else a fetch, and a
  miss of the second costs the difference between that fetch and that read. What stays on GPUs is decided by the kinds
  "eviction" and "prewarming".
- The rank is monotone in the utility, so it changes neither the order nor the victims; only ties, and scores that are
  renewed every `renew_s`, tell the two apart (erratum E24). b0 is 1, so that the least important has rank 0, not minus
  infinity. Victims leave by (rank, utility, last use).
- Between two renewals the paper's queue is read-only and a shadow is built; here old scores are computed anew at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from glowplug.policies.caching.ordering import Ordering, Resident


@dataclass(frozen=True, slots=True, kw_only=True)
class RateParams:
    """Constants of the count of requests."""

    half_life_s: float = 300.0
    spread: float = 10.0
    max_names: int = 4096  # names remembered; past that, the one asked for longest ago is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceParams(RateParams):
    renew_s: float = 0.0  # greatest age of a score; 0 computes scores at each use
    counts: Literal["uses", "requests"] = "uses"  # what the rate is made of


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """Facts about a cache for its ordering. `penalty_s` is P of mCache Eq. 1: (name, bytes) -> seconds of a miss."""

    penalty_s: Callable[[str, int], float]
    importance: ImportanceParams = field(default_factory=ImportanceParams)


@dataclass(slots=True)
class _Rate:
    """Exponentially decaying counts of requests, one for each half-life."""

    weights: tuple[float, ...]
    since_s: float
    is_floor: bool = False  # the weights were asked for, but no request is counted yet


class Importance:
    """mCache's order. `penalty_s`: (name, bytes) -> seconds that a miss costs, measured or modelled."""

    name = "least important"
    rule = "who costs least to bring back, by how often it is asked for, leaves first"
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
        """Return whether the rate counts requests, of which `requested` has to be notified."""
        return self._params.counts == "requests"

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        if not self.counts_requests:
            self._count(name, 1, now_s)
        elif name not in self._rates:
            self._count(name, 1, now_s, is_floor=True)

    def requested(self, name: str, num_requests: int, now_s: float) -> None:
        """Count requests for models with these weights. Weights never asked for on this node are not counted: of many
        nodes and models, most do not concern a node."""
        if name in self._rates:
            self._count(name, num_requests, now_s)

    def _count(self, name: str, num: int, now_s: float, *, is_floor: bool = False) -> None:
        rate = self._rates.pop(name, None)
        is_new = rate is None or rate.is_floor  # the first request replaces the floor
        decayed = (0.0,) * len(self._half_lives_s) if rate is None or is_new else self._decayed(rate, now_s)
        self._rates[name] = _Rate(tuple(weight + num for weight in decayed), now_s, is_floor)  # ordered by last use
        while len(self._rates) > self._params.max_names:
            del self._rates[next(iter(self._rates))]

    def left(self, name: str) -> None:
        """Keep the history of evicted weights: it counts again when they come back."""

    def rate_per_s(self, name: str, now_s: float) -> float:
        """Remembered requests a second; 0 for a name never used."""
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
    """Eq. 2, with a b0 of 1, for utilities in ascending order."""
    out: list[float] = []
    below = 0
    for at, utility in enumerate(sorted_utilities):
        if at and utility > sorted_utilities[at - 1]:
            below = at
        out.append(math.log(below + 1.0))
    return out


def request_counter(order: Ordering) -> Importance | None:
    """Return `order` if it has to be notified of requests, else None."""
    return order if isinstance(order, Importance) and order.counts_requests else None


def mcache(cache: CacheFacts) -> Ordering:
    """Build the policy `mcache`. Its options are the fields of `ImportanceParams`; they override what `cache` says."""
    return Importance(cache.penalty_s, cache.importance)
