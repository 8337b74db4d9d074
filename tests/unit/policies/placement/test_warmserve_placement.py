"""WarmServe section 5.2, last paragraph, and section 4: which GPUs a new instance takes over."""

from glowplug.domain.instance import InstanceState
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.warmserve_placement import place, unplaced
from tests.fleet_builder import a_model, a_node, an_instance


def replica(instance_id, model, gpu_id, state=InstanceState.PREWARMED):
    return an_instance(instance_id, model, state, gpu_id=gpu_id, mib=100, replica=True)


def decide(policy, node, rows, *, scores=None, reserved=None, model=None):
    view = PlacementView(
        now_s=0.0, nodes=[node], dormant={"node-1": rows}, scores=scores or {}, reserved=reserved or {}
    )
    return policy(PlaceRequest(instance_id="i", model=model or a_model("m", mib=300)), view)


def test_a_prewarmed_copy_is_taken_and_what_lies_with_it_loses_its_place():
    node = a_node(gpus_mib=(300, 300), grants={0: [("r-a", 100)], 1: [("r-m", 100), ("r-b", 100)]})
    rows = [replica("r-a", "a", "node-1/0"), replica("r-m", "m", "node-1/1"), replica("r-b", "b", "node-1/1")]
    decision = decide(place, node, rows, scores={"r-b": 9.0, "r-a": 0.1})
    assert (decision.source, decision.drops, decision.gpu_id) == ("r-m", ("r-b",), "node-1/1")


def test_without_a_copy_the_group_whose_scores_add_up_to_least():
    grants = {0: [("r-a", 100)], 1: [("r-b", 100)], 2: [("i-9", 300)]}
    node = a_node(gpus_mib=(300, 300, 300), grants=grants)
    rows = [replica("r-a", "a", "node-1/0"), replica("r-b", "b", "node-1/1")]
    scores = {"r-a": 2.0, "r-b": 1.0}
    assert decide(place, node, rows, scores=scores).drops == ("r-b",)
    assert decide(unplaced, node, rows, scores=scores).drops == ("r-a",), "the ablation takes the first"


def test_gpus_of_running_instances_and_those_promised_are_no_candidates():
    node = a_node(gpus_mib=(300, 300), grants={0: [("i-9", 10)]})
    assert decide(place, node, []).gpu_id == "node-1/1"
    full = decide(place, node, [], reserved={"node-1/1": 10})
    assert full.stages == () and full.possible and "that serves nobody" in full.reason


def test_what_is_promised_to_a_replica_on_its_way_does_not_close_a_gpu():
    node = a_node(gpus_mib=(300,))
    coming = replica("r-a", "a", "node-1/0", InstanceState.STARTING)
    decision = decide(place, node, [coming], reserved={"node-1/0": coming.workers[0].num_bytes})
    assert decision.drops == ("r-a",)


def test_a_tensor_group_takes_gpus_of_one_node_that_are_all_free():
    node = a_node(gpus_mib=(300, 300, 300), grants={1: [("i-9", 300)]})
    (stage,) = decide(place, node, [], model=a_model("m", mib=500, num_gpus=2)).stages
    assert stage.gpu_ids == ("node-1/0", "node-1/2")
