"""Run a control service: REST first, then bus, store and epoch, then its controller's shell, until stopped.

Where processes elect a leader, each is complete, but only the leader's effects count (runtime/leader.py).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from glowplug.bus.port import Bus
from glowplug.controllers.port import Controller, Elected
from glowplug.controllers.reads import Reads
from glowplug.domain.errors import NoCapacity, NotLeader, TooLarge
from glowplug.runtime.identity import Identity
from glowplug.runtime.leader import Candidate, ElectedShell
from glowplug.runtime.rest import refused
from glowplug.runtime.service import World, announce, serve_rest
from glowplug.runtime.settings import ElectedSettings
from glowplug.runtime.shell import Executor, Shell
from glowplug.runtime.tasks import end, essential
from glowplug.runtime.web import MAX_BODY_BYTES
from glowplug.state.port import Store
from glowplug.telemetry.metrics import ShellMetrics

if TYPE_CHECKING:
    import httpx


# A Kubernetes Service spreads calls over leader and standbys, so a standby passes its API (`/v1/...`) on: a redirect
# would name an address unreachable for outside clients. Without a leader, it answers reads from its own knowledge and
# refuses changes (503 not_leader).

log = logging.getLogger(__name__)
API: Final = "/v1/"
PASSED_ON: Final = "x-glowplug-passed-on"  # by whom, and only once
TIMEOUT_S: Final = 10.0
READS: Final = ("GET", "HEAD")
# Per connection and rewritten by each sender, or about the page, which was judged here.
_HOP: Final = frozenset(
    {"connection", "content-length", "date", "host", "keep-alive", "server", "te", "trailer", "transfer-encoding"}
    | {"origin", "sec-fetch-site", "x-forwarded-host"}
)


class ToLeader:
    """HTTP middleware of a service. `candidate()` is None without an election, or not yet."""

    def __init__(self, candidate: Callable[[], Candidate | None]) -> None:
        self._candidate = candidate
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        candidate = self._candidate()
        if candidate is None or candidate.may_act() or not request.url.path.startswith(API):
            return await call_next(request)
        lease = candidate.lease
        elsewhere = lease.url if candidate.leader_id != candidate.service_id else ""
        if elsewhere and PASSED_ON not in request.headers:
            answer = await self._pass_on(request, elsewhere, candidate.service_id)
            if answer is not None:
                return answer
        if request.method in READS:
            return await call_next(request)
        who = f"{candidate.leader_id} at {elsewhere} does, and does not answer" if elsewhere else "no process does"
        return refused(NotLeader(f"this {candidate.service} does not lead now: {who}", retry_after_s=1))

    async def _pass_on(self, request: Request, url: str, by: str) -> Response | None:
        import httpx  # a tenth of a start, needed only by standbys

        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return refused(TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes"))
        headers = [(k, v) for k, v in request.headers.items() if k not in _HOP]
        self._client = self._client or httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        try:
            answer = await self._client.request(
                request.method,
                httpx.URL(url).copy_with(raw_path=_target(request)),
                content=body,
                headers=[*headers, (PASSED_ON, by)],
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            log.warning("the leader at %s does not answer: %r", url, error)
            return None
        back = {k: v for k, v in answer.headers.items() if k not in _HOP and k != "content-encoding"}
        return Response(answer.content, answer.status_code, back)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


def _target(request: Request) -> bytes:
    """Still escaped."""
    path: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope.get("query_string", b"")
    return path + (b"?" + query if query else b"")


C = TypeVar("C")
Background = Callable[[Shell], Any]


class ControlService:
    """Holds the shell once it exists; until then REST answers 503. `candidate` runs for leader, if one is elected.
    Subscribes to the events in `reads`; `executors` perform the controller's own effects; `target` receives its
    commands."""

    def __init__(
        self,
        world: World,
        reads: Reads,
        executors: Mapping[type[Any], Executor] | None = None,
        target: str = "any",
    ) -> None:
        self.world, self.reads, self._executors = world, reads, executors or {}
        self._commands = reads.command_filters(target)
        reads.check_executors(self._executors)
        self.shell: Shell | None = None
        self.candidate: Candidate | None = None
        self.identity: Identity | None = None
        self._watching: asyncio.Task[None] | None = None

    def not_ready(self) -> str:
        """Why this service cannot work, or ""."""
        if self.shell is None or not self.shell.restored:
            return "connecting to the bus and the store"
        if not self.world.bus.connected:
            return "the bus does not answer"
        return self.world.bus.refusal or self.world.store.refusal

    def controller(self, kind: type[C]) -> C:
        """Raises NoCapacity (503) while connecting."""
        controller = self._connected().controller
        assert isinstance(controller, kind)
        return controller

    async def ask(self, stimulus: Any) -> None:
        """Raises the controller's errors, or NoCapacity (503) while connecting."""
        await self._connected().ask(stimulus)

    def _connected(self) -> Shell:
        if self.shell is None:
            raise NoCapacity(f"the {self.world.service} is still connecting", retry_after_s=1)
        return self.shell

    def about(self) -> dict[str, Any]:
        """Role and leader, for `/health`. A new leader counts as standby until it has read its predecessor's writes."""
        if self.candidate is None:
            return {"role": "single"}
        lease = self.candidate.lease
        role = "leader" if isinstance(self.shell, ElectedShell) and self.shell.may_act() else "standby"
        return {"role": role, "leader": self.candidate.leader_id, "leader_url": lease.url, "epoch": lease.epoch}

    async def run(
        self,
        stopping: asyncio.Event,
        app: FastAPI,
        make_controller: Callable[[int], Any],
        background: Background | None = None,
    ) -> None:
        """Serve until `stopping`. `background(shell)` runs beside it (while leading, if elected) and ends the service
        by an error. Elections need Elected controllers."""
        world, settings = self.world, self.world.settings
        app.state.about = self.about
        forward = ToLeader(lambda: self.candidate)
        app.middleware("http")(forward)
        server, url = await serve_rest(app, settings)
        essential(server, stopping)
        lease_s = settings.leader_lease_s if isinstance(settings, ElectedSettings) else 0.0
        if lease_s:
            connect = self._stand(make_controller, background, url, lease_s, stopping)
        else:
            connect = self._connect(make_controller, background, url)
        connecting = asyncio.create_task(connect)
        stop_asked = asyncio.create_task(stopping.wait())
        await asyncio.wait([connecting, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        beside: asyncio.Task[Any] | None = None
        if connecting.done():
            beside = asyncio.create_task(connecting.result(), name=f"{world.service} background")
            essential(beside, stopping)
            log.info("ready at %s", url)
            await stopping.wait()
            await end([beside])
            if self.candidate is not None:
                await self.candidate.resign()
            assert self.shell is not None
            await self.shell.stop()
        await end([self._watching])
        if self.identity is not None:
            await self.identity.release()
        await forward.close()
        await world.close(connecting, beside, server, stop_asked)

    async def _connect(
        self, make_controller: Callable[[int], Controller], background: Background | None, url: str
    ) -> Coroutine[Any, Any, None]:
        """Without an election: act at once. Return the background."""
        world, name = self.world, self.world.settings.service_id
        await world.bus.connect()
        epoch = await world.epoch()
        await self._claim(url)  # before any decision
        controller = make_controller(epoch)
        shell = Shell(*self._around(controller), epoch=epoch, **self._options())
        await shell.start()
        await self._listen(shell)
        if self._commands:
            # A service of one process has a known reader name (runtime/privileges.py), closed to other users.
            reader = world.service if isinstance(world.settings, ElectedSettings) else name
            await world.bus.subscribe(self._commands, shell.on_event, durable=f"{reader}-commands")
        self.shell = shell
        await announce(shell, url)
        return _beside(shell, background)

    async def _stand(
        self,
        make_controller: Callable[[int], Elected],
        background: Background | None,
        url: str,
        lease_s: float,
        stopping: asyncio.Event,
    ) -> Coroutine[Any, Any, None]:
        """With an election: follow, and run for leader."""
        world, name = self.world, self.world.settings.service_id
        await world.bus.connect()
        durable = f"{world.service}-commands"  # shared: the next leader reads on

        async def term(epoch: int) -> None:
            try:
                await shell.lead(epoch, url)
                if self._commands:
                    await world.bus.subscribe(self._commands, shell.on_event, durable=durable)
                await announce(shell, url)
                await _beside(shell, background)
            finally:
                shell.follow()
                await world.bus.release(durable)

        candidate = Candidate(world.service, name, url, lease_s, world.store, world.metrics, term, stopping)
        shell = ElectedShell(*self._around(make_controller), may_act=candidate.may_act, **self._options())
        await shell.start()
        await self._claim(url)  # the store has answered; a standby decides nothing
        await self._listen(shell)
        self.shell, self.candidate = shell, candidate
        await announce(shell, url)
        return candidate.run()

    def _around(self, controller: C) -> tuple[str, str, C, Bus, Store, ShellMetrics]:
        world = self.world
        name = world.settings.service_id
        return world.service, name, controller, world.bus, world.store, world.metrics

    def _options(self) -> dict[str, Any]:
        settings = self.world.settings
        periods = {"tick_s": settings.tick_s, "resync_s": settings.resync_s}
        return {"reads": self.reads, "executors": self._executors, **periods}

    async def _claim(self, url: str) -> None:
        """Take the service id and keep it. Raises ServiceIdTaken."""
        self.identity = Identity(self.world.store, self.world.settings.service_id, url)
        await self.identity.claim()
        self._watching = asyncio.create_task(self.identity.watch(), name="the service id")

    async def _listen(self, shell: Shell) -> None:
        """Subscribe to telemetry and facts, also as a standby."""
        bus = self.world.bus
        if telemetry := self.reads.telemetry_filters():
            await bus.subscribe(telemetry, shell.on_event)
        if facts := self.reads.fact_filters():
            await bus.subscribe(facts, shell.on_event, durable=f"{shell.service_id}-facts")


async def _beside(shell: Shell, background: Background | None) -> None:
    if background is not None:
        await background(shell)
    await asyncio.Event().wait()
