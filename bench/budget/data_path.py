"""Send one warm request and one chunk of a stream through the router's own classes, over transports that only count
bytes, so that the router's Python is measured without the kernel."""

import asyncio
import json
import os
import tempfile
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from glowplug.controllers.router.controller import RouterController
from glowplug.domain.access import NO_LIMITS, AccessLimits, ApiKey, Tenant, digest_of, key_id_of
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.services.router.client import ClientConnection
from glowplug.services.router.conversation import TextReader, open_lengths
from glowplug.services.router.engine import EngineConnection, Pool
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.port import DataPort
from glowplug.services.router.reports import Reports
from glowplug.services.router.request_table import RequestTable
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.usage import UsageLog
from glowplug.services.router.usage_journal import Journal
from glowplug.services.router.usage_spool import Spool

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
QUESTION = "Why is the sky blue, and is it as blue on a planet with twice as much air? Answer in three sentences."


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def request_bytes(*, stream: bool = True, key: str = "") -> bytes:
    body = json.dumps({"model": "m", "stream": stream, "messages": [{"role": "user", "content": QUESTION}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:8000\r\ncontent-type: application/json\r\n"
    if key:
        head += b"authorization: Bearer %b\r\n" % key.encode()
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


FIRST, LAST = chunk(EVENT), chunk(DONE) + b"0\r\n\r\n"


class Nowhere:
    """A stand-in for a socket."""

    def __init__(self) -> None:
        self._descriptor = os.open(os.devnull, os.O_WRONLY)

    def fileno(self) -> int:
        return self._descriptor


class Kept(asyncio.Transport):
    """A transport that drops its bytes. As at uvloop's, calls that ask for its state are none of Python functions."""

    get_write_buffer_size = int
    is_closing = bool

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return Nowhere() if name == "socket" else default

    def write(self, data: Any) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


@dataclass
class DataPath:
    """A router with one client's connection and one to the engine of its only instance."""

    client: ClientConnection
    engine: EngineConnection
    table: RequestTable[Exchange]
    sent: list[Any]
    port: DataPort

    @classmethod
    def made(cls, length_model: str = "") -> "DataPath":
        """Assemble it as services/router/main.py does, with the default settings. Needs a running loop."""
        settings = RouterSettings()
        controller = RouterController(settings.controller_params())
        clock = count(1000.0, 0.001)  # a machine that is busy decides nothing else
        table = RequestTable[Exchange](controller, clock=lambda: next(clock))
        limits = replace(settings.limits, engine_idle_s=86400.0)
        table.restore("models", {"m": a_model()})
        table.restore("instances", {"i-1": an_instance()})
        metrics = RouterMetrics(CollectorRegistry(), controller=controller)
        sent: list[Any] = []
        spool = Spool(Path(tempfile.mkdtemp()), settings.usage_spool_bytes)
        journal = Journal(spool.folder, 100)
        put = lambda *given: sent.append(given)  # noqa: E731
        reports = Reports("router-1", table, metrics, put, 10, UsageLog(spool, metrics, journal))
        lengths = open_lengths(length_model)
        texts = TextReader(lengths, table) if lengths is not None else None
        port = DataPort(
            table,
            metrics,
            reports.finished,
            reports.refusals.take,
            limits,
            rules=settings.web_rules(),
            texts=texts,
            journal=journal,
        )
        pool = port.engines.pools["i-1"] = Pool(table.controller.fleet.instances["i-1"], port.limits)
        return cls(*connected(port, pool), table, sent, port)

    def beside(self) -> "DataPath":
        """Open another client's connection to the same router, and another one to the engine."""
        client, engine = connected(self.port, self.port.engines.pools["i-1"])
        return replace(self, client=client, engine=engine)

    def with_keys(self, num_keys: int, limits: AccessLimits = NO_LIMITS) -> list[str]:
        """Give the router this many named keys of ten tenants, which may use models by pattern; returns them. `limits`:
        of each key and tenant."""
        presented = [f"gp-k{number:07d}-{'s' * 43}" for number in range(num_keys)]
        keys = [
            ApiKey(
                key_id=key_id_of(key),
                tenant=f"t{number % 10}",
                name="k",
                sha256=digest_of(key),
                models=("m*", "org/*"),
                limits=limits,
            )
            for number, key in enumerate(presented)
        ]
        self.table.restore("tenants", {f"t{n}": Tenant(name=f"t{n}", limits=limits) for n in range(10)})
        self.table.restore("keys", {key.key_id: key for key in keys})
        return presented

    def ask(self, request: bytes) -> None:
        self.client.data_received(request)

    def begin(self) -> None:
        """Send the head of the answer, and its first event."""
        self.engine.data_received(HEAD)
        self.engine.data_received(FIRST)

    def more(self, event: bytes) -> None:
        self.engine.data_received(event)

    def end(self) -> None:
        self.engine.data_received(LAST)
        assert self.client.exchange is None
        self.sent.clear()

    def whole(self, request: bytes) -> None:
        """Send one request and answer it with a stream of one event."""
        self.ask(request)
        self.begin()
        self.end()


def connected(port: DataPort, pool: Pool) -> tuple[ClientConnection, EngineConnection]:
    """A client's connection, and an idle one from the pool to the engine."""
    engine = EngineConnection(pool)
    engine.connection_made(Kept())
    pool.put(engine)
    client = ClientConnection(port.context, port.intake.take, port.connections)
    client.connection_made(Kept())
    return client, engine


def a_model() -> Model:
    weights = WeightsRef(uri="file:///none")
    return Model(name="m", key="m", engine="fake", weights=weights, weights_bytes=1, kv_bytes=1, max_concurrency=64)


def an_instance() -> Instance:
    worker = Worker(worker_id="w", node_id="node-1", gpu_id="node-1/0", num_bytes=2, gpu_bytes=7)
    return Instance(
        instance_id="i-1",
        model_key="m",
        engine="fake",
        state=InstanceState.READY,
        workers=(worker,),
        url="http://127.0.0.1:1",
        max_concurrency=64,
        kv_tokens=100_000,
        revision=1,
    )


__all__ = ["DataPath", "request_bytes"]
