"""Measure the console under a large fleet: first paint, event to page, memory over an hour of events, cost of a beat.

    python bench/console/run.py [--nodes 200 --gpus 8 --models 500] [--json FILE]

Starts NATS, Valkey and a console process of its own, lets a synthetic fleet publish to them, and looks with a real
browser. The fleet is made up (and says `emulated`); the way from the bus to the pixels is real. `--serve` only serves
the page until Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import psutil
from playwright.async_api import Browser

from bench.console.rig import Rig, Tab, open_tab, page_cpu_s, rig
from bench.console.synthetic import SyntheticFleet
from bench.measured.data import data_option, write_data
from glowplug.services.console.settings import ConsoleSettings
from tests import browser as chromium
from tests.browser import until

MIB = 1 << 20
SETTLE_S = 3.0
BEAT_EVERY_S = 10


@dataclass(frozen=True)
class Row:
    """One line of the table. `bound` is the promised limit, 0 without one; `name` is the figure's name in the data,
    which ends in its unit, "" if the data leave it out."""

    what: str
    seen: float
    unit: str
    bound: float = 0.0
    name: str = ""

    @property
    def holds(self) -> bool:
        return not self.bound or self.seen <= self.bound

    def __str__(self) -> str:
        bound = f"< {self.bound:g}" if self.bound else ""
        return f"{self.what:<58} {self.seen:>10.1f} {self.unit:<5} {bound:>8} {'' if self.holds else 'BROKEN'}".rstrip()


@contextlib.asynccontextmanager
async def living(at: Rig, speed: float) -> AsyncIterator[None]:
    task = asyncio.create_task(at.life(speed))
    try:
        yield
    finally:
        if task.done():
            task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


async def first_paint(at: Rig, browser: Browser, loads: int) -> list[Row]:
    """Load the page in fresh profiles, with nothing cached, while the fleet lives at its own speed."""
    painted, drawn, cpu_s = [], [], []
    for _ in range(loads):
        tab = await open_tab(browser, at.url, len(at.fleet.nodes))
        await until(tab.page, "window.meters.drawn > 0")
        cpu_s.append(page_cpu_s())
        meters = await tab.meters()
        painted.append(meters["fcp"])
        drawn.append(meters["drawn"])
        await tab.page.context.close()
    return [
        Row(
            f"first contentful paint, median of {loads} loads",
            statistics.median(painted),
            "ms",
            1500,
            "first_paint_ms_p50",
        ),
        Row("  the slowest of them", max(painted), "ms"),
        Row("the whole fleet drawn, median", statistics.median(drawn), "ms", 1500, "fleet_drawn_ms_p50"),
        Row("  the slowest of them", max(drawn), "ms"),
        Row("  CPU of the page's process until then, median", 1000 * statistics.median(cpu_s), "ms"),
    ]


async def updates(at: Rig, tab: Tab, marks: int) -> list[Row]:
    """Time events from their publication until the page shows them."""
    await tab.page.evaluate("window.meters.longTasks.length = 0")
    began, cpu_s, page_s = time.monotonic(), at.cpu_s(), page_cpu_s()
    for number in range(marks):
        decision_id = await at.mark()
        await until(tab.page, f"window.meters.seen['{decision_id}'] > 0", within_s=10)
        await asyncio.sleep(0.05 + 0.017 * (number % 7))  # not in step with the beat
    took_s = time.monotonic() - began
    meters = await tab.meters()
    late = [meters["seen"][key] - 1000 * sent_at for key, sent_at in at.marks.items()]
    beats = took_s / ConsoleSettings().stream_beat_s
    return [
        Row(f"event to page, median of {marks}", statistics.median(late), "ms", 100, "event_to_page_ms_p50"),
        Row("  95 of 100 within", quantile(late, 0.95), "ms", 100, "event_to_page_ms_p95"),
        Row("  the slowest of them", max(late), "ms"),
        Row("main thread: tasks over 50 ms, per minute", 60 * len(meters["longTasks"]) / took_s, ""),
        Row("  the longest of them", max(meters["longTasks"], default=0.0), "ms"),
        Row("page: CPU of its process", 100 * (page_cpu_s() - page_s) / took_s, "%"),
        Row("console: CPU per beat", 1000 * (at.cpu_s() - cpu_s) / beats, "ms"),
        Row("console: CPU", 100 * (at.cpu_s() - cpu_s) / took_s, "%"),
    ]


async def hour(at: Rig, tab: Tab, minutes: float, speed: float) -> list[Row]:
    """Play an hour's worth of events faster, and compare memory a sixth of the way in with memory at the end.

    Nodes beat each BEAT_EVERY_S seconds; a beat without news leaves nothing behind. All else comes as often as in that
    hour.
    """
    at.fleet.beat_every_s = BEAT_EVERY_S
    whole_s, warm_s = 60 * minutes, 60 * minutes / 6
    began, num_events, from_s = time.monotonic(), at.num_events, at.num_seconds
    early: tuple[int, int, float] | None = None
    while (lived_s := at.num_seconds - from_s) < whole_s:
        await asyncio.sleep(0.2)
        if early is None and lived_s >= warm_s:
            early = at.rss_bytes(), await tab.heap_bytes(), (await tab.measures())["Nodes"]
    took_s, events = time.monotonic() - began, at.num_events - num_events
    assert early is not None
    late = at.rss_bytes(), await tab.heap_bytes(), (await tab.measures())["Nodes"]
    dropped = await tab.page.evaluate("document.querySelector('#status').textContent.includes('dropped')")
    told = f"{events} events of {minutes:g} min in {took_s:.0f} s"
    return [
        Row(f"{told}: console RSS", late[0] / MIB, "MiB"),
        Row("  grown since a sixth of it", (late[0] - early[0]) / MIB, "MiB", 16),
        Row("page: JavaScript heap", late[1] / MIB, "MiB"),
        Row("  grown since a sixth of it", (late[1] - early[1]) / MIB, "MiB", 8),
        Row("page: DOM nodes", late[2], ""),
        Row("  grown since a sixth of it", late[2] - early[2], ""),
        Row("page fell behind (0 no, 1 yes)", float(dropped), ""),
    ]


async def measure(args: argparse.Namespace, show: Callable[[Row], object] = lambda _: None) -> list[Row]:
    """Measure every row of the table, in order; `show` gets each as soon as it is known."""
    fleet = SyntheticFleet(args.nodes, args.gpus, args.models, seed=args.seed)
    async with rig(fleet) as at, chromium.browsing("--enable-precise-memory-info") as browser:
        async with living(at, 1.0):
            await asyncio.sleep(SETTLE_S)
            rows = shown(await first_paint(at, browser, args.loads), show)
            tab = await open_tab(browser, f"{at.url}/#/{args.view}", args.nodes)
            await until(tab.page, "document.querySelector('#status').textContent === 'live'")
            await asyncio.sleep(SETTLE_S)
            if args.view == "fleet":
                rows += shown(await updates(at, tab, args.marks), show)
        if args.minutes:
            async with living(at, args.speed):
                rows += shown(await hour(at, tab, args.minutes, args.speed), show)
        assert tab.complaints == [], tab.complaints
    return rows


def shown(rows: list[Row], show: Callable[[Row], object]) -> list[Row]:
    for row in rows:
        show(row)
    return rows


async def serve(args: argparse.Namespace) -> None:
    """Only serve the page, alive, for a person."""
    fleet = SyntheticFleet(args.nodes, args.gpus, args.models, seed=args.seed)
    async with rig(fleet) as at, living(at, 1.0):
        print(f"{at.url}  (Ctrl-C ends it)", flush=True)
        await asyncio.Event().wait()


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--loads", type=int, default=5, help="page loads to measure")
    parser.add_argument("--marks", type=int, default=100, help="updates to measure")
    parser.add_argument("--minutes", type=float, default=60, help="of events for the memory rows; 0 leaves them out")
    parser.add_argument("--speed", type=float, default=30, help="factor of the fleet's clock in that part")
    parser.add_argument("--view", default="fleet", help="the open view: fleet, models, requests, ...")
    parser.add_argument("--serve", action="store_true", help="only serve the page until Ctrl-C")
    data_option(parser)
    return parser.parse_args(argv)


def as_data(rows: Sequence[Row]) -> dict[str, object]:
    return {row.name: row.seen for row in rows if row.name}


def main() -> int:
    args = parsed()
    if args.serve:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve(args))
        return 0
    if chromium.CHROMIUM is None:
        print(chromium.MISSING)
        return 1
    print(f"{args.nodes} nodes of {args.gpus} GPUs, {args.models} models (emulated), view {args.view}")
    print(f"{os.cpu_count()} cores, load of the machine before {psutil.getloadavg()[0]:.1f}", flush=True)
    rows = asyncio.run(measure(args, lambda row: print(row, flush=True)))
    write_data(args.json, as_data(rows))
    print(f"load of the machine after {psutil.getloadavg()[0]:.1f}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
