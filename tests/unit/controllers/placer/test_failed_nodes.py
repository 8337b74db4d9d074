"""Starts whose weights one node cannot get."""

from typing import Any

from glowplug.controllers.effects import Record, Tick
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.instance import InstanceState
from glowplug.events.commands import StartInstance
from glowplug.events.facts import InstanceFailed
from tests.fleet_builder import a_model, a_node, an_event, an_instance
from tests.unit.controllers.placer.rig import a_placer, asked, payloads

MODEL = a_model(mib=100)


def placer(num_nodes: int = 3, **params: Any) -> PlacerController:
    given: dict[str, Any] = {"settle_s": 0.0, "node_lease_s": 1e6} | params
    return a_placer(*(a_node(f"node-{n}") for n in range(1, num_nodes + 1)), models=[MODEL], **given)


def started(controller: PlacerController, name: str, now_s: float) -> tuple[str, int, str]:
    """A start's node, the number of others it may try, and the reason."""
    effects = controller.handle(asked(MODEL, name, wanted_at=now_s), now_s)
    (start,) = payloads(effects, StartInstance)
    reason = next(e.decision.reason for e in effects if isinstance(e, Record) and e.decision.kind == "place")
    return start.target, start.tries_left, reason


def fails(
    controller: PlacerController, name: str, node_id: str, now_s: float, code: str = "no_space", tries_left: int = 0
) -> None:
    row = an_instance(
        name, state=InstanceState.FAILED, gpu_id=f"{node_id}/0", mib=100, revision=2, tries_left=tries_left
    )
    controller.handle(an_event(InstanceFailed(instance=row, code=code)), now_s)


def test_tries_that_take_longer_than_a_node_is_avoided_come_to_an_end() -> None:
    controller, left = placer(), []
    for number in range(1, 5):
        node_id, tries_left, _ = started(controller, f"i-{number}", 130.0 * number)
        left.append(tries_left)
        fails(controller, f"i-{number}", node_id, 130.0 * number + 129.0, tries_left=tries_left)
        controller.handle(Tick(), 130.0 * number + 129.5)
    assert left == [2, 1, 0, 1], "the fourth is the first of another start, beside the node that has just failed"


def test_tries_that_a_failed_start_left_are_forgotten_with_the_nodes_to_avoid() -> None:
    controller = placer(5, avoid_node_s=60.0)
    fails(controller, "i-1", "node-1", 2.0, tries_left=1)
    assert started(controller, "i-2", 3.0)[1] == 0, "the last one of that series"
    controller.handle(Tick(), 61.0)
    assert controller.fleet.failed_nodes.left_by_digest, "not yet"
    controller.handle(Tick(), 63.0)
    assert not controller.fleet.failed_nodes.left_by_digest
    assert started(controller, "i-3", 63.0)[1] == 2, "a start after that may be tried anew"
