"""WarmServe's plan over a fleet as the placer sees it, and the baselines beside it."""

from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast
from glowplug.policies.prewarming import warmserve
from glowplug.policies.prewarming.baselines import keep_last, nothing
from glowplug.policies.prewarming.port import PrewarmView
from tests.fleet_builder import a_model, a_node, an_instance

CAN = ("emulated:prewarm",)


def forecast(mean, peak):
    return Forecast(made_at=0.0, window_s=300.0, concurrency_mean=mean, concurrency_peak=peak)


def seen(nodes, models, forecasts, **fields):
    return PrewarmView(
        now_s=100.0,
        nodes=nodes,
        models={m.key: m for m in models},
        forecasts=forecasts,
        load_s={m.key: 1.0 for m in models},
        **fields,
    )


def test_replicas_for_the_load_to_come_less_what_runs():
    """Section 5.2, Eq. 5-6: ceil(20/8) - 1 basic ones, and for a peak of 30 one burst more."""
    models = [a_model("a", mib=100)]
    nodes = [a_node(f"node-{n}", abilities=CAN) for n in range(4)]
    plan = warmserve.plan(seen(nodes, models, {"a": forecast(20.0, 30.0)}, num_active={"a": 1}))
    assert len(plan.steps) == 3
    assert len({s.node_id for s in plan.steps}) == 3, "never two copies on one GPU (erratum E10)"


def test_draining_instances_leave_their_gpus_to_replicas_and_running_ones_do_not():
    """Section 4.1: proactive prewarming into what a stopping instance no longer needs."""
    node = a_node(gpus_mib=(300, 300), grants={0: [("i-run", 100)], 1: [("i-drain", 150)]}, abilities=CAN)
    view = seen([node], [a_model("a", mib=100)], {"a": forecast(8.0, 16.0)}, draining=frozenset({"i-drain"}))
    assert [s.gpu_ids for s in warmserve.plan(view).steps] == [("node-1/1",)]
    assert warmserve.unproactive(view).steps == ()


def test_replicas_there_take_the_first_scores_and_extras_nothing():
    """Erratum E10."""
    rows = [an_instance(f"r-{n}", "a", InstanceState.PREWARMED, gpu_id=f"node-1/{n}", replica=True) for n in range(2)]
    node = a_node(gpus_mib=(100, 100), grants={0: [("r-0", 100)], 1: [("r-1", 100)]}, abilities=CAN)
    view = seen([node], [a_model("a")], {"a": forecast(4.0, 4.0)}, dormant={"node-1": rows})
    assert warmserve.plan(view).scores == {"r-0": 1.0}


def test_a_worthless_replica_gives_way_when_there_is_no_room():
    """Erratum E9, an extension."""
    row = an_instance("r-0", "old", InstanceState.PREWARMED, replica=True)
    node = a_node(gpus_mib=(100,), grants={0: [("r-0", 100)]}, abilities=CAN)
    models = [a_model("a", mib=100), a_model("old", mib=100)]
    (step,) = warmserve.plan(seen([node], models, {"a": forecast(4.0, 4.0)}, dormant={"node-1": [row]})).steps
    assert step.drop == ("r-0",)


def test_engines_that_cannot_prewarm_get_nothing():
    view = seen([a_node(abilities=("other:prewarm",))], [a_model("a")], {"a": forecast(4.0, 4.0)})
    assert warmserve.plan(view).steps == ()


def test_the_ablation_overlaps_as_it_comes():
    """Section 7.5: without evict-aware placement the first GPUs with room are taken."""
    models = [a_model("a", mib=200, num_gpus=2), a_model("b", mib=200, num_gpus=2)]
    node = a_node(gpus_mib=(100, 200, 100), abilities=CAN)
    view = seen([node], models, {"a": forecast(8.0, 8.0), "b": forecast(8.0, 8.0)})
    assert [s.gpu_ids for s in warmserve.plan(view).steps] == [("node-1/0", "node-1/1")]
    overlapping = [s.gpu_ids for s in warmserve.unplaced(view).steps]
    assert overlapping == [("node-1/0", "node-1/1"), ("node-1/1", "node-1/2")]


def test_replicas_of_a_model_that_changed_are_dropped():
    row = an_instance("r-0", "a", InstanceState.PREWARMED, replica=True, model_revision=1)
    view = seen([a_node(abilities=CAN)], [a_model("a", revision=2)], {}, dormant={"node-1": [row]})
    assert warmserve.plan(view).drops == nothing(view).drops == keep_last(view).drops == ("r-0",)


def test_keep_last_makes_nothing_and_values_what_was_used_last():
    """Section 7.1, the baseline SLLM-GPU."""
    rows = [an_instance(f"r-{n}", n, InstanceState.PREWARMED, replica=True) for n in ("a", "b")]
    view = seen([a_node()], [a_model("a"), a_model("b")], {}, dormant={"node-1": rows}, last_used_at={"b": 99.0})
    plan = keep_last(view)
    assert plan.steps == () and plan.scores["r-b"] > plan.scores["r-a"]


def test_a_copy_under_a_drain_does_not_stand_for_one_that_a_start_can_use():
    """A GPU that drains takes what finds no place on an idle one; an idle one is not left empty for it."""
    rows = [an_instance("r-0", "a", InstanceState.PREWARMED, gpu_id="node-1/1", replica=True)]
    grants = {1: [("i-drain", 100), ("r-0", 100)]}
    node = a_node(gpus_mib=(300, 300), grants=grants, abilities=CAN)
    view = seen(
        [node],
        [a_model("a", mib=100)],
        {"a": forecast(4.0, 4.0)},
        draining=frozenset({"i-drain"}),
        dormant={"node-1": rows},
    )
    assert [s.gpu_ids for s in warmserve.plan(view).steps] == [("node-1/0",)]
    literally = warmserve.WarmserveParams(usable_first=False)
    assert warmserve.plan(view, literally).steps == (), "Algorithm 1 counts a replica wherever it lies"


def test_what_drains_stays_as_a_copy_of_its_model_and_gets_no_second():
    node = a_node(gpus_mib=(300,), grants={0: [("i-drain", 150)]}, abilities=CAN)
    row = an_instance("i-drain", "a", InstanceState.DRAINING, gpu_id="node-1/0")
    models = [a_model("a", mib=100), a_model("b", mib=100)]
    forecasts = {"a": forecast(4.0, 4.0), "b": forecast(4.0, 4.0)}
    drains = {"draining": frozenset({"i-drain"}), "finishing": {"node-1": [row]}}
    assert [s.model_key for s in warmserve.plan(seen([node], models, forecasts, **drains)).steps] == ["b"]
