"""Starts whose weights one node cannot get."""

from typing import Any

import pytest

from glowplug.controllers.effects import Record, Tick
from glowplug.controllers.operator import Cordon
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import PlaceInstance, StartInstance, StopInstance
from glowplug.events.facts import InstanceFailed, InstanceReady, ModelDeployed, NodeLeft, WeightsFetched
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, beat, payloads

MODEL = a_model(mib=100)


def placer(num_nodes: int = 3, **params: Any) -> PlacerController:
    given: dict[str, Any] = {"settle_s": 0.0, "node_lease_s": 1e6, "max_tick_gap_s": 1e6} | params
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


def test_the_next_start_goes_to_another_node_and_the_last_one_is_said_to_be_the_last() -> None:
    controller = placer(5)
    assert started(controller, "i-1", 1.0)[:2] == ("node-1", 2)
    fails(controller, "i-1", "node-1", 2.0)
    node_id, tries_left, reason = started(controller, "i-2", 2.0)
    assert (node_id, tries_left) == ("node-2", 1)
    assert "its weights could not be fetched on node-1 (no_space) in the last 120 s" in reason
    assert "1 more node may be tried" in reason
    fails(controller, "i-2", "node-2", 3.0, "weights_corrupt")
    node_id, tries_left, reason = started(controller, "i-3", 3.0)
    assert (node_id, tries_left) == ("node-3", 0) and "no more node may be tried" in reason
    assert "node-1 (no_space) and node-2 (weights_corrupt)" in reason
    fails(controller, "i-3", "node-3", 4.0, "weights_unavailable")
    assert started(controller, "i-4", 9.0)[:2] == ("node-4", 0), "who asks later is refused at once should it fail"


def test_where_all_nodes_have_failed_any_is_tried_and_none_is_left() -> None:
    controller = placer(2)
    assert started(controller, "i-1", 1.0)[:2] == ("node-1", 1)
    fails(controller, "i-1", "node-1", 2.0)
    assert started(controller, "i-2", 2.0)[:2] == ("node-2", 0)
    fails(controller, "i-2", "node-2", 3.0)
    assert started(controller, "i-3", 9.0)[:2] == ("node-1", 0)


def test_tries_that_take_longer_than_a_node_is_avoided_come_to_an_end() -> None:
    controller, left = placer(), []
    for number in range(1, 5):
        node_id, tries_left, _ = started(controller, f"i-{number}", 130.0 * number)
        left.append(tries_left)
        fails(controller, f"i-{number}", node_id, 130.0 * number + 129.0, tries_left=tries_left)
        controller.handle(Tick(), 130.0 * number + 129.5)
    assert left == [2, 1, 0, 1], "the fourth is the first of another start, beside the node that has just failed"


@pytest.mark.parametrize("code", ["engine_failed", "out_of_memory", "start_timeout", "node_left"])
def test_what_is_not_about_weights_keeps_no_node_away(code: str) -> None:
    controller = placer()
    assert started(controller, "i-1", 1.0)[0] == "node-1"
    fails(controller, "i-1", "node-1", 2.0, code)
    assert started(controller, "i-2", 3.0)[:2] == ("node-1", 2)


@pytest.mark.parametrize(
    "over",
    [
        lambda c: c.handle(Tick(), 122.0),
        lambda c: c.handle(an_event(ModelDeployed(model=MODEL)), 3.0),
        lambda c: c.handle(
            an_event(
                WeightsFetched(
                    node_id="node-1",
                    model_key="m",
                    digest=MODEL.weights.digest,
                    num_bytes=1,
                    seconds=1.0,
                    source="file",
                )
            ),
            3.0,
        ),
        lambda c: beat(
            c, 3.0, a_node("node-1", revision=9, cached=(CachedWeights(digest=MODEL.weights.digest, num_bytes=1),))
        ),
    ],
    ids=["its time is over", "deployed anew", "fetched", "there"],
)
def test_a_node_is_taken_again(over: Any) -> None:
    controller = placer()
    started(controller, "i-1", 1.0)
    fails(controller, "i-1", "node-1", 2.0)
    over(controller)
    assert started(controller, "i-2", 123.0)[0] == "node-1"


def test_a_node_that_has_left_is_no_longer_counted() -> None:
    controller = placer()
    fails(controller, "i-1", "node-1", 2.0)
    controller.handle(an_event(NodeLeft(node_id="node-1", reason="asked to stop")), 3.0)
    controller.handle(Tick(), 4.0)
    assert started(controller, "i-2", 5.0)[:2] == ("node-2", 1)


def test_a_row_says_it_where_the_fact_was_lost_and_the_next_placer_knows_it_too() -> None:
    controller = placer()
    row = an_instance("i-1", state=InstanceState.FAILED, gpu_id="node-1/0", revision=2, tries_left=2)
    controller.restore("instances", {"i-1": row}, 2.0)
    successor = placer()
    successor.inherit(controller, 3.0)
    assert started(successor, "i-2", 4.0)[0] == "node-2"


def test_a_jump_of_the_clock_makes_no_node_good() -> None:
    controller = placer(max_tick_gap_s=3.0)
    fails(controller, "i-1", "node-1", 2.0)
    controller.handle(Tick(), 3.0)
    controller.handle(Tick(), 1000.0)
    assert started(controller, "i-2", 1001.0)[0] == "node-2"


def test_a_start_on_the_node_that_an_operator_names_is_tried_there_alone() -> None:
    controller = placer()
    fails(controller, "i-1", "node-1", 2.0)
    command = PlaceInstance(instance_id="i-2", model=MODEL, reason="asked", wanted_at=3.0, node_id="node-1")
    effects = controller.handle(an_event(command, issuer="autoscaler-1", epoch=1), 3.0)
    (start,) = payloads(effects, StartInstance)
    assert (start.target, start.tries_left) == ("node-1", 0)


def test_nodes_that_could_not_run_it_are_no_others() -> None:
    small, other = a_node("node-2", gpus_mib=(50,)), a_node("node-3", engines=("llamacpp",))
    controller = a_placer(a_node("node-1"), small, other, a_node("node-4"), models=[MODEL], settle_s=0.0)
    controller.handle(Cordon("node-4", True), 0.5)
    assert started(controller, "i-1", 1.0)[:2] == ("node-1", 0)
    fails(controller, "i-1", "node-1", 2.0)
    assert started(controller, "i-2", 3.0)[:2] == ("node-1", 0), "it is all that there is"


def test_others_leave_elsewhere_and_not_on_the_node_that_has_failed() -> None:
    nodes = [a_node(f"node-{n}", gpus_mib=(150,), grants={0: [(f"b-{n}", 100)]}) for n in (1, 2)]
    busy = a_model("b", mib=100)
    controller = a_placer(*nodes, models=[MODEL, busy], settle_s=0.0)
    for n in (1, 2):
        row = an_instance(f"b-{n}", "b", gpu_id=f"node-{n}/0", mib=100, ready_at=-50.0 - n)
        controller.handle(an_event(InstanceReady(instance=row)), 0.5)
    controller.handle(load_report(m=ModelLoad(num_waiting=1), b=ModelLoad()), 3.9)
    fails(controller, "i-1", "node-1", 3.9)
    effects = [*controller.handle(asked(MODEL, "i-2", wanted_at=4.0), 4.0), *controller.handle(Tick(), 4.5)]
    assert {stop.instance_id for stop in payloads(effects, StopInstance)} == {"b-2"}


def test_weights_that_need_not_come_are_tried_nowhere_else() -> None:
    model = a_model(mib=100, weights=WeightsRef(uri=""))
    effects = placer().handle(asked(model, "i-1"), 1.0)
    assert payloads(effects, StartInstance)[0].tries_left == 0


def test_tries_that_a_failed_start_left_are_forgotten_with_the_nodes_to_avoid() -> None:
    controller = placer(5, avoid_node_s=60.0)
    fails(controller, "i-1", "node-1", 2.0, tries_left=1)
    assert started(controller, "i-2", 3.0)[1] == 0, "the last one of that series"
    controller.handle(Tick(), 61.0)
    assert controller.fleet.failed_nodes.left_by_digest, "not yet"
    controller.handle(Tick(), 63.0)
    assert not controller.fleet.failed_nodes.left_by_digest
    assert started(controller, "i-3", 63.0)[1] == 2, "a start after that may be tried anew"
