"""How long an event takes from publish to handler on the embedded NATS: `make bench BENCH=bus_latency`.

JetStream stores on file and syncs every write (`sync_interval: always`), as the local fleet runs it. One process
publishes and hears, one event at a time; so a row is publish + store + deliver + decode.
"""

import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from glowplug.bus.nats_bus import NatsBus
from glowplug.events.subjects import TELEMETRY
from tests.contract.bus_rig import Ear, commands_of, evicted, evictions_of, load, stop
from tests.servers import NatsProcess

NUM_EVENTS = 300


async def _measure(bus: NatsBus, plane: str) -> tuple[list[float], list[float]]:
    """(seconds from publish to handler, seconds of publish alone), one per event."""
    make, filters, durable = {
        "evt": (lambda: evicted("bench"), evictions_of("bench"), "bench-facts"),
        "cmd": (lambda: stop("bench"), commands_of("bench"), "bench-commands"),
        "tel": (lambda: load("bench"), TELEMETRY, ""),
    }[plane]
    ear = Ear()
    await bus.subscribe([filters], ear, durable=durable)
    heard, published = [], []
    for num in range(NUM_EVENTS):
        started = time.perf_counter()
        await bus.publish(make())
        published.append(time.perf_counter() - started)
        await ear.hear(num + 1)
        heard.append(time.perf_counter() - started)
    return heard, published


def _row(plane: str, heard: list[float], published: list[float]) -> str:
    def ms(samples: list[float], quantile: int) -> str:
        return f"{statistics.quantiles(samples, n=100)[quantile - 1] * 1000:.2f}"

    return f"{plane:5} {ms(heard, 50):>8} {ms(heard, 99):>8} {ms(published, 50):>12} {ms(published, 99):>12}"


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder:
        server = NatsProcess(Path(folder)).start()
        bus = NatsBus(server.url, "bench")
        try:
            await bus.connect()
            print(f"{NUM_EVENTS} events each, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; ms")
            print(f"{'plane':5} {'p50':>8} {'p99':>8} {'publish p50':>12} {'publish p99':>12}")
            for plane in ("tel", "evt", "cmd"):
                print(_row(plane, *await _measure(bus, plane)))
        finally:
            await bus.close()
            server.kill()


if __name__ == "__main__":
    asyncio.run(main())
