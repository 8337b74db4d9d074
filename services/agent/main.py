"""Start an agent."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Query
from fastapi.responses import PlainTextResponse

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import StopAsked
from glowplug.domain.errors import NoCapacity, NotFound
from glowplug.domain.instance import Instance
from glowplug.memory.discovery import HardwareUnavailable
from glowplug.runtime import log_rest
from glowplug.runtime.clock import published
from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import World, run, serve_rest
from glowplug.services.agent.service import AgentService
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.agent.state_file import NodeTaken
from glowplug.telemetry.metrics import FailureCounter

MAX_LOG_BYTES = 1 << 20
ENGINE_LOGS = "/logs/engines"


def make(service: AgentService) -> FastAPI:
    settings = service.settings
    app = make_app(
        "agent",
        settings.service_id,
        ready=service.not_ready,
        policies=dict,
        description=f"The agent of {settings.node}: starts, drains and stops engines, and owns its GPUs' memory.",
    )
    _instances(app, service)
    _hardware(app, service.controller, service)
    app.include_router(log_rest.routes(service.outputs.ring, admin(settings.admin_token), ENGINE_LOGS))
    return app


def _known(controller: AgentController, instance_id: str) -> Instance:
    holding = controller.holdings.get(instance_id)
    if holding is None:
        raise NotFound(f"no instance {instance_id!r} on this node")
    return holding.instance


def _instances(app: FastAPI, service: AgentService) -> None:
    controller, settings = service.controller, service.settings

    @app.get("/v1/instances", tags=["instances"])
    async def instances(model: str = "", gone: bool = False) -> dict[str, Any]:
        """Instances of this node, newest first; `gone=true` shows those that ended lately too."""
        rows = [i for i in controller.instances if (gone or not i.state.is_gone) and model in ("", i.model_key)]
        rows.sort(key=lambda i: -i.created_at)
        return {"object": "list", "data": msgspec.to_builtins([published(row) for row in rows])}

    @app.get("/v1/instances/{instance_id}", tags=["instances"])
    async def instance(instance_id: str) -> Any:
        """One instance with the phases of its start."""
        return msgspec.to_builtins(published(_known(controller, instance_id)))

    @app.get(
        "/v1/instances/{instance_id}/logs",
        tags=["instances"],
        dependencies=[Depends(admin(settings.admin_token))],
        response_class=PlainTextResponse,
    )
    async def logs(instance_id: str, tail: int = Query(100, ge=1, le=10_000)) -> PlainTextResponse:
        """The last lines of the engine's log, kept until the instance is forgotten or many others have ended since."""
        _known(controller, instance_id)
        text = await asyncio.to_thread(_tail, service.engines.log_path(instance_id), tail)
        return PlainTextResponse(text)

    @app.post(
        "/v1/instances/{instance_id}/stop",
        tags=["instances"],
        dependencies=[Depends(admin(settings.admin_token))],
        status_code=202,
    )
    async def stop(instance_id: str, grace_s: float = Query(30.0, ge=0, le=3600)) -> Any:
        """Drain and stop one instance, now and here. Another may start if requests need one."""
        _known(controller, instance_id)
        if service.not_ready():
            raise NoCapacity(f"the agent is not ready: {service.not_ready()}", retry_after_s=1)
        await service.shell.ask(StopAsked(instance_id, "an operator asked the agent", grace_s))
        return msgspec.to_builtins(published(_known(controller, instance_id)))


def _hardware(app: FastAPI, controller: AgentController, service: AgentService) -> None:
    @app.get("/v1/gpus", tags=["hardware"])
    async def gpus() -> dict[str, Any]:
        """Each GPU with its grants, and the bytes of each owner."""
        rows = []
        for gpu in controller.ledger.gpus:
            own = {"bytes_by_owner": gpu.bytes_by_owner, "used_bytes": gpu.used_bytes, "free_bytes": gpu.free_bytes}
            rows.append(msgspec.to_builtins(gpu) | own)
        return {"object": "list", "data": rows, "warnings": list(service.warnings)}

    @app.get("/v1/engines", tags=["hardware"])
    async def engines() -> dict[str, Any]:
        """Engines this node knows, and why those that cannot start here cannot."""
        rows = [msgspec.to_builtins(kind) | {"available": not kind.unavailable} for kind in controller.engines.values()]
        return {"object": "list", "data": rows}


def _tail(path: Path, num_lines: int) -> str:
    """Read the last lines within MAX_LOG_BYTES; "" if there are none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MAX_LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "".join(f"{line}\n" for line in deque(text.splitlines(), maxlen=num_lines))


async def serve(stopping: asyncio.Event) -> None:
    settings = AgentSettings.read()
    settings.service_id = settings.service_id or f"agent-{settings.node}"
    world = World.open("agent", settings)
    world.metrics.observers.append(FailureCounter().saw)
    try:
        service = AgentService(settings, world.bus, world.store, world.metrics, connect=world.bus.connect)
    except (NodeTaken, HardwareUnavailable, ValueError, OSError) as error:
        raise SystemExit(f"glowplug: agent of {settings.node}: {error}") from error
    server, url = await serve_rest(make(service), settings)
    await service.start(url)
    await stopping.wait()
    await service.stop()
    await world.close(server)


def main() -> None:
    run(serve)
