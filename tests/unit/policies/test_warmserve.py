"""WarmServe's published formulas with hand-worked numbers."""

import math

import pytest

from glowplug.policies.placement.warmserve_evict_aware import (
    MAX_REPLICAS,
    PrewarmDemand,
    Prewarmed,
    PrewarmNode,
    ReplicaClass,
    ReplicaShape,
    ScoreParams,
    is_nested_or_disjoint,
    plan,
    replicas,
)
from glowplug.policies.prewarming.warmserve_reservation import prewarmable_bytes
from glowplug_lab.policies.warmserve_csp import CspParams, forecast, season
from glowplug_lab.policies.warmserve_placement import take_over

GB = 10**9
ONE = ReplicaShape(num_gpus=1, bytes_per_gpu=13 * GB)
TWO = ReplicaShape(num_gpus=2, bytes_per_gpu=12 * GB)


def a_demand(key="m", mean=0.0, peak=0.0, active=0, load_s=1.0):
    loads = {"concurrency_mean": mean, "concurrency_peak": peak, "max_concurrency": 32}
    return PrewarmDemand(model_key=key, num_active=active, load_s=load_s, **loads)


def a_node(*replicas, num=2, free=75 * GB, draining=()):
    ids = tuple(f"node-1/{n}" for n in range(num))
    return PrewarmNode(
        node_id="node-1", gpu_ids=ids, free_bytes=(free,) * num, replicas=replicas, draining=frozenset(draining)
    )


def a_replica(name, model, *gpus, score=1.0, ready=True):
    gpu_ids = tuple(f"node-1/{g}" for g in gpus)
    return Prewarmed(replica_id=name, model_key=model, gpu_ids=gpu_ids, score=score, is_ready=ready)


# section 5.1


def test_the_season_is_the_mean_of_the_same_window_on_past_days():
    """Eq. 2."""
    loads = [1, 10, 2, 20, 3, 30]  # two windows a day
    assert season(loads, 6, 2) == 2.0
    assert season(loads, 7, 2) == 20.0
    assert season(loads, 1, 2) is None


DAY = [10.0] * 4
WEEK = [5.0, 50.0, 7.0] * 3
FORECASTS = {  # loads, windows a day, params -> next window
    "the newest error weighs 4/7": ([*DAY, 11.0, 12.0, 14.0], 4, {"num_errors": 3}, 10 + (4 * 4 + 2 * 2 + 1 * 1) / 7),
    "as printed the oldest does (E1)": (
        [*DAY, 11.0, 12.0, 14.0],
        4,
        {"num_errors": 3, "literal_weights": True},
        10 + (1 * 4 + 2 * 2 + 4 * 1) / 7,
    ),
    "a perfect season, first window": (WEEK[:6], 3, {}, 5.0),
    "a perfect season, second window": (WEEK[:7], 3, {}, 50.0),
    "a perfect season, third window": (WEEK[:8], 3, {}, 7.0),
    "nothing is known": ([], 288, {}, 0.0),
    "the first day has only the last load": ([6.0], 288, {}, 6.0),
    "the first day weighs the newest twice": ([0.0, 6.0], 288, {}, 4.0),
    "none is below nothing": ([10.0, 10.0, 0.0], 1, {"num_errors": 1}, 0.0),
}


@pytest.mark.parametrize(("loads", "per_day", "params", "wanted"), FORECASTS.values(), ids=FORECASTS)
def test_the_forecast_is_the_season_and_the_correction(loads, per_day, params, wanted):
    """Eq. 3-4."""
    assert forecast(loads, per_day, CspParams(**params)) == pytest.approx(wanted)


def test_a_day_has_a_window():
    with pytest.raises(ValueError, match="0 windows a day"):
        forecast([1.0], 0)


# section 5.2, scores


def test_a_forecast_beyond_any_fleet_makes_a_bounded_list_of_replicas():
    wishes = replicas([a_demand(mean=4e18, peak=9e18, active=0)])
    assert len(wishes) == 2 * MAX_REPLICAS


@pytest.mark.parametrize(("burst", "factor"), [("difference", (130 - 70) / 70), ("ratio", 130 / 70)])
def test_numbers_and_scores_of_basic_and_burst_replicas(burst, factor):
    """Eq. 5-8: 70 in flight on average need 3 instances of 32, one runs; a peak of 130 needs two more."""
    wishes = replicas([a_demand(mean=70, peak=130, active=1, load_s=2.0)], ScoreParams(burst=burst))
    assert [w.kind for w in wishes] == [ReplicaClass.BASIC] * 2 + [ReplicaClass.BURST] * 2
    scores = [2.0, 2 * math.exp(-1 / 4), 2 * math.exp(-2 / 4) * factor, 2 * math.exp(-3 / 4) * factor]
    assert [w.score for w in wishes] == pytest.approx(scores)


def test_basic_comes_before_burst_whatever_they_score():
    """Section 5.2, "Note that basic replicas always have higher priorities" (erratum E5)."""
    demands = [a_demand("calm", mean=10, peak=10, load_s=0.1), a_demand("wild", mean=0.0, peak=30, load_s=5.0)]
    assert [w.model_key for w in replicas(demands)] == ["calm", "wild"]
    assert [w.model_key for w in replicas(demands, ScoreParams(class_first=False))] == ["wild", "calm"]


def test_a_model_asleep_on_average_has_a_finite_burst_factor():
    """Erratum E4."""
    (wish,) = replicas([a_demand(mean=0.0, peak=5.0)])
    assert wish.score == pytest.approx(100.0)
    assert replicas([a_demand(mean=0.0, peak=0.0)]) == []


def test_the_burst_factor_has_a_bound():
    """Erratum E4: a peak of 1000 over the floor of the mean is 20,000 times it."""
    (basic, burst, *_) = replicas([a_demand(mean=1e-9, peak=1000.0)])
    assert basic.kind is ReplicaClass.BASIC and burst.kind is ReplicaClass.BURST
    assert burst.score == pytest.approx(math.exp(-1 / 32) * 100.0)


# section 4.1


def test_the_kv_cache_that_may_be_prewarmed_into():
    """Eq. 1 at R/C = 8/32 and K = 40 % frees 57 %; the published code 35 % (erratum E3)."""
    assert prewarmable_bytes(8, 32, 400, 1000) == 1000 - (400 + 31)
    assert prewarmable_bytes(8, 32, 400, 1000, literal_code=True) == 350
    assert prewarmable_bytes(20, 32, 100, 1000) == 1000 - 625
    assert prewarmable_bytes(0, 32, 0, 1000) == 1000
    assert prewarmable_bytes(32, 32, 990, 1000) == 0
    with pytest.raises(ValueError, match="2000 of 1000 bytes"):
        prewarmable_bytes(1, 32, 2000, 1000)


# section 5.2, Algorithm 1


def planned(node, shapes=(), **load_s):
    """(model, GPUs, replicas dropped) of each step; one replica wished for each model."""
    wishes = replicas([a_demand(key, 1, 1, load_s=seconds) for key, seconds in load_s.items()])
    lying = {replica.model_key for replica in node.replicas}
    steps = plan(wishes, dict.fromkeys(lying | load_s.keys(), ONE) | dict(shapes), [node])
    return [(s.model_key, "".join(g.removeprefix("node-1/") for g in s.gpu_ids), s.drop) for s in steps]


def test_the_first_guideline_forbids_partial_sharing():
    """Figure 7."""
    assert all(is_nested_or_disjoint(0b0011, other) for other in (0b1100, 0b1111, 0b0011))
    assert not is_nested_or_disjoint(0b0110, 0b0011)


def test_high_scores_get_gpus_of_their_own_before_they_share():
    """The third lies nowhere above the others: where the sum of scores is least."""
    assert planned(a_node(), a=3.0, b=2.0, c=1.0) == [("a", "0", ()), ("b", "1", ()), ("c", "1", ())]


def test_a_newcomer_lies_with_those_that_score_less():
    node = a_node(a_replica("r1", "low", 0), a_replica("r2", "high", 1))
    assert planned(node, high=9.0, low=1.0, new=5.0) == [("new", "0", ())]


@pytest.mark.parametrize(("load_s", "gpu"), [(3.0, "1"), (1.0, "0")], ids=["2 + 2 + 2 it beats", "5 is less than 6"])
def test_among_groups_it_beats_the_least_sum_is_taken_even_where_another_sum_is_less(load_s, gpu):
    """Algorithm 1: min S_g among those with H_g < score, else min S_g of all."""
    node = a_node(a_replica("r1", "big", 0), *(a_replica(f"r-{low}", low, 1) for low in "pqr"))
    assert planned(node, big=5.0, new=load_s, p=2.0, q=2.0, r=2.0) == [("new", gpu, ())]


def test_pairs_are_nested_or_disjoint_with_what_lies_there():
    node = a_node(a_replica("r1", "pair", 1, 2), num=4)
    assert planned(node, {"pair": TWO, "other": TWO}, pair=9.0, other=1.0) == [("other", "03", ())]


def test_no_model_lies_twice_on_a_gpu_and_replicas_there_are_not_made_again():
    """Erratum E10."""
    there = a_replica("r1", "a", 0)
    wishes = replicas([a_demand("a", mean=33, peak=33)])
    (step,) = plan(wishes, {"a": ONE}, [a_node(there)])
    assert step.gpu_ids == ("node-1/1",)
    assert plan(wishes, {"a": ONE}, [a_node(there, num=1)]) == []


def test_worthless_replicas_give_way_when_memory_is_short():
    """Erratum E9, an extension."""
    full = a_node(a_replica("old", "gone", 0), num=1, free=5 * GB)
    assert planned(full, new=1.0) == [("new", "0", ("old",))]
    assert planned(full, new=1.0, gone=1.0) == []


def test_what_fits_no_node_is_passed_over():
    wide = ReplicaShape(num_gpus=4, bytes_per_gpu=GB)
    assert planned(a_node(), {"wide": wide}, wide=9.0, small=1.0) == [("small", "0", ())]


# section 5.2, scale-up

READY, COMING = a_replica("r1", "a", 0), a_replica("r2", "a", 1, ready=False)


@pytest.mark.parametrize(
    ("num", "there", "wanted"),
    [
        (4, [READY, COMING, a_replica("r3", "b", 2, score=5.0)], ("node-1/0", "r1", ())),
        (4, [COMING, a_replica("r3", "b", 2, score=5.0)], ("node-1/1", "r2", ())),
        (2, [a_replica("r3", "b", 0, score=5.0), a_replica("r4", "c", 1)], ("node-1/1", "", ("r4",))),
        (
            2,
            [READY, a_replica("r2", "a", 1), a_replica("r3", "b", 0, score=5.0), a_replica("r4", "b", 1)],
            ("node-1/1", "r2", ("r4",)),
        ),
    ],
    ids=["a ready copy", "then one on its way", "then the cheapest GPUs", "of two ready ones the cheaper for others"],
)
def test_scale_up_takes(num, there, wanted):
    """Section 5.2, last paragraph; erratum E8."""
    found = take_over("a", ONE, [a_node(*there, num=num)])
    assert (found.gpu_id, found.source, found.drops) == wanted


def test_gpus_that_still_serve_are_not_taken():
    assert take_over("a", ONE, [a_node(a_replica("r1", "a", 0), num=1, draining=["node-1/0"])]) is None
