"""Connect to the bus on NATS: facts and commands through JetStream on file, telemetry on core subjects.

A server that has run out of disk answers but stores nothing: `Storing` detects it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError, ServiceUnavailableError

from glowplug.bus.port import MAX_DELIVER, BusCounts, BusUnavailable, Handler
from glowplug.bus.streams import consumer_config, stream_configs, stream_of
from glowplug.events import Event, encode
from glowplug.events import subjects as names

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0  # for streams that refuse
CHECK_QUIET_S = 5.0  # before a watched stream is checked
CHECK_HEADER = "Glowplug-Check"  # marks a message that is not an event
STORES_NOTHING = "the bus answers but stores no events (its disk may be full)"

Store = Callable[[str], Awaitable[None]]
FETCH_WAIT_S = 5.0
RENEW_S = 30.0  # others may change a reader
PUBLISH_TIMEOUT_S = 3.0
RETRY_S = 0.25
CLOSE_S = 2.0
CANCEL_AGAIN_S = 0.2
ANSWER_S = 1.0  # bound for a living server to answer a ping or store
ARRIVE_S = 5.0  # ... to confirm a subscription, even on a busy machine
PING_LEFT_S = 60  # by then the connection has been given up
REFUSED = (NatsError, OSError, TimeoutError)
NOT_STORED = (TimeoutError, ServiceUnavailableError)  # of a stream that stores nothing


class Storing:
    """Detects streams that refuse messages.

    `store(stream)` sends a check message and raises unless it is stored; `answers()` tells a refusal from a lost
    server, which the connection notices. `watched` streams are checked when quiet, to know of a refusal in advance.
    """

    def __init__(
        self,
        store: Store,
        answers: Callable[[], Awaitable[bool]],
        refused: tuple[type[BaseException], ...],
        watched: tuple[str, ...] = (),
        *,
        check_every_s: float = CHECK_EVERY_S,
        quiet_s: float = CHECK_QUIET_S,
    ) -> None:
        self._check_every_s, self._quiet_s = check_every_s, quiet_s
        self._store, self._answers, self._refused = store, answers, refused
        self._stored_at: dict[str, float] = dict.fromkeys(watched, 0.0)
        self._watched = watched
        self._refusals: dict[str, str] = {}

    @property
    def refusal(self) -> str:
        """Why the bus answers but stores no events, or ""."""
        return next(iter(self._refusals.values()), "")

    def of(self, stream: str) -> str:
        return self._refusals.get(stream, "")

    def stored(self, stream: str, now_s: float) -> None:
        self._stored_at[stream] = now_s
        if self._refusals.pop(stream, ""):
            log.info("the stream %s stores events again", stream)

    async def refused(self, stream: str, error: BaseException) -> None:
        """Note a refused message. A lost connection or a pause is not a refusal, so a server that answers is tried once
        more."""
        if stream in self._refusals or not await self._answers():
            return
        try:
            await self._store(stream)
        except self._refused:
            said = STORES_NOTHING if isinstance(error, TimeoutError) else f"{STORES_NOTHING}: {error}"
            self._refusals[stream] = said
            log.error("the stream %s has refused an event: %s", stream, said)

    def reset(self) -> None:
        """Forget the refusals of the previous or restarted server."""
        self._refusals.clear()

    async def watch(self, connected: Callable[[], bool]) -> None:
        """Keep checking streams that refuse, and watched ones that are quiet."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._check_every_s)
            quiet_since = loop.time() - self._quiet_s
            quiet = {stream for stream in self._watched if self._stored_at[stream] < quiet_since}
            for stream in sorted(quiet | self._refusals.keys()):
                if connected():
                    await self._check(stream, loop)

    async def _check(self, stream: str, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await self._store(stream)
        except self._refused as error:
            await self.refused(stream, error)
        else:
            self.stored(stream, loop.time())


@dataclass(eq=False)
class _Reader:
    """One durable reader. `rebind`: bind again, or end if `released`."""

    durable: str
    filters: tuple[str, ...]
    handler: Handler
    patient: bool = False
    stood_at: tuple[int, int] | None = None  # last delivery: its number, and the event's in the stream
    rebind: asyncio.Event = field(default_factory=asyncio.Event)
    bound: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    released: bool = False


class NatsBus:
    """Reconnects for ever, with a new client once the library closes its own, as at most errors of a server;
    subscriptions survive that and restarts of the server, even an emptied one.

    After a reconnect it restores missing streams and rebinds every durable reader, as old pulls would wait in vain.
    Without `makes_streams` it waits for another client's. `inbox`: prefix of reply subjects. A stream that stores
    nothing shows in `refusal` and is checked until it stores (`Storing`); with `asks_first` even before a refusal. The
    usage stream is neither awaited nor reported: older fleets lack it, and routers keep refused usage on disk.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        replicas: int = 1,
        inbox: str = "_INBOX",
        makes_streams: bool = True,
        asks_first: bool = False,
    ) -> None:
        self._url, self._name, self._replicas = url, name, replicas
        self._inbox, self._makes_streams = inbox, makes_streams
        self._nc = Client()
        self._js = self._nc.jetstream()
        self._tasks: list[asyncio.Task[None]] = []
        self._in_flight: set[asyncio.Timeout] = set()
        self._back = asyncio.Event()  # the server is back, or lost a stream
        self._readers: dict[str, _Reader] = {}
        self._core: list[tuple[str, Callable[[Msg], Awaitable[None]]]] = []  # subscriptions, by subject
        self._dialling = asyncio.Lock()
        self._pings: set[asyncio.Task[None]] = set()
        self._storing = Storing(
            self._store_check, self._answers, REFUSED, (names.COMMANDS_STREAM,) if asks_first else ()
        )
        self.counts = BusCounts()

    @property
    def refusal(self) -> str:
        return self._storing.refusal

    @property
    def connected(self) -> bool:
        return bool(self._nc.is_connected)

    async def connect(self) -> None:
        """Connect and make the streams. Retries until cancelled."""
        await self._dial()
        await self._ensure_streams()
        watching = self._storing.watch(lambda: self.connected)
        self._tasks += [asyncio.create_task(self._repair()), asyncio.create_task(watching)]

    async def _dial(self) -> None:
        while True:
            try:
                self._nc = await nats.connect(
                    self._url.split(","),
                    name=self._name,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RETRY_S,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    error_cb=_log_error,
                    disconnected_cb=self._on_lost,
                    reconnected_cb=self._on_back,
                    connect_timeout=2,
                    inbox_prefix=self._inbox,
                    skip_subject_validation=True,  # only `subjects` makes them
                )
                break
            except REFUSED as error:
                log.warning("this service cannot connect to NATS and tries again: %s", error)
                await asyncio.sleep(RETRY_S)
        self._js = self._nc.jetstream(timeout=PUBLISH_TIMEOUT_S)

    async def _dial_if_closed(self) -> None:
        async with self._dialling:
            while self._nc.is_closed:
                log.error("the connection to NATS has been closed for good: this service opens another")
                await self._dial()
                with contextlib.suppress(*REFUSED):
                    for subject, callback in self._core:
                        await self._nc.subscribe(subject, cb=callback)
                    await self._on_back()

    async def _on_lost(self) -> None:
        """Fail the lost connection's publishes now, not at their timeout."""
        now = asyncio.get_running_loop().time()
        for scope in tuple(self._in_flight):
            scope.reschedule(now)

    async def _on_back(self) -> None:
        self.counts.num_reconnects += 1
        self._storing.reset()
        self._back.set()

    async def _repair(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._back.wait()
            await self._dial_if_closed()
            if not self._back.is_set():
                continue
            self._back.clear()
            log.info("NATS answers again: this service sets up its streams and readers anew")
            await self._ensure_streams()
            for reader in self._readers.values():
                reader.rebind.set()

    async def _ensure_streams(self) -> None:
        """Wait for the streams; one with unchangeable settings is used as it is."""
        for config in stream_configs(self._replicas):
            while True:
                await self._dial_if_closed()
                try:
                    if self._makes_streams:
                        await self._js.add_stream(config)
                    else:
                        await self._js.stream_info(str(config.name))
                    break
                except NotFoundError:
                    if config.name == names.USAGE_STREAM:
                        break
                    log.info("this service waits until another one has created the stream %s", config.name)
                    await asyncio.sleep(RETRY_S)
                except BadRequestError as error:
                    log.warning("this service updates the stream %s, which has other settings: %s", config.name, error)
                    with contextlib.suppress(*REFUSED):
                        await self._js.update_stream(config)
                    break
                except REFUSED as error:
                    log.warning("NATS has not set up the stream %s: %r", config.name, error)
                    if config.name == names.USAGE_STREAM and not self._makes_streams:
                        break
                    await asyncio.sleep(RETRY_S)

    async def publish(self, event: Event) -> None:
        subject, raw = names.subject(event.data), encode(event)
        if not self.connected:
            raise BusUnavailable("not connected")
        stream = "" if names.is_telemetry(event.type) else stream_of([subject])
        if refusal := self._storing.of(stream):
            raise BusUnavailable(f"{subject}: {refusal}")
        try:
            if stream:
                headers = {"Nats-Msg-Id": event.event_id}
                if event.traceparent:
                    headers["traceparent"] = event.traceparent
                await self._store(stream, subject, raw, headers, PUBLISH_TIMEOUT_S)
            else:
                await self._nc.publish(subject, raw)
        except NoStreamResponseError as error:
            if stream != names.USAGE_STREAM or self._makes_streams:
                self._back.set()  # the stream is gone: make it again
            raise BusUnavailable(f"{subject}: no stream accepts it") from error
        except REFUSED as error:
            if stream and stream != names.USAGE_STREAM and isinstance(error, NOT_STORED):
                await self._storing.refused(stream, error)
            raise BusUnavailable(f"{subject}: {type(error).__name__} {error}") from error

    async def _store(self, stream: str, subject: str, raw: bytes, headers: dict[str, str], timeout_s: float) -> None:
        """Publish and wait until stored. Raises REFUSED."""
        async with asyncio.timeout(timeout_s) as scope:
            self._in_flight.add(scope)
            try:
                await self._js.publish(subject, raw, headers=headers, timeout=timeout_s)
            finally:
                self._in_flight.discard(scope)
        self._storing.stored(stream, asyncio.get_running_loop().time())

    async def _store_check(self, stream: str) -> None:
        await self._store(stream, names.check(stream, self._name), b"", {CHECK_HEADER: "1"}, ANSWER_S)

    async def _answers(self) -> bool:
        return await self._answered(self._nc.flush(timeout=PING_LEFT_S), ANSWER_S)

    async def _answered(self, flush: Coroutine[Any, Any, None], within_s: float) -> bool:
        """Return whether the server answers a flush in time. A late answer to a cancelled flush would break the client,
        so the flush is left to end."""
        ping = asyncio.create_task(flush)
        self._pings.add(ping)
        ping.add_done_callback(self._pinged)
        await asyncio.wait({ping}, timeout=within_s)
        return self.connected and ping.done() and not ping.cancelled() and ping.exception() is None

    def _pinged(self, ping: asyncio.Task[None]) -> None:
        self._pings.discard(ping)
        if not ping.cancelled() and (error := ping.exception()) is not None:
            log.debug("NATS has not answered a ping: %r", error)

    async def subscribe(
        self, filters: Sequence[str], handler: Handler, *, durable: str = "", patient: bool = False
    ) -> None:
        if not durable:
            callback = self._core_callback(handler)
            for subject in filters:
                self._core.append((subject, callback))
                await self._nc.subscribe(subject, cb=callback)
            if not await self._answered(arrive(self._nc), ARRIVE_S):
                log.warning("NATS has not confirmed the subscription to %s", ", ".join(filters))
            return
        reader = self._readers[durable] = _Reader(durable, tuple(filters), handler, patient)
        reader.task = asyncio.create_task(self._read(reader))
        try:
            await reader.bound.wait()
        except asyncio.CancelledError:
            await self.release(durable)
            raise

    async def release(self, durable: str) -> None:
        reader = self._readers.pop(durable, None)
        if reader is None or reader.task is None:
            return
        reader.released = True
        reader.rebind.set()
        await asyncio.wait([reader.task], timeout=CLOSE_S)
        await _cancel(reader.task)

    def _core_callback(self, handler: Handler) -> Callable[[Msg], Awaitable[None]]:
        one_at_a_time = asyncio.Lock()

        async def on_message(msg: Msg) -> None:
            if (event := self._read_message(msg)) is None:
                return
            async with one_at_a_time:
                try:
                    await handler(event)
                except Exception:
                    log.exception("the handler of an event on %s failed", msg.subject)

        return on_message

    def _read_message(self, msg: Msg) -> Event | None:
        is_check = CHECK_HEADER in (msg.headers or {})
        return None if is_check else self.counts.read(msg.subject, msg.data)

    async def _read(self, own: _Reader) -> None:
        """Bind and read until released, anew after each reconnect."""
        while not own.released:
            own.rebind.clear()
            try:
                reader = await self._bind(own)
            except REFUSED as error:
                log.warning("the reader %s cannot bind to its stream and tries again: %r", own.durable, error)
                await asyncio.sleep(RETRY_S)
                await self._ensure_streams()
                continue
            own.bound.set()
            if own.released:
                own.rebind.set()
            try:
                await self._read_bound(reader, own)
            except Exception as error:
                log.warning("the reader %s has stopped and binds again: %r", own.durable, error, exc_info=error)
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(*REFUSED):
                    await reader.unsubscribe()

    async def _bind(self, own: _Reader) -> JetStreamContext.PullSubscription:
        stream, info = stream_of(own.filters), await self._make(own)
        if stream == names.USAGE_STREAM and info.delivered is not None:
            own.stood_at = info.delivered.consumer_seq, info.delivered.stream_seq
        return await self._js.pull_subscribe_bind(durable=own.durable, stream=stream)

    async def _make(self, own: _Reader) -> api.ConsumerInfo:
        """Make it, or find it and set its filters."""
        config = consumer_config(own.durable, own.filters, patient=own.patient)
        return await self._js.add_consumer(stream_of(own.filters), config)

    async def _read_bound(self, reader: JetStreamContext.PullSubscription, own: _Reader) -> None:
        """Pull one message at a time, lest others wait here while their acknowledgement times out."""
        rebind = own.rebind
        waiter = asyncio.create_task(rebind.wait())
        pull: asyncio.Task[list[Msg]] | None = None
        loop = asyncio.get_running_loop()
        made_at = loop.time()
        try:
            while not rebind.is_set():
                if loop.time() - made_at >= RENEW_S:
                    with contextlib.suppress(*REFUSED):
                        await self._make(own)
                    made_at = loop.time()
                pull = asyncio.create_task(reader.fetch(1, timeout=FETCH_WAIT_S))
                await asyncio.wait({pull, waiter}, return_when=asyncio.FIRST_COMPLETED)
                if not pull.done() or pull.cancelled():  # by the library, which has closed the connection
                    return
                with contextlib.suppress(TimeoutError):
                    for msg in pull.result():
                        self._count(msg, own)
                        await self._handle(msg, own)
        finally:
            await _cancel(waiter, *([pull] if pull is not None else []))

    def _count(self, msg: Msg, own: _Reader) -> None:
        delivery = msg.metadata
        self.counts.pending[delivery.consumer] = delivery.num_pending
        self.counts.num_redelivered += delivery.num_delivered > 1
        if own.stood_at is None:
            return
        (number, place), now = own.stood_at, delivery.sequence
        if delivery.num_delivered > 1:
            own.stood_at = now.consumer, place
            return
        own.stood_at = now.consumer, now.stream
        # Events between that the reader's other processes did not get were discarded.
        num_lost = (now.stream - place) - (now.consumer - number)
        if num_lost > 0:
            self.counts.num_overflowed += num_lost
            log.error("%s has discarded %d events that %s had not read", delivery.stream, num_lost, own.durable)

    async def _handle(self, msg: Msg, own: _Reader) -> None:
        event = self._read_message(msg)
        try:
            if event is not None:
                await own.handler(event)
        except Exception:
            log.exception("the handler of an event on %s failed", msg.subject)
            await self._failed(msg, own.patient)
            return
        with contextlib.suppress(*REFUSED):
            await msg.ack()

    async def _failed(self, msg: Msg, patient: bool) -> None:
        """Redeliver the event, up to its last delivery; patient readers have none."""
        is_last = not patient and msg.metadata.num_delivered >= MAX_DELIVER
        self.counts.num_given_up += is_last
        if is_last:
            log.error("gave up an event on %s: its handler failed at all %d deliveries", msg.subject, MAX_DELIVER)
        with contextlib.suppress(*REFUSED):
            await (msg.term() if is_last else msg.nak(delay=RETRY_S))

    async def close(self) -> None:
        readers = [reader.task for reader in self._readers.values() if reader.task is not None]
        await _cancel(*self._tasks, *readers)
        if self._nc.options:  # else it never connected
            with contextlib.suppress(*REFUSED):
                await asyncio.wait_for(self._nc.drain() if self.connected else self._nc.close(), CLOSE_S)
        await _cancel(*self._pings)  # after the connection, as a late answer would break it


async def arrive(client: Client) -> None:
    """Wait until the server has all that this client has sent. Raises as `Client.flush`.

    One flush is not enough: its ping overtakes data waiting for the client's writer. The writer has run before the
    answer, so a second flush follows all data.
    """
    for _ in range(2):
        await client.flush(timeout=PING_LEFT_S)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel until over: in Python 3.11 `asyncio.wait_for`, used by the client, swallows a cancellation at the moment
    of its answer, and the task would run on."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in done:
            _ = task.cancelled() or task.exception()


async def _log_error(error: Exception) -> None:
    log.warning("the connection to NATS reports an error: %r", error)
