"""The placer's metrics: a silent node stays as 0, one that leaves does not."""

from dataclasses import replace

from prometheus_client import CollectorRegistry

from glowplug.controllers.effects import Publish, Tick
from glowplug.events.facts import NodeBeat, NodeLeft
from glowplug.services.placer.main import REMEMBER_LOST_S, FleetCollector
from tests.fleet_builder import a_model, a_node, an_event
from tests.unit.controllers.placer.rig import a_placer, asked

LEASE_S = 8.0


class Shown:
    def __init__(self) -> None:
        self.placer = a_placer(node_lease_s=LEASE_S)
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        self.collector = FleetCollector(lambda: self.placer, lambda: self.now_s)
        self.registry.register(self.collector)

    def handle(self, stimulus: object) -> None:
        for effect in self.placer.handle(stimulus, self.now_s):
            self.collector.saw(effect)

    def run_to(self, to_s: float) -> None:
        while self.now_s < to_s:
            self.now_s += 1.0
            self.handle(Tick())

    def up(self, node: str) -> float | None:
        return self.registry.get_sample_value("glowplug_node_up", {"node": node})


def test_a_silent_node_is_0_until_it_is_back_or_an_hour_has_passed() -> None:
    shown = Shown()
    shown.handle(an_event(NodeBeat(node=a_node("node-1"))))
    assert shown.up("node-1") == 1
    assert shown.registry.get_sample_value("glowplug_nodes", {"state": "alive"}) == 1
    shown.run_to(LEASE_S + 2)
    assert shown.up("node-1") == 0
    assert shown.registry.get_sample_value("glowplug_nodes", {"state": "alive"}) == 0
    shown.handle(an_event(NodeBeat(node=a_node("node-1", revision=2))))
    assert shown.up("node-1") == 1
    shown.run_to(shown.now_s + LEASE_S + 2)
    assert shown.up("node-1") == 0
    shown.now_s += REMEMBER_LOST_S
    assert shown.up("node-1") is None


def test_a_node_that_says_goodbye_is_not_missed() -> None:
    shown = Shown()
    shown.handle(an_event(NodeBeat(node=a_node("node-1"))))
    shown.handle(an_event(NodeLeft(node_id="node-1", reason="the agent was asked to stop")))
    shown.run_to(LEASE_S + 2)
    assert shown.up("node-1") is None


def test_before_there_is_a_controller_nothing_is_shown_and_nothing_breaks() -> None:
    registry = CollectorRegistry()
    collector = FleetCollector(lambda: None, lambda: 0.0)
    registry.register(collector)
    collector.saw(Publish(NodeLeft(node_id="n", reason="")))
    assert [s for m in registry.collect() for s in m.samples] == []


def test_a_copy_that_waits_for_free_memory_is_no_placement_that_lacks_it() -> None:
    """GpuLedgerFull counts placements that lack memory; a copy meant to sleep may wait for days."""
    shown = Shown()
    for instance_id, is_patient in (("i-1", True), ("i-2", False)):
        event = asked(a_model(), instance_id)
        shown.handle(replace(event, data=replace(event.data, waits=is_patient)))
    assert shown.registry.get_sample_value("glowplug_placements_pending", {"stage": "room"}) == 1
    assert shown.registry.get_sample_value("glowplug_placements_pending", {"stage": "start"}) == 0
