"""Start an agent."""

import asyncio

from glowplug.memory.discovery import HardwareUnavailable
from glowplug.runtime.service import World, run, serve_rest
from glowplug.services.agent.app import make
from glowplug.services.agent.service import AgentService
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.agent.state_file import NodeTaken
from glowplug.telemetry.metrics import FailureCounter
from glowplug.telemetry.tracing import Tracing


async def serve(stopping: asyncio.Event) -> None:
    settings = AgentSettings()
    settings.service_id = settings.service_id or f"agent-{settings.node}"
    world = World.open("agent", settings)
    world.metrics.observers.append(FailureCounter().saw)
    counts = world.tracing.counts
    engine_tracing = Tracing("engine", f"{settings.node}-engines", settings.otlp_endpoint, counts=counts)
    try:
        service = AgentService(
            settings, world.bus, world.store, world.tracing, engine_tracing, world.metrics, connect=world.bus.connect
        )
    except (NodeTaken, HardwareUnavailable, ValueError, OSError) as error:
        raise SystemExit(f"glowplug: agent of {settings.node}: {error}") from error
    server, url = await serve_rest(make(service), settings)
    await service.start(url)
    await stopping.wait()
    await service.stop()
    await world.close(server)
    await asyncio.to_thread(engine_tracing.shutdown)


def main() -> None:
    run(serve)
