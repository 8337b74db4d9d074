"""The bus on NATS: facts and commands through JetStream on file, telemetry on core subjects."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError

from glowplug.bus.port import BusUnavailable, Handler
from glowplug.events import Event, decode, encode
from glowplug.events import subjects as names
from glowplug.events.envelope import MalformedEvent

log = logging.getLogger(__name__)

MAX_DELIVER = 5
ACK_WAIT_S = 10.0
FETCH_BATCH = 64
FETCH_WAIT_S = 30.0
PUBLISH_TIMEOUT_S = 3.0
RETRY_S = 0.5
COMMANDS_MAX_AGE_S = 60.0
FACTS_MAX_AGE_S = 24 * 3600.0
FACTS_MAX_BYTES = 256 * 1024 * 1024
COMMANDS_MAX_BYTES = 64 * 1024 * 1024
CONSUMER_INACTIVE_S = 3600.0


def stream_configs(replicas: int) -> tuple[StreamConfig, StreamConfig]:
    """The two streams. Old facts are discarded; commands expire, since a late command is a wrong one."""
    facts = StreamConfig(
        name=names.FACTS_STREAM,
        subjects=[names.FACTS],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=FACTS_MAX_AGE_S,
        max_bytes=FACTS_MAX_BYTES,
        duplicate_window=120.0,
        num_replicas=replicas,
    )
    commands = StreamConfig(
        name=names.COMMANDS_STREAM,
        subjects=[names.COMMANDS_ALL],
        storage=StorageType.FILE,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_age=COMMANDS_MAX_AGE_S,
        max_bytes=COMMANDS_MAX_BYTES,
        duplicate_window=60.0,
        num_replicas=replicas,
    )
    return facts, commands


class NatsBus:
    """A client that reconnects for ever and whose subscriptions outlive the server's restarts."""

    def __init__(self, url: str, name: str, *, replicas: int = 1) -> None:
        self._url, self._name, self._replicas = url, name, replicas
        self._nc: Client = Client()
        self._js: JetStreamContext = self._nc.jetstream()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_malformed = 0

    @property
    def connected(self) -> bool:
        return bool(self._nc.is_connected)

    async def connect(self) -> None:
        """Connect and make the streams. Retries until the server answers; cancel to give up."""
        while True:
            try:
                self._nc = await nats.connect(
                    self._url,
                    name=self._name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RETRY_S,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    error_cb=_log_error,
                    allow_reconnect=True,
                    connect_timeout=2,
                )
                break
            except (OSError, NatsError) as error:
                log.warning("bus not reachable: %s", error)
                await asyncio.sleep(RETRY_S)
        self._js = self._nc.jetstream(timeout=PUBLISH_TIMEOUT_S)
        await self._ensure_streams()

    async def _ensure_streams(self) -> None:
        for config in stream_configs(self._replicas):
            while True:
                try:
                    await self._js.add_stream(config)
                    break
                except (NatsError, OSError, TimeoutError) as error:
                    log.warning("stream %s not ready: %s", config.name, error)
                    await asyncio.sleep(RETRY_S)

    async def publish(self, event: Event) -> None:
        subject, raw = names.subject(event.data), encode(event)
        headers = {"Nats-Msg-Id": event.event_id}
        if event.traceparent:
            headers["traceparent"] = event.traceparent
        if not self.connected:
            raise BusUnavailable("not connected")
        try:
            if names.is_telemetry(event.type):
                await self._nc.publish(subject, raw)
            else:
                await self._js.publish(subject, raw, headers=headers, timeout=PUBLISH_TIMEOUT_S)
        except (NatsError, OSError, TimeoutError) as error:
            raise BusUnavailable(f"{subject}: {error!r}") from error

    async def subscribe(self, filters: Sequence[str], handler: Handler, *, durable: str = "") -> None:
        if not durable:
            for subject in filters:
                await self._nc.subscribe(subject, cb=self._core_callback(handler))
            return
        ready = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._pull(tuple(filters), handler, durable, ready)))
        await ready.wait()

    def _core_callback(self, handler: Handler):  # type: ignore[no-untyped-def]
        async def on_message(msg: Msg) -> None:
            event = self._decode(msg)
            if event is not None:
                try:
                    await handler(event)
                except Exception:
                    log.exception("handler of %s failed", msg.subject)

        return on_message

    def _decode(self, msg: Msg) -> Event | None:
        try:
            return decode(msg.data)
        except MalformedEvent as error:
            self.num_malformed += 1
            log.warning("malformed event on %s: %s", msg.subject, error)
            return None

    async def _pull(self, filters: tuple[str, ...], handler: Handler, durable: str, ready: asyncio.Event) -> None:
        """Fetch and handle for ever; a lost consumer or stream is made again."""
        subscription = None
        while True:
            try:
                if subscription is None:
                    subscription = await self._consumer(filters, durable)
                    ready.set()
                messages = await subscription.fetch(FETCH_BATCH, timeout=FETCH_WAIT_S)
            except TimeoutError:
                continue
            except (NatsError, OSError) as error:
                log.warning("consumer %s lost (%r); making it again", durable, error)
                subscription = None
                await asyncio.sleep(RETRY_S)
                with contextlib.suppress(NatsError, OSError, TimeoutError):
                    await self._js.add_stream(stream_configs(self._replicas)[".cmd." in filters[0]])
                continue
            for msg in messages:
                await self._handle(msg, handler)

    async def _consumer(self, filters: tuple[str, ...], durable: str) -> JetStreamContext.PullSubscription:
        is_commands = ".cmd." in filters[0]
        stream = names.COMMANDS_STREAM if is_commands else names.FACTS_STREAM
        config = ConsumerConfig(
            durable_name=durable,
            filter_subjects=list(filters),
            deliver_policy=DeliverPolicy.ALL if is_commands else DeliverPolicy.NEW,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_deliver=MAX_DELIVER,
            max_ack_pending=FETCH_BATCH * 4,
            inactive_threshold=CONSUMER_INACTIVE_S,
        )
        try:
            await self._js.consumer_info(stream, durable)
        except NotFoundError:
            await self._js.add_consumer(stream, config)
        return await self._js.pull_subscribe_bind(durable=durable, stream=stream)

    async def _handle(self, msg: Msg, handler: Handler) -> None:
        event = self._decode(msg)
        try:
            if event is not None:
                await handler(event)
        except Exception:
            log.exception("handler of %s failed; it will be delivered again", msg.subject)
            with contextlib.suppress(NatsError, OSError):
                await msg.nak(delay=RETRY_S)
            return
        with contextlib.suppress(NatsError, OSError):
            await msg.ack()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            await asyncio.wait_for(self._nc.drain() if self.connected else self._nc.close(), 2)


async def _log_error(error: Exception) -> None:
    log.warning("bus: %r", error)
