"""Run one service process: connect, restore, subscribe, serve REST, drain on SIGTERM."""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from glowplug import __version__
from glowplug.bus.nats_bus import NatsBus
from glowplug.domain.address import http_url, reachable
from glowplug.domain.errors import BadRequest
from glowplug.events.facts import ServiceStarted
from glowplug.runtime import log_rest
from glowplug.runtime.clock import CLOCK
from glowplug.runtime.errors import WrongSetting
from glowplug.runtime.identity import ServiceIdTaken
from glowplug.runtime.privileges import inbox_of, makes_streams
from glowplug.runtime.rest import Guarded, admin
from glowplug.runtime.rest_server import RestServer
from glowplug.runtime.settings import ServiceSettings
from glowplug.runtime.shell import Shell
from glowplug.runtime.tasks import StopSignal, end, essential
from glowplug.state.port import StoreUnavailable
from glowplug.state.redis_store import RedisStore
from glowplug.telemetry import logs
from glowplug.telemetry.metrics import ShellMetrics

log = logging.getLogger(__name__)
FAILED = 70  # exit code after an essential part failed (EX_SOFTWARE)
EXIT_WITHIN_S = 10.0  # then a hanging process prints its stacks and ends
ASKS_FIRST = ("router", "autoscaler", "placer")  # cold starts need their commands and request.waiting


class PortTaken(RuntimeError):
    """The port is in use."""


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Bind a listening socket. Raises PortTaken naming host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.listen(2048)
    sock.setblocking(False)
    return sock


@dataclass
class World:
    settings: ServiceSettings
    service: str
    bus: NatsBus
    store: RedisStore
    metrics: ShellMetrics

    @classmethod
    def open(cls, service: str, settings: ServiceSettings) -> "World":
        service_id = settings.service_id or f"{service}-1"
        settings.service_id = service_id
        logs.configure(service_id, level=settings.log_level, json=settings.log_json)
        metrics = ShellMetrics(service)
        metrics.introduce(service_id)
        return cls(
            settings=settings,
            service=service,
            bus=NatsBus(
                settings.nats_url,
                service_id,
                replicas=settings.nats_replicas,
                inbox=inbox_of(settings.nats_url),
                makes_streams=makes_streams(settings.nats_url),
                asks_first=service in ASKS_FIRST,
            ),
            store=RedisStore(settings.redis_url),
            metrics=metrics,
        )

    async def epoch(self) -> int:
        """Return this process's fencing epoch; waits for the store."""
        while True:
            try:
                return await self.store.next_epoch(self.service)
            except StoreUnavailable as error:
                log.warning("waiting for the store: %s", error)
                await asyncio.sleep(0.2)

    async def close(self, *tasks: "asyncio.Task[Any] | None") -> None:
        await end(tasks)
        await self.bus.close()
        await self.store.close()


async def announce(shell: Shell, url: str, data_url: str = "") -> None:
    """Best effort."""
    payload = ServiceStarted(
        service=shell.service,
        service_id=shell.service_id,
        url=url,
        version=__version__,
        service_epoch=shell.epoch,
        data_url=data_url,
    )
    with contextlib.suppress(Exception):
        await shell.bus.publish(shell.event(payload))


async def serve_rest(app: FastAPI, settings: ServiceSettings) -> tuple[asyncio.Task[None], str]:
    """Serve `app` and this process's log in this loop. Return the task and the advertised base URL."""
    app.include_router(log_rest.routes(logs.RING, admin(settings.admin_token)))
    sock = listen(settings.host, settings.port)
    port = sock.getsockname()[1]
    guarded = Guarded(app, settings.web_rules())
    task = asyncio.create_task(_run_server(RestServer.of(guarded), sock))
    return task, http_url(settings.advertise_host or reachable(settings.host), port)


async def _run_server(server: RestServer, sock: socket.socket) -> None:
    """Serve until cancelled, then finish open answers within the graceful time."""
    try:
        await server._serve([sock])
    except asyncio.CancelledError:
        if server.started:
            await server.shutdown(sockets=[sock])


def run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main(stopping)` on uvloop; SIGTERM and SIGINT set `stopping`.

    A taken port or wrong setting ends with one clear line, a failed essential part with the code FAILED. Remains of
    `main` have EXIT_WITHIN_S to end; then all threads' stacks are printed and the process exits with 1.
    """
    try:
        import uvloop

        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        loop_factory = None

    async def body() -> None:
        stopping = StopSignal()
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, stopping.set)
        keeping = asyncio.create_task(CLOCK.keep(), name="the clock")
        essential(keeping, stopping)
        await main(stopping)
        # All work is over: no leftover library task or thread may hold the process.
        faulthandler.dump_traceback_later(EXIT_WITHIN_S, exit=True)
        await end(asyncio.all_tasks() - {asyncio.current_task()})
        if isinstance(stopping.failure, PortTaken | ServiceIdTaken):
            raise stopping.failure  # a wrong setting
        if stopping.failure is not None:  # already logged
            raise SystemExit(FAILED)

    runner = asyncio.Runner(loop_factory=loop_factory)
    try:
        runner.run(body())
    except (PortTaken, ServiceIdTaken, WrongSetting) as error:
        raise SystemExit(f"glowplug: {error}") from error
    except BadRequest as error:  # only its reader can judge it, e.g. a policy's name
        name = f"GLOWPLUG_{error.param.upper()}: " if error.param else ""
        raise SystemExit(f"glowplug: {name}{error.message}") from error
    finally:
        runner.close()
        faulthandler.cancel_dump_traceback_later()
