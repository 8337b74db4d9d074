"""Whose turn it is on a GPU that holds one engine at a time (policies/eviction/turns.py) in the placer."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.placer.controller import PlacerController, PlacerParams
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.events.facts import InstanceReady, InstanceStopped
from glowplug.policies.eviction.lru import evict
from glowplug.policies.placement.first_fit import place
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import asked, beat, payloads


def placer(node, turns) -> PlacerController:
    chosen = {"placement": "first_fit", "eviction": "lru"}
    controller = PlacerController(place, evict, chosen, epoch=3, params=PlacerParams(turns=turns))
    controller.restore("nodes", {node.node_id: node}, 0.0)
    for at in (0.0, 2.0):
        controller.handle(Tick(), at)
    return controller


def balanced(load, *, arrived):
    """Who is told to go when another model's two requests wait for the GPU of a busy engine started in a second."""
    controller = placer(a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=5), "balanced")
    fact = InstanceReady(instance=an_instance("i-1", "a", mib=150, created_at=1.0, ready_at=2.0))
    controller.handle(an_event(fact), 2.0)
    for num, at in ((0, 4.5), (1, 6.5), (1, 8.5)):
        beat(controller, at, a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=6))
        controller.handle(load_report(a=replace(load, num_arrived=num), b=ModelLoad(num_waiting=2)), at)
        early = controller.handle(asked(a_model("b", mib=150)), at) + controller.handle(Tick(), at)
        assert payloads(early, StopInstance) == [], "it has just come"
    controller.handle(load_report(a=replace(load, num_arrived=1 + arrived), b=ModelLoad(num_waiting=2)), 9.4)
    return payloads(controller.handle(Tick(), 9.6), StopInstance)


@pytest.mark.parametrize(("arrived", "goes"), [(0, True), (4, False)])
def test_where_turns_are_balanced_a_burst_is_served_to_its_end_and_no_longer(arrived, goes):
    busy = ModelLoad(num_in_flight=3, in_flight_by_instance={"i-1": 3})
    assert bool(balanced(busy, arrived=arrived)) is goes


def test_of_equal_priority_the_queue_that_has_waited_most_in_all_comes_first_where_turns_are_balanced():
    for turns, first in (("fair", "i-b"), ("balanced", "i-c")):
        controller = placer(a_node(gpus_mib=(200,), grants={0: [("i-1", 200)]}, revision=5), turns)
        controller.handle(an_event(InstanceReady(instance=an_instance("i-1", "a", mib=200, ready_at=9.4))), 9.4)
        beat(controller, 9.5, a_node(gpus_mib=(200,), grants={0: [("i-1", 200)]}, revision=6))
        controller.handle(asked(a_model("b", mib=150), "i-b", wanted_at=9.0), 9.6)
        controller.handle(asked(a_model("c", mib=150), "i-c", wanted_at=9.0), 9.7)
        controller.handle(load_report(b=ModelLoad(num_waiting=1), c=ModelLoad(num_waiting=9)), 9.8)
        started = beat(controller, 10.0, a_node(gpus_mib=(200,), revision=7))
        gone = an_instance("i-1", "a", InstanceState.STOPPED, mib=200, revision=9)
        started += controller.handle(an_event(InstanceStopped(instance=gone)), 10.0)
        assert [start.instance_id for start in payloads(started, StartInstance)] == [first]


def test_an_idle_engine_that_has_just_come_makes_room_for_who_waits_but_not_for_what_may_come():
    stopped = {}
    for turns, num_waiting in (("fair", 0), ("balanced", 0), ("balanced", 1)):
        controller = placer(a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=5), turns)
        row = an_instance("i-1", "a", mib=150, created_at=7.0, ready_at=8.0)
        controller.handle(an_event(InstanceReady(instance=row)), 8.0)
        heard, now_s = [], 9.0
        while not heard and now_s < 20.0:
            now_s += 0.5
            beat(controller, now_s, a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=int(now_s * 2)))
            controller.handle(load_report(b=ModelLoad(num_waiting=num_waiting)), now_s)
            heard = controller.handle(asked(a_model("b", mib=150)), now_s) + controller.handle(Tick(), now_s)
            heard = payloads(heard, StopInstance)
        stopped[turns, num_waiting] = now_s
    assert stopped == {("fair", 0): 9.5, ("balanced", 1): 9.5, ("balanced", 0): 13.0}, "five seconds after it was ready"


def waits(num_dispatched=0, num_waiting=5):
    return ModelLoad(num_waiting=num_waiting, num_dispatched=num_dispatched)


def full_of(model_key):
    mib = 200
    controller = placer(a_node(gpus_mib=(200,), grants={0: [("i-1", mib)]}, revision=5), "balanced")
    row = an_instance("i-1", model_key, mib=mib, created_at=1.0, ready_at=9.4)
    controller.handle(an_event(InstanceReady(instance=row)), 9.4)
    beat(controller, 9.5, a_node(gpus_mib=(200,), grants={0: [("i-1", mib)]}, revision=6))
    return controller


def test_a_model_that_is_far_behind_another_that_waits_goes_before_a_longer_queue():
    controller = full_of("a")
    for key in "bc":
        controller.handle(asked(a_model(key, mib=150), f"i-{key}", wanted_at=9.0), 9.6)
    for at, num in ((9.7, 0), (9.9, 6)):
        controller.handle(load_report(b=waits(num_waiting=1), c=waits(num, num_waiting=99)), at)
        controller.handle(Tick(), at)
    gone = an_instance("i-1", "a", InstanceState.STOPPED, mib=200, revision=9)
    started = beat(controller, 10.0, a_node(gpus_mib=(200,), revision=7))
    started += controller.handle(an_event(InstanceStopped(instance=gone)), 10.0)
    assert [start.instance_id for start in payloads(started, StartInstance)] == ["i-b"]


@pytest.mark.parametrize(("ahead", "num_b", "starts"), [(5, 5, True), (6, 5, False), (6, 0, True)])
def test_bytes_that_come_free_are_left_by_who_is_far_ahead_of_another_that_waits(ahead, num_b, starts):
    """b needs the whole GPU and waits for it; c has just left and would fit again beside what is there."""
    controller = placer(a_node(gpus_mib=(200,), grants={0: [("i-1", 100), ("i-2", 100)]}, revision=5), "balanced")
    for instance_id, key in (("i-1", "a"), ("i-2", "c")):
        row = an_instance(instance_id, key, mib=100, created_at=1.0, ready_at=9.4)
        controller.handle(an_event(InstanceReady(instance=row)), 9.4)
    controller.handle(asked(a_model("b", mib=150), "i-b", wanted_at=9.0), 9.6)
    for at, num in ((9.7, 0), (9.9, ahead)):
        beat(controller, at, a_node(gpus_mib=(200,), grants={0: [("i-1", 100), ("i-2", 100)]}, revision=int(at * 10)))
        controller.handle(load_report(a=waits(1), b=waits(num_waiting=num_b), c=waits(num)), at)
        assert payloads(controller.handle(Tick(), at), StopInstance) == []
    gone = an_instance("i-2", "c", InstanceState.STOPPED, mib=100, revision=9)
    controller.handle(an_event(InstanceStopped(instance=gone)), 10.0)
    beat(controller, 10.0, a_node(gpus_mib=(200,), grants={0: [("i-1", 100)]}, revision=100))
    again = asked(a_model("c", mib=100), "i-c", wanted_at=9.0)
    found = [*controller.handle(again, 10.1), *controller.handle(Tick(), 10.2)]
    assert bool(payloads(found, StartInstance)) is starts
