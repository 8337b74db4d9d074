"""The console's event log: the latest events of each class, live streams, causes and effects.

Events are kept as JSON; telemetry has its own ring, so that it displaces no fact."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from glowplug.domain.errors import BadRequest, Contended, NotFound
from glowplug.domain.model import Model, WeightsRef
from glowplug.events import Event
from glowplug.events.envelope import PAYLOADS, encode
from glowplug.events.filters import DEFAULT_PLANES, PLANES, EventFilter, Sighting, sight, summary
from glowplug.events.subjects import subject
from glowplug.services.console.records import HEARTBEAT_S, Mailbox, json_response, message, streamed
from glowplug.telemetry.tracing import trace_id_of
from glowplug.weights.source import redacted

ROW_OVERHEAD_BYTES: Final = 900  # measured with tracemalloc, rounded up
MAX_WORDS_CHARS: Final = 240
CHAIN_LIMIT: Final = 32
EFFECTS_LIMIT: Final = 100
BEAT_S: Final = 0.25  # between batches
FIRST_ROWS: Final = 200
MAX_ROWS: Final = 1000
MAX_TEXT: Final = 200

Text = Annotated[str, Query(max_length=MAX_TEXT)]
Texts = Annotated[list[str] | None, Query(max_length=16)]


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """`seq`: order of arrival; `trace_id`: "" unless sampled."""

    seq: int
    event_id: str
    seen: Sighting
    occurred_at: float
    cause_id: str
    trace_id: str
    words: str
    emulated: bool


class Entry(msgspec.Struct, frozen=True, gc=False):
    row: EventRow
    raw: bytes  # JSON without system prompts and secrets of addresses

    @property
    def num_bytes(self) -> int:
        return len(self.raw) + ROW_OVERHEAD_BYTES


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[EventRow]
    num_skipped: int
    num_passed: int  # since the start


class Watcher(Mailbox[EventRow]):
    def __init__(self, wanted: EventFilter, limit: int) -> None:
        super().__init__(limit)
        self.wanted = wanted

    def offer(self, entry: Entry) -> None:
        if self.wanted.wants(entry.row.seen, entry.raw):
            self.put(entry.row)

    async def batches(
        self, log: "EventLog", beat_s: float, heartbeat_s: float = HEARTBEAT_S
    ) -> AsyncIterator[EventBatch]:
        """Yield at most one batch a beat, an empty one as heartbeat. Ends when closed."""
        async for rows, num_skipped in self.arrivals(heartbeat_s):
            yield EventBatch(rows=rows, num_skipped=num_skipped, num_passed=log.num_passed)
            if rows:
                await asyncio.sleep(beat_s)


class _Ring:
    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events, self._max_bytes = max_events, max_bytes
        self.entries: dict[str, Entry] = {}  # by event_id, oldest first
        self.num_bytes = 0

    def put(self, entry: Entry) -> None:
        self.entries[entry.row.event_id] = entry
        self.num_bytes += entry.num_bytes
        while len(self.entries) > self._max_events or (self.num_bytes > self._max_bytes and len(self.entries) > 1):
            self.num_bytes -= self.entries.pop(next(iter(self.entries))).num_bytes


class EventLog:
    """A ring per class (facts, commands, telemetry) of at most `max_events` events and `max_bytes` bytes each."""

    def __init__(self, *, max_events: int = 4000, max_bytes: int = 8 << 20, watch_limit: int = 60) -> None:
        self._rings = {plane: _Ring(max_events, max_bytes) for plane in PLANES}
        self._watch_limit = watch_limit
        self.watchers: set[Watcher] = set()
        self.num_passed = 0
        self._closed = False

    def take(self, event: Event) -> None:
        if self.get(event.event_id) is not None:
            return
        seen = sight(subject(event.data), event.issuer, event.data)
        self.num_passed += 1
        entry = Entry(_row(self.num_passed, event, seen), encode(discreet_event(event)))
        self._rings[seen.plane].put(entry)
        for watcher in self.watchers:
            watcher.offer(entry)

    def watch(self, wanted: EventFilter) -> Watcher:
        watcher = Watcher(wanted, self._watch_limit)
        if self._closed:
            watcher.close()
        self.watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self.watchers.discard(watcher)

    def close(self) -> None:
        self._closed = True
        for watcher in self.watchers:
            watcher.close()

    def get(self, event_id: str) -> Entry | None:
        return next((ring.entries[event_id] for ring in self._rings.values() if event_id in ring.entries), None)

    def latest(self, wanted: EventFilter, limit: int) -> list[EventRow]:
        """Oldest first."""
        matching = (entry.row for entry in self._newest(wanted.planes) if wanted.wants(entry.row.seen, entry.raw))
        return list(islice(matching, limit))[::-1]

    def chain(self, cause_id: str) -> tuple[list[EventRow], bool]:
        """Return the kept causes, nearest first, and whether the chain is complete."""
        chain: list[EventRow] = []
        while cause_id and len(chain) < CHAIN_LIMIT and (entry := self.get(cause_id)) is not None:
            chain.append(entry.row)
            cause_id = entry.row.cause_id
        return chain, not cause_id

    def effects(self, event_id: str) -> list[EventRow]:
        """Oldest first."""
        found = [e.row for e in self._newest(PLANES) if e.row.cause_id == event_id]
        return found[::-1][:EFFECTS_LIMIT]

    def kept(self) -> dict[str, dict[str, int]]:
        return {plane: {"num": len(r.entries), "num_bytes": r.num_bytes} for plane, r in self._rings.items()}

    def _newest(self, planes: tuple[str, ...]) -> Iterator[Entry]:
        walks = (reversed(ring.entries.values()) for plane, ring in self._rings.items() if plane in planes)
        return heapq.merge(*walks, key=lambda entry: entry.row.seq, reverse=True)


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """`types`: all known; `command`: shows the same in a shell."""

    rows: list[EventRow]
    command: str
    types: list[str]
    num_passed: int
    kept: dict[str, dict[str, int]]


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """`chain`: causes, nearest first; `is_whole` False if an older cause was dropped."""

    row: EventRow
    event: msgspec.Raw
    chain: list[EventRow]
    is_whole: bool
    effects: list[EventRow]
    command: str


def asked_for(
    plane: Texts = None,
    type: Texts = None,
    entity: Text = "",
    model: Text = "",
    node: Text = "",
    service: Text = "",
    id: Text = "",
    q: Text = "",
) -> EventFilter:
    """`plane` (evt, cmd, tel) and `type` may repeat. Raises BadRequest."""
    if unknown := [name for name in plane or () if name not in PLANES]:
        raise BadRequest(f"plane: {unknown[0][:32]!r} is not one of {', '.join(PLANES)}", param="plane")
    return EventFilter(
        planes=tuple(dict.fromkeys(plane)) if plane else DEFAULT_PLANES,
        types=tuple(kind[:MAX_TEXT] for kind in type or () if kind),
        entity=entity,
        model=model,
        node=node,
        service=service,
        entity_id=id,
        text=q.strip(),
    )


Wanted = Annotated[EventFilter, Depends(asked_for)]


def routes(log: EventLog, *, max_watchers: int) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["events"])

    @router.get("/events", response_class=StreamingResponse)
    async def stream(wanted: Wanted) -> Response:
        """Server-sent events: `events` with the latest that match, then `more` as they come and the number skipped."""
        if len(log.watchers) >= max_watchers:
            raise Contended("too many open views of events", retry_after_s=5.0)
        return streamed(_until_gone(log, wanted))

    @router.get("/events/latest")
    async def latest(wanted: Wanted, limit: int = Query(FIRST_ROWS, ge=1, le=MAX_ROWS)) -> Response:
        """The newest events that match, oldest first."""
        return json_response(_opening(log, wanted, limit))

    @router.get("/events/{event_id}")
    async def one(event_id: str) -> Response:
        """One event with its payload, the chain of its causes and its effects."""
        entry = log.get(event_id)
        if entry is None:
            raise NotFound(f"the console has no event {event_id[:64]}: it keeps the latest since it started")
        chain, is_whole = log.chain(entry.row.cause_id)
        seen = entry.row.seen
        wanted = EventFilter(planes=(seen.plane,), types=(seen.kind,), entity_id=seen.entity_id)
        return json_response(
            EventPage(
                row=entry.row,
                event=msgspec.Raw(entry.raw),
                chain=chain,
                is_whole=is_whole,
                effects=log.effects(event_id),
                command=wanted.command(),
            )
        )

    return router


def _opening(log: EventLog, wanted: EventFilter, limit: int) -> Opening:
    rows, command, types = log.latest(wanted, limit), wanted.command(), sorted(PAYLOADS)
    return Opening(rows=rows, command=command, types=types, num_passed=log.num_passed, kept=log.kept())


async def _until_gone(log: EventLog, wanted: EventFilter) -> AsyncIterator[bytes]:
    watcher = log.watch(wanted)
    try:
        yield message("events", _opening(log, wanted, FIRST_ROWS))
        async for batch in watcher.batches(log, BEAT_S):
            yield message("more", batch)
    finally:
        log.leave(watcher)


def discreet_weights(weights: WeightsRef) -> WeightsRef:
    """Strip user, password and query; "" if the address cannot be parsed."""
    try:
        return replace(weights, uri=redacted(weights.uri))
    except ValueError:
        return replace(weights, uri="")


def discreet_model(model: Model) -> Model:
    said = f"{len(model.system_prompt)} characters" if model.system_prompt else ""
    return replace(model, system_prompt=said, weights=discreet_weights(model.weights))


def discreet_event(event: Event) -> Event:
    data = event.data
    if isinstance(model := getattr(data, "model", None), Model):
        return replace(event, data=replace(data, model=discreet_model(model)))
    if isinstance(weights := getattr(data, "weights", None), WeightsRef):
        return replace(event, data=replace(data, weights=discreet_weights(weights)))
    return event


def clip(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _row(seq: int, event: Event, seen: Sighting) -> EventRow:
    return EventRow(
        seq=seq,
        event_id=event.event_id,
        seen=seen,
        occurred_at=event.occurred_at,
        cause_id=event.cause_id,
        trace_id=trace_id_of(event.traceparent),
        words=clip(summary(event.data), MAX_WORDS_CHARS),
        emulated=is_emulated(event.data),
    )


def is_emulated(data: Any) -> bool:
    about = getattr(data, "instance", None) or getattr(data, "model", None) or data
    gpus = getattr(getattr(data, "node", None), "gpus", ())
    return (
        bool(getattr(about, "emulated", False))
        or getattr(about, "engine", "") == "emulated"
        or any(gpu.kind == "emulated" for gpu in gpus)
    )
