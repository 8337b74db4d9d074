"""The fleet as JSON and as a stream of changes; matching requests; one model in full."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import Contended
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.fleet.tables import find_model
from glowplug.services.console import fleet_rows as rows
from glowplug.services.console.decisions import DecisionLog, named_in
from glowplug.services.console.fleet_view import Fetches, ShownFleet
from glowplug.services.console.records import json_response, streamed
from glowplug.services.console.request_log import RequestLog
from glowplug.services.console.stream import Hub, OpenPage, TooManyClients

STARTS_SHOWN: Final = 10


class ModelDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`why` the model is in its state, by `decision` if one is recorded."""

    now: float
    model: rows.ModelRow
    digest: str  # of its weights
    instances: list[rows.InstanceRow]
    starts: list[rows.TimedStart]
    coming: list[rows.TimedStart]
    why: str
    decision: DecisionRecord | None


def starts(instances: Iterable[Instance]) -> list[rows.TimedStart]:
    """Newest first."""
    over = [start for instance in instances if (start := rows.past_start(instance)) is not None]
    return sorted(over, key=lambda start: -start.ended_at)[:STARTS_SHOWN]


def coming(instances: Iterable[Instance], fetches: Fetches, now_s: float) -> list[rows.TimedStart]:
    """Oldest first."""
    return [
        rows.timed_start(with_fetch(instance), fetches.of(instance.model_key, instance.node_id, now_s))
        for instance in sorted(instances, key=lambda i: (i.created_at, i.instance_id))
        if instance.state.is_coming
    ]


def why_so(model_key: str, instances: Iterable[Instance], decisions: DecisionLog) -> tuple[str, DecisionRecord | None]:
    """Return the reason and the decision that placed the newest serving or starting instance; else the latest about the
    model, or one that evicted an instance of it."""
    living = sorted((i for i in instances if not i.state.is_gone), key=lambda i: (i.created_at, i.instance_id))
    active = [i for i in living if not i.state.is_dormant and i.state is not InstanceState.DRAINING]
    found = next((d for i in reversed(active) if (d := decisions.get(i.decision_id)) is not None), None)
    if found is None and not active:
        found = next((d for d in decisions.newest() if _concerns(d, model_key, decisions)), None)
    if found is not None:
        return found.reason, found
    if living:
        return living[-1].reason or "the decision that placed it is no longer on record", None
    return "no decision about it yet: no request has asked for it", None


def _concerns(record: DecisionRecord, model_key: str, decisions: DecisionLog) -> bool:
    if record.kind != "evict":
        return record.model_key == model_key
    victims = (decisions.instance(instance_id) for instance_id in named_in(record) - {record.instance_id})
    return any(victim is not None and victim.model_key == model_key for victim in victims)


def with_fetch(instance: Instance) -> Instance:
    """Add the fetch: agents report LOADING once the weights are complete in host memory."""
    if instance.state is not InstanceState.LOADING or any(phase.name is PhaseName.FETCH for phase in instance.phases):
        return instance
    created_at = instance.created_at
    fetch = Phase(name=PhaseName.FETCH, started_at=created_at, ended_at=max(created_at, instance.changed_at))
    return replace(instance, phases=(*instance.phases, fetch))


MAX_LINES = 500


def routes(
    view: ShownFleet,
    hub: Hub,
    requests: RequestLog,
    clock: Callable[[], float],
) -> APIRouter:
    """`clock`: epoch seconds."""
    router = APIRouter(prefix="/api/v1", tags=["fleet"])

    @router.get("/fleet")
    async def fleet() -> Response:
        """Models, instances, nodes, latest decisions and requests, and whether bus and store answer."""
        return json_response(view.snapshot(clock()))

    @router.get("/stream", response_class=StreamingResponse)
    async def stream() -> Response:
        """Server-sent events: `fleet` first, then `patch` and `traces`; `dropped` when this reader was too slow."""
        try:
            client = hub.join(view, clock())
        except TooManyClients as error:
            raise Contended("too many open pages", retry_after_s=5.0) from error
        return streamed(_until_gone(hub, client))

    @router.get("/requests")
    async def matching(
        model: str = Query("", max_length=256),
        state: str = Query("", max_length=32),
        q: str = Query("", max_length=200),
        limit: int = Query(200, ge=1, le=MAX_LINES),
    ) -> Response:
        """Requests held and under way, oldest first, then those that ended, newest first. `state` is one state, "live"
        or "ended"; every word of `q` must stand in an id, the model key, the error code or the status."""
        return json_response(requests.page(clock(), model=model, state=state, text=q, limit=limit))

    @router.get("/models/{key}")
    async def model(key: str) -> Response:
        """One model by key, name or alias, as its owner declared it; its instances, its latest starts and those under
        way."""
        now_s = clock()
        key = find_model(view.models, key).key
        snapshot = view.snapshot(now_s)
        mine = list(view.fleet.of(key).values())
        why, decision = why_so(key, mine, view.decisions)
        detail = ModelDetail(
            now=snapshot.now,
            model=view.model_rows.rows[key],
            digest=view.digest_of(key),
            instances=[row for row in snapshot.instances if row.value.model_key == key],
            starts=starts(view.decisions.instances_of(key)),
            coming=coming(mine, view.fetches, now_s),
            why=why,
            decision=decision,
        )
        return json_response(detail)

    return router


async def _until_gone(hub: Hub, client: OpenPage) -> AsyncIterator[bytes]:
    try:
        async for raw in client.messages():
            yield raw
    finally:
        hub.leave(client)
