"""The bus to look at: a live stream with filters, the latest events, and one event with its causes and effects."""

from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from glowplug.domain.errors import BadRequest, Contended, NotFound
from glowplug.events.envelope import PAYLOADS
from glowplug.events.filters import DEFAULT_PLANES, PLANES, EventFilter
from services.console.events import EventLog, EventRow
from services.console.stream import message
from services.console.trace_api import json_response

FIRST_ROWS: Final = 200
MAX_ROWS: Final = 1000
MAX_TEXT: Final = 200

Text = Annotated[str, Query(max_length=MAX_TEXT)]
Texts = Annotated[list[str] | None, Query(max_length=16)]


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of the stream: the latest events that match, and the command that shows the same.

    `types` are all there are; `kept` says how full each ring is.
    """

    rows: list[EventRow]
    command: str
    types: list[str]
    num_passed: int
    kept: dict[str, dict[str, int]]


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """One event whole. `chain` is its cause and so on up; `is_whole` False when an older cause is kept no more."""

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
    """The filter of a query; `plane` (evt, cmd, tel) and `type` may be given repeatedly. Raises BadRequest."""
    if unknown := [name for name in plane or () if name not in PLANES]:
        raise BadRequest(f"plane must be one of {', '.join(PLANES)}, got {unknown[0][:32]!r}", param="plane")
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


def routes(log: EventLog, *, max_watchers: int, beat_s: float) -> APIRouter:
    """`max_watchers` streams at once; each is sent at most one batch every `beat_s`."""
    router = APIRouter(prefix="/api/v1", tags=["events"])

    @router.get("/events", response_class=StreamingResponse)
    async def stream(wanted: Wanted) -> Response:
        """Server-sent events: `events` with the latest that match, then `more` as they come, with what was left out."""
        if len(log.watchers) >= max_watchers:
            raise Contended("too many open views of events", retry_after_s=5.0)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_until_gone(log, wanted, beat_s), media_type="text/event-stream", headers=headers)

    @router.get("/events/latest")
    async def latest(wanted: Wanted, limit: int = Query(FIRST_ROWS, ge=1, le=MAX_ROWS)) -> Response:
        """The newest events that match, oldest first."""
        return json_response(_opening(log, wanted, limit))

    @router.get("/events/{event_id}")
    async def one(event_id: str) -> Response:
        """One event with its payload, the chain of its causes and what it caused."""
        entry = log.get(event_id)
        if entry is None:
            raise NotFound(f"event {event_id[:64]} is not here: the console keeps the latest since it started")
        chain = log.chain(entry.row.cause_id)
        wanted = EventFilter(planes=(entry.seen.plane,), types=(entry.seen.kind,), entity_id=entry.seen.entity_id)
        return json_response(
            EventPage(
                row=entry.row,
                event=msgspec.Raw(entry.raw),
                chain=chain,
                is_whole=not (chain[-1] if chain else entry.row).cause_id,
                effects=log.effects(event_id),
                command=wanted.command(),
            )
        )

    return router


def _opening(log: EventLog, wanted: EventFilter, limit: int) -> Opening:
    return Opening(
        rows=log.latest(wanted, limit),
        command=wanted.command(),
        types=sorted(PAYLOADS),
        num_passed=log.num_passed,
        kept=log.kept(),
    )


async def _until_gone(log: EventLog, wanted: EventFilter, beat_s: float) -> AsyncIterator[bytes]:
    watcher = log.watch(wanted)
    try:
        yield message("events", _opening(log, wanted, FIRST_ROWS))
        async for batch in watcher.batches(log, beat_s):
            yield message("more", batch)
    finally:
        log.leave(watcher)
