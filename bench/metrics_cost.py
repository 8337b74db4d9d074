"""What metrics cost a router: CPU per request, one scrape, and the longest pause of the loop meanwhile."""

import argparse
import asyncio
import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from glowplug.controllers.router.controller import RouterController
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.events.facts import RequestFinished
from glowplug.telemetry.tally import exposition
from services.router.metrics import RouterMetrics


@dataclass(frozen=True)
class Ended:
    """An ended stream of 100 tokens."""

    model: Model
    fact: RequestFinished

    def count(self, metrics: RouterMetrics) -> None:
        metrics.finished(self.model, self.fact, begun=True, queue_s=0.0, router_s=0.001, num_events=100)


def ended_stream(key: str) -> Ended:
    weights = WeightsRef(uri="file:/w")
    slo = Slo(ttft_s=1.0, tpot_s=0.1)
    model = Model(name=key, key=key, engine="emulated", weights=weights, weights_bytes=1, kv_bytes=0, slo=slo)
    fact = RequestFinished(
        model_key=key,
        request_id="r",
        router_id="router-1",
        instance_id="i",
        status=200,
        arrived_at=0.0,
        finished_at=2.2,
        queue_s=0.0,
        ttft_s=0.2,
        e2e_s=2.2,
        prompt_tokens=10,
        response_tokens=100,
        tokens_exact=True,
        cold=False,
        stream=True,
    )
    return Ended(model, fact)


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
        metrics = RouterMetrics(registry, controller=RouterController())
        ended = [ended_stream(f"model-{i}") for i in range(num)]
        for one in ended:
            one.count(metrics)
        started = time.process_time()
        for i in range(args.requests):
            ended[i % num].count(metrics)
        each_us = (time.process_time() - started) / args.requests * 1e6
        num_bytes, took_s, pause_s = asyncio.run(scrape(registry))
        print(f"{num:>7} {each_us:>11.1f} {num_bytes / 1e3:>10.0f} {took_s * 1e3:>10.1f} {pause_s * 1e3:>17.1f}")


if __name__ == "__main__":
    main()
