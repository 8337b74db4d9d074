"""WarmServe section 7.1, the baseline MuxServe: engines side by side on GPUs they share, and nobody leaves."""

from glowplug.policies.placement import muxserve_like
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from tests.fleet_builder import MIB, a_model, a_node


def place(model, nodes, reserved=None):
    request = PlaceRequest(instance_id="i-1", model=model)
    return muxserve_like.place(request, PlacementView(now_s=0.0, nodes=nodes, reserved=reserved or {}))


def test_takes_the_gpus_that_the_fewest_share():
    """Section 7.1: "collocates models on GPUs"."""
    shared_by_two = a_node("node-1", gpus_mib=(900, 900), grants={0: [("i-8", 10)], 1: [("i-9", 10)]})
    shared_by_one = a_node("node-2", gpus_mib=(900, 900), grants={0: [("i-7", 400)], 1: [("i-7", 400)]})
    decision = place(a_model(mib=200, num_gpus=2), [shared_by_two, shared_by_one])
    assert decision.stages[0].gpu_ids == ("node-2/0", "node-2/1"), "one engine over both shares with less than two"
    assert [rival.score for rival in decision.rivals] == [1, 2]


def test_bytes_that_are_promised_count_as_shared_and_as_gone():
    node = a_node(gpus_mib=(300, 300))
    assert place(a_model(mib=100), [node], {"node-1/0": 1}).gpu_id == "node-1/1"


def test_divides_the_kv_space_and_leaves_room_for_the_next():
    """Section 2.1: "GPU sharing limits the KV cache space of each model"."""
    model = a_model(mib=100, kv_bytes=900 * MIB)
    alone = place(model, [a_node(gpus_mib=(1000,))]).stages[0].bytes_per_gpu
    assert alone == 550 * MIB, "100 of weights, and half of the 900 beside them"
    second = place(model, [a_node(gpus_mib=(1000,), grants={0: [("i-1", 550)]})]).stages[0].bytes_per_gpu
    assert second == 275 * MIB, "100 of weights, and half of the 350 that are left beside them"
    small = a_model(mib=50, kv_bytes=50 * MIB)
    assert place(small, [a_node(gpus_mib=(1000,))]).stages[0].bytes_per_gpu == 100 * MIB, "never more than it asks for"


def test_whoever_finds_no_room_has_none_ever():
    """Section 7.3: a "static model placement strategy"."""
    decision = place(a_model(mib=200), [a_node(gpus_mib=(300,), grants={0: [("i-9", 200)]})])
    assert not decision.stages and not decision.possible and "nobody leaves" in decision.reason
    assert not place(a_model(mib=100), [a_node(draining=True)]).stages
    assert not place(a_model(mib=100, engine="vllm"), [a_node()]).stages
