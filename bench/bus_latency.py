"""Measure the latency of an event from publish to handler on the embedded NATS: `make bench BENCH=bus_latency`.

JetStream stores to files and syncs every write (`sync_interval: always`), as in the local fleet. One process publishes
and receives, one event at a time, so a row is publish + store + deliver + decode.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measured.data import data_option, write_data
from glowplug.bus.nats_bus import NatsBus
from glowplug.events.subjects import TELEMETRY
from tests.contract.bus_rig import Listener, commands_of, evicted, evictions_of, load, stop
from tests.servers import NatsProcess

NUM_EVENTS = 300


async def _measure(bus: NatsBus, plane: str) -> tuple[list[float], list[float]]:
    """(seconds from publish to handler, seconds of publish only), with one value per event."""
    planes: dict[str, tuple[Callable[[], Any], str, str]] = {
        "evt": (lambda: evicted("bench"), evictions_of("bench"), "bench-facts"),
        "cmd": (lambda: stop("bench"), commands_of("bench"), "bench-commands"),
        "tel": (lambda: load("bench"), TELEMETRY, ""),
    }
    make, filters, durable = planes[plane]
    listener = Listener()
    await bus.subscribe([filters], listener, durable=durable)
    heard, published = [], []
    for num in range(NUM_EVENTS):
        started = time.perf_counter()
        await bus.publish(make())
        published.append(time.perf_counter() - started)
        await listener.listen(num + 1)
        heard.append(time.perf_counter() - started)
    return heard, published


def _row(plane: str, heard: list[float], published: list[float]) -> str:
    def ms(samples: list[float], quantile: int) -> str:
        return f"{statistics.quantiles(samples, n=100)[quantile - 1] * 1000:.2f}"

    return f"{plane:5} {ms(heard, 50):>8} {ms(heard, 99):>8} {ms(published, 50):>12} {ms(published, 99):>12}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data_option(parser)
    args = parser.parse_args()
    medians_ms: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder:
        server = NatsProcess(Path(folder)).start()
        bus = NatsBus(server.url, "bench")
        try:
            await bus.connect()
            print(f"{NUM_EVENTS} events each, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms")
            print(f"{'plane':5} {'p50':>8} {'p99':>8} {'publish p50':>12} {'publish p99':>12}")
            for plane in ("tel", "evt", "cmd"):
                heard, published = await _measure(bus, plane)
                print(_row(plane, heard, published))
                medians_ms[plane] = statistics.median(heard) * 1000
        finally:
            await bus.close()
            server.kill()
    write_data(args.json, {"handler_ms_p50": medians_ms})


if __name__ == "__main__":
    asyncio.run(main())
