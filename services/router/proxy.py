"""The data port: OpenAI's HTTP API in front of the fleet's engines.

An asyncio.Protocol on both sides with httptools, no task and no lock per request, no parsing per chunk, and neither
the bus nor the store on the way. Each file has one side: proxy_client (requests in), proxy_exchange (one request's
life), proxy_engine (engines and their pools), proxy_local (answers of our own).
"""

import asyncio
import hmac
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable

from glowplug.domain.errors import BadRequest, GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from glowplug.engines.drivers import api_of
from glowplug.runtime.web import WebRules
from glowplug.telemetry.tracing import Tracing
from services.router import api_errors, ids, proxy_local
from services.router.desk import Desk
from services.router.http_text import JSON_HEADERS
from services.router.limits import Limits
from services.router.metrics import RouterMetrics
from services.router.proxy_client import ClientConnection
from services.router.proxy_engine import Pool
from services.router.proxy_exchange import Exchange
from services.router.request_body import READERS, check_model, read_body, readers, sizes
from services.router.request_head import Parsed, Refused
from services.router.spans import RequestTrace
from services.router.web_access import WebAccess

log = logging.getLogger(__name__)
DRAIN_POLL_S = 0.05
SLEPT_S = 1.0  # a sweep later than this means that the process was stopped, or did not get a processor


class DataPort:
    """One listening data port: its connections, its pools, its sweeps."""

    def __init__(
        self,
        desk: Desk,
        metrics: RouterMetrics,
        limits: Limits | None = None,
        *,
        api_key: str = "",
        rules: WebRules | None = None,
        tracing: Tracing | None = None,
        sampler: ids.Sampler | None = None,
        on_finished: Callable[[Exchange], None] = lambda exchange: None,
        passed_fields: Iterable[str] = (),
        engine_secret: str = "",
    ) -> None:
        self.desk, self.metrics, self.limits = desk, metrics, limits or Limits()
        self.loop = asyncio.get_running_loop()
        self.leaving = self.draining = self.refusing = False  # told to stop; no idle connections; 503 to what comes
        self.tracks_tokens = desk.controller.tracks_tokens  # else nobody counts them
        self.buffered_bytes = 0
        self.connections: set[ClientConnection] = set()
        self._expected = api_key.encode()
        self.web = WebAccess(rules)
        self._engine_secret = engine_secret
        self._readers = readers(passed_fields)
        self._apis: dict[str, tuple[Model, EngineApi]] = {}  # by model_key: what its engine answers, as its driver says
        self._tracing, self._sampler = tracing, sampler or ids.Sampler()
        self._on_finished = on_finished
        self._tickets = itertools.count(1)
        self._pools: dict[str, Pool] = {}
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._sweep_due = math.inf

    # -- life ---------------------------------------------------------------------------------------------------

    async def serve(self, sock: socket.socket) -> None:
        """Accept on a listening socket until `drain`."""
        server = await self.loop.create_server(lambda: ClientConnection(self), sock=sock, backlog=2048)
        self._servers.append(server)
        if self._sweeper is None:
            self._sweeper = self.loop.create_task(self._sweep_for_ever())

    async def leave(self, delay_s: float) -> None:
        """Say that we stop, to whoever asks whether we are ready and in every answer (connection: close), and serve as
        before for `delay_s`: balancers notice, clients come back to another router."""
        self.leaving = self.desk.leaving = True
        await asyncio.sleep(delay_s)

    async def drain(self, within_s: float, *, keep_listening: bool = True) -> None:
        """Finish what is here, then close everything. Requests still here after `within_s` are told so. What comes is
        refused (503); where others take what comes, on this port or behind a balancer, do not keep listening: then
        whatever is on its way on a connection of ours is served too."""
        self.leaving = self.draining = self.desk.leaving = True
        self.refusing = keep_listening
        if not keep_listening:
            self._stop_listening()
        for connection in [c for c in self.connections if c.is_idle]:
            connection.close()
        deadline = self.loop.time() + within_s
        while (self.desk.exchanges or self._is_receiving()) and self.loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        for exchange in list(self.desk.exchanges.values()):
            exchange.stop(503, "This router is stopping.", "router_stopping")
        await self.close()

    def _is_receiving(self) -> bool:
        return not self.refusing and any(not connection.is_idle for connection in self.connections)

    async def close(self) -> None:
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.connections):
            connection.close()
        for pool in self._pools.values():
            pool.close()
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
                self._sweep(time.monotonic())
            except Exception:  # without sweeps no slow client and no silent engine would ever be given up
                log.exception("a sweep of the data port failed")

    def _sweep(self, now: float) -> None:
        slept_s = now - self._sweep_due
        if slept_s > SLEPT_S:  # what came meanwhile has not been read yet: nobody is late for that
            self._postpone(slept_s)
        for connection in list(self.connections):
            connection.sweep(now)
        for exchange in list(self.desk.exchanges.values()):
            engine = exchange.engine
            if engine is not None and not engine.paused and now - engine.heard_at > self.limits.engine_silence_s:
                engine.give_up(f"the engine was silent for {self.limits.engine_silence_s:g} s")
        known = self.desk.controller.fleet.instances
        for instance_id, pool in list(self._pools.items()):
            pool.sweep(now)
            if instance_id not in known:
                pool.close()
                del self._pools[instance_id]
        models = self.desk.controller.fleet.models
        for key in [key for key in self._apis if key not in models]:
            del self._apis[key]
        self.metrics.connections.set(len(self.connections))

    def _postpone(self, by_s: float) -> None:
        for connection in self.connections:
            connection.postpone(by_s)
        for exchange in self.desk.exchanges.values():
            if exchange.engine is not None:
                exchange.engine.heard_at += by_s

    # -- connections --------------------------------------------------------------------------------------------

    def opened(self, connection: ClientConnection) -> None:
        self.connections.add(connection)
        if len(self.connections) > self.limits.num_connections:
            connection.refuse(Refused(503, "Too many connections.", "overloaded", retry_after_s=1.0))

    def closed(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)

    def pool(self, instance: Instance) -> Pool:
        """The pool of an instance; a new one when its address or its key has changed."""
        pool = self._pools.get(instance.instance_id)
        if pool is None or (pool.url, pool.key_id) != (instance.url, instance.key_id):
            if pool is not None:
                pool.close()
            pool = self._pools[instance.instance_id] = Pool(instance, self.limits, self._engine_secret)
        return pool

    # -- requests -----------------------------------------------------------------------------------------------

    def name(self, parsed: Parsed) -> None:
        """Give a request its ticket and its id."""
        parsed.ticket = next(self._tickets)
        parsed.request_id = ids.request_id(parsed.headers.get(b"x-request-id"), parsed.ticket)

    def take(self, client: ClientConnection, parsed: Parsed) -> bool:
        """One complete request, none other being answered on its connection. True when an exchange now has it, and
        its body counts as buffered until that is over."""
        if (refusal := self.web.refusal(parsed)) is not None:
            self._refuse_with(client, parsed, refusal)
            return False
        if parsed.path not in READERS or parsed.method != b"POST":
            self._local(client, parsed)
            return False
        if self._expected and not self._may(parsed):
            self._unauthorized(client, parsed)
            return False
        if self.refusing:
            message = "This router is stopping."
            self._refuse(client, parsed, 503, message, "router_stopping", "service_unavailable", retry_after_s=1.0)
            return False
        try:
            asked = read_body(parsed.path, parsed.body, self._readers)
        except BadRequest as error:
            self._refuse_with(client, parsed, error)
            return False
        model = self.desk.lookup(asked.model)
        if model is None:
            message = f"The model `{asked.model[:200]}` does not exist."
            self._refuse(client, parsed, 404, message, "model_not_found", param="model")
            return False
        try:
            needs = check_model(asked, model, self._api(model), parsed.path)
        except GlowplugError as error:
            self._refuse_with(client, parsed, error)
            return False
        exchange = Exchange(self, client, parsed, model, bool(asked.stream))
        exchange.needs = needs
        exchange.prompt_tokens, exchange.max_tokens = sizes(asked)
        self._trace(exchange, parsed)
        client.exchange = exchange
        self.desk.arrive(exchange)
        return True

    def _trace(self, exchange: Exchange, parsed: Parsed) -> None:
        """Join the client's trace or begin one; unsampled requests only carry a context on."""
        parent = ids.parent_context(parsed.headers.get(b"traceparent"))
        sampled = parent[1] if parent is not None else self._sampler.root(exchange.arrived)
        if sampled and self._tracing is not None:
            exchange.trace = RequestTrace(self._tracing, parent[0] if parent is not None else "", exchange)
            exchange.traceparent = exchange.trace.traceparent
        else:
            exchange.traceparent = parent[0] if parent is not None else ids.new_context()

    def _api(self, model: Model) -> EngineApi:
        known = self._apis.get(model.key)
        if known is None or known[0] is not model:
            known = self._apis[model.key] = model, api_of(model)
        return known[1]

    def _may(self, parsed: Parsed) -> bool:
        """Clients of OpenAI's API send the key as a bearer token, those of Anthropic's in a header of its own."""
        scheme, _, given = parsed.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = parsed.headers.get(b"x-api-key", b"")
        return hmac.compare_digest(given, self._expected)

    def _unauthorized(self, client: ClientConnection, parsed: Parsed) -> None:
        message = "The API key is missing or wrong (`Authorization: Bearer ...`, or `x-api-key`)."
        self._refuse(client, parsed, 401, message, "invalid_api_key", "authentication_error")

    def _local(self, client: ClientConnection, parsed: Parsed) -> None:
        """Everything that is not a POST to an engine."""
        path = parsed.path
        if headers := self.web.preflight(parsed):
            client.respond(parsed, 200, b"", headers=headers)
        elif path in READERS:
            self._not_allowed(client, parsed, b"POST")
        elif not proxy_local.is_local(path):
            message = f"There is nothing at {path[:200].decode('ascii', 'replace')}."
            self._refuse(client, parsed, 404, message, "not_found")
        elif parsed.method not in (b"GET", b"HEAD"):
            self._not_allowed(client, parsed, b"GET, HEAD")
        elif self._expected and path.startswith(b"/v1/") and not self._may(parsed):
            self._unauthorized(client, parsed)
        else:
            status, body = proxy_local.answer(path, self.desk)
            client.respond(parsed, status, body)

    def _not_allowed(self, client: ClientConnection, parsed: Parsed, allowed: bytes) -> None:
        message = f"{parsed.method.decode('ascii', 'replace')} is not allowed here; use {allowed.decode()}."
        body = api_errors.body(parsed.path, 405, message, "invalid_request_error", "method_not_allowed")
        headers = JSON_HEADERS + b"allow: %b\r\n" % allowed
        self.metrics.refused(405)
        client.respond(parsed, 405, body, headers=headers)

    def _refuse(
        self,
        client: ClientConnection,
        parsed: Parsed,
        status: int,
        message: str,
        code: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        self.metrics.refused(status)
        body = api_errors.body(parsed.path, status, message, kind, code, param)
        headers = JSON_HEADERS + (api_errors.NO_RETRY if status == 501 else b"")
        client.respond(parsed, status, body, headers=headers, retry_after_s=retry_after_s)

    def _refuse_with(self, client: ClientConnection, parsed: Parsed, error: GlowplugError) -> None:
        self._refuse(client, parsed, error.status, error.message, error.code, error.type, param=error.param)

    def ended(self, exchange: Exchange, *, left: bool) -> None:
        """The books of one request: counted, told, and its place given to the next."""
        self.buffered_bytes -= len(exchange.body)
        self.metrics.finished(exchange)
        self._on_finished(exchange)
        if left:
            self.desk.left(exchange)
        else:
            self.desk.ended(exchange, exchange.ended - exchange.dispatched if exchange.status == 200 else 0.0)
