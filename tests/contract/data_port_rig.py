"""A data port and scripted engines on real sockets."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import Model
from glowplug.events.envelope import PAYLOADS
from glowplug.runtime.clock import now_s
from glowplug.runtime.service import listen
from glowplug.services.router.client import ClientConnection
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.exchange_states import Ending, faults
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.port import DataPort
from glowplug.services.router.reports import Reports
from glowplug.services.router.request_table import RequestTable
from glowplug.services.router.settings import Limits
from tests import fleet_builder
from tests.waiting import until

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Then = Literal["end", "die", "close", "hang"]
Reply = Callable[["Served"], Awaitable[None]]


def a_model(name: str = "m", **over: Any) -> Model:
    return fleet_builder.a_model(name, **({"key": name, "engine": "fake"} | over))


def an_instance(instance_id: str, url: str, state: InstanceState = InstanceState.READY, **over: Any) -> Instance:
    """It took two seconds to start, half a second of that for its weights."""
    phases = (Phase(name=PhaseName.FETCH, started_at=100.0, ended_at=100.5),)
    fields = {"url": url, "created_at": 100.0, "ready_at": 102.0, "phases": phases} | over
    return fleet_builder.an_instance(instance_id, fields.pop("model_key", "m"), state, **fields)


@dataclass
class Served:
    head: bytes
    body: bytes
    writer: asyncio.StreamWriter
    left: asyncio.Event

    def header(self, name: str) -> str | None:
        match = re.search(rb"(?im)^" + name.encode() + rb":[ ]*(.*?)\r$", self.head)
        return match[1].decode() if match else None

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, value: Any, status: str = "200 OK", extra: bytes = b"") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
        await self.send(head % (status.encode(), extra, len(body)) + body)

    async def sse_head(self) -> None:
        await self.send(SSE_HEAD)

    async def chunk(self, data: bytes) -> None:
        await self.send(chunk(data))

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def die(self) -> None:
        self.writer.transport.abort()


def sending(*steps: bytes | asyncio.Event, then: Then = "end", every_s: float = 0.01) -> Reply:
    """Send bytes at short intervals, waiting for each event; then do as `then` says."""

    async def reply(served: Served) -> None:
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await served.send(step)
                await asyncio.sleep(every_s)
        if then == "die":
            served.die()
        elif then == "close":
            served.writer.close()
        elif then == "hang":
            await served.left.wait()

    return reply


def streaming(*steps: bytes | asyncio.Event, then: Then = "end", every_s: float = 0.01) -> Reply:
    """As chunks; the last is sent only at a normal end."""
    framed = [chunk(step) if isinstance(step, bytes) else step for step in steps]
    return sending(SSE_HEAD, *framed, *[b"0\r\n\r\n"] * (then == "end"), then=then, every_s=every_s)


def answering(value: Any, status: str = "200 OK", extra: bytes = b"", *, after_s: float = 0.0) -> Reply:
    async def reply(served: Served) -> None:
        await asyncio.sleep(after_s)
        await served.json(value, status, extra)

    return reply


async def stream_three(served: Served) -> None:
    await served.sse_head()
    for data in (TOKEN, TOKEN, TOKEN, DONE):
        await served.chunk(data)
    await served.end()


async def die_at_once(served: Served) -> None:
    served.die()


async def hang(served: Served) -> None:
    await served.left.wait()


class FakeEngine:
    def __init__(self, reply: Reply = stream_three) -> None:
        self.reply = reply
        self.served: list[Served] = []
        self.num_connections = 0
        self.url = ""

    async def start(self) -> "FakeEngine":
        self.server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def stop(self) -> None:
        self.server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                served = Served(head, body, writer, asyncio.Event())
                self.served.append(served)
                watch = asyncio.create_task(_watch(reader, served))
                try:
                    await self.reply(served)
                except ConnectionError:
                    served.left.set()
                    raise
                finally:
                    watch.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watch
        writer.close()


async def _watch(reader: asyncio.StreamReader, served: Served) -> None:
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.005)
    served.left.set()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool = True  # False: it ended before its framing did

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json()["error"]["code"])


def data_events(body: bytes) -> list[bytes]:
    return [event for event in body.split(b"\n\n") if event.startswith(b"data:")]


def assert_error(answer: Answer, status: int, code: str) -> None:
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (status, code) and answer.complete
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert answer.headers["x-request-id"]


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().split("\r\n")[:-2]
        pairs = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
        assert len(pairs) == len(dict(pairs)), f"a header twice: {pairs}"
        return int(first.split()[1]), dict(pairs)

    async def answer(self, *, method: str = "POST") -> Answer:
        status, headers = await self.head()
        if method == "HEAD" or status == 100:
            return Answer(status, headers, b"")
        try:
            if "content-length" in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        except asyncio.IncompleteReadError as error:
            return Answer(status, headers, error.partial, complete=False)
        if headers.get("transfer-encoding") != "chunked":
            return Answer(status, headers, await self.reader.read())
        parts: list[bytes] = []
        try:
            while part := await self.chunk():
                parts.append(part)
        except asyncio.IncompleteReadError:
            return Answer(status, headers, b"".join(parts), complete=False)
        return Answer(status, headers, b"".join(parts))

    async def chunk(self) -> bytes:
        size = int((await self.reader.readuntil(b"\r\n"))[:-2], 16)
        data = await self.reader.readexactly(size + 2)
        return data[:-2]

    async def rest(self) -> bytes:
        body = bytearray()
        while part := await self.chunk():
            body += part
        return bytes(body)

    def half_close(self) -> None:
        self.writer.write_eof()

    async def at_end(self) -> bool:
        return await self.reader.read(1) == b""

    def close(self) -> None:
        self.writer.transport.abort()


def post(path: str, body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (path.encode(), extra, len(body)) + body


def chat(model: str = "m", *, stream: bool = False, extra: bytes = b"", body: bytes | None = None) -> bytes:
    fields = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    return post("/v1/chat/completions", json.dumps(fields).encode() if body is None else body, extra)


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\n%btransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def get(path: str, *, method: str = "GET", extra: bytes = b"") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: t\r\n".encode() + extra + b"\r\n"


GET = get("/v1/models")


@dataclass
class Rig:
    """A router without its control plane: the test passes facts by hand."""

    port: DataPort
    table: RequestTable[Exchange]
    reports: Reports
    host_port: tuple[str, int]
    published: list[Publish]
    reported: list[Any]
    finished: list[Exchange]
    engines: list[FakeEngine] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    async def client(self) -> Client:
        made = Client(*await asyncio.open_connection(*self.host_port))
        self.clients.append(made)
        return made

    async def sent(self, request: bytes) -> Client:
        client = await self.client()
        await client.send(request)
        return client

    async def held(self, request: bytes) -> Client:
        before = self.num_held
        client = await self.sent(request)
        await self.until(lambda: self.num_held == before + 1)
        return client

    async def ask(self, request: bytes, method: str = "POST") -> Answer:
        return await (await self.sent(request)).answer(method=method)

    async def engine(self, reply: Reply = stream_three, *, instance_id: str = "i-1", **over: Any) -> FakeEngine:
        engine = await FakeEngine(reply).start()
        self.engines.append(engine)
        self.tell(an_instance(instance_id, engine.url, **over))
        return engine

    def tell(self, instance: Instance, code: str = "") -> None:
        why = {"code": code or "engine_failed"} if instance.state is InstanceState.FAILED else {}
        fact = PAYLOADS[f"instance.{instance.state.value}"](instance=instance, **why)
        event = fleet_builder.an_event(fact)
        self.table.do(self.table.controller.handle(event, self.table.clock()))

    async def connection(self) -> ClientConnection:
        await self.until(lambda: len(self.port.connections) == 1)
        (connection,) = self.port.connections
        return connection

    @property
    def endings(self) -> list[Ending]:
        return [one.ending for one in self.finished if one.ending is not None]

    @property
    def exchange(self) -> Exchange:
        return next(iter(self.table.exchanges.values()))

    def tick(self) -> None:
        self.table.take(Tick())

    @contextlib.asynccontextmanager
    async def ticking(self) -> AsyncIterator[None]:
        """Advance the controller's time, as in a router."""

        async def tick_for_ever() -> None:
            while True:
                self.tick()
                await asyncio.sleep(0.05)

        ticker = asyncio.create_task(tick_for_ever())
        try:
            yield
        finally:
            ticker.cancel()

    async def until(self, condition: Callable[[], bool]) -> None:
        def is_so() -> bool:
            sound(self.table)
            return condition()

        await until(is_so, every_s=0.002)

    @property
    def num_held(self) -> int:
        return sum(load.num_waiting for load in self.table.controller.loads().values())

    @property
    def num_in_flight(self) -> int:
        return sum(load.num_in_flight for load in self.table.controller.loads().values())


def sound(table: RequestTable[Exchange]) -> None:
    found = [(ticket, *faults(one)) for ticket, one in table.exchanges.items()]
    assert not any(len(one) > 1 for one in found), found


class SoundTable(RequestTable[Exchange]):
    """Each stimulus finds and leaves all exchanges without a fault."""

    def take(self, stimulus: Any) -> None:
        sound(self)
        super().take(stimulus)
        sound(self)


@contextlib.asynccontextmanager
async def a_rig(
    limits: Limits | None = None,
    *,
    api_key: str = "",
    models: tuple[Model, ...] | None = None,
    clock: Callable[[], float] = now_s,
    **over: Any,
) -> AsyncIterator[Rig]:
    """It knows model `m` (cold until `engine`); at the end all counts must be zero."""
    controller = RouterController(RouterParams(**over.pop("params", {})))
    published: list[Publish] = []
    reported: list[Any] = []
    finished: list[Exchange] = []
    table = SoundTable(controller, published.append, clock=clock)
    table.restore("models", {m.key: m for m in (models or (a_model(),))})
    metrics = RouterMetrics(CollectorRegistry())
    reports = Reports("router-1", table, metrics, lambda payload, *_: reported.append(payload), 10)

    def report(exchange: Exchange) -> None:
        assert not [*faults(exchange)]
        finished.append(exchange)
        reports.finished(exchange)
        reported.append(reports._kept[-1][0])

    port = DataPort(table, metrics, report, reports.refusals.take, limits, api_key=api_key, **over)
    sock = listen("127.0.0.1", 0)
    await port.serve(sock)
    rig = Rig(port, table, reports, sock.getsockname(), published, reported, finished)
    try:
        yield rig
        for client in rig.clients:
            client.close()
        await rig.until(lambda: not table.exchanges)
        assert rig.num_held == 0 and rig.num_in_flight == 0, controller.loads()
        assert port.context.buffered_bytes == 0
    finally:
        await port.close()
        for engine in rig.engines:
            await engine.stop()
