"""The bus on NATS: facts and commands through JetStream on file, telemetry on core subjects.

A server whose disk was full answers everything and stores nothing: `Storing` asks whether it still stores what it is
sent."""

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
from nats.js import JetStreamContext
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError, ServiceUnavailableError

from glowplug.bus.port import MAX_DELIVER, BusCounts, BusUnavailable, Handler
from glowplug.bus.streams import consumer_config, stream_configs, stream_of
from glowplug.events import Event, encode
from glowplug.events import subjects as names

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0  # a stream that refused is asked again, until it stores
CHECK_QUIET_S = 5.0  # a stream is asked when nothing has been stored in it for so long, by those who must know
CHECK_HEADER = "Glowplug-Check"  # a message that carries it is no event, and no reader's business
STORES_NOTHING = "the bus answers and stores no events (a full disk does this)"

Store = Callable[[str], Awaitable[None]]
FETCH_WAIT_S = 5.0
PUBLISH_TIMEOUT_S = 3.0
RETRY_S = 0.25
CLOSE_S = 2.0
CANCEL_AGAIN_S = 0.2
ANSWER_S = 1.0  # a server that lives answers a ping, and stores a message, within it
ARRIVE_S = 5.0  # a server that lives has taken a subscription within it, however busy its machine
PING_LEFT_S = 60  # by then the connection of a ping without an answer has been given up
REFUSED = (NatsError, OSError, TimeoutError)
NOT_STORED = (TimeoutError, ServiceUnavailableError)  # what a stream that stores nothing answers, or does not


class Storing:
    """Which streams refuse, and since when others have been quiet.

    `store(stream)` sends a check message there and raises when it is not stored; `answers()` says whether the server
    answers at all: a server that does not is lost, which the connection notices by itself. `watched` streams are asked
    when they are quiet, so that a refusal is known before somebody needs the stream.
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
        """Why the bus stores no events though it answers, or ""."""
        return next(iter(self._refusals.values()), "")

    def of(self, stream: str) -> str:
        """Why one stream takes no messages; "" if it does."""
        return self._refusals.get(stream, "")

    def stored(self, stream: str, now_s: float) -> None:
        """The stream has taken a message."""
        self._stored_at[stream] = now_s
        if self._refusals.pop(stream, ""):
            log.info("%s stores events again", stream)

    async def refused(self, stream: str, error: BaseException) -> None:
        """Note that the stream refused a message. A lost connection, or a server that stood still for a while, is no
        refusal: so ask a server that answers once more."""
        if stream in self._refusals or not await self._answers():
            return
        try:
            await self._store(stream)
        except self._refused:
            said = STORES_NOTHING if isinstance(error, TimeoutError) else f"{STORES_NOTHING}: {error}"
            self._refusals[stream] = said
            log.error("%s: %s", stream, said)

    def reset(self) -> None:
        """Forget the refusals of the server before, once another one (or the same one, restarted) is connected."""
        self._refusals.clear()

    async def watch(self, connected: Callable[[], bool]) -> None:
        """For ever: ask those that refuse, and those that are watched and quiet."""
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
    stood_at: tuple[int, int] | None = None  # its last delivery: its number, and that of the event in its stream
    rebind: asyncio.Event = field(default_factory=asyncio.Event)
    bound: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    released: bool = False


class NatsBus:
    """A client that reconnects for ever and whose subscriptions outlive the server's restarts, emptied or not.

    After each reconnect the streams are made again where they are missing, then every durable reader is bound anew:
    a pull that was waiting on the old connection would wait in vain. A client that may not make streams
    (`makes_streams`) waits for one that does. `inbox`: what the subjects of its answers begin with. A stream that
    stores nothing is reported by `refusal` and asked again until it stores (`Storing`); with `asks_first` also
    before anything has been refused. The stream of usage is not waited for and its refusals are not reported: a fleet
    of an older version has none, and routers keep on disk what it does not take.
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
        self._back = asyncio.Event()  # the server is back, or a stream of it is gone
        self._readers: dict[str, _Reader] = {}  # by durable name
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
        """Connect and make the streams. Retries until the server answers; cancel to give up."""
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
                    skip_subject_validation=True,  # they are made by `subjects` alone
                )
                break
            except REFUSED as error:
                log.warning("bus not reachable: %s", error)
                await asyncio.sleep(RETRY_S)
        self._js = self._nc.jetstream(timeout=PUBLISH_TIMEOUT_S)
        await self._ensure_streams()
        watching = self._storing.watch(lambda: self.connected)
        self._tasks += [asyncio.create_task(self._repair()), asyncio.create_task(watching)]

    async def _on_lost(self) -> None:
        """Publishes that wait for an answer of the lost connection fail now instead of at their timeout."""
        now = asyncio.get_running_loop().time()
        for scope in tuple(self._in_flight):
            scope.reschedule(now)

    async def _on_back(self) -> None:
        self.counts.num_reconnects += 1
        self._storing.reset()
        self._back.set()

    async def _repair(self) -> None:
        while True:
            await self._back.wait()
            self._back.clear()
            log.info("the bus answers again: setting up its streams and readers")
            await self._ensure_streams()
            for reader in self._readers.values():
                reader.rebind.set()

    async def _ensure_streams(self) -> None:
        """Waits until the streams exist. A stream whose settings cannot be changed is used as it is."""
        for config in stream_configs(self._replicas):
            while True:
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
                    log.warning("stream %s exists with other settings: %s", config.name, error)
                    with contextlib.suppress(*REFUSED):
                        await self._js.update_stream(config)
                    break
                except REFUSED as error:
                    log.warning("stream %s not ready: %r", config.name, error)
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
                self._back.set()  # the stream is gone though the server is not: make it again
            raise BusUnavailable(f"{subject}: no stream takes it") from error
        except REFUSED as error:
            if stream and stream != names.USAGE_STREAM and isinstance(error, NOT_STORED):
                await self._storing.refused(stream, error)
            raise BusUnavailable(f"{subject}: {error!r}") from error

    async def _store(self, stream: str, subject: str, raw: bytes, headers: dict[str, str], timeout_s: float) -> None:
        """Publish to a stream and wait until it has stored the message. Raises what REFUSED names."""
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
        """Whether the server, from which nothing has come for a while, answers a ping in time."""
        return await self._answered(self._nc.flush(timeout=PING_LEFT_S), ANSWER_S)

    async def _answered(self, flush: Coroutine[Any, Any, None], within_s: float) -> bool:
        """Whether the server answers what is flushed in time. A flush that is given up would break the client when its
        answer comes after all: this one is left to end."""
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
        """Bind, read until the connection has been lost and found, and again, until released."""
        while not own.released:
            own.rebind.clear()
            try:
                reader = await self._bind(own)
            except REFUSED as error:
                log.warning("reader %s cannot bind: %r", own.durable, error)
                await asyncio.sleep(RETRY_S)
                await self._ensure_streams()
                continue
            own.bound.set()
            if own.released:
                own.rebind.set()  # it was, while this bound
            try:
                await self._read_bound(reader, own)
            except Exception as error:
                log.warning("reader %s lost (%r); binding again", own.durable, error, exc_info=error)
                await asyncio.sleep(RETRY_S)
            finally:
                with contextlib.suppress(*REFUSED):
                    await reader.unsubscribe()

    async def _bind(self, own: _Reader) -> JetStreamContext.PullSubscription:
        stream = stream_of(own.filters)
        config = consumer_config(own.durable, own.filters, patient=own.patient)
        info = await self._js.add_consumer(stream, config)  # makes it, or finds it
        if stream == names.USAGE_STREAM and info.delivered is not None:
            own.stood_at = info.delivered.consumer_seq, info.delivered.stream_seq
        return await self._js.pull_subscribe_bind(durable=own.durable, stream=stream)

    async def _read_bound(self, reader: JetStreamContext.PullSubscription, own: _Reader) -> None:
        """One message per pull: none waits in this process while its time to be acknowledged runs out."""
        rebind = own.rebind
        waiter = asyncio.create_task(rebind.wait())
        pull: asyncio.Task[list[Msg]] | None = None
        try:
            while not rebind.is_set():
                pull = asyncio.create_task(reader.fetch(1, timeout=FETCH_WAIT_S))
                await asyncio.wait({pull, waiter}, return_when=asyncio.FIRST_COMPLETED)
                if not pull.done():
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
        # Others that share the reader's name have had the deliveries between; the rest was there and is no more.
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
        """Have the event delivered again, until its last delivery, which a patient reader has none of."""
        is_last = not patient and msg.metadata.num_delivered >= MAX_DELIVER
        self.counts.num_given_up += is_last
        if is_last:
            log.error("an event on %s is given up: its handler failed at all %d deliveries", msg.subject, MAX_DELIVER)
        with contextlib.suppress(*REFUSED):
            await (msg.term() if is_last else msg.nak(delay=RETRY_S))

    async def close(self) -> None:
        readers = [reader.task for reader in self._readers.values() if reader.task is not None]
        await _cancel(*self._tasks, *readers)
        if self._nc.options:  # else it never connected, and there is nothing to close
            with contextlib.suppress(*REFUSED):
                await asyncio.wait_for(self._nc.drain() if self.connected else self._nc.close(), CLOSE_S)
        await _cancel(*self._pings)  # after the connection: an answer to a ping that is given up would break it


async def arrive(client: Client) -> None:
    """Wait until the server has what this client has sent. Raises what `Client.flush` raises.

    One flush does not say so: its ping goes to the socket at once and overtakes what waits for the client's writer.
    When the answer is there the writer has run, and the ping of a second flush comes after all of it."""
    for _ in range(2):
        await client.flush(timeout=PING_LEFT_S)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they are over. `asyncio.wait_for` of Python 3.11, used by the client, swallows cancellations
    that come in the moment of its answer; a task that goes on would be waited for until the process is killed."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in done:
            _ = task.cancelled() or task.exception()  # an error on the way out is not reported


async def _log_error(error: Exception) -> None:
    log.warning("the connection to NATS reports an error: %r", error)
