"""The pages' stream of diffs."""

import asyncio
import dataclasses
import json
from typing import Any

import msgspec
import pytest

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events.facts import DecisionMade, InstanceStopped, ModelUndeployed, NodeBeat
from glowplug.services.console.fleet_rows import SHOWN
from glowplug.services.console.stories import Stories
from glowplug.services.console.stream import Hub, OpenPage, TooManyClients
from tests import console_story as story
from tests.waiting import WAIT_S

NOW = 5_000.0


async def test_a_page_gets_the_fleet_then_only_what_changes() -> None:
    view, hub = story.view(NOW), Hub()
    client = hub.join(view, NOW)
    hub.flush(view, NOW)
    gone = story.instance("i-0a9e", "smol-poet", "node-2", InstanceState.STOPPED, NOW, revision=9)
    view.take(story.fact(InstanceStopped(instance=gone), NOW), NOW)
    view.take(story.fact(ModelUndeployed(model_key="smol-tutor"), NOW), NOW)
    decided = dataclasses.replace(story.decisions(NOW)[0], decision_id="d-77")
    view.take(story.fact(DecisionMade(decision=decided), NOW), NOW)
    hub.flush(view, NOW)
    (first, fleet), (second, patch) = await take(client, 2)
    assert (first, second) == ("fleet", "patch")
    assert len(fleet["models"]) == 6
    assert patch["removed"] == {"models": ["smol-tutor"], "instances": ["i-0a9e"]}
    cold = {"temperature": "cold", "state": "cold", "eta_s": 1.7, "num_ready": 0, "instances": []}
    assert patch["changed"] == {"models": [{"key": "smol-poet", "joined": cold}]}
    assert "models" not in patch and "nodes" not in patch
    assert [row["value"]["decision_id"] for row in patch["decisions"]] == ["d-77"]


async def test_a_page_gets_the_fields_that_it_shows() -> None:
    view, hub = story.view(NOW), Hub()
    [(_, fleet)] = await take(hub.join(view, NOW), 1)
    whole = json.loads(msgspec.json.encode(view.snapshot(NOW)))
    for table, cls in {"models": Model, "instances": Instance, "nodes": Node, "decisions": DecisionRecord}.items():
        for sent, row in zip(fleet[table], whole[table], strict=True):
            assert sent["value"] == {name: row["value"][name] for name in SHOWN[cls]} and sent["joined"]
    joined = {row["value"]["key"]: row["joined"] for row in fleet["models"]}
    assert "phases" in (instance := joined["smol-poet"]["last_cold_start"]["instance"]) and "url" not in instance
    assert joined["broken"]["failure"].keys() == {"instance_id", "changed_at", "reason"}


async def test_of_a_value_only_other_fields_are_sent() -> None:
    view, hub = story.view(NOW), Hub()
    client = hub.join(view, NOW)
    hub.flush(view, NOW)
    fuller = story.node("node-3", NOW + 1, story.grants("r-1", 64, 0), cached=(), revision=2)
    view.take(story.fact(NodeBeat(node=fuller), NOW + 1), NOW + 1)
    hub.flush(view, NOW + 1)
    _, (_, patch) = await take(client, 2)
    [changed] = patch["changed"]["nodes"]
    assert changed["node_id"] == "node-3" and changed.keys() == {"node_id", "value"}
    assert changed["value"].keys() == {"gpus"}, "its heartbeat is not shown"


async def take(client: OpenPage, count: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    async for raw in client.messages():
        lines = raw.decode().split("\n")
        found.append((lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: "))))
        if len(found) == count:
            break
    return found


async def test_a_slow_page_loses_the_oldest_and_is_sent_how_many() -> None:
    client = OpenPage(limit=3)
    dropped = [client.put(f"event: m\ndata: {i}\n\n".encode()) for i in range(5)]
    assert dropped == [0, 0, 0, 1, 1]
    assert await take(client, 4) == [("dropped", {"num": 2}), ("m", 2), ("m", 3), ("m", 4)]
    assert client.put(b"event: m\ndata: 5\n\n") == 0 and await take(client, 1) == [("m", 5)]


async def test_a_quiet_stream_says_that_it_lives() -> None:
    messages = OpenPage(limit=3).messages(heartbeat_s=0.001)
    assert [await anext(messages), await anext(messages)] == [b": beat\n\n"] * 2


async def test_a_trace_that_grows_many_times_is_sent_once_per_flush() -> None:
    view, hub = story.view(NOW), Hub()
    stories = Stories(10, view.decisions, view.models)
    client = hub.join(view, NOW)
    for event in story.cold_trace(20, NOW, "m", "r"):
        view.take(event, NOW)
        stories.take(event)
    hub.flush(view, NOW, stories.take_changed())
    hub.flush(view, NOW, stories.take_changed())
    messages = [data for name, data in await take(client, 3) if name == "traces"]
    assert len(messages) == 1
    assert messages[0]["traces"][0]["num_spans"] == 12


async def test_two_pages_are_kept_in_step() -> None:
    view, hub = story.view(NOW), Hub()
    first = hub.join(view, NOW)
    view.take(story.fact(ModelUndeployed(model_key="smol-tutor"), NOW), NOW)
    second = hub.join(view, NOW)
    assert [name for name, _ in await take(first, 2)] == ["fleet", "patch"]
    (_, fleet) = (await take(second, 1))[0]
    assert len(fleet["models"]) == 5


async def test_places_are_bounded_and_freed() -> None:
    view, hub = story.view(NOW), Hub(max_clients=1)
    client = hub.join(view, NOW)
    with pytest.raises(TooManyClients):
        hub.join(view, NOW)
    hub.leave(client)
    assert hub.join(view, NOW) in hub.clients


async def test_closing_lets_every_page_go() -> None:
    view, hub = story.view(NOW), Hub()
    client = hub.join(view, NOW)
    reading = asyncio.create_task(take(client, 99))
    await asyncio.sleep(0)
    hub.close()
    assert [name for name, _ in await asyncio.wait_for(reading, WAIT_S)] == ["fleet"]
    with pytest.raises(TooManyClients):
        hub.join(view, NOW)
