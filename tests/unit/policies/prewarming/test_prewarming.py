"""Plans of WarmServe, the baselines and the union over the placer's fleet."""

from dataclasses import replace

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import Forecast
from glowplug.policies.placement.warmserve_evict_aware import EvictAwareParams
from glowplug.policies.prewarming import union, warmserve
from glowplug.policies.prewarming.baselines import nothing
from glowplug.policies.prewarming.port import PrewarmView, reads_profile, weighs_worth
from glowplug.policies.prewarming.warmserve import LayerProfile, first_layers, first_layers_bytes
from glowplug.policies.registry import choose
from glowplug.policies.worth import InMemory, asked, idle_worth, level
from glowplug_lab.policies.keep_last import keep_last
from tests.fleet_builder import MIB, a_model, a_node, an_instance

A, B = a_model("a"), a_model("b")  # 100 MiB each
FIRST = warmserve.WarmserveParams(first_layers=True, num_layers=10)
LLAMA_7B = LayerProfile(
    num_layers=32, weights_bytes=12_550_000_000, load_bytes_per_s=32e9, prefill_s_per_layer=0.035 / 32
)


def forecast(mean=4.0, peak=4.0):
    return Forecast(made_at=0.0, window_s=300.0, concurrency_mean=mean, concurrency_peak=peak)


def node(*gpus_mib, name="node-1", abilities=("emulated:prewarm",), **fields):
    return a_node(name, gpus_mib=gpus_mib or (300,), abilities=abilities, **fields)


def copy(replica_id, model="a", state=InstanceState.PREWARMED, gpu=0, **fields):
    return an_instance(replica_id, model, state, gpu_id=f"node-1/{gpu}", replica=True, **fields)


def seen(*nodes, models=(A,), copies=(), **fields):
    """Every model has a forecast and loads in 1 s; `copies` are on node-1."""
    given = {"forecasts": {m.key: forecast() for m in models}, "load_s": {m.key: 1.0 for m in models}} | fields
    return PrewarmView(now_s=100.0, nodes=nodes, models={m.key: m for m in models}, dormant={"node-1": copies}, **given)


def gpus(plan):
    return ["".join(g.removeprefix("node-1/") for g in step.gpu_ids) for step in plan.steps]


def test_replicas_for_the_load_to_come_less_what_runs():
    """Section 5.2, Eq. 5-6: ceil(20/8) - 1 basic ones, and for a peak of 30 one burst more."""
    nodes = [node(name=f"node-{n}") for n in range(4)]
    plan = warmserve.plan(seen(*nodes, forecasts={"a": forecast(20.0, 30.0)}, num_active={"a": 1}))
    assert len(plan.steps) == 3
    assert len({s.node_id for s in plan.steps}) == 3, "never two copies on one GPU (erratum E10)"


def test_slots_that_engines_have_count_not_those_that_were_declared():
    """Eq. 5's B: of 8 declared slots memory allows 2, so four requests take two instances."""
    nodes = [node(name=f"node-{n}") for n in range(4)]
    assert [len(warmserve.plan(seen(*nodes, slots=slots)).steps) for slots in ({}, {"a": 2})] == [1, 2]


def test_draining_instances_leave_their_gpus_to_replicas_and_running_ones_do_not():
    """Section 4.1: proactive prewarming."""
    here = node(300, 300, grants={0: [("i-run", 100)], 1: [("i-drain", 150)]})
    view = seen(here, forecasts={"a": forecast(8.0, 16.0)}, draining=frozenset({"i-drain"}))
    assert gpus(warmserve.plan(view)) == ["1"]
    assert warmserve.unproactive(view).steps == ()


def test_replicas_there_take_the_first_scores_and_extras_nothing():
    """Erratum E10."""
    here = node(100, 100, grants={0: [("r-0", 100)], 1: [("r-1", 100)]})
    assert warmserve.plan(seen(here, copies=[copy("r-0"), copy("r-1", gpu=1)])).scores == {"r-0": 1.0}


def test_a_worthless_replica_gives_way_when_memory_is_short():
    """Erratum E9, an extension."""
    view = seen(
        node(100, grants={0: [("r-0", 100)]}),
        models=[A, a_model("old")],
        forecasts={"a": forecast()},
        copies=[copy("r-0", "old")],
    )
    (step,) = warmserve.plan(view).steps
    assert step.drop == ("r-0",)


def test_engines_that_cannot_prewarm_get_nothing():
    assert warmserve.plan(seen(node(abilities=("other:prewarm",)))).steps == ()


def test_the_ablation_overlaps_as_it_comes():
    """Section 7.5."""
    pairs = [a_model(key, mib=200, num_gpus=2) for key in "ab"]
    view = seen(node(100, 200, 100), models=pairs)
    assert gpus(warmserve.plan(view)) == ["01"]
    assert gpus(warmserve.unplaced(view)) == ["01", "12"]


def test_replicas_of_a_model_that_changed_are_dropped():
    view = seen(node(), models=[a_model("a", revision=2)], forecasts={}, copies=[copy("r-0", model_revision=1)])
    assert warmserve.plan(view).drops == nothing(view).drops == keep_last(view).drops == ("r-0",)
    pinned = a_model("a", revision=2, declared_at=1)
    view = seen(node(), models=[pinned], forecasts={}, copies=[copy("r-0", model_revision=1)])
    assert nothing(view).drops == (), "an operator has pinned it: its declaration is what it was"


def test_keep_last_makes_nothing_and_values_what_was_used_last():
    """Section 7.1, the baseline SLLM-GPU."""
    copies = [copy("r-a", "a"), copy("r-b", "b")]
    plan = keep_last(seen(node(), models=[A, B], forecasts={}, copies=copies, last_used_at={"b": 99.0}))
    assert plan.steps == () and plan.scores["r-b"] > plan.scores["r-a"]


def test_a_copy_under_a_drain_does_not_stand_for_one_that_a_start_can_use():
    here = node(300, 300, grants={1: [("i-drain", 100), ("r-0", 100)]})
    view = seen(here, draining=frozenset({"i-drain"}), copies=[copy("r-0", gpu=1)])
    assert gpus(warmserve.plan(view)) == ["0"]


def test_what_drains_stays_as_a_copy_of_its_model_and_gets_no_second():
    row = an_instance("i-drain", "a", InstanceState.DRAINING)
    here = node(grants={0: [("i-drain", 150)]})
    view = seen(here, models=[A, B], draining=frozenset({"i-drain"}), finishing={"node-1": [row]})
    assert [s.model_key for s in warmserve.plan(view).steps] == ["b"]


@pytest.mark.parametrize(
    ("gpus_mib", "models", "fields", "fits"),
    [
        ((100, 99, 100), [A], {}, ["0"]),
        ((99, 100, 100), [A, B], {}, ["1", "2"]),
        ((200, 100), [A, B], {}, ["0", "0"]),
        ((300,), [A], {"forecasts": {"a": forecast(16.0, 16.0)}}, ["0"]),
        ((300, 99, 300), [A], {"forecasts": {"a": forecast(16.0, 16.0)}}, ["0", "2"]),
        ((99,), [a_model("big", mib=100), a_model("c", mib=99)], {}, ["0"]),
        ((300, 300), [a_model("a", engine="other")], {}, []),
        ((100, 100), [a_model("a", mib=200, num_gpus=2)], {}, ["01"]),
        ((100,), [a_model("a", mib=200, num_gpus=2)], {}, []),
    ],
)
def test_the_ablation_takes_the_first_gpus_with_the_memory_and_none_twice_for_a_model(gpus_mib, models, fields, fits):
    view = seen(node(*gpus_mib), models=models, **fields)
    assert gpus(warmserve.unplaced(view)) == fits


def test_a_plan_makes_as_many_steps_as_allowed_and_the_next_goes_on():
    view = seen(*(node(300, 300, name=f"node-{n}") for n in range(9)), forecasts={"a": forecast(200.0, 200.0)})
    for policy in (warmserve.plan, warmserve.unplaced):
        assert len(policy(view).steps) == 16
    few = warmserve.WarmserveParams(evict_aware=False, placement=EvictAwareParams(max_steps=1))
    (step,) = warmserve.plan(view, few).steps
    assert (step.model_key, step.node_id, step.bytes_per_gpu) == ("a", "node-0", 100 * MIB) and step.score > 0


def test_the_ablation_leaves_what_lies_there_and_asks_no_second_time():
    here = node(200, 200, grants={0: [("r-0", 100)]})
    view = seen(here, models=[A, B], copies=[copy("r-0")], forecasts={"a": forecast(16.0, 16.0), "b": forecast()})
    assert [(s.model_key, *s.gpu_ids) for s in warmserve.unplaced(view).steps] == [("b", "node-1/0"), ("a", "node-1/1")]


def test_a_plan_counts_its_wishes_and_those_that_no_copy_answers():
    view = seen(node(300, 300), forecasts={"a": forecast(20.0, 20.0)}, copies=[copy("r-0")])
    assert dict(warmserve.plan(view).inputs) == {"wishes": 3, "open": 2}
    drains = replace(view, draining=frozenset({"i-drain"}))
    assert dict(warmserve.plan(drains).inputs) == {"wishes": 3, "open": 2}


def test_ahead_of_a_drain_each_gpu_is_filled_once_and_first_those_that_can_be_used():
    """Both models are wished for twice; the free GPU takes one of each, and the draining one the others."""
    here = node(200, 200, grants={1: [("i-drain", 50)]})
    wanted = {"a": forecast(16.0, 16.0), "b": forecast(9.0, 9.0)}
    view = seen(here, models=[A, B], draining=frozenset({"i-drain"}), forecasts=wanted)
    assert [(s.model_key, *s.gpu_ids) for s in warmserve.plan(view).steps] == [
        ("a", "node-1/0"),
        ("b", "node-1/0"),
        ("a", "node-1/1"),
    ]
    assert [(s.model_key, *s.gpu_ids) for s in warmserve.unproactive(view).steps] == [
        ("a", "node-1/0"),
        ("b", "node-1/0"),
    ]


def test_a_copy_that_goes_for_another_is_not_counted_on_afterwards():
    """The worthless one is dropped for the first wish, and its bytes are not given away a second time."""
    here = node(100, 100, grants={0: [("r-0", 100)], 1: [("i-drain", 100)]})
    models = [A, a_model("old")]
    view = seen(
        here, models=models, copies=[copy("r-0", "old")], draining=frozenset({"i-drain"}), forecasts={"a": forecast()}
    )
    (step,) = warmserve.plan(view).steps
    assert (step.gpu_ids, step.drop) == (("node-1/0",), ("r-0",))


def test_copies_under_a_drain_and_others_are_both_worth_what_they_stand_for():
    here = node(300, 300, grants={0: [("r-1", 100)], 1: [("i-drain", 100), ("r-0", 100)]})
    view = seen(here, draining=frozenset({"i-drain"}), copies=[copy("r-0", gpu=1), copy("r-1")])
    assert dict(warmserve.plan(view).scores) == {"r-0": 1.0, "r-1": 1.0}


def test_stale_copies_answer_no_wish():
    stale = [copy("r-0", model_revision=1), copy("r-gone", "gone")]
    here = node(300, 300, grants={0: [("r-0", 100), ("r-gone", 100)]})
    view = seen(here, models=[a_model("a", revision=2)], copies=stale)
    plan = warmserve.plan(view)
    assert (plan.drops, dict(plan.scores), len(plan.steps)) == (("r-0", "r-gone"), {}, 1)


# section 4, erratum E7


@pytest.mark.parametrize(
    ("changed", "k"), [({}, 30), ({"lead_s": 0.15}, 17), ({"load_bytes_per_s": 1e12}, 1)],
    ids=[
        "12.3 ms a layer against 1.1 ms of compute: 31 x 1.1 ms hide two",
        "the extension: 150 ms until the first layer computes hide thirteen more",
        "layers that load faster than they compute",
    ],
)  # fmt: skip
def test_seven_billion_weights_over_pcie_beside_a_prefill_of_35_ms(changed, k):
    profile = replace(LLAMA_7B, **changed)
    assert first_layers(profile) == k
    assert first_layers_bytes(profile) == -(-12_550_000_000 * k // 32)


def test_a_layer_that_comes_just_in_time_is_not_held():
    assert first_layers(LayerProfile(num_layers=2, weights_bytes=2, load_bytes_per_s=1, prefill_s_per_layer=1.0)) == 1


@pytest.mark.parametrize("field", ["num_layers", "load_bytes_per_s"])
def test_a_model_has_layers_and_a_link_a_rate(field):
    with pytest.raises(ValueError, match=field):
        replace(LLAMA_7B, **{field: 0})


def planned_mib(view, params=FIRST):
    return [step.bytes_per_gpu / MIB for step in warmserve.plan(view, params).steps]


def test_replicas_of_the_first_layers_are_smaller_so_more_of_them_fit():
    """A prefill takes half as long as loading."""
    view = seen(node(130), models=[A, B], prefill_s={"a": 0.5, "b": 0.5})
    assert planned_mib(view, warmserve.WarmserveParams()) == [100]
    assert planned_mib(view) == [60, 60]


def test_a_model_of_which_no_prefill_was_seen_is_prewarmed_whole():
    assert planned_mib(seen(node())) == [100]
    leads = replace(FIRST, growth_leads=True)
    assert planned_mib(seen(node(), growth_s={"a": 0.9}), leads) == [100]
    assert planned_mib(seen(node(), prefill_s={"a": 0.5}, load_s={"a": 0.0}), leads) == [100]
    assert planned_mib(seen(node(), models=[a_model("a", mib=0)], prefill_s={"a": 0.5})) == [0]


def test_how_long_the_load_takes_is_what_was_measured():
    """Ten layers in 2 s, and 50 ms of compute each: 9 x 50 ms hide two of them."""
    assert planned_mib(seen(node(), prefill_s={"a": 0.5}, load_s={"a": 2.0})) == [80]


def test_the_growth_counts_only_where_it_is_asked_for():
    view = seen(node(), prefill_s={"a": 0.5}, growth_s={"a": 0.2})
    assert planned_mib(view) == [60]
    assert planned_mib(view, replace(FIRST, growth_leads=True)) == [40]


@pytest.mark.parametrize("params", [FIRST, warmserve.WarmserveParams()], ids=["first layers", "whole"])
@pytest.mark.parametrize(("gpu_mib", "fits"), [(65, False), (70, True)])
def test_free_is_what_the_replicas_that_give_way_hold_and_no_more(gpu_mib, fits, params):
    """Erratum E9 with a replica of 60 MiB, which an earlier placer may have left to one that plans whole ones."""
    view = seen(
        node(gpu_mib, grants={0: [("r-0", 60)]}),
        models=[a_model("a", mib=70), a_model("old")],
        forecasts={"a": forecast(1, 1)},
        copies=[copy("r-0", "old", mib=60)],
    )
    assert bool(warmserve.plan(view, params).steps) is fits


def test_the_option_is_a_word_of_the_policy_and_asks_for_its_profile():
    for name in ("warmserve", "warmserve_literal"):
        assert reads_profile(choose("prewarming", f"{name}:first_layers=true"))
        assert not reads_profile(choose("prewarming", name))
    assert reads_profile(choose("prewarming", "union:plan.first_layers=true"))
    assert not reads_profile(choose("prewarming", "union")) and weighs_worth(choose("prewarming", "union:price=1"))
    assert not reads_profile(choose("prewarming", "warmserve:proactive=false")) and not reads_profile(None)
    with pytest.raises(BadRequest, match="is neither true nor false"):
        choose("prewarming", "warmserve:first_layers=3")


PRICED, FREE = union.UnionParams(price=0.005), union.UnionParams(price=0.0)
HERE = CachedWeights(digest=A.weights.digest, num_bytes=1)


def weighed(*nodes, worths=None, **fields):
    """As the placer tells the union: a start from a replica saves 1 s, and copies have these `worths`."""
    models = {model.key for model in fields.get("models", (A,))}
    holdings = {
        name: InMemory(name=name, asked=worth, climb_s=1.0, num_bytes=1, idle_worth=worth / 60)
        for name, worth in (worths or {}).items()
    }
    return seen(*nodes, **({"climb_s": dict.fromkeys(models, 1.0), "holdings": holdings} | fields))


def test_the_union_makes_replicas_only_where_host_memory_has_the_weights():
    """WarmServe section 7.1 has all weights in host memory."""
    view = weighed(
        node(300, 300, cached=(HERE,)), models=[a_model("near"), a_model("far", weights=WeightsRef(uri="file:/far"))]
    )
    assert {step.model_key for step in warmserve.plan(view).steps} == {"near", "far"}
    plan = union.plan(view, FREE)
    assert [step.model_key for step in plan.steps] == ["near"]
    assert dict(plan.inputs) == {"wishes": 2, "open": 2, "over_network": 1, "unpaid": 0}


def test_the_union_counts_slots_that_engines_have_too():
    here = node(300, 300, cached=(HERE,))
    wished = [
        {wish.rank for wish in union.wishes(weighed(here, slots=slots, num_active={"a": 1}), FREE)}
        for slots in ({}, {"a": 2})
    ]
    assert wished == [set(), {0, 1}]


def test_every_copy_is_worth_something_to_the_union_with_a_forecast_or_without():
    """WarmServe scores only the forecast's wishes."""
    keys = ("wished", "recent", "old")
    view = weighed(
        node(cached=(HERE,)),
        models=[a_model(key) for key in keys],
        copies=[copy(f"i-{key}", key) for key in keys],
        forecasts={"wished": forecast(1.0, 1.0)},
        worths={"i-wished": 0.9, "i-recent": 0.5, "i-old": 0.1},
    )
    assert dict(union.plan(view).scores) == {"i-wished": 0.9, "i-recent": 0.5, "i-old": 0.1}
    assert set(warmserve.plan(view).scores) == {"i-wished"}


@pytest.mark.parametrize(("there", "dropped"), [(0.1, ("i-old",)), (0.9, ())])
def test_what_is_wished_for_takes_the_place_of_copies_that_are_worth_less_than_half_of_it(there, dropped):
    full = node(100, cached=(HERE,), grants={0: [("i-old", 100)]})
    old = [copy("i-old", "old", mib=100)]
    view = weighed(full, models=[A, a_model("old")], copies=old, worths={"i-old": there}, forecasts={"a": forecast()})
    assert [step.drop for step in union.plan(view, FREE).steps] == ([dropped] if dropped else [])


def test_the_union_gives_gpus_back_on_which_nothing_is_worth_its_price():
    """0.005 s of waiting a second: one copy saves 0.1 s a minute, the other 0.6 s."""
    here = node(300, 300, cached=(HERE,), grants={0: [("i-a", 100)], 1: [("i-b", 100)]})
    copies = [copy("i-a", "a", mib=100), copy("i-b", "b", gpu=1, mib=100)]
    worths = {"i-a": 0.1, "i-b": 0.6}
    view = weighed(here, models=[A, B], copies=copies, worths=worths, forecasts={})
    (dropped,) = union.plan(view, PRICED).unpaid.items()
    assert dropped == ("i-a", "what lies on node-1/0 saves 1.67 ms of waiting a second, and has to save 5")
    assert union.plan(view, FREE).unpaid == {}, "no price: they stay until they are in the way"
    assert choose("prewarming", "union:price=0")(view).unpaid == {}
    beside = node(300, 300, cached=(HERE,), grants={0: [("i-a", 100), ("i-run", 100)], 1: [("i-b", 100)]})
    assert (
        union.plan(weighed(beside, models=[A, B], copies=copies, worths=worths, forecasts={}), PRICED).unpaid == {}
    ), "beside one that serves a copy costs nothing"
    both = [copies[0], copy("i-b", "b", mib=100)]
    shared = node(300, cached=(HERE,), grants={0: [("i-a", 100), ("i-b", 100)]})
    assert union.plan(weighed(shared, models=[A, B], copies=both, worths=worths, forecasts={}), PRICED).unpaid == {}


def test_the_union_counts_slots_as_engines_say_them():
    """Of 8 declared slots memory allows 2."""
    view = weighed(node(300, 300, 300, 300, cached=(HERE,)), forecasts={"a": forecast(4.0, 6.0)}, num_active={"a": 1})
    assert [len(union.wishes(replace(view, slots=slots), FREE)) for slots in ({}, {"a": 2})] == [0, 3]
    asks = union.UnionParams(price=0.001)
    assert [len(union.plan(replace(view, slots=slots), asks).steps) for slots in ({}, {"a": 2})] == [0, 3]


def test_the_union_makes_no_replica_that_would_not_pay_for_an_empty_gpu():
    """0.4 requests a window of 300 s, and 1 s saved: 1.3 ms a second."""
    rare = forecast(0.01, 0.4)
    view = weighed(node(300, cached=(HERE,)), forecasts={"a": rare})
    assert union.plan(view, PRICED).steps == () and union.plan(view, PRICED).inputs["unpaid"] == 1
    assert len(union.plan(view, union.UnionParams(price=0.001)).steps) == 1


def test_wishes_are_for_models_known_and_saving_seconds_the_most_valuable_first():
    models = [A, B, a_model("free"), a_model("c")]
    view = weighed(
        node(300),
        models=models,
        forecasts={key: forecast(8.0, 8.0) for key in ("c", "b", "a", "free", "unknown")},
        climb_s={"a": 1.0, "b": 30.0, "c": 1.0, "unknown": 9.0},
        num_active={"b": 1},
        num_leaving_copies={"c": 1},
    )
    few = union.UnionParams(max_replicas=1, least_asked=1e-9)
    found = union.wishes(view, few)
    assert [(wish.model_key, wish.rank) for wish in found] == [("b", 0), ("a", 0), ("c", 0)]
    by_key = {wish.model_key: wish.score for wish in found}
    assert by_key["b"] > by_key["a"] > by_key["c"] and by_key["a"] == pytest.approx(
        asked(level(forecast(8, 8), 0, 8), 61)
    )
    assert by_key["c"] == pytest.approx(asked(level(forecast(8, 8), 1, 8), 61))
    ranks = [
        wish.rank
        for wish in union.wishes(view, union.UnionParams(least_asked=1e-9, max_replicas=3))
        if wish.model_key == "a"
    ]
    assert ranks == [0, 1, 2]
    at_limit = union.UnionParams(least_asked=by_key["c"])
    assert "c" in {wish.model_key for wish in union.wishes(view, at_limit)}


def priced(*rows, price=0.005, gpus_mib=(300, 300, 300), worths=None, **fields):
    grants = {
        at: [(r.instance_id, 50) for r in rows if f"node-1/{at}" in {w.gpu_id for w in r.workers}] for at in range(3)
    }
    here = node(*gpus_mib, cached=(HERE,), grants=grants)
    given = {"models": [A, B], "copies": rows, "worths": worths or {}, "forecasts": {}} | fields
    return union.plan(weighed(here, **given), union.UnionParams(price=price))


def wide(replica_id, *gpus, model="a", **fields):
    row = copy(replica_id, model, gpu=gpus[0], **fields)
    return replace(row, workers=tuple(replace(row.workers[0], gpu_id=f"node-1/{gpu}") for gpu in gpus))


def test_gpus_that_copies_share_are_held_against_the_price_together():
    """0.005 s a second and GPU: three of them need 0.9 s a minute."""
    chain = wide("i-1", 0), wide("i-2", 0, 1, model="b"), wide("i-3", 1, 2)
    for worth, unpaid in ((0.31, set()), (0.29, {"i-1", "i-2", "i-3"})):
        assert priced(*chain, worths=dict.fromkeys(("i-1", "i-2", "i-3"), worth)).unpaid.keys() == unpaid
    apart = wide("i-1", 0), wide("i-2", 1, model="b")
    assert priced(*apart, worths={"i-1": 0.9, "i-2": 0.1}).unpaid.keys() == {"i-2"}
    assert priced(*apart, worths={"i-1": 0.9, "i-2": 0.0}).unpaid.keys() == {"i-2"}
    assert priced(wide("i-1", 0), worths={"i-1": 60.0}, price=1.0).unpaid == {}, "just as much pays"


def test_only_copies_that_could_go_are_held_against_the_price():
    asleep = copy("i-1", state=InstanceState.SWAPPED_OUT)
    assert priced(asleep, worths={"i-1": 0.0}).unpaid == {}
    assert priced(copy("i-1"), worths={}).unpaid == {}, "nobody knows its worth yet"
    assert priced(copy("i-1"), worths={"i-1": 0.0}).unpaid.keys() == {"i-1"}


def test_a_copy_that_goes_for_a_step_is_not_what_keeps_its_gpu():
    here = node(100, cached=(HERE,), grants={0: [("i-old", 100)]})
    old = [copy("i-old", "old", mib=100)]
    view = weighed(here, models=[A, a_model("old")], copies=old, worths={"i-old": 0.1}, forecasts={"a": forecast()})
    plan = union.plan(view, union.UnionParams(price=0.001))
    assert [step.drop for step in plan.steps] == [("i-old",)] and plan.unpaid == {}
    dear = union.plan(view, union.UnionParams(price=0.9))
    assert dear.steps == () and dear.inputs["unpaid"] == 1 and dear.unpaid == {}


def test_a_replica_beyond_those_there_saves_less():
    """Of a model with a copy, or an instance, the next one has to be worth its price by itself."""
    here = node(300, 300, cached=(HERE,), grants={0: [("i-a", 50)]})
    view = weighed(here, copies=[copy("i-a")], worths={"i-a": 60.0}, forecasts={"a": forecast(9.0, 9.0)})
    first, second = (idle_worth(level(forecast(9.0, 9.0), num, 8), 1.0) for num in (0, 1))
    assert first > second > 0
    for price, num in ((second * 0.99, 1), (second * 1.01, 0)):
        assert len(union.plan(view, union.UnionParams(price=price)).steps) == num
    serves = weighed(here, forecasts={"a": forecast(9.0, 9.0)}, num_active={"a": 1})
    for price, num in ((second * 0.99, 1), (second * 1.01, 0)):
        assert len(union.plan(serves, union.UnionParams(price=price)).steps) == num


def test_of_replicas_on_gpus_apart_each_has_to_pay_for_its_own():
    busy, rare = forecast(9.0, 9.0), forecast(0.01, 0.4)
    view = weighed(node(100, 100, cached=(HERE,)), models=[A, B], forecasts={"a": busy, "b": rare})
    plan = union.plan(view, replace(PRICED, max_replicas=1))
    assert [step.model_key for step in plan.steps] == ["a"] and plan.inputs["unpaid"] == 1
    assert dict(plan.scores) == plan.unpaid == {}
