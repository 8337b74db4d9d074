"""The data port: OpenAI's HTTP API in front of the fleet's engines, composed of its parts.

An asyncio.Protocol on both sides with httptools, no task and no lock per request, no parsing per chunk, and neither
the bus nor the store on the way. Requests come in by a client's connection (client.py), are taken (intake.py) into an
exchange (exchange.py) that the controller decides on (request_table.py), and go to an engine's (engine.py). Here these
are put together, listen, are swept once a second, and drain.
"""

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable

from glowplug.runtime.web import WebRules
from glowplug.telemetry.tracing import Tracing
from services.router.client import ClientConnection
from services.router.conversation import Lengths
from services.router.engine import Engines
from services.router.exchange import Exchange
from services.router.http_request import Access
from services.router.intake import Intake
from services.router.metrics import RouterMetrics
from services.router.port_context import PortContext
from services.router.request_table import RequestTable, Stage
from services.router.settings import Limits
from services.router.tracing import Sampler

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.05
SLEPT_S = 1.0  # a sweep later than this means that the process was stopped, or did not get a processor


class DataPort:
    """One listening data port. `report` is called once for each exchange, at its end."""

    def __init__(
        self,
        table: RequestTable[Exchange],
        metrics: RouterMetrics,
        report: Callable[[Exchange], None],
        limits: Limits | None = None,
        *,
        api_key: str = "",
        rules: WebRules | None = None,
        tracing: Tracing | None = None,
        sampler: Sampler | None = None,
        passed_fields: Iterable[str] = (),
        lengths: Lengths | None = None,
        engine_secret: str = "",
    ) -> None:
        self.limits = limits or Limits()
        self.connections: set[ClientConnection] = set()
        self.engines = Engines(self.limits, engine_secret)
        self._table = table
        self.context = PortContext(self.limits, table, metrics, Access(rules, api_key), self.engines.connect, report)
        self.context.max_continuations = table.controller.params.max_continuations
        self._intake = Intake(
            self.context, tracing=tracing, sampler=sampler, passed_fields=passed_fields, lengths=lengths
        )
        self._loop = self.context.loop
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._sweep_due = math.inf

    async def serve(self, sock: socket.socket) -> None:
        """Accept on a listening socket until `drain`."""
        context, take, connections = self.context, self._intake.take, self.connections
        server = await self._loop.create_server(
            lambda: ClientConnection(context, take, connections), sock=sock, backlog=2048
        )
        self._servers.append(server)
        if self._sweeper is None:
            self._sweeper = self._loop.create_task(self._sweep_for_ever())

    async def leave(self, delay_s: float) -> None:
        """Say that we stop, to those who ask whether we are ready and in every answer (connection: close), and serve as
        before for `delay_s`: balancers notice, clients come back to another router."""
        self._table.stage = Stage.LEAVING
        await asyncio.sleep(delay_s)

    async def drain(self, within_s: float, *, keep_listening: bool = True) -> None:
        """Finish what is here, then close everything. Requests still here after `within_s` end with 503. What comes
        is refused (503); where others take what comes, on this port or behind a balancer, do not keep listening: then
        whatever is on its way on a connection of ours is served too."""
        self._table.stage = Stage.REFUSING if keep_listening else Stage.DRAINING
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
        refusing = self._table.stage is Stage.REFUSING
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
            except Exception:  # without sweeps no slow client and no silent engine would ever be given up
                log.exception("a sweep of the data port failed")

    def sweep(self, now: float) -> None:
        """Give up what is late or silent, and forget what is no more."""
        limits, slept_s = self.limits, now - self._sweep_due
        if slept_s > SLEPT_S:  # what came meanwhile has not been read yet: no request is late for that
            self._postpone(slept_s)
        for connection in list(self.connections):
            connection.sweep(now)
        for exchange in list(self._table.exchanges.values()):
            engine = exchange.engine
            silence_s = limits.deserted_silence_s if exchange.is_deserted else limits.engine_silence_s
            if engine is not None and not engine.paused and now - engine.heard_at > silence_s:
                engine.give_up(f"the engine was silent for {silence_s:g} s")
        self.engines.sweep(now, self._table.controller.fleet.instances)
        self._intake.forget_models()
        self.context.metrics.connections.set(len(self.connections))

    def _postpone(self, by_s: float) -> None:
        for connection in self.connections:
            connection.postpone(by_s)
        for exchange in self._table.exchanges.values():
            if exchange.engine is not None:
                exchange.engine.heard_at += by_s
