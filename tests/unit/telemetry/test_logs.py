"""Request and event in log lines. In a separate process: logging is global."""

import json
import logging
import subprocess
import sys
from typing import Any

from glowplug.telemetry.logs import MAX_REPEATS, Lines, Repeats, labelled

PROGRAM = """
import asyncio, logging
import httpx
from prometheus_client import CollectorRegistry
from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.effects import Publish
from glowplug.runtime.rest import make_app
from glowplug.controllers.reads import Reads
from glowplug.runtime.shell import Shell
from glowplug.events.facts import NodeLeft
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry import logs
from glowplug.telemetry.metrics import ShellMetrics
from tests.fleet_builder import an_event

log = logging.getLogger("x")
TRACED = "00-" + "a" * 32 + "-" + "b" * 16

class Talking:
    def handle(self, stimulus, now_s):
        log.warning("saw it")
        return []
    def restore(self, table, rows, now_s):
        return []

async def main():
    logs.configure("placer-1", json=True)
    log.warning("begins")
    shell = Shell("placer", "placer-1", Talking(), MemoryBus(), MemoryStore(),
                  ShellMetrics("placer", CollectorRegistry()), tick_s=60, reads=Reads(service="placer"))
    await shell.start()
    for flags in ("01", "00"):
        await shell.on_event(an_event(NodeLeft(node_id="n", reason=""), traceparent=f"{TRACED}-{flags}"))
    await shell.stop()
    app = make_app("placer", "placer-1", ready=lambda: "", policies=lambda: {"a": 1 / 0})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        headers = {"x-request-id": "r-7", "traceparent": f"{TRACED}-01"}
        assert (await client.get("/policies", headers=headers)).status_code == 500

asyncio.run(main())
"""


def lines() -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_lines_carry_service_event_request_and_trace() -> None:
    begins, traced, unsampled, failed = lines()
    assert begins["service"] == "placer-1" and begins["event"] == "begins" and begins["level"] == "warning"
    assert begins["timestamp"].endswith("Z") and "trace_id" not in begins
    assert (traced["event"], traced["trace_id"], traced["event_type"]) == ("saw it", "a" * 32, "node.left")
    assert traced["event_id"] and "trace_id" not in unsampled and unsampled["event_type"] == "node.left"
    assert (failed["request_id"], failed["trace_id"]) == ("r-7", "a" * 32)
    assert "ZeroDivisionError" in failed["exception"]


def test_a_warning_that_comes_again_and_again_is_logged_once_in_ten_seconds() -> None:
    now = [0.0]
    repeats = Repeats(lambda: now[0])

    def logged(text: str, level: int = logging.WARNING) -> str:
        record = logging.LogRecord("x", level, "f.py", 1, "bus: %s", (text,), None)
        return record.getMessage() if repeats.filter(record) else ""

    assert [logged("gone") for _ in range(3)] == ["bus: gone", "", ""]
    assert logged("slow") == "bus: slow" and logged("gone", logging.ERROR) == "bus: gone"
    with labelled("", request_id="r-1"):
        assert logged("gone") == "bus: gone", "it is about another request"
    assert [logged("gone", logging.INFO) for _ in range(2)] == ["bus: gone"] * 2
    now[0] = 10.5
    assert logged("gone") == "bus: gone (2 more since the last such line)"
    for number in range(MAX_REPEATS):
        logged(str(number))
    assert logged("gone") == "bus: gone", "it is not remembered for ever"


def test_a_line_for_people_has_time_level_text_and_labels() -> None:
    record = logging.makeLogRecord({"msg": "saw %d", "args": (2,), "levelname": "INFO", "created": 0.5, "why": "a b"})
    with labelled("", event_id="e-1"):
        assert Lines(as_json=False).format(record) == (
            "1970-01-01T00:00:00.500000Z [info     ] saw 2 event_id=e-1 why='a b'"
        )
    try:
        raise ValueError("no")
    except ValueError:
        record.exc_info = sys.exc_info()
    first, *rest = Lines(as_json=False).format(record).splitlines()
    assert first.endswith("why='a b'") and rest[-1] == "ValueError: no"
