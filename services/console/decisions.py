"""The latest decisions of the fleet, and the starts they led to, as JSON.

Pure. Bounded by `max_decisions`; the latest `INSTANCES_KEPT` instances stay, also when gone."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import NotFound
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.facts import DecisionMade, InstanceChange, ModelDeployed, ModelUndeployed
from glowplug.runtime.decision_search import DecisionSearch
from glowplug.services.console.events import EventLog, EventRow
from glowplug.services.console.fleet_rows import DecisionMarks, DecisionRow, FleetRow, TimedStart, timed_start
from glowplug.services.console.records import Newest, json_response
from glowplug.telemetry.tracing import trace_id_of

INSTANCES_KEPT: Final = 4000
RELATED_SHOWN: Final = 50
MAX_LINES: Final = 500


class DecisionLog:
    def __init__(self, *, max_decisions: int = 2000) -> None:
        self._records: Newest[str, DecisionRecord] = Newest(max_decisions)
        self._events: Newest[str, str] = Newest(max_decisions)  # decision id -> event id
        self._instances: Newest[str, Instance] = Newest(INSTANCES_KEPT)
        self._emulated: dict[str, bool] = {}  # by model key

    def __len__(self) -> int:
        return len(self._records)

    def take(self, event: Event) -> None:
        """Apply an event of a decision, an instance or a model; ignore others."""
        data = event.data
        if isinstance(data, DecisionMade):
            record = data.decision
            self._events.put(record.decision_id, event.event_id)
            record = replace(record, traceparent=record.traceparent or event.traceparent)
            if record.decision_id in self._records:
                self._records[record.decision_id] = record  # the store's may lack the trace
            self.put(record)
        elif isinstance(data, InstanceChange):
            self.put_instance(data.instance)
        elif isinstance(data, ModelDeployed):
            self.put_model(data.model)
        elif isinstance(data, ModelUndeployed):
            self._emulated.pop(data.model_key, None)

    def put(self, record: DecisionRecord) -> None:
        if record.decision_id in self._records:
            return
        self._records.put(record.decision_id, record)
        if engine := record.inputs.get("engine"):
            self._emulated[record.model_key] = engine == "emulated"

    def restore(self, records: Iterable[DecisionRecord]) -> None:
        """Merge the tail of the fleet's log, in any order."""
        missing = [record for record in records if record.decision_id not in self._records]
        newest_known = max((r.made_at for r in self._records.values()), default=0.0)
        if any(record.made_at < newest_known for record in missing):
            missing += self._records.values()
            self._records.clear()
        for record in sorted(missing, key=lambda r: (r.made_at, r.decision_id)):
            self.put(record)

    def put_instance(self, instance: Instance) -> None:
        """An older revision never wins."""
        known = self._instances.get(instance.instance_id)
        if known is None or instance.revision > known.revision:
            self._instances.put(instance.instance_id, instance)

    def put_model(self, model: Model) -> None:
        self._emulated[model.key] = model.engine == "emulated"

    def get(self, decision_id: str) -> DecisionRecord | None:
        return self._records.get(decision_id)

    def event_of(self, decision_id: str) -> str:
        """ "" if read from the store."""
        return self._events.get(decision_id, "")

    def instance(self, instance_id: str) -> Instance | None:
        return self._instances.get(instance_id)

    def instances_of(self, model_key: str) -> Iterator[Instance]:
        """Latest change first."""
        return (one for one in reversed(self._instances.values()) if one.model_key == model_key)

    def newest(self, wanted: DecisionSearch = DecisionSearch()) -> Iterator[DecisionRecord]:
        return (record for record in reversed(self._records.values()) if wanted.wants(record))

    def latest(self, num: int) -> list[DecisionRecord]:
        """Newest first."""
        return list(islice(reversed(self._records.values()), num))

    def row(self, record: DecisionRecord) -> DecisionRow:
        trace_id = trace_id_of(record.traceparent)
        return FleetRow(record, DecisionMarks(trace_id=trace_id, emulated=self.is_emulated(record)))

    def is_emulated(self, record: DecisionRecord) -> bool:
        instances = (self.instance(instance_id) for instance_id in named_in(record))
        return self._emulated.get(record.model_key, False) or any(one.emulated for one in instances if one)

    def related(self, record: DecisionRecord) -> list[DecisionRecord]:
        """Return decisions on the same instance, its victims or the same request, oldest first."""
        ids = named_in(record)
        trace_id = trace_id_of(record.traceparent)
        found = [
            other
            for other in reversed(self._records.values())
            if other.decision_id != record.decision_id
            and (
                ids & named_in(other)
                or (record.request_id and other.request_id == record.request_id)
                or (trace_id and trace_id_of(other.traceparent) == trace_id)
            )
        ]
        return found[:RELATED_SHOWN][::-1]

    def facets(self) -> dict[str, list[str]]:
        records = self._records.values()
        return {
            name: sorted({str(getattr(r, field)) for r in records} - {""})
            for name, field in (("kind", "kind"), ("policy", "policy"), ("service", "service"), ("node", "node_id"))
        }


def named_in(record: DecisionRecord) -> set[str]:
    victims = record.chosen.split(", ") if record.kind == "evict" else []
    return {record.instance_id, *(victim for victim in victims if " " not in victim)} - {""}


class DecisionList(msgspec.Struct, frozen=True, kw_only=True):
    """Newest first. `num_matching` may exceed the lines; `facets`: filter values."""

    decisions: list[DecisionRow]
    num_matching: int
    num_kept: int
    facets: dict[str, list[str]]


class DecisionPage(msgspec.Struct, frozen=True, kw_only=True):
    """`chain`: causes, nearest first; `is_whole` False if an older cause was dropped. `outcome`: the start that it led
    to."""

    decision: DecisionRow
    event_id: str
    chain: list[EventRow]
    is_whole: bool
    outcome: TimedStart | None
    victims: list[Instance]
    related: list[DecisionRow]
    command: str


def routes(decisions: DecisionLog, events: EventLog) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["decisions"])

    @router.get("/decisions")
    async def latest(
        wanted: Annotated[DecisionSearch, Depends()], limit: int = Query(200, ge=1, le=MAX_LINES)
    ) -> Response:
        """Decisions, newest first; filters are exact, `q` looks anywhere, `instance` finds victims too."""
        found = list(decisions.newest(wanted))
        return json_response(
            DecisionList(
                decisions=[decisions.row(record) for record in found[:limit]],
                num_matching=len(found),
                num_kept=len(decisions),
                facets=decisions.facets(),
            )
        )

    @router.get("/decisions/{decision_id}")
    async def one(decision_id: str) -> Response:
        """One decision: rule, inputs, rivals, causes, outcome, and related decisions."""
        record = decisions.get(decision_id)
        if record is None:
            raise NotFound(f"the console has no decision {decision_id[:64]}: it keeps the newest")
        return json_response(_page(record, decisions, events))

    return router


def _page(record: DecisionRecord, decisions: DecisionLog, events: EventLog) -> DecisionPage:
    chain, is_whole = events.chain(record.cause_id)
    placed = decisions.instance(record.instance_id)
    victims = sorted(named_in(record) - {record.instance_id})
    subject = record.instance_id or record.model_key or record.gpu_id or record.node_id or record.decision_id
    return DecisionPage(
        decision=decisions.row(record),
        event_id=decisions.event_of(record.decision_id),
        chain=chain,
        is_whole=is_whole,
        outcome=timed_start(placed) if placed is not None else None,
        victims=[victim for name in victims if (victim := decisions.instance(name)) is not None],
        related=[decisions.row(other) for other in decisions.related(record)],
        command=shlex.join(["glowplug", "why", subject]),
    )
