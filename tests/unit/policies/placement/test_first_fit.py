"""First fit, the baseline placement of HydraServe section 8.1."""

from glowplug.policies.placement import first_fit
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from tests.fleet_builder import MIB, a_model, a_node


def place(model, nodes, reserved):
    request = PlaceRequest(instance_id="i-1", model=model)
    return first_fit.place(request, PlacementView(now_s=0.0, nodes=nodes, reserved=reserved))


def test_takes_the_first_gpu_with_room_by_node_and_index():
    nodes = [a_node("node-2"), a_node("node-1", gpus_mib=(50, 200))]
    decision = place(a_model(mib=100), nodes, {})
    assert (decision.node_id, decision.gpu_id, decision.num_bytes) == ("node-1", "node-1/1", 100 * MIB)
    assert [r.name for r in decision.rivals] == ["node-1/0", "node-1/1", "node-2/0"]


def test_grants_and_reservations_both_count():
    node = a_node(gpus_mib=(300,), grants={0: [("i-9", 150)]})
    assert place(a_model(mib=150), [node], {}).gpu_id == "node-1/0"
    assert place(a_model(mib=150), [node], {"node-1/0": 1}).gpu_id == ""


def test_full_now_is_not_impossible():
    node = a_node(gpus_mib=(300,), grants={0: [("i-9", 300)]})
    decision = place(a_model(mib=100), [node], {})
    assert decision.gpu_id == "" and decision.possible


def test_too_large_wrong_engine_and_no_node_are_impossible_and_say_why():
    assert "no GPU is large enough" in place(a_model(mib=301), [a_node()], {}).reason
    other = place(a_model(engine="vllm"), [a_node()], {})
    assert not other.possible and "cannot start engine vllm" in other.rivals[0].why
    assert place(a_model(), [], {}).reason == "no node has joined"


def test_a_draining_node_gets_nothing():
    assert place(a_model(), [a_node(draining=True)], {}).gpu_id == ""


def test_a_model_of_several_gpus_takes_them_on_one_node():
    nodes = [a_node("node-1", gpus_mib=(100, 300)), a_node("node-2", gpus_mib=(100, 300, 10, 300))]
    (stage,) = place(a_model(mib=301, num_gpus=2), nodes, {}).stages
    assert (stage.gpu_ids, stage.bytes_per_gpu) == (("node-2/1", "node-2/3"), -(-301 * MIB // 2))
    three = place(a_model(mib=900, num_gpus=3), nodes, {})
    assert not three.possible and three.reason == "no node has 3 GPUs of 300 MiB each"
