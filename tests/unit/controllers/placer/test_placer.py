"""The placer: where an instance goes, and which others leave for it."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Save, Tick
from glowplug.controllers.operator import Cordon
from glowplug.events.commands import StartInstance
from glowplug.events.facts import (
    NodeJoined,
    NodeLeft,
)
from glowplug.policies.placement.first_fit import place
from tests.fleet_builder import a_model, a_node, an_event
from tests.unit.controllers.placer.rig import a_placer as placer
from tests.unit.controllers.placer.rig import asked, beat, payloads


def ticks(controller, since_s, until_s):
    return [e for n in range(int(since_s * 2) + 1, int(until_s * 2) + 1) for e in controller.handle(Tick(), n / 2)]


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


@pytest.mark.parametrize("waits", [True, False])
def test_a_policy_is_told_of_a_copy_that_is_to_sleep_and_of_a_start_that_a_request_waits_for(waits):
    told = []

    def policy(request, view):
        told.append((request.is_to_sleep, request.is_awaited))
        return place(request, view)

    command = replace(asked(a_model()).data, waits=waits, is_awaited=not waits)
    placer(a_node(), place=policy).handle(an_event(command, issuer="autoscaler-1", epoch=1), 1.0)
    assert set(told) == {(waits, not waits)}
