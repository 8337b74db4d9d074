"""What metrics cost a router: CPU per request, one scrape, and the longest pause of the loop meanwhile."""

import argparse
import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from glowplug.controllers.router.controller import RouterController
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.telemetry.tally import exposition
from services.router.metrics import RouterMetrics


def exchange(key: str) -> Any:
    """An ended stream of 100 tokens, as much of it as metrics look at."""
    base = Model(name="m", key="m", engine="emulated", weights=WeightsRef(uri="file:/w"), weights_bytes=1, kv_bytes=0)
    return SimpleNamespace(
        model=replace(base, key=key, slo=Slo(ttft_s=1.0, tpot_s=0.1)),
        status=200,
        arrived=0.0,
        first_byte=0.2,
        ended=2.2,
        started=True,
        cold=False,
        router_s=0.001,
        queue_s=0.0,
        num_events=100,
        token_counts=lambda: (10, 100, True),
    )


async def scrape(registry: CollectorRegistry) -> tuple[int, float, float]:
    """(bytes, seconds, longest pause of the loop meanwhile)."""
    pauses, done = [], False

    async def watch() -> None:
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(0)
            pauses.append(time.perf_counter() - before)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    started = time.perf_counter()
    body = await exposition(registry)
    took_s = time.perf_counter() - started
    done = True
    await watching
    return len(body), took_s, max(pauses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, nargs="+", default=[10, 100, 500, 1000])
    parser.add_argument("--requests", type=int, default=50_000)
    args = parser.parse_args()
    print(f"{'models':>7} {'us/request':>11} {'scrape kB':>10} {'scrape ms':>10} {'longest pause ms':>17}")
    for num in args.models:
        registry = CollectorRegistry()
        metrics = RouterMetrics(registry)
        metrics.join(ShellMetrics("router", CollectorRegistry()), RouterController())
        ended = [exchange(f"model-{i}") for i in range(num)]
        for one in ended:
            metrics.finished(one)
        started = time.process_time()
        for i in range(args.requests):
            metrics.finished(ended[i % num])
        each_us = (time.process_time() - started) / args.requests * 1e6
        num_bytes, took_s, pause_s = asyncio.run(scrape(registry))
        print(f"{num:>7} {each_us:>11.1f} {num_bytes / 1e3:>10.0f} {took_s * 1e3:>10.1f} {pause_s * 1e3:>17.1f}")


if __name__ == "__main__":
    main()
