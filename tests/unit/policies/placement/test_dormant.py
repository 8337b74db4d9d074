"""Growing from dormant copies, and room made by dropping replicas."""

from glowplug.domain.instance import InstanceState
from glowplug.policies.placement.dormant import grow, with_drops
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from tests.fleet_builder import MIB, a_model, a_node, an_instance


def replica(instance_id, model, mib, *, gpu_id="node-1/0", state=InstanceState.PREWARMED):
    return an_instance(instance_id, model, state, gpu_id=gpu_id, mib=mib, replica=True)


def seen(node, *rows, scores=None):
    return PlacementView(now_s=9.0, nodes=[node], dormant={"node-1": list(rows)}, scores=scores or {})


def asked(model):
    return PlaceRequest(instance_id="i-new", model=model)


def test_an_instance_grows_from_its_copy_and_the_worth_least_beside_it_gives_way():
    """WarmServe section 5.2, last paragraph: the sum of the evicted replicas' scores is kept least."""
    node = a_node(gpus_mib=(300,), grants={0: [("r-own", 100), ("r-a", 80), ("r-b", 80)]})
    rows = [replica("r-own", "m", 100), replica("r-a", "a", 80), replica("r-b", "b", 80)]
    decision = grow(asked(a_model("m", mib=220)), seen(node, *rows, scores={"r-a": 0.2, "r-b": 0.9}))
    assert (decision.source, decision.drops, decision.gpu_id) == ("r-own", ("r-a",), "node-1/0")
    assert decision.num_bytes == 220 * MIB


def test_a_ready_copy_goes_before_one_asleep_and_one_on_its_way():
    node = a_node(gpus_mib=(300, 300, 300), grants={0: [("r-1", 100)], 2: [("r-3", 100)]})
    rows = [
        replica("r-1", "m", 100, state=InstanceState.LOADING),
        an_instance("i-2", "m", InstanceState.SWAPPED_OUT, gpu_id="node-1/1", mib=100),
        replica("r-3", "m", 100, gpu_id="node-1/2"),
    ]
    assert grow(asked(a_model("m", mib=150)), seen(node, *rows)).source == "r-3"
    assert grow(asked(a_model("m", mib=150)), seen(node, *rows[:2])).source == "i-2"
    assert grow(asked(a_model("m", mib=150)), seen(node, rows[0])).source == "r-1"


def test_a_copy_of_an_older_revision_or_on_a_full_gpu_is_none():
    node = a_node(gpus_mib=(300,), grants={0: [("r-1", 100), ("i-9", 150)]})
    assert grow(asked(a_model("m", mib=200)), seen(node, replica("r-1", "m", 100))) is None
    old = an_instance("r-1", "m", InstanceState.PREWARMED, mib=100, replica=True, model_revision=7)
    assert grow(asked(a_model("m", mib=100, revision=8)), seen(node, old)) is None


def test_replicas_are_dropped_where_they_are_worth_least_and_none_needlessly():
    node = a_node(gpus_mib=(300, 300), grants={0: [("r-1", 200)], 1: [("r-2", 30), ("r-3", 170), ("r-4", 90)]})
    rows = [
        replica("r-1", "a", 200),
        *(replica(f"r-{n}", f"m{n}", 100, gpu_id="node-1/1") for n in (2, 3, 4)),
    ]
    scores = {"r-1": 5.0, "r-2": 0.1, "r-3": 0.5, "r-4": 2.0}
    decision = with_drops(asked(a_model("new", mib=170)), seen(node, *rows, scores=scores))
    assert (decision.gpu_id, decision.drops) == ("node-1/1", ("r-3",)), "with r-3 gone, r-2 is not in the way"


def test_a_running_engine_is_never_dropped():
    node = a_node(gpus_mib=(300,), grants={0: [("i-9", 200), ("r-1", 50)]})
    assert with_drops(asked(a_model("new", mib=200)), seen(node, replica("r-1", "a", 50))) is None
