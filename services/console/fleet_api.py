"""The fleet as JSON and as a stream of changes; matching requests; one model in full."""

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import Contended, ModelNotFound
from glowplug.domain.instance import Instance, InstanceState, PhaseName
from glowplug.domain.model import Model
from glowplug.services.console import fleet_rows as rows
from glowplug.services.console.decisions import DecisionLog, named_in
from glowplug.services.console.events import discreet_model
from glowplug.services.console.fleet_view import Fetches, FleetView
from glowplug.services.console.records import json_response, record_of, streamed
from glowplug.services.console.request_log import RequestLog
from glowplug.services.console.stream import Client, Hub, TooManyClients

STARTS_SHOWN: Final = 10


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """A start under way. Offsets of phases are from `began_at`."""

    instance_id: str
    node_id: str
    state: str
    began_at: float
    emulated: bool
    phases: tuple[rows.PhaseRow, ...]
    fetch: rows.FetchRow | None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The decision behind a model's state; `decision_id`: "" if none is recorded."""

    reason: str
    decision_id: str = ""
    made_at: float = 0.0


class ModelDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`model`: the fleet's row; `declared`: by its file or the API."""

    now: float
    model: rows.ModelRow
    instances: list[rows.InstanceRow]
    declared: dict[str, Any]
    starts: list[rows.Start]
    coming: list[Coming]
    why: Why


def starts(instances: Iterable[Instance]) -> list[rows.Start]:
    """Newest first."""
    over = [start for instance in instances if (start := rows.start_of(instance)) is not None]
    return sorted(over, key=lambda start: -start.ended_at)[:STARTS_SHOWN]


def coming(instances: Iterable[Instance], fetches: Fetches, now_s: float) -> list[Coming]:
    """Oldest first."""
    found = []
    for instance in sorted(instances, key=lambda i: (i.created_at, i.instance_id)):
        if instance.state.is_coming:
            began, phases = rows.began_at(instance), _phases_so_far(instance)
            fetch = fetches.of(instance.model_key, instance.node_id, now_s)
            found.append(
                record_of(Coming, instance, state=instance.state.value, began_at=began, phases=phases, fetch=fetch)
            )
    return found


def why_so(model_key: str, instances: Iterable[Instance], decisions: DecisionLog) -> Why:
    """Return the decision that placed the newest serving or starting instance; else the latest about the model, or one
    that evicted an instance of it."""
    living = sorted((i for i in instances if not i.state.is_gone), key=lambda i: (i.created_at, i.instance_id))
    active = [i for i in living if not i.state.is_dormant and i.state is not InstanceState.DRAINING]
    found = next((d for i in reversed(active) if (d := decisions.get(i.decision_id)) is not None), None)
    if found is None and not active:
        found = next((d for d in decisions.newest() if _concerns(d, model_key, decisions)), None)
    if found is not None:
        return Why(reason=found.reason, decision_id=found.decision_id, made_at=found.made_at)
    if living:
        return Why(reason=living[-1].reason or "the decision that placed it is on record no more")
    return Why(reason="nothing has been decided about it: no request has asked for it")


def _concerns(record: DecisionRecord, model_key: str, decisions: DecisionLog) -> bool:
    if record.kind != "evict":
        return record.model_key == model_key
    victims = (decisions.instance(instance_id) for instance_id in named_in(record) - {record.instance_id})
    return any(victim is not None and victim.model_key == model_key for victim in victims)


def _phases_so_far(instance: Instance) -> tuple[rows.PhaseRow, ...]:
    """Add the fetch: agents report LOADING once the weights are complete in host memory."""
    began = rows.began_at(instance)
    reported = rows.phase_rows(instance, began)
    if instance.state is not InstanceState.LOADING or any(phase.name == PhaseName.FETCH for phase in reported):
        return reported
    offset_s = instance.created_at - began
    fetch_s = max(0.0, instance.changed_at - instance.created_at)
    return (*reported, rows.PhaseRow(PhaseName.FETCH.value, offset_s, fetch_s, 0.0))


def declared(model: Model) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(discreet_model(model))
    return fields


MAX_LINES = 500


def routes(
    view: FleetView,
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
        """One model: its row, its instances, what its owner declared, its latest starts and the one under way."""
        now_s = clock()
        snapshot = view.snapshot(now_s)
        row = next((row for row in snapshot.models if row.key == key), None)
        if row is None:
            raise ModelNotFound(f"no model {key[:256]!r} is deployed", param="key")
        mine = list(view.fleet.of(key).values())
        detail = ModelDetail(
            now=snapshot.now,
            model=row,
            instances=[line for line in snapshot.instances if line.model_key == key],
            declared=declared(view.models[key]),
            starts=starts(view.decisions.instances_of(key)),
            coming=coming(mine, view.fetches, now_s),
            why=why_so(key, mine, view.decisions),
        )
        return json_response(detail)

    return router


async def _until_gone(hub: Hub, client: Client) -> AsyncIterator[bytes]:
    try:
        async for raw in client.messages():
            yield raw
    finally:
        hub.leave(client)
