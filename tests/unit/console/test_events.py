"""The event rings."""

import asyncio
import dataclasses
from typing import Any

from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.events import Event
from glowplug.events.commands import FetchWeights, PlaceInstance, StartInstance, StopInstance
from glowplug.events.facts import InstanceReady, ModelDeployed, NodeBeat, RequestWaiting
from glowplug.events.filters import EventFilter
from glowplug.services.console.events import ROW_OVERHEAD_BYTES, EventLog
from glowplug.telemetry.tracing import trace_id_of
from tests.console_story import instance, node, traceparent
from tests.fleet_builder import a_model, an_event


def event(data: Any, *, cause: str = "", issuer: str = "placer-1", trace: str = "") -> Event:
    return dataclasses.replace(an_event(data, issuer=issuer, traceparent=trace), cause_id=cause)


def stop(instance_id: str = "i-1", target: str = "node-1", **more: Any) -> Event:
    return event(StopInstance(target=target, instance_id=instance_id, reason="idle"), **more)


def beat(node_id: str = "node-1") -> Event:
    return event(NodeBeat(node=node(node_id, 1.0, ())), issuer=f"agent-{node_id}")


def waiting(model_key: str = "m") -> Event:
    fact = RequestWaiting(
        model_key=model_key, request_id="r-1", router_id="router-1", num_waiting=1, waiting_since=1.0, deadline_at=9.0
    )
    return event(fact, issuer="router-1", trace=traceparent(3))


def log_with(*events: Event, **bounds: int) -> EventLog:
    log = EventLog(**bounds)
    for one in events:
        log.take(one)
    return log


def test_rings_are_bounded_by_count_and_by_what_they_cost() -> None:
    log = log_with(*(stop(f"i-{n}") for n in range(50)), max_events=10)
    assert [row.words.split()[0] for row in log.latest(EventFilter(), 99)] == [
        f"instance_id=i-{n}" for n in range(40, 50)
    ]
    small = log_with(*(stop(f"i-{n}") for n in range(50)), max_events=99, max_bytes=6 * ROW_OVERHEAD_BYTES)
    kept = small.kept()["cmd"]
    assert 0 < kept["num"] <= 6 and kept["num_bytes"] <= 6 * ROW_OVERHEAD_BYTES


def test_telemetry_pushes_no_fact_out() -> None:
    fact = waiting()
    log = log_with(fact, *(beat() for _ in range(100)), max_events=5)
    assert log.get(fact.event_id) is not None and log.kept()["tel"]["num"] == 5


def test_an_event_delivered_twice_is_kept_once() -> None:
    fact = waiting()
    log = log_with(fact, fact)
    assert log.num_passed == 1 and len(log.latest(EventFilter(), 9)) == 1


def test_the_latest_come_in_the_order_of_arrival_whatever_their_class() -> None:
    log = log_with(waiting("a"), stop(), beat(), waiting("b"))
    every = log.latest(EventFilter(planes=("evt", "cmd", "tel")), 3)
    assert [row.seen.kind for row in every] == ["agent.stop", "node.beat", "request.waiting"]
    assert [row.seen.model_key for row in log.latest(EventFilter(types=("request.",)), 9)] == ["a", "b"]
    assert [row.seen.node_id for row in log.latest(EventFilter(node="node-1"), 9)] == ["node-1"]


def test_a_chain_leads_to_the_first_cause_and_survives_what_is_gone() -> None:
    first = waiting()
    start = StartInstance(target="node-1", instance_id="i-1", model=a_model(), workers=(), decision_id="d-1")
    second = event(start, cause=first.event_id)
    third = stop(cause=second.event_id)
    log = log_with(first, second, third)
    chain, is_whole = log.chain(third.cause_id)
    assert [row.seen.kind for row in chain] == ["agent.start", "request.waiting"] and is_whole
    assert [row.event_id for row in log.effects(first.event_id)] == [second.event_id]
    assert log.chain("gone") == ([], False)


def test_a_ring_of_causes_ends() -> None:
    one, two = stop(), stop()
    looped = [dataclasses.replace(a, cause_id=b.event_id) for a, b in ((one, two), (two, one))]
    chain, is_whole = log_with(*looped).chain(one.event_id)
    assert 0 < len(chain) <= 32 and not is_whole


def test_rows_say_what_is_emulated_and_which_trace_it_belongs_to() -> None:
    ready = instance("i-1", "m", "node-2", InstanceState.READY, 1.0, emulated=True)
    assert ready.emulated
    log = log_with(event(InstanceReady(instance=ready)), waiting())
    ready_row, waiting_row = log.latest(EventFilter(), 9)
    assert ready_row.emulated and not waiting_row.emulated
    assert waiting_row.trace_id == trace_id_of(traceparent(3)) != ""
    assert trace_id_of(traceparent(3)[:-2] + "00") == "", "no trace is kept that is not sampled"


def test_no_event_shows_a_system_prompt_or_a_secret_of_an_address() -> None:
    uri = "https://user:pass@models.example/a.gguf?X-Amz-Signature=abc"
    model = a_model(weights=WeightsRef(uri=uri), system_prompt="Words of a person.")
    carriers = (
        ModelDeployed(model=model),
        PlaceInstance(instance_id="i-1", model=model, wanted_at=1.0, reason="asked"),
        StartInstance(target="node-1", instance_id="i-1", model=model, workers=(), decision_id="d-1"),
        FetchWeights(target="node-1", model_key=model.key, weights=model.weights, instance_id="i-1"),
    )
    for data in carriers:
        log = log_with(seen := event(data))
        entry = log.get(seen.event_id)
        assert entry is not None and b"https://models.example/a.gguf" in entry.raw
        assert not [secret for secret in (b"pass", b"Signature", b"Words") if secret in entry.raw], data.TYPE
        assert log.latest(EventFilter(text="words of a person"), 9) == []


async def test_a_watcher_gets_the_newest_and_is_sent_how_many_it_did_not_get() -> None:
    log = EventLog(watch_limit=3)
    watcher = log.watch(EventFilter(planes=("cmd",)))
    for n in range(10):
        log.take(stop(f"i-{n}"))
    log.take(waiting())
    batch = await anext(watcher.batches(log, beat_s=0.0))
    assert [row.words.split()[0] for row in batch.rows] == ["instance_id=i-7", "instance_id=i-8", "instance_id=i-9"]
    assert (batch.num_skipped, batch.num_passed) == (7, 11)


async def test_a_watcher_is_sent_an_empty_batch_when_nothing_matches_and_ends_with_the_console() -> None:
    log = EventLog()
    watcher = log.watch(EventFilter(text="never"))
    batches = watcher.batches(log, beat_s=0.0, heartbeat_s=0.01)
    log.take(waiting())
    assert (await anext(batches)).rows == [] and watcher in log.watchers
    log.close()
    assert [batch async for batch in batches][1:] == []
    log.leave(watcher)
    late = log.watch(EventFilter())
    assert [batch async for batch in late.batches(log, beat_s=0.0)] == []
    await asyncio.sleep(0)
