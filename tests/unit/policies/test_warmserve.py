"""WarmServe's published formulas with hand-worked numbers."""

import math
from dataclasses import replace

import pytest

from glowplug.domain.hardware import SharedWeights
from glowplug.domain.instance import InstanceState
from glowplug.fleet.node_index import NodeIndex
from glowplug.policies.placement.warmserve_evict_aware import (
    MAX_REPLICAS,
    EvictAwareParams,
    PrewarmDemand,
    Prewarmed,
    PrewarmNode,
    ReplicaClass,
    ReplicaShape,
    ReplicaWish,
    ScoreParams,
    is_nested_or_disjoint,
    plan,
    prewarm_nodes,
    replicas,
    serving_gpus,
    start_nodes,
)
from glowplug.policies.prewarming.warmserve_reservation import prewarmable_bytes
from glowplug_lab.policies.warmserve_csp import CspParams, forecast, season
from glowplug_lab.policies.warmserve_placement import take_over
from tests.fleet_builder import MIB, a_model, an_instance
from tests.fleet_builder import a_node as fleet_node

GB = 10**9
ONE = ReplicaShape(num_gpus=1, bytes_per_gpu=13 * GB)
TWO = ReplicaShape(num_gpus=2, bytes_per_gpu=12 * GB)


def a_demand(key="m", mean=0.0, peak=0.0, active=0, load_s=1.0, batch=32):
    loads = {"concurrency_mean": mean, "concurrency_peak": peak, "max_concurrency": batch}
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
    assert len(replicas([a_demand(mean=2.0, peak=3.0, batch=1)])) == 3


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


def wish(model="new", score=4.0, kind=ReplicaClass.BASIC, rank=0):
    return ReplicaWish(model_key=model, kind=kind, rank=rank, score=score)


def lying(name, *gpus, num_bytes=13 * GB, **fields):
    """A replica of a model of its own, without a shape."""
    return replace(a_replica(name, f"of {name}", *gpus), bytes_per_gpu=num_bytes, **fields)


def placed(*nodes, wishes=(wish(),), shapes=(), worths=None, **params):
    """(model, node, GPUs, replicas dropped) of each step."""
    known = {one.model_key: ONE for one in wishes} | dict(shapes)
    steps = plan(wishes, known, nodes, EvictAwareParams(**params), worths=worths)
    return [(s.model_key, s.node_id, "".join(g.removeprefix("node-1/") for g in s.gpu_ids), s.drop) for s in steps]


def second(node):
    return replace(node, node_id="node-2")


def test_a_replica_lies_above_or_below_another_as_a_whole():
    pair = a_node(lying("r1", 0, 1))
    assert placed(pair, worths={"r1": 1.0}) == [("new", "node-1", "0", ())]
    assert placed(pair, shapes={"new": TWO}, worths={"r1": 1.0}) == [("new", "node-1", "01", ())]
    assert placed(a_node(lying("r1", 0)), shapes={"new": TWO}, worths={"r1": 1.0}) == [("new", "node-1", "01", ())]
    assert placed(a_node(lying("r1", 0, 1), num=3), shapes={"new": TWO}, worths={"r1": 1.0})[0][2] == "01"


def test_the_node_is_taken_where_least_is_lost():
    low, high = a_node(lying("r1", 0), num=1), a_node(lying("r2", 0), num=1)
    assert placed(low, second(a_node(num=1)), worths={"r1": 1.0})[0][1] == "node-2", "nothing lies there"
    assert placed(low, second(high), worths={"r1": 1.0, "r2": 2.0})[0][1] == "node-1"
    assert placed(low, second(high), worths={"r1": 2.0, "r2": 1.0})[0][1] == "node-2"
    assert placed(low, second(high), worths={"r1": 5.0, "r2": 6.0})[0][1] == "node-1", "both are worth more"
    assert placed(low, second(high), worths={"r1": 3.0, "r2": 3.0})[0][1] == "node-1"


def test_who_scores_as_much_is_not_beaten():
    node = a_node(lying("r1", 0), lying("r2", 1), lying("r3", 1))
    assert placed(node, worths={"r1": 4.0, "r2": 2.5, "r3": 2.5})[0][2] == "1"


def test_a_wish_without_a_shape_or_for_another_engine_is_passed_over_and_steps_have_a_limit():
    assert plan([wish()], {}, [a_node()]) == []
    wishes = [wish(model) for model in "abc"]
    assert [len(placed(a_node(), wishes=wishes, max_steps=most)) for most in (1, 2, 3, 4)] == [1, 2, 3, 3]
    vllm = {"new": replace(ONE, engine="vllm")}
    for engines, num in ((None, 1), (frozenset({"vllm"}), 1), (frozenset({"llamacpp"}), 0)):
        assert len(placed(replace(a_node(), engines=engines), shapes=vllm)) == num


def test_a_model_that_lies_everywhere_keeps_no_other_from_the_same_place():
    wishes = [wish("a"), wish("a", rank=1), wish("b")]
    full = second(a_node(num=1, free=GB))
    assert [step[:2] for step in placed(a_node(num=1), full, wishes=wishes)] == [("a", "node-1"), ("b", "node-1")]


@pytest.mark.parametrize(("worth", "dropped"), [(2.0, ("r1",)), (2.1, None)])
def test_a_replica_of_half_the_worth_gives_way(worth, dropped):
    steps = placed(a_node(lying("r1", 0), num=1, free=0), worths={"r1": worth})
    assert steps == ([("new", "node-1", "0", dropped)] if dropped else [])


def test_those_that_give_way_are_worth_half_of_the_newcomer_together():
    node, worths = a_node(lying("r1", 0), lying("r2", 0), num=1, free=0), {"r1": 1.5, "r2": 1.5}
    assert placed(node, worths=worths) == [("new", "node-1", "0", ("r1",))], "the other one stays"
    twice = {"new": replace(ONE, bytes_per_gpu=26 * GB)}
    assert placed(node, shapes=twice, worths=worths) == []
    assert placed(node, shapes=twice, worths={"r1": 1.0, "r2": 1.0})[0][3] == ("r1", "r2")


def test_what_drains_or_is_only_planned_does_not_give_way():
    assert placed(a_node(lying("r1", 0, may_go=False), num=1, free=0), worths={}) == []
    stays = lying("r1", 0, may_go=False, num_bytes=0)
    assert placed(a_node(stays, lying("r2", 0), num=1, free=0), worths={})[0][3] == ("r2",)
    wishes = [wish("a", 1.0), wish("b", 9.0, ReplicaClass.BURST)]
    assert placed(a_node(num=1, free=13 * GB), wishes=wishes, worths={}) == [("a", "node-1", "0", ())]


def test_only_what_lies_on_the_gpus_gives_way_and_as_little_as_is_enough():
    node = a_node(lying("r0", 0), lying("r1", 0), lying("r2", 1), free=0)
    shapes = {"new": replace(ONE, bytes_per_gpu=13 * GB)}
    assert placed(node, shapes=shapes, worths={}) == [("new", "node-1", "1", ("r2",))]
    other = second(a_node(lying("r3", 0), lying("r4", 0), num=1, free=0))
    assert placed(second(node), replace(other, node_id="node-1"), shapes=shapes, worths={})[0][1] == "node-2"


def test_a_copy_of_the_model_or_a_group_across_another_is_no_place_to_clear():
    mine = replace(lying("r1", 0, num_bytes=0), model_key="new", counts=False)
    assert placed(a_node(mine, lying("r2", 0), num=1, free=0), worths={}) == []
    across = [lying("r1", 1, 2, num_bytes=0), lying("r2", 0, num_bytes=12 * GB), lying("r3", 3, num_bytes=12 * GB)]
    node = replace(a_node(*across, num=4), free_bytes=(0, 12 * GB, 0, 0))
    assert placed(node, shapes={"new": TWO}, worths={"r1": 3.0}) == [("new", "node-1", "03", ("r2", "r3"))]
    no_pair = replace(a_node(*across[:2], num=3), free_bytes=(0, 12 * GB, 0))
    assert placed(no_pair, shapes={"new": TWO}, worths={"r1": 3.0}) == []
    below = replace(a_node(*across[:2], num=3), free_bytes=(0, 12 * GB, 12 * GB))
    assert placed(below, shapes={"new": replace(TWO, num_gpus=3)}, worths={"r1": 3.0})[0][2:] == ("012", ("r2",))


def test_of_places_to_clear_the_one_whose_other_replicas_are_all_beaten_then_the_one_that_loses_least():
    stale = [lying("s0", 0), lying("s1", 1)]
    beside = [lying(f"r{n}", int(n != 0), num_bytes=0) for n in range(4)]
    node = a_node(*stale, *beside, free=0)
    assert placed(node, worths={"r0": 9.0, "r1": 3.9, "r2": 3.9, "r3": 3.9})[0][2:] == ("1", ("s1",))
    assert placed(node, worths={"r0": 4.0, "r1": 2.5, "r2": 2.5, "r3": 2.1})[0][2:] == ("1", ("s1",))
    assert placed(node, worths={"r0": 3.5, "r1": 3.0, "r2": 2.5, "r3": 2.5})[0][2:] == ("0", ("s0",)), "3.5 beside 8"
    assert placed(node, worths={"r0": 3.5, "r1": 2.2, "r2": 0.0, "r3": 0.0})[0][2] == "1"


def test_bytes_that_a_dropped_replica_held_are_free_for_the_next_wish_too():
    wishes = [wish("a"), wish("b"), wish("c")]
    node = a_node(lying("r1", 0, num_bytes=21 * GB), num=1, free=5 * GB)
    assert placed(node, wishes=wishes, worths={}) == [("a", "node-1", "0", ("r1",)), ("b", "node-1", "0", ())]
    by_shape = a_node(replace(lying("r1", 0), bytes_per_gpu=0), num=1, free=5 * GB)
    known = {"of r1": ReplicaShape(num_gpus=1, bytes_per_gpu=21 * GB)}
    assert len(placed(by_shape, wishes=wishes, shapes=known, worths={})) == 2
    unknown = a_node(replace(lying("r1", 0), bytes_per_gpu=0), num=1, free=13 * GB - 1)
    assert placed(unknown, wishes=wishes, worths={}) == []
    gone = replace(lying("r1", 0, num_bytes=21 * GB), gpu_ids=("node-1/9", "node-1/0"))
    assert len(placed(a_node(gone, num=1, free=5 * GB), wishes=wishes, worths={})) == 2, "a GPU of it is gone"


def test_gpus_that_are_unknown_are_a_place_of_their_own():
    assert a_node().bits(("node-9/0", "node-1/1", "node-9/1")) == 0b10110


def test_a_step_says_what_it_saves_and_over_whom():
    def said(kind, **worths):
        return plan([wish(kind=kind)], {"new": ONE}, [a_node(lying("r1", 0), num=1)], worths=worths)[0].reason

    saves = "that is expected needs it, and it is expected to save 4 s of loading"
    assert said(ReplicaClass.BASIC) == f"the average load {saves}"
    assert said(ReplicaClass.BURST, r1=3.0) == f"the highest load {saves}: more than each copy there (together 3 s)"
    assert said(ReplicaClass.BASIC, r1=5.0).endswith("s of loading: no more than those there (together 5 s)")


# nodes of the fleet


def holding(*holders, promised=0, rows=(), besides=()):
    """Whether a GPU with these holders' grants counts as serving."""
    node = fleet_node("node-1", grants={0: [(holder, 10) for holder in holders]})
    reserved = {"node-1/0": promised} if promised else {}
    return serving_gpus(node, rows, reserved, besides) == {"node-1/0"}


def copy(name, state=InstanceState.PREWARMED, **fields):
    return an_instance(name, f"of {name}", state, replica=True, **fields)


COMING = copy("r-2", InstanceState.LOADING, mib=1)


HOLDING = {  # holders and what else is known of the GPU -> whether it serves
    "empty": ([], {}, False),
    "an instance": (["i-9"], {}, True),
    "a copy": (["r-1"], {"rows": [copy("r-1")]}, False),
    "both": (["r-1", "i-9"], {"rows": [copy("r-1")]}, True),
    "one that drains": (["i-9"], {"besides": {"i-9"}}, False),
    "a promise": ([], {"promised": 1}, True),
    "a promise to a copy on its way": ([], {"promised": MIB, "rows": [COMING]}, False),
    "and to another": ([], {"promised": MIB + 1, "rows": [COMING]}, True),
    "a promise to another than the copy that holds": (["r-2"], {"promised": MIB, "rows": [COMING]}, True),
    "a promise to another than a copy elsewhere": ([], {"promised": MIB, "rows": [copy("r-1", mib=1)]}, True),
}


@pytest.mark.parametrize(("holders", "given", "serves"), HOLDING.values(), ids=HOLDING)
def test_a_gpu_serves_if_it_is_held_by_or_promised_to_others_than_copies(holders, given, serves):
    assert holding(*holders, **given) is serves


def test_prewarming_sees_gpus_that_do_not_serve_and_copies_anywhere():
    nodes = [
        fleet_node("node-1", gpus_mib=(300,) * 3, grants={0: [("i-1", 9)], 1: [("i-2", 9)], 2: [("r-1", 9)]}),
        fleet_node("node-2", grants={0: [("i-1", 9)]}), fleet_node("node-3", draining=True),
        fleet_node("node-4", grants={0: [("i-1", 9)]}), fleet_node("node-5", abilities=("emulated:prewarm",)),
    ]  # fmt: skip
    rows = {
        "node-1": [copy("r-1", gpu_id="node-1/2"), copy("r-2", InstanceState.SWAPPED_OUT)],
        "node-4": [copy("r-4", InstanceState.LOADING, gpu_id="node-4/0")],
    }
    index = NodeIndex(nodes, dormant=rows)

    def found(is_ahead):
        return {
            node.node_id: ([g[-1] for g in node.gpu_ids], {g[-1] for g in node.draining},
                           [(r.replica_id, r.is_ready) for r in node.replicas], node.engines)
            for node in prewarm_nodes(index, {"i-2"}, is_ahead=is_ahead)
        }  # fmt: skip

    there, coming, empty = ("r-1", True), ("r-4", False), frozenset()
    others = {"node-4": ([], set(), [coming], empty), "node-5": (["0"], set(), [], {"emulated"})}
    assert found(False) == {"node-1": (["2"], set(), [there], empty)} | others
    assert found(True) == {"node-1": (["1", "2"], {"1"}, [there], empty)} | others


def test_a_copy_whose_weights_others_read_does_not_go():
    weights = [SharedWeights(key="k", num_bytes=9, holders=holders) for holders in (("r-1", "i-1"), ("r-2",))]
    node = fleet_node("node-1", grants={0: [("r-1", 9), ("r-2", 9)]})
    node = replace(node, gpus=(replace(node.gpus[0], shared=tuple(weights)),))
    (found,) = prewarm_nodes(NodeIndex([node], dormant={"node-1": [copy("r-1"), copy("r-2")]}), (), is_ahead=False)
    assert [(r.replica_id, r.may_go) for r in found.replicas] == [("r-1", False), ("r-2", True)]


def test_a_start_sees_the_nodes_with_enough_large_gpus_that_do_not_serve():
    model = a_model("m", mib=200, num_gpus=2, revision=7)
    nodes = [
        fleet_node("node-1", gpus_mib=(100, 99, 100, 100), grants={0: [("i-1", 9)]}),
        fleet_node("node-2", gpus_mib=(100, 99)), fleet_node("node-3", gpus_mib=(100, 100), draining=True),
        fleet_node("node-4", gpus_mib=(100, 100), engines=("vllm",)), fleet_node("node-5", gpus_mib=(100, 100)),
    ]  # fmt: skip
    revisions = {"r-1": ("m", 7), "r-2": ("m", 6), "r-3": ("other", 6)}
    rows = [an_instance(r, key, InstanceState.PREWARMED, gpu_id="node-1/2", model_revision=revision)
            for r, (key, revision) in revisions.items()]  # fmt: skip
    found = start_nodes(model, 100 * MIB, NodeIndex(nodes, dormant={"node-1": rows}, scores={"r-1": 2.0}))
    assert [(n.node_id, sorted(n.draining), [(r.replica_id, r.score) for r in n.replicas]) for n in found] == [
        ("node-1", ["node-1/0", "node-1/1"], [("r-1", 2.0), ("r-3", 0.0)]),
        ("node-5", [], []),
    ]


def test_what_fits_no_node_is_passed_over():
    wide = ReplicaShape(num_gpus=4, bytes_per_gpu=GB)
    assert planned(a_node(), {"wide": wide}, wide=9.0, small=1.0) == [("small", "0", ())]


# section 5.2, scale-up

READY, LOADING = a_replica("r1", "a", 0), a_replica("r2", "a", 1, ready=False)


@pytest.mark.parametrize(
    ("num", "there", "wanted"),
    [
        (4, [READY, LOADING, a_replica("r3", "b", 2, score=5.0)], ("node-1/0", "r1", ())),
        (4, [LOADING, a_replica("r3", "b", 2, score=5.0)], ("node-1/1", "r2", ())),
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
