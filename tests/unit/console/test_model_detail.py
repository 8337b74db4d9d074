"""A model's starts and declaration in the console. tests/e2e/console/test_values.py has what the page makes of them."""

from dataclasses import replace
from typing import Any

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import WeightsRef
from glowplug.events.facts import WeightsFetched, WeightsProgressed
from glowplug.services.console.decisions import DecisionLog
from glowplug.services.console.events import discreet_model
from glowplug.services.console.fleet_api import STARTS_SHOWN, coming, starts, why_so
from glowplug.services.console.fleet_rows import TimedStart
from glowplug.services.console.fleet_view import FETCH_LEASE_S, Fetches
from tests import console_story as story

AT = 1000.0
DECIDE = Phase(name=PhaseName.DECIDE, started_at=AT, ended_at=AT + 0.5)
LOAD = Phase(name=PhaseName.LOAD, started_at=AT + 2.0, ended_at=AT + 3.0, predicted_s=0.8)


def instance(number: int, state: InstanceState, **fields: object) -> Instance:
    made = story.instance(f"i-{number}", "chat", "node-1", state, AT)
    history_of = {"created_at": AT + 1.0, "changed_at": AT + 2.0, "ready_at": 0.0, "phases": (DECIDE,), **fields}
    return replace(made, **history_of)  # type: ignore[arg-type]


def ready(number: int, ready_at: float = AT + 4.0) -> Instance:
    return instance(number, InstanceState.READY, ready_at=ready_at, phases=(DECIDE, LOAD))


def starts_of(*instances: Instance) -> list[TimedStart]:
    log = DecisionLog()
    for revision, made in enumerate(instances):
        log.put_instance(replace(made, revision=revision))
    return starts(log.instances_of("chat"))


def test_a_start_is_remembered_once_with_its_phases_and_what_was_predicted() -> None:
    draining = instance(1, InstanceState.DRAINING, ready_at=AT + 4.0, phases=(DECIDE, LOAD))
    [start] = starts_of(ready(1), ready(1), draining)
    assert (start.began_at, start.ended_at) == (AT, AT + 4.0), "counted from the decision"
    assert start.instance.phases == (DECIDE, LOAD)


def test_a_start_that_failed_says_why_and_an_engine_that_died_later_is_no_failed_start() -> None:
    failed = instance(1, InstanceState.FAILED, reason="no kernel image", changed_at=AT + 3.0)
    died = instance(2, InstanceState.FAILED, reason="killed", ready_at=AT + 4.0)
    found = starts_of(failed, died)
    assert [(s.instance.instance_id, s.ended_at - s.began_at) for s in found] == [("i-2", 4.0), ("i-1", 3.0)]


def test_only_the_latest_starts_are_shown() -> None:
    found = starts_of(*(ready(i, AT + i) for i in range(2, 30)))
    assert len(found) == STARTS_SHOWN and found[0].instance.instance_id == "i-29"


def test_a_start_under_way_shows_its_fetch_and_what_is_over() -> None:
    starting = instance(1, InstanceState.STARTING)
    progress = WeightsProgressed(node_id="node-1", model_key="chat", digest="d", num_bytes_done=30, num_bytes=120)
    fetches = Fetches()
    fetches.progress(progress, AT)
    [start] = coming([starting], fetches, AT)
    assert start.fetch is not None and start.fetch.report == progress
    assert start.instance == starting and (start.began_at, start.ended_at) == (AT, 0.0)
    [silent] = coming([starting], fetches, AT + FETCH_LEASE_S)
    assert silent.fetch is None
    fetches.end(
        WeightsFetched(node_id="node-1", model_key="chat", digest="d", num_bytes=120, seconds=1.0, source="http")
    )
    [loading] = coming([instance(1, InstanceState.LOADING)], fetches, AT)
    assert loading.fetch is None
    fetched = Phase(name=PhaseName.FETCH, started_at=AT + 1.0, ended_at=AT + 2.0)
    assert loading.instance.phases == (DECIDE, fetched)
    assert coming([ready(1)], fetches, AT) == []


def test_an_address_that_is_none_shows_nothing_and_raises_nothing() -> None:
    model = replace(story.model("chat", "chat", 10), weights=WeightsRef(uri="https://user:pass@[::1/a.gguf"))
    assert discreet_model(model).weights.uri == ""
    at_signs = replace(model, weights=WeightsRef(uri="https://user:p@ss@models.example/a.gguf"))
    assert discreet_model(at_signs).weights.uri == "https://models.example/a.gguf"


def decided(number: int, kind: str, reason: str, **fields: Any) -> DecisionRecord:
    return story.a_decision(number, kind, reason, **{"model_key": "chat", "made_at": AT + number, **fields})


def test_a_model_says_why_it_is_where_it_is_and_why_it_is_cold() -> None:
    log = DecisionLog()

    def decision_of(*instances: Instance) -> str:
        reason, found = why_so("chat", instances, log)
        assert found is not None and found.reason == reason
        return found.decision_id

    assert why_so("chat", [], log) == ("no decision about it yet: no request has asked for it", None)
    log.put(decided(1, "place", "chat starts on node-1/0: 20 GiB are free"))
    log.put(decided(2, "scale", "an instance of chat drains: it has been idle", service="autoscaler"))
    running = instance(1, InstanceState.READY, ready_at=AT, decision_id="d-1")
    assert decision_of(running) == "d-1"
    gone = instance(1, InstanceState.STOPPED)
    assert decision_of(gone) == "d-2", "cold: the latest decision about it"
    log.put_instance(gone)
    log.put(decided(3, "evict", "chat leaves node-1 for other", model_key="other", instance_id="i-9", chosen="i-1"))
    log.put(decided(4, "evict", "third leaves node-2 for chat", instance_id="i-1", chosen="i-8"))
    assert decision_of(gone) == "d-3", "it had to leave; who left for it is not why it is cold"
    asleep = instance(1, InstanceState.SWAPPED_OUT, ready_at=AT, decision_id="d-1")
    assert decision_of(asleep) == "d-3", "asleep: why it sleeps, not why it once started"
    lost = instance(2, InstanceState.READY, decision_id="lost", reason="it is ready")
    assert why_so("chat", [lost], log) == ("it is ready", None)
