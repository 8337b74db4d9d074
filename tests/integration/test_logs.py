"""Logs over REST, of one process and of a fleet, without loss or duplicates."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.envelope import to_json
from glowplug.runtime import log_rest
from glowplug.runtime.identity import PROCESSES, ServiceHolder
from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import serve_rest
from glowplug.runtime.settings import ServiceSettings
from glowplug.services.agent.service import MAX_READ_BYTES, EngineOutputs, level_of
from glowplug.telemetry.log_ring import LogRing
from glowplug.telemetry.logs import RING, KeptStream, Lines, labelled
from tests.console_server import ADMIN_TOKEN, ConsoleUnderTest, visited
from tests.fleet_builder import a_node

TOKEN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}


@contextlib.asynccontextmanager
async def process(ring: LogRing) -> AsyncIterator[str]:
    """Serves the log `ring` at /other/logs to holders of the admin token; yields its address."""
    app = make_app("test", "test-1", ready=lambda: "", policies=dict)
    app.include_router(log_rest.routes(ring, admin(ADMIN_TOKEN), "/other/logs"))
    app.include_router(log_rest.routes(ring, admin(ADMIN_TOKEN), "/other/logs/engines"))
    server, url = await serve_rest(app, ServiceSettings(admin_token=ADMIN_TOKEN))
    try:
        yield f"{url}/other"
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


async def test_the_log_of_a_process_is_filtered_and_followed_with_the_token() -> None:
    ring = LogRing(max_lines=3)
    async with process(ring) as url, httpx.AsyncClient(timeout=10) as client:
        assert (await client.get(f"{url}/logs")).status_code == 401
        client.headers.update(TOKEN)
        ring.put(1.0, "info", "hello", {"model": "smol-chat"})
        ring.put(2.0, "error", "lost", {"request_id": "r-1"})
        whole = (await client.get(f"{url}/logs")).json()
        assert [line["text"] for line in whole["lines"]] == ["hello", "lost"]
        assert whole["lines"][0] == {"at": 1.0, "level": "info", "text": "hello", "fields": {"model": "smol-chat"}}
        for query, wanted in (
            ({"level": "error"}, ["lost"]),
            ({"contains": ["SMOL", "hell"]}, ["hello"]),
            ({"id": ["r-1", "x"]}, ["lost"]),
            ({"limit": 1}, ["lost"]),
        ):
            found = (await client.get(f"{url}/logs", params=query)).json()
            assert [line["text"] for line in found["lines"]] == wanted
        waiting = asyncio.create_task(client.get(f"{url}/logs", params={"after": whole["cursor"], "wait_s": 10}))
        await asyncio.sleep(0.05)
        ring.put(3.0, "info", "later", {})
        page = (await waiting).json()
        assert [line["text"] for line in page["lines"]] == ["later"]
        for n in range(5):
            ring.put(4.0, "info", str(n), {})
        page = (await client.get(f"{url}/logs", params={"after": page["cursor"]})).json()
        assert ([line["text"] for line in page["lines"]], page["num_lost"]) == (["2", "3", "4"], 2)
        assert (await client.get(f"{url}/logs", params={"level": "loud"})).status_code == 400


async def filled(at: ConsoleUnderTest, url: str) -> None:
    claim = ServiceHolder(url=url, process="p", seen_at=time.time())
    await at.store.put(PROCESSES, "router-1", to_json(claim))
    await at.store.put(
        PROCESSES, "placer-9", to_json(ServiceHolder(url="http://127.0.0.1:1", process="p", seen_at=time.time()))
    )
    await at.store.put(PROCESSES, "old-1", to_json(ServiceHolder(url=url, process="p", seen_at=time.time() - 3600)))
    await at.store.put("nodes", "node-1", to_json(a_node("node-1", agent_url=url)))
    while not (at.console.log_sources.processes and at.console.view.nodes):
        await asyncio.sleep(0.02)


async def test_the_console_merges_every_log_and_goes_on_where_a_reader_was() -> None:
    ring = LogRing()
    async with process(ring) as url, visited(admin_token=ADMIN_TOKEN) as (at, client):
        await filled(at, url)
        assert (await client.post("/api/v1/logs", json={})).status_code == 401
        client.headers.update(TOKEN)
        ring.put(time.time(), "info", "one", {})
        RING.put(time.time(), "warning", "the console's own", {})
        first = (await client.post("/api/v1/logs", json={"service": "router"})).json()
        assert [(line["text"], line["source"]) for line in first["lines"]] == [("one", "router-1")]
        whole = (await client.post("/api/v1/logs", json={})).json()
        assert {row["name"]: bool(row["problem"]) for row in whole["sources"]} == {
            "router-1": False,
            "placer-9": True,
            "agent-node-1": False,
            "engines of node-1": False,
            "console-1": False,
        }
        assert "the console's own" in [line["text"] for line in whole["lines"]]
        assert [line["at"] for line in whole["lines"]] == sorted(line["at"] for line in whole["lines"])
        cursors, got = first["cursors"], []
        for n in range(30):
            ring.put(time.time(), "info", f"n{n}", {"node": "x"})
            if n % 4 == 0:
                page = (await client.post("/api/v1/logs", json={"service": "router", "cursors": cursors})).json()
                cursors, got = page["cursors"], got + [line["text"] for line in page["lines"]]
        page = (await client.post("/api/v1/logs", json={"service": "router", "cursors": cursors, "limit": 1})).json()
        got += [line["text"] for line in page["lines"]]
        assert got == [f"n{n}" for n in range(30)]
        node = (await client.post("/api/v1/logs", json={"node": "node-1", "words": ["n29"]})).json()
        assert {line["source"] for line in node["lines"]} == {"agent-node-1", "engines of node-1"}


async def test_a_process_that_was_started_anew_is_read_from_its_first_line() -> None:
    before, after = LogRing(), LogRing()
    before.put(1.0, "info", "old", {})
    for n in range(3):
        after.put(2.0, "info", f"new {n}", {})
    cursor = before.read().cursor
    async with process(after) as url, visited() as (at, client):
        await filled(at, url)
        client.headers.update(TOKEN)
        body = {"service": "router", "cursors": {"router-1": cursor}}
        assert [line["text"] for line in (await client.post("/api/v1/logs", json=body)).json()["lines"]] == [
            "new 0",
            "new 1",
            "new 2",
        ]


@pytest.mark.parametrize(
    "body", ["[]", '{"limit": 0}', '{"words": [1]}', '{"loud": 1}', '{"ids": ["%s"]}' % ("x" * 301)]
)
async def test_what_is_no_question_is_refused(body: str) -> None:
    async with visited() as (_, client):
        answer = await client.post("/api/v1/logs", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


def test_a_line_in_memory_carries_the_ids_of_the_one_that_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    ring = LogRing()
    logger = logging.Logger("x")
    logger.addHandler(KeptStream(sys.stderr, Lines(as_json=False), ring))
    with labelled(f"00-{'a' * 32}-{'b' * 16}-01", request_id="r-7"):
        logger.warning("%d bytes", 3, extra={"instance": "i-1"})
        logger.warning("%d bytes", "none")
    assert "3 bytes request_id=r-7" in capsys.readouterr().err
    [line] = ring.read().lines
    assert (line.level, line.text) == ("warning", "3 bytes")
    assert line.fields == {"request_id": "r-7", "trace_id": "a" * 32, "instance": "i-1"}


def test_what_engines_write_is_followed_once_whatever_it_is(tmp_path: Path) -> None:
    ring = LogRing()
    outputs = EngineOutputs(ring, "node-1", lambda name: tmp_path / f"{name}.log")
    rows = [instance("i-2"), instance("i-1"), instance("i-0")]
    log = tmp_path / "i-1.log"
    log.write_bytes(b"INFO ready\nWARN ful")
    (tmp_path / "i-2.log").hardlink_to(log)  # one process under two names
    outputs.read(rows, 5.0)
    with log.open("ab") as file:
        file.write(b"l\n\n\xff\n")
    outputs.read(rows, 6.0)
    outputs.read(rows, 7.0)
    assert [(line.text, line.level, line.at) for line in ring.read().lines] == [
        ("INFO ready", "info", 5.0),
        ("WARN full", "warning", 6.0),
        ("\ufffd", "info", 6.0),
    ]
    assert ring.read().lines[0].fields == {"instance": "i-2", "model": "smol", "node": "node-1"}
    log.write_bytes(b"again\n")
    outputs.read(rows, 8.0)
    log.write_bytes(b"again\n" + b"x" * (2 * MAX_READ_BYTES) + b"\nend\n")
    outputs.read(rows, 9.0)
    last = [line.text for line in ring.read().lines[3:]]
    assert (last[0], last[-1]) == ("again", "end")


def instance(instance_id: str) -> Instance:
    return Instance(
        instance_id=instance_id,
        model_key="smol",
        engine="llamacpp",
        state=InstanceState.READY,
        workers=(),
        created_at=1.0,
    )


@pytest.mark.parametrize(
    ("line", "level"),
    [("ERROR: no", "error"), ("2026 [warning] x", "warning"), ("FATAL x", "critical"), ("x" * 90 + " ERROR", "info")],
)
def test_the_level_of_an_engine_line(line: str, level: str) -> None:
    assert level_of(line) == level
