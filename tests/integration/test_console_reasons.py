"""Events, decisions and forecasts over real HTTP, and traces that outlive their console."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.instance import InstanceState
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import to_json
from glowplug.events.facts import DecisionMade, InstanceReady, RequestWaiting
from tests import console_story as story
from tests.console_server import ConsoleUnderTest, serving
from tests.waiting import until

PATIENCE_S = 20.0
NOW = time.time()


def chain() -> list[Event]:
    """A request waits, so an instance is asked for, placed by a decision, and comes up."""
    waiting = RequestWaiting(
        model_key="m", request_id="req-1", router_id="router-1", num_waiting=1, waiting_since=NOW, deadline_at=NOW + 60
    )
    placed = DecisionRecord(
        decision_id="d-p-1-1", kind="place", policy="first_fit", service="placer", reason="first GPU with 2 GiB free",
        made_at=NOW, model_key="m", instance_id="i-1", node_id="node-1", gpu_id="node-1/0", chosen="node-1/0",
        inputs={"need_bytes": 1 << 30, "engine": "emulated"}, rivals=(Rival(name="node-2/0", score=0.0, why="full"),),
        cause_id="e-place", traceparent=story.traceparent(4),
    )  # fmt: skip
    ready = story.instance("i-1", "m", "node-1", InstanceState.READY, NOW, emulated=True)
    place = PlaceInstance(instance_id="i-1", model=story.model("m", "m", 10), reason="1 waiting", wanted_at=NOW)
    told: list[tuple[str, Any, str, str]] = [
        ("e-waiting", waiting, "req-1", "router-1"),
        ("e-place", place, "e-waiting", "autoscaler-1"),
        ("e-decision", DecisionMade(decision=placed), "e-place", "placer-1"),
        ("e-ready", InstanceReady(instance=ready), "e-start", "agent-node-1"),
    ]
    return [
        Event(event_id=id_, type=data.TYPE, occurred_at=NOW, issuer=by, data=data, cause_id=cause,
              traceparent=story.traceparent(4), epoch=1)
        for id_, data, cause, by in told
    ]  # fmt: skip


async def get(at: ConsoleUnderTest, path: str, **query: str) -> Any:
    async with httpx.AsyncClient() as client:
        answer = await client.get(at.url + path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def messages(client: httpx.AsyncClient, url: str) -> AsyncIterator[tuple[str, Any]]:
    async with client.stream("GET", url, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


async def test_an_event_leads_to_its_causes_and_effects() -> None:
    async with serving() as at:
        await at.tell(*chain())
        latest = await get(at, "/api/v1/events/latest")
        assert [row["type"] for row in latest["rows"]][-4:] == [
            "request.waiting", "placer.place", "decision.made", "instance.ready",
        ]  # fmt: skip
        assert latest["command"] == "glowplug tap" and "instance.ready" in latest["types"]
        found = await get(at, "/api/v1/events/e-decision")
        assert [row["event_id"] for row in found["chain"]] == ["e-place", "e-waiting"]
        assert found["event"]["data"]["decision"]["reason"] == "first GPU with 2 GiB free"
        assert [row["event_id"] for row in (await get(at, "/api/v1/events/e-place"))["effects"]] == ["e-decision"]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{at.url}/api/v1/events/none")).status_code == 404
            refused = await client.get(f"{at.url}/api/v1/events/latest", params={"plane": "odd"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "plane"


async def test_the_stream_filters_on_the_server_and_counts_what_it_leaves_out() -> None:
    async with serving(events_per_beat=5) as at, httpx.AsyncClient() as client:
        await at.tell(*chain())
        url = f"{at.url}/api/v1/events?plane=evt&model=m&type=request.&q=REQ-1"
        stream = messages(client, url)
        name, opening = await anext(stream)
        assert name == "events" and [row["event_id"] for row in opening["rows"]] == ["e-waiting"]
        assert opening["command"] == "glowplug tap --plane evt --type request. --model m --grep REQ-1"
        waiting = chain()[0]
        flood = [
            Event(event_id=f"e-{n}", type=waiting.type, occurred_at=NOW, issuer="router-1", data=waiting.data)
            for n in range(200)
        ]
        await at.tell(*flood, *chain()[1:])
        rows, skipped = [], 0
        async with asyncio.timeout(PATIENCE_S):
            async for name, batch in stream:
                assert name == "more" and len(batch["rows"]) <= 5
                rows += [row["event_id"] for row in batch["rows"]]
                skipped += batch["num_skipped"]
                if len(rows) + skipped >= 200:
                    break
        assert len(rows) + skipped == 200 and rows[-1] == "e-199", "every event is shown or counted"
        await stream.aclose()
        await until(lambda: not at.console.events.watchers)


async def test_views_of_events_are_few_and_end_with_the_console() -> None:
    async with serving(events_max_watchers=1) as at:
        client = httpx.AsyncClient()
        stream = messages(client, f"{at.url}/api/v1/events")
        await anext(stream)
        refused = await client.get(f"{at.url}/api/v1/events")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
    async with asyncio.timeout(PATIENCE_S):
        rest = [name async for name, _ in stream]
    assert set(rest) <= {"more"}, "it ended by itself"
    await client.aclose()


async def test_a_decision_has_its_causes_and_what_came_of_it() -> None:
    async with serving() as at:
        await at.tell(*chain())
        (line,) = (await get(at, "/api/v1/decisions", trace=story.trace_id(4)))["decisions"]
        assert line["emulated"] and line["num_rivals"] == 1
        page = await get(at, f"/api/v1/decisions/{line['decision_id']}")
        assert page["record"]["inputs"]["need_bytes"] == 1 << 30 and page["record"]["rivals"][0]["why"] == "full"
        assert [row["type"] for row in page["chain"]] == ["placer.place", "request.waiting"]
        assert page["outcome"]["state"] == "ready" and page["outcome"]["phases"][1]["predicted_s"] > 0
        assert page["event_id"] == "e-decision" and page["command"] == "glowplug why i-1"
        none = await get(at, "/api/v1/decisions", kind="evict")
        assert none["decisions"] == [] and none["num_kept"] == 1 and none["facets"]["policy"] == ["first_fit"]


async def test_decisions_of_before_the_console_come_from_the_store() -> None:
    async with serving() as at:
        for number in range(3):
            await at.store.append("decisions", to_json(story.decisions(NOW)[number]), keep=10)
        async with asyncio.timeout(PATIENCE_S):
            while (await get(at, "/api/v1/decisions"))["num_kept"] < 3:
                await asyncio.sleep(0.05)
        found = (await get(at, "/api/v1/decisions"))["decisions"]
        assert [line["decision_id"] for line in found] == ["d-2", "d-1", "d-0"]


async def test_a_console_without_a_predictor_says_so() -> None:
    async with serving() as at:
        page = await get(at, "/api/v1/forecasts", model="m")
        assert "GLOWPLUG_PREDICTOR_URL" in page["problem"] and page["windows"] == []


@pytest.mark.parametrize("log_prompts", [True, False])
async def test_prompts_reach_the_disk_only_when_they_are_asked_for(tmp_path: Path, log_prompts: bool) -> None:
    said = story.make_span(
        1, 1, 0, "chat", NOW, 1.0, {"gen_ai.prompt": "canary-of-a-prompt", "kept": "canary-of-a-word"}
    )
    async with serving(state_dir=tmp_path, log_prompts=log_prompts) as at:
        at.console.open_disk()
        await at.export(story.export({"engine": [said]}))
        assert at.console.disk is not None
        at.console.disk.close()
    on_disk = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"canary-of-a-word" in on_disk and (b"canary-of-a-prompt" in on_disk) is log_prompts


@pytest.mark.parametrize("trace_disk", [True, False])
async def test_traces_outlive_their_console(tmp_path: Path, trace_disk: bool) -> None:
    trace = story.cold_trace(0, NOW - 5, "m", "r-0")
    async with serving(state_dir=tmp_path) as first:
        if trace_disk:
            first.console.open_disk()
        await first.export(trace)
        before = await get(first, f"/api/traces/{story.trace_id(0)}")
        if first.console.disk is not None:
            first.console.disk.close()
    async with serving(state_dir=tmp_path) as second:
        if trace_disk:
            second.console.open_disk()
            assert await get(second, f"/api/traces/{story.trace_id(0)}") == before
            assert (await get(second, "/api/v1/requests/r-0/trace"))["stages"] == []
            assert second.console.disk is not None
            second.console.disk.close()
        else:
            assert (await get(second, "/api/v1/traces"))["num_kept"] == 0
