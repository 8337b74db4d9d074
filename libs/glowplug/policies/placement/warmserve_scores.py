"""The number of replicas of each model to prewarm, and the worth of each.

Paper: WarmServe section 5.2, Eq. 5-8, with L_A and L_P the predicted average and peak concurrency, B the batch size, K
the active instances, T_c the seconds to load the weights, i the rank of a replica in its class:

    N_basic = max(ceil(L_A / B) - K, 0)                                            (5)
    N_burst = max(ceil(L_P / B) - N_basic - K, 0)                                  (6)
    S_basic = exp(-i / (N_basic + N_burst)) T_c                                    (7)
    S_burst = exp(-(N_basic + i) / (N_basic + N_burst)) T_c (L_P - L_A) / L_A      (8)

Departures:
- Eq. 8 divides by zero for a model that sleeps on average: L_A is floored at `min_average` (erratum E4). The published
  code multiplies by L_P / L_A; `burst="ratio"` does that.
- The factor (L_P - L_A) / L_A has no bound in the paper. Here it is at most `max_burst_factor`, so that one model that
  sleeps on average and bursts does not outweigh the bursts of all others together.
- "Basic replicas always have higher priorities than burst replicas": the order is (class, -score), where the published
  code sorts by score alone (erratum E5; `class_first=False`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Literal


class ReplicaClass(IntEnum):
    """Basic replicas serve the average load, burst ones the peak."""

    BASIC = 0
    BURST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmDemand:
    """One model's coming window: predicted concurrency, and what it runs now."""

    model_key: str
    concurrency_mean: float  # L_A
    concurrency_peak: float  # L_P
    max_concurrency: int  # B
    num_active: int  # K; draining instances do not count
    load_s: float  # T_c


SCORE_UNIT = "s of loading that it is expected to save"  # unit of Eq. 7-8: T_c times a weight
LOST_UNIT = "s of loading expected for what gives way"  # the same, of dropped replicas
MAX_REPLICAS = 1024  # per class and model, more than any fleet can hold: bounds absurd forecasts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWish:
    """One replica worth prewarming."""

    model_key: str
    kind: ReplicaClass
    rank: int  # within its class
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreParams:
    burst: Literal["difference", "ratio"] = "difference"
    min_average: float = 0.05
    max_burst_factor: float = 100.0
    class_first: bool = True


def replicas(demands: Iterable[PrewarmDemand], params: ScoreParams = ScoreParams()) -> list[ReplicaWish]:
    """Every replica worth prewarming, the most valuable first; ties go by model key and rank."""
    ranked = sorted(chain.from_iterable(_of(demand, params) for demand in demands))
    return [wish for *_, wish in ranked]


# A wish after its sort key, which is unique.
_Ranked = tuple[int, float, str, int, int, ReplicaWish]


@lru_cache(maxsize=16384)  # most models want the same in successive plans
def _of(demand: PrewarmDemand, params: ScoreParams) -> tuple[_Ranked, ...]:
    average, peak = max(0.0, demand.concurrency_mean), max(0.0, demand.concurrency_peak)
    batch = max(1, demand.max_concurrency)
    num_basic = min(max(math.ceil(average / batch) - demand.num_active, 0), MAX_REPLICAS)
    num_burst = min(max(math.ceil(peak / batch) - num_basic - demand.num_active, 0), MAX_REPLICAS)
    total = num_basic + num_burst
    if not total:
        return ()
    factor = burst_factor(average, peak, params)
    kinds = [(ReplicaClass.BASIC, rank, 1.0) for rank in range(num_basic)]
    kinds += [(ReplicaClass.BURST, rank, factor) for rank in range(num_burst)]
    ranked: list[_Ranked] = []
    for at, (kind, rank, weight) in enumerate(kinds):
        score = math.exp(-at / total) * demand.load_s * weight
        wish = ReplicaWish(model_key=demand.model_key, kind=kind, rank=rank, score=score)
        ranked.append((kind if params.class_first else 0, -score, demand.model_key, kind, rank, wish))
    return tuple(ranked)


def burst_factor(average: float, peak: float, params: ScoreParams) -> float:
    """The height of the peak above the average, relative to it and bounded (the last factor of Eq. 8)."""
    floor = max(average, params.min_average)
    factor = peak / floor if params.burst == "ratio" else (peak - average) / floor
    return min(max(factor, 0.0), params.max_burst_factor)
