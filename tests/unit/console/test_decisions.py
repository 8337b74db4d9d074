"""The log of decisions."""

from dataclasses import replace

import pytest

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import InstanceState
from glowplug.events.facts import DecisionMade, InstanceFailed, InstanceReady
from glowplug.runtime.decision_search import DecisionSearch
from glowplug.services.console.decisions import DecisionLog
from tests.console_story import a_decision as decision
from tests.console_story import fact, instance, trace_id, traceparent


def ids(log: DecisionLog, **wanted: str) -> list[str]:
    return [record.decision_id for record in log.newest(DecisionSearch(**wanted))]


def log_of(*records: DecisionRecord, **bounds: int) -> DecisionLog:
    log = DecisionLog(**bounds)
    for record in records:
        log.take(fact(DecisionMade(decision=record), record.made_at, int(record.made_at)))
    return log


def test_the_newest_are_kept_and_each_once() -> None:
    log = log_of(*(decision(n) for n in (1, 2, 2, 3, 4)), max_decisions=3)
    assert ids(log) == ["d-4", "d-3", "d-2"]
    assert log.event_of("d-4") and log.event_of("d-1") == ""


def test_what_the_store_has_is_put_in_its_place() -> None:
    log = log_of(decision(5))
    log.restore([decision(6), decision(5), decision(4)])
    assert ids(log) == ["d-6", "d-5", "d-4"]
    log.restore([decision(7)])
    log.restore([decision(7)])
    assert ids(log)[0] == "d-7" and len(log) == 4


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"kind": "evict"}, ["d-2"]),
        ({"instance": "i-victim"}, ["d-2"]),
        ({"instance": "i-1"}, ["d-2", "d-1"]),
        ({"node": "node-1", "kind": "place"}, ["d-1"]),
        ({"trace": trace_id(7)}, ["d-1"]),
        ({"q": "NODE-1/0"}, ["d-2", "d-1"]),
        ({"policy": "lru", "model": "other"}, []),
    ],
)
def test_searches(wanted: dict[str, str], found: list[str]) -> None:
    log = log_of(
        decision(1, instance_id="i-1", node_id="node-1", gpu_id="node-1/0", traceparent=traceparent(7)),
        decision(2, kind="evict", policy="lru", instance_id="i-1", gpu_id="node-1/0", chosen="i-victim, i-other"),
    )
    assert ids(log, **wanted) == found


def test_what_came_of_it_is_the_newest_row_of_its_instance() -> None:
    log = log_of(decision(1, instance_id="i-1"))
    ready = instance("i-1", "m", "node-1", InstanceState.READY, 100.0, emulated=True)
    log.take(fact(InstanceReady(instance=ready), 101.0))
    assert log.row(log.latest(1)[0]).joined.emulated
    log.take(fact(InstanceFailed(instance=replace(ready, state=InstanceState.FAILED, revision=4)), 99.0))
    assert log.instance("i-1") == ready, "older news never win"


def test_what_belongs_to_a_decision() -> None:
    log = log_of(
        decision(1, kind="scale", instance_id="i-1", request_id="r-1"),
        decision(2, kind="evict", instance_id="i-1", chosen="i-9"),
        decision(3, instance_id="i-1"),
        decision(4, instance_id="i-2"),
    )
    placed = log.get("d-3")
    assert placed is not None
    assert [other.decision_id for other in log.related(placed)] == ["d-1", "d-2"]
    assert log.facets()["kind"] == ["evict", "place", "scale"]
