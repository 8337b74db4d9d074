"""WarmServe's published formulas, section by section, with numbers worked by hand."""

import math

import pytest

from glowplug.policies.placement.warmserve_evict_aware import ReplicaShape, plan, take_over
from glowplug.policies.placement.warmserve_scores import (
    MAX_REPLICAS,
    PrewarmDemand,
    ReplicaClass,
    ScoreParams,
    replicas,
)
from glowplug.policies.placement.warmserve_view import Prewarmed, PrewarmNode, is_nested_or_disjoint
from glowplug.policies.prediction.warmserve_csp import CspParams, forecast, season
from glowplug.policies.prewarming.warmserve_reservation import ReservationParams, prewarmable_bytes

GB = 10**9
ONE = ReplicaShape(num_gpus=1, bytes_per_gpu=13 * GB)
TWO = ReplicaShape(num_gpus=2, bytes_per_gpu=12 * GB)


def a_demand(key="m", mean=0.0, peak=0.0, active=0, load_s=1.0):
    return PrewarmDemand(
        model_key=key,
        concurrency_mean=mean,
        concurrency_peak=peak,
        max_concurrency=32,
        num_active=active,
        load_s=load_s,
    )


def a_node(num=4, free=75 * GB, replicas=(), draining=(), name="node-1"):
    ids = tuple(f"{name}/{n}" for n in range(num))
    return PrewarmNode(
        node_id=name, gpu_ids=ids, free_bytes=(free,) * num, replicas=tuple(replicas), draining=frozenset(draining)
    )


def a_replica(name, model, *gpus, score=1.0, ready=True, node="node-1"):
    return Prewarmed(
        replica_id=name, model_key=model, gpu_ids=tuple(f"{node}/{g}" for g in gpus), score=score, is_ready=ready
    )


# section 5.1


def test_the_season_is_the_mean_of_the_same_window_on_past_days():
    """Eq. 2."""
    loads = [1, 10, 2, 20, 3, 30]  # two windows a day
    assert season(loads, 6, 2) == 2.0
    assert season(loads, 7, 2) == 20.0
    assert season(loads, 6, 2, num_days=2) == 2.5
    assert season(loads, 1, 2) is None


def test_the_newest_error_weighs_half():
    """Eq. 3 as meant: weights 4/7, 2/7, 1/7 for N = 3; as printed the other way round (erratum E1)."""
    day = [10.0] * 4
    loads = [*day, 11.0, 12.0, 14.0]
    right = CspParams(num_errors=3)
    assert forecast(loads, 4, right) == pytest.approx(10 + (4 * 4 + 2 * 2 + 1 * 1) / 7)
    assert forecast(loads, 4, CspParams(num_errors=3, literal_weights=True)) == pytest.approx(
        10 + (1 * 4 + 2 * 2 + 4 * 1) / 7
    )


def test_a_perfect_season_is_forecast_exactly():
    loads = [5.0, 50.0, 7.0] * 3
    assert [forecast(loads[:n], 3) for n in (6, 7, 8)] == [5.0, 50.0, 7.0]


def test_the_first_day_has_only_the_last_loads():
    assert forecast([], 288) == 0.0
    assert forecast([6.0], 288) == 6.0
    assert forecast([0.0, 6.0], 288) == 4.0


def test_no_forecast_below_nothing():
    assert forecast([10.0, 10.0, 0.0], 1, CspParams(num_errors=1)) == 0.0
    with pytest.raises(ValueError, match="0 windows a day"):
        forecast([1.0], 0)


# section 5.2, scores


def test_a_forecast_beyond_any_fleet_makes_a_bounded_list_of_replicas():
    wishes = replicas([a_demand(mean=4e18, peak=9e18, active=0)])
    assert len(wishes) == 2 * MAX_REPLICAS


def test_numbers_of_basic_and_burst_replicas():
    """Eq. 5-6: 70 in flight on average need 3 instances of 32, one runs; a peak of 130 needs two more."""
    wishes = replicas([a_demand(mean=70, peak=130, active=1)])
    assert [w.kind for w in wishes] == [ReplicaClass.BASIC] * 2 + [ReplicaClass.BURST] * 2


def test_scores():
    """Eq. 7-8."""
    wishes = replicas([a_demand(mean=70, peak=130, active=1, load_s=2.0)])
    factor = (130 - 70) / 70
    assert [w.score for w in wishes] == pytest.approx(
        [2.0, 2 * math.exp(-1 / 4), 2 * math.exp(-2 / 4) * factor, 2 * math.exp(-3 / 4) * factor]
    )
    ratio = replicas([a_demand(mean=70, peak=130, active=1, load_s=2.0)], ScoreParams(burst="ratio"))
    assert ratio[2].score == pytest.approx(2 * math.exp(-2 / 4) * 130 / 70)


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


# section 4.1


def test_the_burst_factor_has_a_bound():
    """Erratum E4: a peak of 1000 over the floor of the mean is 20,000 times it."""
    (basic, burst, *_) = replicas([a_demand(mean=1e-9, peak=1000.0)])
    assert basic.kind is ReplicaClass.BASIC and burst.kind is ReplicaClass.BURST
    assert burst.score == pytest.approx(math.exp(-1 / 32) * 100.0)


def test_the_kv_cache_that_may_be_prewarmed_into():
    """Eq. 1 at R/C = 8/32 and K = 40 % frees 57 %; the published code 35 % (erratum E3)."""
    assert prewarmable_bytes(8, 32, 400, 1000) == 1000 - (400 + 31)
    assert prewarmable_bytes(8, 32, 400, 1000, ReservationParams(literal_code=True)) == 350
    assert prewarmable_bytes(20, 32, 100, 1000) == 1000 - 625
    assert prewarmable_bytes(0, 32, 0, 1000) == 1000
    assert prewarmable_bytes(32, 32, 990, 1000) == 0
    with pytest.raises(ValueError, match="2000 of 1000 bytes"):
        prewarmable_bytes(1, 32, 2000, 1000)


# section 5.2, Algorithm 1


def wishes_of(*demands):
    return replicas(demands)


def test_the_first_guideline_forbids_partial_sharing():
    """Figure 7."""
    assert is_nested_or_disjoint(0b0011, 0b1100)
    assert is_nested_or_disjoint(0b0011, 0b1111)
    assert is_nested_or_disjoint(0b0011, 0b0011)
    assert not is_nested_or_disjoint(0b0110, 0b0011)


def test_high_scores_get_gpus_of_their_own_before_they_share():
    steps = plan(
        wishes_of(a_demand("a", 1, 1, load_s=3.0), a_demand("b", 1, 1, load_s=2.0), a_demand("c", 1, 1, load_s=1.0)),
        {"a": ONE, "b": ONE, "c": ONE},
        [a_node(num=2)],
    )
    assert [(s.model_key, s.gpu_ids) for s in steps] == [
        ("a", ("node-1/0",)),
        ("b", ("node-1/1",)),
        ("c", ("node-1/1",)),  # nowhere above the others: where the sum of scores is least
    ]


def test_a_newcomer_lies_with_those_that_score_less():
    there = [a_replica("r1", "low", 0), a_replica("r2", "high", 1)]
    wishes = wishes_of(
        a_demand("high", 1, 1, load_s=9.0), a_demand("low", 1, 1, load_s=1.0), a_demand("new", 1, 1, load_s=5.0)
    )
    (step,) = plan(wishes, {"low": ONE, "high": ONE, "new": ONE}, [a_node(num=2, replicas=there)])
    assert step.gpu_ids == ("node-1/0",)


def test_among_groups_it_beats_the_least_sum_is_taken_even_where_another_sum_is_less():
    """Algorithm 1: min S_g among those with H_g < score; only where there is none, min S_g of all."""
    there = [a_replica("r1", "big", 0), *(a_replica(f"r-{low}", low, 1) for low in "pqr")]
    lows = [a_demand(low, 1, 1, load_s=2.0) for low in "pqr"]
    shapes = dict.fromkeys(("big", "new", "p", "q", "r"), ONE)
    for load_s, gpu in ((3.0, "node-1/1"), (1.0, "node-1/0")):  # 2 + 2 + 2 against 5
        wishes = wishes_of(a_demand("big", 1, 1, load_s=5.0), a_demand("new", 1, 1, load_s=load_s), *lows)
        (step,) = plan(wishes, shapes, [a_node(num=2, replicas=there)])
        assert step.gpu_ids == (gpu,)


def test_pairs_are_nested_or_disjoint_with_what_lies_there():
    there = [a_replica("r1", "pair", 1, 2)]
    wishes = wishes_of(a_demand("pair", 1, 1, load_s=9.0), a_demand("other", 1, 1, load_s=1.0))
    (step,) = plan(wishes, {"pair": TWO, "other": TWO}, [a_node(num=4, replicas=there)])
    assert step.gpu_ids == ("node-1/0", "node-1/3")


def test_no_model_lies_twice_on_a_gpu_and_replicas_there_are_not_made_again():
    """Erratum E10."""
    there = [a_replica("r1", "a", 0)]
    wishes = wishes_of(a_demand("a", mean=33, peak=33))
    (step,) = plan(wishes, {"a": ONE}, [a_node(num=2, replicas=there)])
    assert step.gpu_ids == ("node-1/1",)
    assert plan(wishes, {"a": ONE}, [a_node(num=1, replicas=there)]) == []


def test_worthless_replicas_give_way_when_room_is_short():
    """Erratum E9, an extension."""
    full = a_node(num=1, free=5 * GB, replicas=[a_replica("old", "gone", 0)])
    shapes = {"gone": ONE, "new": ONE}
    (step,) = plan(wishes_of(a_demand("new", 1, 1)), shapes, [full])
    assert step.drop == ("old",)
    wanted = wishes_of(a_demand("new", 1, 1), a_demand("gone", 1, 1))
    assert plan(wanted, shapes, [full]) == []


def test_what_fits_no_node_is_passed_over():
    wishes = wishes_of(a_demand("wide", 1, 1, load_s=9.0), a_demand("small", 1, 1, load_s=1.0))
    shapes = {"wide": ReplicaShape(num_gpus=4, bytes_per_gpu=GB), "small": ONE}
    assert [s.model_key for s in plan(wishes, shapes, [a_node(num=2)])] == ["small"]


# section 5.2, scale-up


def test_scale_up_takes_a_ready_copy_then_one_on_its_way_then_the_cheapest_gpus():
    ready, coming = a_replica("r1", "a", 0), a_replica("r2", "a", 1, ready=False)
    other = a_replica("r3", "b", 2, score=5.0)
    node = a_node(num=4, replicas=[ready, coming, other])
    assert take_over("a", ONE, [node]).replica_id == "r1"
    node = a_node(num=4, replicas=[coming, other])
    assert take_over("a", ONE, [node]).replica_id == "r2"
    node = a_node(num=2, replicas=[a_replica("r3", "b", 0, score=5.0), a_replica("r4", "c", 1, score=1.0)])
    missed = take_over("a", ONE, [node])
    assert (missed.replica_id, missed.gpu_ids, missed.evicted) == ("", ("node-1/1",), ("r4",))


def test_of_two_ready_copies_the_one_that_costs_the_others_least():
    """Section 5.2, last paragraph; erratum E8."""
    node = a_node(
        num=2,
        replicas=[
            a_replica("r1", "a", 0),
            a_replica("r2", "a", 1),
            a_replica("r3", "b", 0, score=5.0),
            a_replica("r4", "b", 1, score=1.0),
        ],
    )
    chosen = take_over("a", ONE, [node])
    assert (chosen.replica_id, chosen.evicted, chosen.lost_score) == ("r2", ("r4",), 1.0)


def test_gpus_that_still_serve_are_not_taken():
    node = a_node(num=1, draining=["node-1/0"], replicas=[a_replica("r1", "a", 0)])
    assert take_over("a", ONE, [node]) is None
