"""Large groups of GPUs stay whole: ours, where models of several GPUs live beside small ones."""

from dataclasses import replace

from glowplug.domain.hardware import CachedWeights, GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.policies.placement import union
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.union import broken, fresh
from tests.fleet_builder import MIB, a_model, a_node, an_instance

SMALL = a_model("small", mib=100)


def node_of_four(*, busy=(), replica_at=None, has_weights=True):
    """Four GPUs of 100 MiB; `busy` serve, a replica of "small" lies on `replica_at`, a large one on 0 and 1."""
    grants = {n: [(f"i-{n}", 100)] for n in busy}
    if replica_at is not None:
        grants[replica_at] = [*grants.get(replica_at, ()), ("r-small", 40)]
    cached = (CachedWeights(digest="d", num_bytes=MIB, model_keys=("small",)),) if has_weights else ()
    node = a_node(gpus_mib=(100,) * 4, grants=grants, cached=cached)
    prewarmed = {"r-small"}
    gpus = tuple(
        replace(
            gpu,
            grants=tuple(replace(g, owner=GrantOwner.PREWARM) if g.holder in prewarmed else g for g in gpu.grants),
        )
        for gpu in node.gpus
    )
    return replace(node, gpus=gpus)


def seen(node, *rows):
    return PlacementView(now_s=0.0, nodes=[node], dormant={"node-1": list(rows)})


def large_replica():
    row = an_instance("r-large", "large", InstanceState.PREWARMED, gpu_id="node-1/0", mib=40, replica=True)
    worker = row.workers[0]
    return replace(row, workers=(worker, replace(worker, worker_id="r-large-1", gpu_id="node-1/1")))


def small_replica(gpu_id):
    return an_instance("r-small", "small", InstanceState.PREWARMED, gpu_id=gpu_id, mib=40, replica=True)


def test_groups_are_counted_in_gpus():
    """Weights and KV cache of one instance on one GPU are two grants and one GPU."""
    node = a_node(gpus_mib=(300,), grants={0: [("i-1", 50), ("i-1", 50)]})
    assert seen(node).fleet.largest_group() == 1
    assert seen(node, large_replica()).fleet.largest_group() == 2


def test_what_taking_a_gpu_breaks():
    node = node_of_four(busy=(3,))
    view = seen(node, large_replica())
    assert broken(node, ["node-1/0"], view, 2) == 2
    assert broken(node, ["node-1/2"], view, 2) == 0, "its group is broken already"
    assert broken(node, ["node-1/0", "node-1/1"], view, 2) == 0, "a whole group is no broken one"


def test_a_copy_in_the_last_free_group_is_left_alone_while_another_gpu_will_do():
    node = node_of_four(busy=(3,), replica_at=0)
    decision = union.place(
        PlaceRequest(instance_id="i-new", model=SMALL), seen(node, small_replica("node-1/0"), large_replica())
    )
    assert (decision.gpu_id, decision.source) == ("node-1/2", "")


def test_it_is_taken_where_nothing_else_is_free_or_no_weights_are_near():
    request = PlaceRequest(instance_id="i-new", model=SMALL)
    full = node_of_four(busy=(2, 3), replica_at=0)
    assert union.place(request, seen(full, small_replica("node-1/0"), large_replica())).source == "r-small"
    far = node_of_four(busy=(3,), replica_at=0, has_weights=False)
    assert union.place(request, seen(far, small_replica("node-1/0"), large_replica())).source == "r-small"


def test_a_large_model_takes_an_aligned_group():
    model = a_model("small", mib=200, num_gpus=2)
    found = fresh(PlaceRequest(instance_id="i-new", model=model), seen(node_of_four(busy=(1,))), 2)
    assert found is not None and found[1].stages[0].gpu_ids == ("node-1/2", "node-1/3")
