"""The data port: OpenAI's HTTP API in front of the fleet's engines.

Both sides are asyncio.Protocols with httptools: no task or lock per request, no parsing per chunk, neither bus nor
store on the way. From a client's connection (client.py) the intake (intake.py) makes a request an exchange
(exchange.py), the controller decides on it (request_table.py), and it goes to an engine's connection (engine.py).
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable

from glowplug.domain.errors import GlowplugError
from glowplug.runtime.web import WebRules
from glowplug.services.router.client import ClientConnection
from glowplug.services.router.conversation import TextReader
from glowplug.services.router.ends import Connection
from glowplug.services.router.engine import Engines
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.http_request import Access, HttpRequest
from glowplug.services.router.intake import Intake
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.request_table import PortStage, RequestTable
from glowplug.services.router.settings import Limits
from glowplug.services.router.tracing import Sampler
from glowplug.services.router.usage_journal import Journal

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.05
SLEPT_S = 1.0  # a sweep this late means a suspended or starved process


class DataPort:
    """One listening data port. It calls `report` once at each exchange's end, and `report_refusal` for each request
    refused before."""

    def __init__(
        self,
        table: RequestTable[Exchange],
        metrics: RouterMetrics,
        report: Callable[[Exchange], None],
        report_refusal: Callable[[HttpRequest, GlowplugError], None],
        limits: Limits | None = None,
        *,
        api_key: str = "",
        rules: WebRules | None = None,
        sampler: Sampler | None = None,
        strict_fields: bool = False,
        console_url: str = "",
        texts: TextReader | None = None,
        engine_secret: str = "",
        journal: Journal | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.connections: set[Connection] = set()
        self.engines = Engines(self.limits, engine_secret)
        self._table = table
        access = Access(rules, api_key, table.keys)
        self.context = PortContext(self.limits, table, metrics, access, self.engines.connect, report, report_refusal)
        self.context.journal = journal or self.context.journal
        self.context.max_continuations = table.controller.params.max_continuations
        self.intake = Intake(self.context, sampler=sampler, strict=strict_fields, console_url=console_url, texts=texts)
        self._loop = self.context.loop
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._sweep_due = math.inf

    async def serve(self, sock: socket.socket) -> None:
        context, take, connections = self.context, self.intake.take, self.connections
        server = await self._loop.create_server(
            lambda: ClientConnection(context, take, connections), sock=sock, backlog=2048
        )
        self._servers.append(server)
        if self._sweeper is None:
            self._sweeper = self._loop.create_task(self._sweep_for_ever())

    async def leave(self, delay_s: float) -> None:
        """Announce the stop (not ready, `connection: close`) and serve for `delay_s`, so that clients turn to another
        router."""
        self._table.stage = PortStage.LEAVING
        await asyncio.sleep(delay_s)

    async def drain(self, within_s: float, *, keep_listening: bool = True) -> None:
        """Finish all requests, then close; those left after `within_s` end with 503. While listening, new requests get
        503. Do not `keep_listening` where other routers take new connections: then late requests on ours are served
        too."""
        self._table.stage = PortStage.REFUSING if keep_listening else PortStage.DRAINING
        if not keep_listening:
            self._stop_listening()
        for connection in [c for c in self.connections if c.is_idle]:
            connection.close()
        deadline = self._loop.time() + within_s
        while (self._table.exchanges or self._is_receiving()) and self._loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        for exchange in list(self._table.exchanges.values()):
            exchange.stop()
        await self.close()

    def _is_receiving(self) -> bool:
        refusing = self._table.stage is PortStage.REFUSING
        return not refusing and any(not connection.is_idle for connection in self.connections)

    async def close(self) -> None:
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.close()
        self.engines.close()
        await asyncio.sleep(0)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def _sweep_for_ever(self) -> None:
        limits = self.limits
        period_s = max(min(1.0, limits.header_s / 4, limits.engine_idle_s / 4, limits.engine_silence_s / 4), 0.01)
        while True:
            self._sweep_due = time.monotonic() + period_s
            await asyncio.sleep(period_s)
            try:
                self.sweep(time.monotonic())
            except Exception:  # else no slow client or silent engine would time out
                log.exception("a sweep of the data port failed; the next one follows as usual")

    def sweep(self, now: float) -> None:
        """Time out slow clients and silent engines, and drop the state of gone instances and models."""
        limits, slept_s = self.limits, now - self._sweep_due
        if slept_s > SLEPT_S:  # bytes may have arrived unread: the pause makes none late
            self._postpone(slept_s)
        for connection in list(self.connections):
            connection.sweep(now)
        self._share_buffers()
        for exchange in list(self._table.exchanges.values()):
            engine, attempt = exchange.engine, exchange.attempt
            is_deserted = attempt is not None and attempt.is_deserted
            silence_s = limits.deserted_silence_s if is_deserted else limits.engine_silence_s
            if engine is not None and not engine.paused and now - engine.heard_at > silence_s:
                engine.give_up(f"the engine was silent for {silence_s:g} s")
        self.engines.sweep(now, self._table.controller.fleet.instances)
        self.intake.forget_models()
        self.context.metrics.connections.set(len(self.connections))

    def _share_buffers(self) -> None:
        """Pause engines early while clients leave too much unread, until half of it is read."""
        context, most = self.context, self.limits.write_buffers_bytes
        num_bytes = sum(connection.transport.get_write_buffer_size() for connection in self.connections)
        is_crowded = num_bytes > (most // 2 if context.is_crowded else most)
        if is_crowded != context.is_crowded:
            context.is_crowded = is_crowded
            for connection in self.connections:
                connection.bound_buffer()

    def _postpone(self, by_s: float) -> None:
        for connection in self.connections:
            connection.postpone(by_s)
        for exchange in self._table.exchanges.values():
            if exchange.engine is not None:
                exchange.engine.heard_at += by_s
