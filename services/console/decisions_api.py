"""Decisions as JSON: a list with filters, and one with its inputs, rivals, causes and what came of it."""

import shlex
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import NotFound
from services.console.decisions import DecisionLine, DecisionLog, DecisionWanted, Outcome, named_in
from services.console.events import EventLog, EventRow
from services.console.trace_api import json_response

MAX_LINES: Final = 500
_Text = Annotated[str, Query(max_length=200)]


class DecisionList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first. `num_matching` may be more than the lines given; `facets` are the values there are."""

    decisions: list[DecisionLine]
    num_matching: int
    num_kept: int
    facets: dict[str, list[str]]


class DecisionPage(msgspec.Struct, frozen=True, kw_only=True):
    """One decision whole. `chain` is its cause and so on up; `is_whole` False when an older cause is kept no more."""

    line: DecisionLine
    record: DecisionRecord
    event_id: str
    chain: list[EventRow]
    is_whole: bool
    outcome: Outcome | None
    victims: list[Outcome]
    related: list[DecisionLine]
    command: str


def asked_for(
    kind: _Text = "", policy: _Text = "", service: _Text = "", model: _Text = "", node: _Text = "", gpu: _Text = "",
    instance: _Text = "", request: _Text = "", trace: _Text = "", q: _Text = "",
) -> DecisionWanted:  # fmt: skip
    """The search of a query."""
    return DecisionWanted(
        kind=kind, policy=policy, service=service, model=model, node=node, gpu=gpu, instance=instance,
        request=request, trace=trace.lower(), text=q.strip(),
    )  # fmt: skip


def routes(decisions: DecisionLog, events: EventLog) -> APIRouter:
    """`events` gives the causes of decisions."""
    router = APIRouter(prefix="/api/v1", tags=["decisions"])

    @router.get("/decisions")
    async def latest(
        wanted: Annotated[DecisionWanted, Depends(asked_for)], limit: int = Query(200, ge=1, le=MAX_LINES)
    ) -> Response:
        """What was decided, newest first; filters are exact, `q` looks anywhere, `instance` finds victims too."""
        found = list(decisions.newest(wanted))
        return json_response(
            DecisionList(
                decisions=[decisions.line(record) for record in found[:limit]],
                num_matching=len(found),
                num_kept=len(decisions),
                facets=decisions.facets(),
            )
        )

    @router.get("/decisions/{decision_id}")
    async def one(decision_id: str) -> Response:
        """One decision: rule, inputs, rivals, the events that led to it, what came of it, and what belongs to it."""
        record = decisions.get(decision_id)
        if record is None:
            raise NotFound(f"decision {decision_id[:64]} is not here (the newest are kept)")
        return json_response(_page(record, decisions, events))

    return router


def _page(record: DecisionRecord, decisions: DecisionLog, events: EventLog) -> DecisionPage:
    chain = events.chain(record.cause_id)
    victims = sorted(named_in(record) - {record.instance_id})
    subject = record.instance_id or record.model_key or record.gpu_id or record.node_id or record.decision_id
    return DecisionPage(
        line=decisions.line(record),
        record=record,
        event_id=decisions.event_of(record.decision_id),
        chain=chain,
        is_whole=not (chain[-1].cause_id if chain else record.cause_id),
        outcome=decisions.outcome(record.instance_id),
        victims=[outcome for victim in victims if (outcome := decisions.outcome(victim))],
        related=[decisions.line(other) for other in decisions.related(record)],
        command=shlex.join(["glowplug", "why", subject]),
    )
