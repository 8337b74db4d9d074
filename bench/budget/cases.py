"""The counted paths, each as a function that is repeated."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bench.budget.count import Count, calls_of, counted
from bench.budget.data_path import EVENT, DataPath, chunk, request_bytes
from bench.budget.placer import Fleet, event
from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.effects import Publish
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.reads import READS
from glowplug.domain.access import AccessLimits
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance
from glowplug.events.facts import RouterLoadReported
from glowplug.policies.registry import choose
from glowplug.runtime.clock import now_s
from glowplug.runtime.shell import Shell
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.world import World

SMALL = Path(__file__).parents[2] / "scenarios" / "small.yaml"
MANY = 64  # the length model has stopped learning from texts by then


@contextmanager
def _loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        runner.run(asyncio.sleep(0))
        yield runner


def warm_request() -> Count:
    """Stream a request of one event over open connections, with the default settings."""

    async def count() -> Count:
        path, request = DataPath.made(), request_bytes()
        for _ in range(MANY):
            path.whole(request)
        return counted(lambda: path.whole(request))

    with _loop() as runner:
        return runner.run(count())


def warm_request_with_a_key() -> Count:
    """Likewise with one of a hundred named keys, which may use some models."""

    async def count() -> Count:
        path = DataPath.made()
        request = request_bytes(key=path.with_keys(100)[50])
        for _ in range(MANY):
            path.whole(request)
        return counted(lambda: path.whole(request))

    with _loop() as runner:
        return runner.run(count())


def warm_request_within_limits() -> Count:
    """Likewise with limits on each tenant and key, beside requests of other tenants, so that the model is shared."""

    async def count() -> Count:
        path = DataPath.made()
        limits = AccessLimits(requests_per_minute=1 << 40, tokens_per_minute=1 << 40)
        requests = [request_bytes(key=key) for key in path.with_keys(100, limits)]
        path.ask(requests[1])  # stays open until another tenant asks
        beside = path.beside()
        beside.whole(requests[2])
        path.begin()
        path.end()
        for number in range(MANY):
            path.whole(requests[number])
        return counted(lambda: path.whole(requests[50]))

    with _loop() as runner:
        return runner.run(count())


def chunk_of_a_stream() -> Count:
    """One event of a stream that has begun."""

    async def count() -> Count:
        path = DataPath.made()
        path.ask(request_bytes())
        path.begin()
        found = counted(lambda: path.more(chunk(EVENT)))
        path.end()
        return found

    with _loop() as runner:
        return runner.run(count())


def placement() -> Count:
    """Run `placer.place` for a model on a fleet of 32 nodes with 8 GPUs, under the union's policies."""
    fleet = Fleet(num_models=60, num_nodes=32, num_gpus=8)
    numbers = iter(range(1, 1000))

    def place() -> None:
        number = next(numbers)
        command = PlaceInstance(instance_id=f"i-{number}", model=fleet.models[0], reason="count", wanted_at=0.0)
        effects = fleet.placer.handle(event(f"e{number}", command), 0.0)
        assert any(isinstance(effect, Publish) for effect in effects)

    return counted(place)


def event_through_a_shell() -> Count:
    """Send a router's load report through the predictor's shell, on a bus and a store in memory."""

    async def count() -> Count:
        controller = PredictorController(make=choose("prediction", "last_window"))
        bus: Any = MemoryBus()
        metrics = ShellMetrics("predictor", CollectorRegistry())
        shell = Shell(
            "predictor", "p-1", controller, bus, MemoryStore(), metrics, reads=READS, tick_s=3600.0, resync_s=3600.0
        )
        loads = {"m": ModelLoad(num_in_flight=1, num_arrived=1, in_flight_by_instance={"i-1": 1})}
        report = RouterLoadReported(router_id="router-1", loads=loads)
        event = Event(event_id="e", type=report.TYPE, occurred_at=now_s(), issuer="router-1", data=report)

        def once() -> None:
            coroutine = shell._handle_named(event)
            try:
                coroutine.send(None)
            except StopIteration:
                return
            raise AssertionError("the handler waits")

        return counted(once)

    with _loop() as runner:
        return runner.run(count())


def simulated_request() -> Count:
    """Simulate one request of scenarios/small.yaml: the difference of 200 and 100 simulated seconds, per request. Bytes
    are left out, since the report keeps some of each request."""

    def done(seconds: float) -> tuple[Counter[str], int]:
        scenario = load(SMALL, (f"seconds={seconds:g}",))
        world = World(scenario.setup, scenario.arrivals())
        calls = calls_of(lambda: world.run(scenario.seconds))
        return calls, world.results.total().num_finished

    done(10.0)
    calls, num = done(100.0)
    more_calls, more = done(200.0)
    more_calls.subtract(calls)
    return Count(Counter({name: round(count / (more - num)) for name, count in more_calls.items()}))


CASES = {
    "warm request": warm_request,
    "warm request with a key": warm_request_with_a_key,
    "warm request within limits": warm_request_within_limits,
    "chunk of a stream": chunk_of_a_stream,
    "placement": placement,
    "event through a shell": event_through_a_shell,
    "simulated request": simulated_request,
}
