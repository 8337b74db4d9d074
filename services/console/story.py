"""The life of a request and of a start, told once, by its events.

`story` draws the rows of one trace id: ends of requests, decisions, instances and fetches. The page's waterfall and the
exported spans (span_export.py) are these rows. Ids of rows are hashes, so that the same events always give the same
spans; the row `engine.generate` has the id that the engine was given, so that the engine's own spans come below it, and
`router.request` is below the client's span.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Final, Protocol

import msgspec

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import BEFORE_START, Instance, InstanceState, Phase, PhaseName, Spell, SpellName
from glowplug.events import Event
from glowplug.events.facts import STAYS, RequestFinished, StreamMove, WeightsFetchFailed
from glowplug.fleet.start_times import StartKind
from glowplug.services.console.decisions import named_in
from glowplug.services.console.records import Newest
from glowplug.telemetry import semconv
from glowplug.telemetry.tracing import parse_traceparent

AttributeValue = bool | int | float | str
Attributes = dict[str, AttributeValue]

MAX_PARTS: Final = 256  # of each kind: a client may send many requests under its own trace
REQUEST, HOLD, GENERATE, CONTINUE = "router.request", "router.hold", "engine.generate", "router.continue"
ROUTER, AGENT, ENGINE, PREFETCHER = "glowplug-router", "glowplug-agent", "glowplug-engine", "glowplug-prefetcher"
FIRST_TOKEN: Final = "first token"
SERVER, CLIENT, INTERNAL = "server", "client", "internal"
_ENGINES_OWN = (PhaseName.LAUNCH, PhaseName.LOAD, PhaseName.WARMUP)
_WAKES = frozenset({StartKind.WAKE.value, StartKind.GROWTH.value})
_WAITS = {
    PhaseName.DECIDE: "agent.await_decision",
    PhaseName.ROOM: "agent.await_room",
    PhaseName.FETCH: "agent.await_weights",
}
_SPELLS = {
    SpellName.DRAIN: (AGENT, "agent.drain"),
    SpellName.SLEEP: (ENGINE, "engine.sleep"),
    SpellName.CONSOLIDATE: (AGENT, "agent.consolidate"),
}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    at: float
    attributes: Attributes = {}


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Epoch seconds. `parent_id` may be that of a row not here: of a client, or of a request that is not over.
    `process`: the one that did it."""

    span_id: str
    parent_id: str
    name: str
    service: str
    process: str
    started_at: float
    ended_at: float
    kind: str = INTERNAL
    error: str = ""
    phase: str = ""
    attributes: Attributes = {}
    marks: tuple[Mark, ...] = ()


class Told:
    """The facts of one trace id. `starts`: instances as their start ended; `lives`: as they are, for their spells.
    `number`: order of coming."""

    def __init__(self, trace_id: str, number: int = 0) -> None:
        self.trace_id, self.number = trace_id, number
        self.requests: Newest[tuple[str, str], tuple[RequestFinished, str]] = Newest(MAX_PARTS)
        self.decisions: Newest[str, DecisionRecord] = Newest(MAX_PARTS)
        self.starts: Newest[str, Instance] = Newest(MAX_PARTS)
        self.lives: Newest[str, Instance] = Newest(MAX_PARTS)
        self.fetches: Newest[str, Event] = Newest(MAX_PARTS)
        self.is_sampled = False
        self.revision = 0


class Names(Protocol):
    """Models and instances, for a story that names them."""

    def model_name(self, model_key: str) -> str: ...

    def instance(self, instance_id: str) -> Instance | None: ...


def trace_of(traceparent: str) -> str:
    context = parse_traceparent(traceparent)
    return context.trace_id if context is not None else ""


def trace_of_its_own(*names: str) -> str:
    """Return the trace id of a start that no request caused."""
    return _hash(16, *names)


def span_id_of(*names: object) -> str:
    return _hash(8, *names)


def has_started(instance: Instance) -> bool:
    """Return whether its start is over, as READY or FAILED."""
    is_ready = bool(instance.start_kind) or (instance.ready_at > 0 and not instance.replica)
    return is_ready or (instance.state is InstanceState.FAILED and not instance.ready_at)


def story(told: Told, names: Names) -> list[Span]:
    """Return the rows, in no order."""
    return [
        *(row for fact, traceparent in told.requests.values() for row in _request(names, fact, traceparent)),
        *(_decision(told, record) for record in told.decisions.values()),
        *(row for instance in told.starts.values() for row in _start(told, instance)),
        *(row for instance in told.lives.values() for row in _life(told, instance)),
        *(_fetch(told, event) for event in told.fetches.values()),
    ]


def tree(rows: Iterable[Span]) -> Iterator[tuple[Span, int, int]]:
    """Yield each row once with its depth and number of children, depth first, siblings by start."""
    in_order = sorted({row.span_id: row for row in rows}.values(), key=lambda r: (r.started_at, -r.ended_at, r.span_id))
    known = {row.span_id for row in in_order}
    children: dict[str, list[Span]] = {}
    for row in in_order:
        is_below = row.parent_id in known and row.parent_id != row.span_id
        children.setdefault(row.parent_id if is_below else "", []).append(row)
    stack = [(row, 0) for row in reversed(children.get("", []))]
    while stack:
        row, depth = stack.pop()
        mine = children.get(row.span_id, [])
        yield row, depth, len(mine)
        stack.extend((child, depth + 1) for child in reversed(mine))


# requests


def _request(names: Names, fact: RequestFinished, traceparent: str) -> Iterator[Span]:
    own = _own_id(fact, traceparent)
    root, sent_at = span_id_of(own, REQUEST), _sent_at(fact)
    error = fact.error_code if fact.status >= 500 else ""
    row = partial(Span, service=ROUTER, process=fact.router_id)
    yield row(
        span_id=root,
        parent_id=fact.parent_span,
        name=REQUEST,
        started_at=fact.arrived_at,
        ended_at=fact.finished_at,
        kind=SERVER,
        error=error,
        attributes=_asked(names, fact),
        marks=tuple(
            Mark(name=STAYS, at=move.at, attributes={semconv.ATTR_REASON: move.message})
            for move in fact.moves
            if move.outcome == STAYS
        ),
    )
    if fact.held:
        yield row(
            span_id=span_id_of(own, HOLD),
            parent_id=root,
            name=HOLD,
            started_at=fact.arrived_at,
            ended_at=sent_at or fact.finished_at,
            error="" if sent_at else error,
            attributes={semconv.ATTR_MODEL: fact.model_key, semconv.ATTR_PREDICTED_SECONDS: fact.eta_s},
        )
    if sent_at:
        yield row(
            span_id=own,
            parent_id=root,
            name=GENERATE,
            started_at=sent_at,
            ended_at=fact.finished_at,
            kind=CLIENT,
            error=error,
            attributes=_generated(fact, names.instance(fact.instance_id)),
            marks=_begun(fact),
        )
    for number, move in enumerate(fact.moves):
        if move.outcome != STAYS:
            yield row(
                span_id=span_id_of(own, CONTINUE, number),
                parent_id=root,
                name=CONTINUE,
                started_at=move.at,
                ended_at=move.until,
                error=error if move.until >= fact.finished_at else "",
                attributes=_moved(move),
            )


def _asked(names: Names, fact: RequestFinished) -> Attributes:
    said: Attributes = {
        semconv.ATTR_REQUEST_ID: fact.request_id,
        semconv.ATTR_MODEL: fact.model_key,
        semconv.GEN_AI_REQUEST_MODEL: names.model_name(fact.model_key),
        semconv.GEN_AI_OPERATION: fact.operation,
        "http.response.status_code": fact.status,
        "glowplug.cold": fact.cold,
        semconv.ATTR_DROPPED_TOOLS: ", ".join(fact.dropped_tools),
    }
    return {name: value for name, value in said.items() if value != ""}


def _own_id(fact: RequestFinished, traceparent: str) -> str:
    """Return the span id that its engine was given; one of its own where that is its client's, or none."""
    context = parse_traceparent(traceparent)
    if context is None or context.span_id == fact.parent_span:
        return span_id_of(fact.router_id, fact.request_id, fact.arrived_at)
    return context.span_id


def _sent_at(fact: RequestFinished) -> float:
    """Return when it first went to an engine; 0 if never. Old routers tell only how long it waited."""
    waited_s = fact.dispatched_s or (fact.queue_s if fact.ttft_s else 0.0)
    return fact.arrived_at + waited_s if waited_s or fact.ttft_s else 0.0


def _generated(fact: RequestFinished, instance: Instance | None) -> Attributes:
    return {
        semconv.ATTR_INSTANCE_ID: fact.instance_id,
        semconv.ATTR_NODE_ID: instance.node_id if instance is not None else "",
        semconv.ATTR_GPU_ID: instance.gpu_id if instance is not None else "",
        semconv.ATTR_EMULATED: fact.emulated,
        semconv.GEN_AI_INPUT_TOKENS: fact.prompt_tokens,
        semconv.GEN_AI_OUTPUT_TOKENS: fact.response_tokens,
    }


def _begun(fact: RequestFinished) -> tuple[Mark, ...]:
    name = FIRST_TOKEN if fact.stream else "first byte"
    return (Mark(name=name, at=fact.arrived_at + fact.ttft_s),) if fact.ttft_s else ()


def _moved(move: StreamMove) -> Attributes:
    said: Attributes = {
        semconv.ATTR_CONTINUE_REASON: move.reason,
        semconv.ATTR_REASON: move.message,
        semconv.ATTR_TOKENS_BEFORE: move.num_tokens,
        semconv.ATTR_FROM_INSTANCE: move.from_instance,
    }
    if move.to_instance:
        said[semconv.ATTR_INSTANCE_ID] = move.to_instance
    if move.outcome:
        said[semconv.ATTR_CONTINUE_OUTCOME] = f"it stayed: {move.outcome}"
    return said


# decisions


def _decision(told: Told, record: DecisionRecord) -> Span:
    scaled = (
        other.decision_id
        for other in told.decisions.values()
        if other.kind == "scale" and other.instance_id == record.instance_id and other.made_at <= record.made_at
    )
    above = next(scaled, "") if record.instance_id and record.kind != "scale" else ""
    about: Attributes = {
        semconv.ATTR_MODEL: record.model_key,
        semconv.ATTR_INSTANCE_ID: record.instance_id,
        semconv.ATTR_DECISION_ID: record.decision_id,
        semconv.ATTR_REASON: record.reason,
    }
    return Span(
        span_id=span_id_of(record.decision_id),
        parent_id=span_id_of(above) if above else _root(told, record.traceparent, record.request_id),
        name=f"{record.service}.{record.kind}",
        service=f"glowplug-{record.service}",
        process=record.service,
        started_at=record.made_at,
        ended_at=record.made_at,
        attributes={name: value for name, value in about.items() if value},
    )


def _root(told: Told, traceparent: str, request_id: str = "") -> str:
    """Return the row of the request that caused it, which may not be over."""
    for fact, its in told.requests.values():
        if fact.request_id == request_id:
            return span_id_of(_own_id(fact, its), REQUEST)
    context = parse_traceparent(traceparent)
    return span_id_of(context.span_id, REQUEST) if context is not None else ""


# instances


def _life(told: Told, instance: Instance) -> Iterator[Span]:
    for spell in instance.spells:
        if (trace_of(spell.traceparent) or trace_of_its_own(instance.instance_id)) == told.trace_id:
            yield from _spell(told, instance, spell)


def _start(told: Told, instance: Instance) -> Iterator[Span]:
    is_ready, about = instance.ready_at > 0, _about(instance)
    above = span_id_of(instance.decision_id) if instance.decision_id in told.decisions else ""
    own = span_id_of(instance.instance_id, "start")
    said = f"it is ready after {instance.ready_at - instance.created_at:.2f} s" if is_ready else instance.reason
    yield Span(
        span_id=own,
        parent_id=above,
        name="agent.start",
        service=AGENT,
        process=f"agent-{instance.node_id}",
        started_at=instance.created_at,
        ended_at=instance.ready_at if is_ready else instance.changed_at,
        error="" if is_ready else instance.reason or "failed",
        attributes={**about, semconv.ATTR_DECISION_ID: instance.decision_id, semconv.ATTR_REASON: said},
    )
    wakes = instance.start_kind in _WAKES
    for phase in instance.phases:
        if phase.name in _ENGINES_OWN:
            does = "wake" if wakes and phase.name is PhaseName.LOAD else phase.name.value
            service, name = ENGINE, f"engine.{does}"
        else:
            service, name = AGENT, _WAITS[phase.name]
        yield _phase(instance, phase, above if phase.name in BEFORE_START else own, service, name, about)


def _phase(
    instance: Instance, phase: Phase, parent_id: str, service: str, name: str, about: Attributes, *, stage: bool = True
) -> Span:
    more: Attributes = {}
    if phase.predicted_s:
        more[semconv.ATTR_PREDICTED_SECONDS] = phase.predicted_s
    if stage:
        more[semconv.ATTR_PHASE] = phase.name.value
    return Span(
        span_id=span_id_of(instance.instance_id, name, phase.name, phase.started_at),
        parent_id=parent_id,
        name=name,
        service=service,
        process=_process(instance, service),
        started_at=phase.started_at,
        ended_at=phase.ended_at,
        phase=phase.name.value if stage else "",
        attributes={**about, **more},
    )


def _spell(told: Told, instance: Instance, spell: Spell) -> Iterator[Span]:
    about = _about(instance)
    own, above = _spell_id(instance, spell), _above(told, instance, spell)
    service, name = _SPELLS[spell.name]
    more: Attributes = {semconv.ATTR_REASON: spell.reason}
    if spell.predicted_s:
        more[semconv.ATTR_PREDICTED_SECONDS] = spell.predicted_s
    yield Span(
        span_id=own,
        parent_id=above,
        name=name,
        service=service,
        process=_process(instance, service),
        started_at=spell.started_at,
        ended_at=spell.ended_at,
        error=spell.error,
        attributes={**about, **more},
    )
    for phase in spell.phases:
        is_fetch = phase.name is PhaseName.FETCH
        service, name = (AGENT, "agent.await_rest") if is_fetch else (ENGINE, "engine.consolidate")
        yield _phase(instance, phase, own, service, name, about, stage=False)


def _above(told: Told, instance: Instance, spell: Spell) -> str:
    """Return the latest decision about it; else the consolidation that left a later stage over; else the request."""
    asked = (r for r in told.decisions.values() if instance.instance_id in named_in(r) and r.made_at <= spell.ended_at)
    if latest := max(asked, key=lambda r: r.made_at, default=None):
        return span_id_of(latest.decision_id)
    if whole := told.lives.get(instance.part_of):
        for grown in whole.spells:
            if grown.name is SpellName.CONSOLIDATE and not grown.error:
                return _spell_id(whole, grown)
    return _root(told, spell.traceparent)


def _spell_id(instance: Instance, spell: Spell) -> str:
    return span_id_of(instance.instance_id, spell.name, spell.started_at)


def _process(instance: Instance, service: str) -> str:
    return f"{instance.node_id}-engines" if service == ENGINE else f"agent-{instance.node_id}"


def _about(instance: Instance) -> Attributes:
    about: Attributes = {
        semconv.ATTR_MODEL: instance.model_key,
        semconv.ATTR_INSTANCE_ID: instance.instance_id,
        semconv.ATTR_NODE_ID: instance.node_id,
        semconv.ATTR_GPU_ID: instance.gpu_id,
        semconv.ATTR_ENGINE: instance.engine,
        semconv.ATTR_EMULATED: instance.emulated,
    }
    if not instance.is_whole:
        about[semconv.ATTR_PIPELINE] = instance.part_of or instance.instance_id
    return about


# fetches


def _fetch(told: Told, event: Event) -> Span:
    fact = event.data
    is_failure = isinstance(fact, WeightsFetchFailed)
    instance_id = getattr(fact, "instance_id", "") or _started_on(told, fact.node_id, fact.model_key)
    placed = (r for r in told.decisions.values() if r.kind == "place" and r.model_key == fact.model_key)
    above = next((r.decision_id for r in placed if not instance_id or _is_of(instance_id, r.instance_id)), "")
    about: Attributes = {
        semconv.ATTR_MODEL: fact.model_key,
        semconv.ATTR_NODE_ID: fact.node_id,
        semconv.ATTR_DIGEST: fact.digest,
        semconv.ATTR_SOURCE: fact.source,
    }
    if not is_failure:
        about |= {
            semconv.ATTR_BYTES: fact.num_bytes,
            semconv.ATTR_RESUMED_BYTES: fact.resumed_bytes,
            semconv.ATTR_RETRIES: fact.num_retries,
        }
    if instance_id:
        about[semconv.ATTR_INSTANCE_ID] = instance_id
    return Span(
        span_id=span_id_of(event.event_id),
        parent_id=span_id_of(above) if above else _root(told, event.traceparent),
        name="weights.fetch",
        service=PREFETCHER,
        process=event.issuer,
        started_at=event.occurred_at - fact.seconds,
        ended_at=event.occurred_at,
        error=f"{fact.code}: {fact.message}" if is_failure else "",
        attributes=about,
    )


def _started_on(told: Told, node_id: str, model_key: str) -> str:
    """Return the instance that whole weights were fetched for, which the fact does not name."""
    there = (one for one in told.starts.values() if (one.node_id, one.model_key) == (node_id, model_key))
    return next((one.instance_id for one in there), "")


def _is_of(instance_id: str, whole_id: str) -> bool:
    """Return whether it is this instance or a later stage of it."""
    return f"{instance_id}.".startswith(f"{whole_id}.")


def _hash(size: int, *names: object) -> str:
    return blake2b("/".join(map(str, names)).encode(), digest_size=size).hexdigest()
