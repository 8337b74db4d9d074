"""The placer: where an instance goes, and which others leave for it."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Record, Remove, Save, Tick
from glowplug.controllers.operator import Cordon
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.instance import InstanceState
from glowplug.domain.lease import Leader
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import CancelPlacement, FetchWeights, PlaceInstance, StartInstance, StopInstance
from glowplug.events.envelope import from_json, to_json
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    NodeJoined,
    NodeLeft,
)
from glowplug.policies.placement.first_fit import place
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer as placer
from tests.unit.controllers.placer.rig import asked, beat, payloads


def ticks(controller, since_s, until_s):
    return [e for n in range(int(since_s * 2) + 1, int(until_s * 2) + 1) for e in controller.handle(Tick(), n / 2)]


def test_a_place_command_becomes_a_decision_a_fetch_and_a_start():
    controller = placer(a_node())
    effects = controller.handle(asked(a_model(mib=100)), 5.0)
    (record,) = [e.decision for e in effects if isinstance(e, Record)]
    (fetch,), (start,) = payloads(effects, FetchWeights), payloads(effects, StartInstance)
    assert (record.kind, record.policy, record.gpu_id) == ("place", "first_fit", "node-1/0")
    assert record.inputs["need_bytes"] == 100 * MIB
    assert start.decision_id == record.decision_id
    assert start.workers[0].num_bytes == 100 * MIB
    assert fetch.target == start.target == "node-1"
    assert [(phase.name.value, phase.started_at) for phase in start.phases] == [("decide", 9.0)], "there were bytes"
    assert record.reason == "m starts on node-1/0: this is the first GPU with 100 MiB free"


def test_a_model_without_weights_is_not_fetched():
    effects = placer(a_node()).handle(asked(a_model(weights=WeightsRef(uri=""))), 5.0)
    assert payloads(effects, FetchWeights) == []
    assert len(payloads(effects, StartInstance)) == 1


def test_bytes_promised_but_not_yet_granted_are_reserved():
    controller = placer(a_node(gpus_mib=(150,)))
    controller.handle(asked(a_model(mib=100), "i-1"), 5.0)
    assert payloads(controller.handle(asked(a_model("n", mib=100), "i-2"), 5.0), StartInstance) == []


def test_bytes_of_a_start_whose_beat_is_still_to_come_are_not_given_twice():
    controller = placer(a_node(gpus_mib=(150,)))
    controller.handle(asked(a_model(mib=100), "i-1"), 5.0)
    starting = an_instance("i-1", state=InstanceState.STARTING, mib=100)
    controller.handle(an_event(InstanceStarting(instance=starting)), 5.1)
    assert payloads(controller.handle(asked(a_model("n", mib=100), "i-2"), 5.2), StartInstance) == []
    beat(controller, 5.3, a_node(gpus_mib=(150,), revision=2, grants={0: [("i-1", 100)]}))
    (start,) = payloads(controller.handle(asked(a_model("o", mib=50), "i-3"), 5.4), StartInstance)
    assert start.instance_id == "i-3", "what the beat shows is not counted again"


def test_the_same_command_twice_starts_once():
    controller = placer(a_node())
    controller.handle(asked(a_model()), 5.0)
    assert payloads(controller.handle(asked(a_model()), 5.5), StartInstance) == []


def full_fleet(**fields):
    """One GPU of 200 MiB, long held by i-1 (model a)."""
    node = a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=5)
    controller = placer(node, models=[a_model("a", mib=150, **fields)])
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1", "a", mib=150, ready_at=1.0))), 2.0)
    beat(controller, 10.0, a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=6))
    return controller


def test_where_bytes_lack_the_idle_instance_leaves_and_the_newcomer_follows():
    controller = full_fleet()
    controller.handle(load_report(a=ModelLoad(last_active_at=3.0)), 10.0)
    effects = controller.handle(asked(a_model("b", mib=150)), 10.1)
    (stop,) = payloads(effects, StopInstance)
    (record,) = [e.decision for e in effects if isinstance(e, Record)]
    assert (stop.instance_id, record.kind, record.policy, record.chosen) == ("i-1", "evict", "lru", "i-1")
    assert payloads(controller.handle(Tick(), 10.5), StopInstance) == [], "asked a moment ago"
    stopped = an_instance("i-1", "a", InstanceState.STOPPED, mib=150, revision=2)
    controller.handle(an_event(InstanceStopped(instance=stopped)), 11.0)
    effects = beat(controller, 11.1, a_node(gpus_mib=(200,), revision=7))
    (start,) = payloads(effects, StartInstance)
    assert start.instance_id == "i-new"
    phases = [(phase.name.value, phase.started_at, phase.ended_at) for phase in start.phases]
    assert phases == [("decide", 9.0, 10.1), ("room", 10.1, 11.1)], "the wait for bytes is not the decision's"
    assert record.reason == "a (150 MiB, idle 7 s) leaves node-1 for b, which lacks 100 MiB: no other may leave"
    assert (record.inputs["lacking_bytes"], record.inputs["freed_bytes"]) == (100 * MIB, 150 * MIB)


@pytest.mark.parametrize(
    ("load", "fields", "why"),
    [
        (ModelLoad(num_in_flight=1, in_flight_by_instance={"i-1": 1}), {}, "busy"),
        (ModelLoad(num_waiting=2), {}, "waited for"),
        (ModelLoad(), {"pinned": True}, "pinned"),
        (ModelLoad(), {"priority": 5}, "more important"),
    ],
)
def test_who_is_not_evicted(load, fields, why):
    controller = full_fleet(**fields)
    controller.handle(load_report(a=load), 10.0)
    assert payloads(controller.handle(asked(a_model("b", mib=150)), 10.1), StopInstance) == [], why


def test_nobody_is_evicted_while_no_router_speaks():
    assert payloads(full_fleet().handle(asked(a_model("b", mib=150)), 10.1), StopInstance) == []


def test_after_a_fair_wait_even_a_busy_instance_is_drained():
    controller = full_fleet()
    busy = ModelLoad(num_in_flight=1, in_flight_by_instance={"i-1": 1})
    controller.handle(load_report(a=busy), 10.0)
    ticks(controller, 9.5, 10)
    controller.handle(asked(a_model("b", mib=150)), 10.1)
    controller.handle(load_report(a=busy), 15.0)
    assert payloads(ticks(controller, 10, 15), StopInstance) == []
    newer = a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=7)
    beat(controller, 15.1, newer)
    (stop,) = payloads(controller.handle(Tick(), 15.2), StopInstance)
    assert stop.instance_id == "i-1" and stop.grace_s > 0


def test_a_drain_under_way_is_waited_for_instead_of_evicting_more():
    node = a_node(gpus_mib=(200,), grants={0: [("i-1", 100), ("i-2", 100)]}, revision=6)
    controller = placer(node)
    for instance_id, state in (("i-1", InstanceState.DRAINING), ("i-2", InstanceState.READY)):
        fact = InstanceReady(instance=an_instance(instance_id, instance_id, state, ready_at=1.0))
        controller.handle(an_event(fact), 5.0)
    controller.handle(load_report(), 5.0)
    assert payloads(controller.handle(asked(a_model("b", mib=100)), 5.1), StopInstance) == []


def test_a_silent_node_has_left_and_its_instances_with_it():
    controller = placer(a_node())
    controller.handle(an_event(InstanceReady(instance=an_instance())), 1.0)
    effects = ticks(controller, 0, 8.5)
    assert [n.node_id for n in payloads(effects, NodeLeft)] == ["node-1"]
    assert [f.code for f in payloads(effects, InstanceFailed)] == ["node_left"]
    (record,) = [e.decision for e in effects if isinstance(e, Record)]
    assert (record.kind, record.policy, record.inputs["instances"]) == ("expire", "node_lease", 1)
    (row,) = [e.value for e in effects if isinstance(e, Save)]
    assert (row.state, row.revision) == (InstanceState.FAILED, 2), "its agent, should it live, sees it is behind"
    assert Remove("instances", "i-1") in controller.handle(Tick(), 400.0)


def test_a_node_that_comes_back_brings_its_instance_back():
    controller = placer(a_node())
    controller.handle(an_event(InstanceReady(instance=an_instance())), 1.0)
    ticks(controller, 0, 8.5)
    beat(controller, 9.0, a_node(revision=2))
    controller.restore("instances", {"i-1": an_instance(revision=3)}, 9.1)
    assert controller.fleet.instances.by_id["i-1"].state is InstanceState.READY


def test_a_command_of_an_older_autoscaler_is_refused():
    controller = placer(a_node())
    controller.handle(asked(a_model(), epoch=5), 5.0)
    with pytest.raises(StaleEpoch):
        controller.handle(asked(a_model("n"), "i-2", epoch=4), 5.1)


def test_cancel_forgets_and_stops_what_was_already_sent():
    controller = placer(a_node())
    controller.handle(asked(a_model()), 5.0)
    cancel = an_event(CancelPlacement(instance_id="i-new", reason="gone"), issuer="autoscaler-1", epoch=1)
    (stop,) = payloads(controller.handle(cancel, 5.1), StopInstance)
    assert stop.grace_s == 0 and controller.placements == {}


def test_more_important_models_are_placed_first():
    controller = placer(a_node(gpus_mib=(100,), grants={0: [("x", 100)]}))
    controller.handle(asked(a_model("low", mib=100), "i-low"), 5.0)
    controller.handle(asked(a_model("high", mib=100, priority=9), "i-high"), 5.1)
    effects = beat(controller, 5.2, a_node(gpus_mib=(100,), revision=2))
    assert [s.instance_id for s in payloads(effects, StartInstance)] == ["i-high"]


def test_a_beat_that_offers_nothing_new_is_not_worth_deciding_on():
    asked_for = []

    def counted(request, view):
        asked_for.append(request.model.key)
        return place(request, view)

    full = a_node(gpus_mib=(100,), grants={0: [("x", 100)]}, revision=1)
    controller = placer(place=counted)
    beat(controller, 5.0, full)
    controller.handle(asked(a_model(mib=100)), 5.1)
    assert len(asked_for) == 1
    for revision in range(2, 10):
        beat(controller, 5.1 + revision / 100, replace(full, revision=revision, heartbeat_at=float(revision)))
    assert len(asked_for) == 1
    assert len(payloads(beat(controller, 6.0, a_node(gpus_mib=(100,), revision=10)), StartInstance)) == 1


def test_placements_of_one_pass_do_not_promise_the_same_bytes_twice():
    controller = placer(a_node(gpus_mib=(300,), grants={0: [("x", 300)]}))
    for number in range(4):
        controller.handle(asked(a_model(f"m{number}", mib=100), f"i-{number}"), 5.0)
    assert len(payloads(beat(controller, 5.5, a_node(revision=2)), StartInstance)) == 3


@pytest.mark.parametrize("gap_s", [60.0, 3600.0, -3600.0])
def test_a_pause_of_the_placer_is_not_the_silence_of_its_nodes(gap_s):
    controller = placer(a_node())
    controller.handle(an_event(InstanceReady(instance=an_instance())), 0.2)
    assert ticks(controller, 0, 2.0) == []
    assert controller.handle(Tick(), 2.0 + gap_s) == []
    assert [n.node_id for n in controller.view(2.0 + gap_s)] == ["node-1"]
    later = [e for n in range(1, 20) for e in controller.handle(Tick(), 2.0 + gap_s + n / 2)]
    assert [n.node_id for n in payloads(later, NodeLeft)] == ["node-1"], "a silence that goes on is one"


def test_a_placement_that_nobody_repeats_is_forgotten():
    controller = placer(a_node(gpus_mib=(100,), grants={0: [("x", 100)]}))
    controller.handle(asked(a_model("lost"), "i-lost"), 0.1)
    controller.handle(asked(a_model("wanted"), "i-wanted"), 0.1)
    for n in range(1, 31):
        controller.handle(Tick(), n / 2)
        if n % 4 == 0:
            controller.handle(asked(a_model("wanted"), "i-wanted"), n / 2)
    assert list(controller.placements) == ["i-wanted"]


def test_the_cordon_of_a_node_that_left_is_listed_and_can_be_lifted():
    controller = placer(a_node())
    controller.restore("cordons", {}, 1.0)
    controller.handle(Cordon("node-1", True), 5.0)
    controller.handle(an_event(NodeLeft(node_id="node-1", reason="asked to stop")), 6.0)
    assert controller.cordons(6.5) == {"node-1": False}
    lifted = controller.handle(Cordon("node-1", False), 7.0)
    assert Save("cordons", "node-1", Cordon("node-1", False)) in lifted
    assert controller.cordons(7.5) == {}
    controller.handle(an_event(NodeJoined(node=a_node(revision=9))), 8.0)
    assert [n.draining for n in controller.view(8.5)] == [False]


def test_a_cordon_outlives_the_placer():
    first = placer(a_node())
    assert first.restore("cordons", {}, 1.0) == []
    (save,) = [e for e in first.handle(Cordon("node-1", True), 5.0) if isinstance(e, Save)]
    rows = {save.key: from_json(to_json(save.value), Cordon)}
    second = placer(a_node())
    assert second.restore("cordons", rows, 6.0) == []
    assert [n.draining for n in second.view(6.0)] == [True]
    lifted = Save("cordons", "node-1", Cordon("node-1", False))
    assert lifted in second.handle(Cordon("node-1", False), 7.0)
    assert second.restore("cordons", rows, 7.1) == [lifted], "read before it was written"
    assert [n.draining for n in second.view(7.1)] == [False]


def test_a_cordon_that_the_store_lost_is_written_again():
    controller = placer(a_node())
    controller.restore("cordons", {}, 1.0)
    controller.handle(Cordon("node-1", True), 5.0)
    assert controller.restore("cordons", {}, 6.0) == [Save("cordons", "node-1", Cordon("node-1", True))]


def test_whatever_is_on_a_drained_node_is_told_to_go_until_it_does():
    """The first stop may be lost, and an instance may appear late."""
    controller = placer(a_node())
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1"))), 1.0)
    assert len(payloads(controller.handle(Cordon("node-1", True), 2.0), StopInstance)) == 1
    assert payloads(controller.handle(Tick(), 2.5), StopInstance) == [], "not yet again"
    again = controller.handle(Tick(), 4.1)
    assert [s.instance_id for s in payloads(again, StopInstance)] == ["i-1"]
    assert not [e for e in again if isinstance(e, Record)], "it was decided once"
    controller.handle(an_event(InstanceReady(instance=an_instance("i-late"))), 4.2)
    late = controller.handle(Tick(), 4.5)
    assert [s.instance_id for s in payloads(late, StopInstance)] == ["i-late"]
    assert [e.decision.instance_id for e in late if isinstance(e, Record)] == ["i-late"]
    draining = replace(an_instance("i-1"), state=InstanceState.DRAINING, revision=9)
    controller.handle(an_event(InstanceDraining(instance=draining)), 4.6)
    told = [s.instance_id for s in payloads(controller.handle(Tick(), 7.0), StopInstance)]
    assert told == ["i-late"], "what drains is left in peace"
    controller.handle(Cordon("node-1", False), 7.1)
    assert payloads(controller.handle(Tick(), 9.5), StopInstance) == []


def test_the_successor_of_a_placer_keeps_its_cordons_and_gives_every_node_a_whole_lease():
    earlier = placer(a_node())
    earlier.restore("cordons", {}, 1.0)
    earlier.handle(Cordon("node-1", True), 2.0)
    earlier.handle(Cordon("node-2", True), 2.0)
    successor = placer(a_node())
    successor.inherit(earlier, 500.0)
    saved = successor.restore("cordons", {"node-2": Cordon("node-2", False)}, 500.0)
    assert saved == [Save("cordons", "node-1", Cordon("node-1", True))]
    successor.restore("nodes", {"node-1": a_node(revision=7)}, 500.0)
    assert payloads(successor.handle(Tick(), 500.5), NodeLeft) == []
    assert [(n.node_id, n.draining) for n in successor.view(500.5)] == [("node-1", True)]


@pytest.mark.parametrize("issuer", ["autoscaler-1", "autoscaler-2"], ids=["restarted", "a standby"])
def test_placements_of_an_autoscaler_that_was_replaced_make_way_whoever_it_was(issuer):
    controller = placer(a_node(gpus_mib=(100,), grants={0: [("x", 100)]}))
    controller.handle(asked(a_model(), "i-old", epoch=5), 1.0)
    controller.handle(replace(asked(a_model(), "i-new", epoch=6), issuer=issuer), 2.0)
    assert list(controller.placements) == ["i-new"]


def test_an_epoch_that_only_the_table_of_leaders_tells_is_enough_to_refuse():
    controller = placer(a_node())
    leader = Leader(service="autoscaler", service_id="autoscaler-2", url="", epoch=9, since=0.0)
    controller.restore("leaders", {"autoscaler": leader}, 1.0)
    ask = PlaceInstance(instance_id="i", model=a_model(mib=100), reason="", wanted_at=0.0)
    with pytest.raises(StaleEpoch):
        controller.handle(an_event(ask, issuer="autoscaler-1", epoch=8), 2.0)
    assert controller.handle(an_event(ask, issuer="autoscaler-2", epoch=9), 2.0)
