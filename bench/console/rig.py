"""A console process fed by a synthetic fleet over real NATS and Valkey, and a browser tab with meters in it."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import psutil
from nats.aio.client import Client as NatsClient
from playwright.async_api import Browser, CDPSession, Page

from bench.console.synthetic import SyntheticFleet, fact
from glowplug.bus.nats_bus import arrive
from glowplug.domain.decision import DecisionRecord
from glowplug.events import Event
from glowplug.events.envelope import encode, to_json
from glowplug.events.facts import DecisionMade
from glowplug.events.subjects import subject
from glowplug.state.port import Store
from glowplug.state.redis_store import RedisStore
from tests.browser import new_page
from tests.ports import free_port
from tests.servers import NatsProcess, ValkeyProcess, until_answers

METERS = """
(() => {
  const m = (window.meters = { longTasks: [], fcp: 0, drawn: 0, seen: {} });
  const observe = (type, each) =>
    new PerformanceObserver((list) => list.getEntries().forEach(each)).observe({ type, buffered: true });
  observe("longtask", (entry) => m.longTasks.push(entry.duration));
  observe("paint", (entry) => { if (entry.name === "first-contentful-paint") m.fcp = entry.startTime; });
  const isDrawn = () => document.querySelectorAll(".node").length === window.wantedNodes
    && document.querySelector(".grant");
  new MutationObserver(() => {
    const now = performance.timeOrigin + performance.now();
    for (const line of document.querySelectorAll(".decisions li[title^=d-mark]")) m.seen[line.title] ??= now;
    if (!m.drawn && isDrawn()) m.drawn = performance.now();
  }).observe(document, { childList: true, subtree: true });
})();
"""


@dataclass
class Rig:
    """`publish` sends; `life` makes the fleet live at `speed` seconds per second until cancelled."""

    fleet: SyntheticFleet
    url: str
    console: psutil.Process
    bus: NatsClient
    store: RedisStore
    num_events: int = 0
    num_seconds: int = 0  # of the fleet's life
    marks: dict[str, float] = field(default_factory=dict)  # decision id -> epoch seconds when it was published

    async def publish(self, event: Event) -> None:
        await self.bus.publish(subject(event.data), encode(event))
        self.num_events += 1

    async def life(self, speed: float) -> None:
        """Publish the events of each second, spread over that second."""
        began = time.monotonic()
        lived = 0
        while True:
            events = list(self.fleet.second(time.time()))
            pieces = 10
            for piece in range(pieces):
                for event in events[piece::pieces]:
                    await self.publish(event)
                due = began + (lived + (piece + 1) / pieces) / speed
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            lived += 1
            self.num_seconds += 1

    async def mark(self) -> str:
        """Publish a decision that no other process makes, and note the time."""
        decision_id = f"d-mark-{len(self.marks)}"
        now_s = time.time()
        record = DecisionRecord(
            decision_id=decision_id, kind="scale", policy="reactive", service="autoscaler", reason="mark", made_at=now_s
        )
        self.marks[decision_id] = now_s
        await self.publish(fact(DecisionMade(decision=record), now_s))
        await arrive(self.bus)
        return decision_id

    def rss_bytes(self) -> int:
        return int(self.console.memory_info().rss)

    def cpu_s(self) -> float:
        times = self.console.cpu_times()
        return float(times.user + times.system)


@contextlib.asynccontextmanager
async def rig(fleet: SyntheticFleet, **env: str) -> AsyncIterator[Rig]:
    """NATS, Valkey with the fleet's tables, and `python -m glowplug.services.console` reading both."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="gp-bench-", dir=shm if shm.is_dir() else None) as name:
        folder = Path(name)
        bus_server, store_server = NatsProcess(folder / "nats"), ValkeyProcess(folder / "valkey")
        try:
            bus_server.start()
            store_server.start()
            store = RedisStore(store_server.url)
            await fill(store, fleet)
            port = free_port()
            given = {
                "GLOWPLUG_NATS_URL": bus_server.url,
                "GLOWPLUG_REDIS_URL": store_server.url,
                "GLOWPLUG_STATE_DIR": str(folder),
                "GLOWPLUG_PORT": str(port),
                "GLOWPLUG_SERVICE_ID": "console-1",
            }
            log = folder / "console.log"
            process = await asyncio.to_thread(spawn, log, os.environ | given | env)
            try:
                url = f"http://127.0.0.1:{port}"
                await asyncio.to_thread(until_answers, f"{url}/live", process, log)
                bus = await nats.connect(bus_server.url)
                yield Rig(fleet, url, psutil.Process(process.pid), bus, store)
                await bus.close()
            finally:
                process.kill()
                process.wait()
                await store.close()
        finally:
            bus_server.kill()
            store_server.kill()


def spawn(log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        return subprocess.Popen([sys.executable, "-m", "glowplug.services.console"], env=env, stdout=sink, stderr=sink)


async def fill(store: Store, fleet: SyntheticFleet) -> None:
    for model in fleet.models:
        await store.put("models", model.key, to_json(model))
    for node in fleet.nodes.values():
        await store.put("nodes", node.node_id, to_json(node))
    for instance in fleet.instances.values():
        await store.put("instances", instance.instance_id, to_json(instance))


@dataclass
class Tab:
    """A page with meters; `complaints` are its errors and warnings."""

    page: Page
    devtools: CDPSession
    complaints: list[str]

    async def meters(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.page.evaluate("window.meters")
        return found

    async def heap_bytes(self) -> int:
        """The size of the JavaScript heap after a collection."""
        await self.devtools.send("HeapProfiler.collectGarbage")
        return int((await self.measures())["JSHeapUsedSize"])

    async def measures(self) -> dict[str, float]:
        told = await self.devtools.send("Performance.getMetrics")
        return {metric["name"]: metric["value"] for metric in told["metrics"]}


def page_cpu_s() -> float:
    """CPU seconds of the busiest page process of this process's browser, which do not depend on the machine's load."""
    pages = [child for child in psutil.Process().children(recursive=True) if "--type=renderer" in child.cmdline()]
    return max(float(times.user + times.system) for times in (page.cpu_times() for page in pages))


async def open_tab(browser: Browser, url: str, num_nodes: int) -> Tab:
    """Open a tab of its own profile (nothing cached) and begin to load `url`."""
    complaints: list[str] = []
    page = await new_page(browser, complaints, reduced_motion="no-preference")
    await page.add_init_script(f"window.wantedNodes = {num_nodes};")
    await page.add_init_script(METERS)
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Performance.enable")
    await page.goto(url, wait_until="commit")
    return Tab(page, devtools, complaints)
