"""Shared weights in the placer."""

from dataclasses import replace

from glowplug.controllers.effects import Tick
from glowplug.domain.hardware import Gpu, Grant, GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.events.facts import InstanceReady
from glowplug.memory.ledger import ByteLedger
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, beat, payloads

A = a_model("a", weights=WeightsRef(uri="file:/a"), weights_bytes=100 * MIB, kv_bytes=40 * MIB)
B = a_model("b", weights=WeightsRef(uri="file:/b"), weights_bytes=60 * MIB, kv_bytes=40 * MIB)
TWO = (("i-1", A), ("i-2", A))


def holding(total_mib, *held, shares=True, replica=False):
    """A one-GPU node that holds these instances (id, model)."""
    ledger = ByteLedger([Gpu(gpu_id="node-1/0", total_bytes=total_mib * MIB)])
    for holder, model in held:
        share = {GrantOwner.WEIGHTS: model.weights_bytes, GrantOwner.KV: model.kv_bytes}
        share = {GrantOwner.PREWARM: model.weights_bytes} if replica else share
        key = (model.share_key, model.weights_bytes) if shares else None
        ledger.exchange((), holder, {"node-1/0": share}, key)
    return replace(a_node(gpus_mib=(total_mib,), revision=5), gpus=ledger.gpus)


def placer(node, *held, evict="swapserve", place="union", **fields):
    controller = a_placer(node, place=place, evict=evict, models=(A, B))
    for number, (holder, model) in enumerate(held):
        state = InstanceState.PREWARMED if fields.get("replica") else InstanceState.READY
        row = an_instance(holder, model.key, state, mib=model.memory_bytes // MIB, ready_at=1.0 + number, **fields)
        controller.handle(an_event(InstanceReady(instance=row)), 2.0)
    beat(controller, 59.0, replace(node, revision=6))
    controller.handle(load_report(), 59.0)
    return controller


def placed(controller, model, instance_id="i-new", now_s=60.0):
    effects = controller.handle(asked(model, instance_id), now_s) + controller.handle(Tick(), now_s)
    starts, stops = payloads(effects, StartInstance), payloads(effects, StopInstance)
    return [start.instance_id for start in starts], sorted(stop.instance_id for stop in stops)


def test_a_further_copy_needs_what_it_does_not_share():
    """240 MiB hold one instance of 140, and two more where its 100 of weights are shared."""
    for place in ("first_fit", "union", "hydraserve", "serverlessllm"):
        controller = placer(holding(220, ("i-1", A)), ("i-1", A), place=place)
        assert placed(controller, A, "i-2") == (["i-2"], []), place
        assert placed(controller, A, "i-3") == (["i-3"], []), "what i-2 is promised is for its KV cache alone"
        assert placed(controller, A, "i-4")[0] == [], "140 and two times 40: all of it"
        alone = placer(holding(220, ("i-1", A), shares=False), ("i-1", A), place=place)
        assert placed(alone, A, "i-2")[0] == []


def test_the_start_names_all_that_the_instance_holds():
    controller = placer(holding(220, ("i-1", A)), ("i-1", A))
    (start,) = payloads(controller.handle(asked(A), 60.0), StartInstance)
    assert [worker.num_bytes for worker in start.workers] == [140 * MIB]


def test_other_weights_share_nothing():
    controller = placer(holding(220, ("i-1", A)), ("i-1", A))
    assert placed(controller, replace(B, kv_bytes=30 * MIB)) == ([], ["i-1"])


def test_one_of_two_that_share_leaves_where_what_it_has_alone_is_enough():
    controller = placer(holding(240, *TWO), *TWO)
    assert placed(controller, B) == ([], ["i-1"]), "100 are needed, 60 are free, and it frees its KV cache of 40"


def test_both_leave_where_the_weights_are_needed_too():
    controller = placer(holding(200, *TWO), *TWO)
    assert placed(controller, B) == ([], ["i-1", "i-2"]), "80 are lacking: no one alone frees more than 40"


def test_nobody_leaves_for_weights_that_a_busy_instance_reads():
    controller = placer(holding(200, *TWO), *TWO)
    controller.handle(load_report(a=ModelLoad(num_in_flight=1, in_flight_by_instance={"i-2": 1})), 59.5)
    assert placed(controller, B) == ([], [])


def test_replicas_that_share_give_way_together():
    also = replace(A, name="c", key="c")
    both = (("r-1", A), ("r-2", also))
    controller = placer(holding(120, *both, replica=True), *both, replica=True)
    (start,) = payloads(controller.handle(asked(B), 60.0), StartInstance)
    assert sorted(start.drops) == ["r-1", "r-2"]


def test_an_instance_that_grows_takes_what_its_replica_holds_and_no_second_copy():
    controller = placer(holding(140, ("r-1", A), replica=True), ("r-1", A), replica=True)
    (start,) = payloads(controller.handle(asked(A), 60.0), StartInstance)
    assert start.source == "r-1" and not start.drops
    assert controller.fleet.capacity.free_bytes("node-1/0") == 0


def test_a_row_without_the_field_shares_nothing():
    """An older agent wrote it."""
    grants = (Grant(holder="i-1", owner=GrantOwner.WEIGHTS, num_bytes=140 * MIB),)
    node = replace(
        a_node(gpus_mib=(220,), revision=5), gpus=(Gpu(gpu_id="node-1/0", total_bytes=220 * MIB, grants=grants),)
    )
    assert placed(placer(node, ("i-1", A)), A, "i-2")[0] == []
