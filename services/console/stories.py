"""The stories that the console keeps, by trace id.

Those of requests alone have a ring of their own, so that many warm requests displace no start. The events of sampled
ones are on disk, so that they outlive their console."""

import asyncio
import heapq
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.envelope import MalformedEvent, decode, encode
from glowplug.events.facts import (
    DecisionMade,
    InstanceChange,
    RouterRequestsFinished,
    WeightsFetched,
    WeightsFetchFailed,
    WeightsPartFetched,
)
from glowplug.services.console.decisions import INSTANCES_KEPT, DecisionLog
from glowplug.services.console.records import Newest
from glowplug.services.console.story import Span, Told, has_started, story, trace_of, trace_of_its_own, tree
from glowplug.telemetry import semconv
from glowplug.telemetry.tracing import is_sampled

log = logging.getLogger(__name__)
MAX_REQUEST_IDS: Final = 8
CHANGES_TOLD: Final = 64  # per beat, the newest
CACHE: Final = "cache"  # source of weights that were in host memory
MAX_BYTES: Final = 16 << 20  # of one file
MAX_PENDING: Final = 10_000
WRITE_EVERY_S: Final = 0.5


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`start_at`: epoch seconds; `revision` grows with each change."""

    trace_id: str
    start_at: float
    duration_s: float
    name: str
    service: str
    model: str
    request_ids: tuple[str, ...]
    services: tuple[str, ...]
    num_spans: int
    num_errors: int
    is_cold: bool
    is_emulated: bool
    revision: int


class Stories:
    """`models` by key. `on_change` gets each story that changes."""

    def __init__(self, num_kept: int, decisions: DecisionLog, models: Mapping[str, Model]) -> None:
        self._decisions, self._models = decisions, models
        self.on_change: Callable[[Told], None] = lambda _: None
        self._of_requests: Newest[str, Told] = Newest(num_kept)
        self._of_starts: Newest[str, Told] = Newest(num_kept)
        self._by_request: Newest[str, str] = Newest(2 * num_kept)
        self._instances: Newest[str, tuple[Any, ...]] = Newest(INSTANCES_KEPT)  # as told
        self._traceparents: Newest[str, str] = Newest(INSTANCES_KEPT)  # of decisions
        self._summaries: Newest[str, TraceSummary] = Newest(2 * num_kept)
        self._changed: Newest[str, None] = Newest(CHANGES_TOLD)
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._of_requests) + len(self._of_starts)

    @property
    def num_evicted(self) -> int:
        return self._num_begun - len(self)

    # stories look these up

    def model_name(self, model_key: str) -> str:
        return self._models[model_key].name if model_key in self._models else model_key

    def instance(self, instance_id: str) -> Instance | None:
        return self._decisions.instance(instance_id)

    def take(self, event: Event) -> bool:
        """Take an event that `self._decisions` has taken. Returns whether a story keeps it."""
        match event.data:
            case RouterRequestsFinished() as report:
                for fact, traceparent in report.traced():
                    key = (fact.router_id, fact.request_id)
                    told = self._told(trace_of(traceparent) or trace_of_its_own(*key))
                    told.requests.put(key, (fact, traceparent))
                    self._by_request.put(fact.request_id, told.trace_id)
                    self._touch(told, traceparent)
                return True
            case DecisionMade(decision=made):
                record = self._decisions.get(made.decision_id)
                if record is None or not record.traceparent:
                    return False
                self._traceparents.put(record.decision_id, record.traceparent)
                told = self._start(trace_of(record.traceparent))
                told.decisions.put(record.decision_id, record)
                self._touch(told, record.traceparent)
                return True
            case WeightsFetched() | WeightsPartFetched() | WeightsFetchFailed() as fact if event.traceparent:
                if fact.source != CACHE:
                    told = self._start(trace_of(event.traceparent))
                    told.fetches.put(event.event_id, event)
                    self._touch(told, event.traceparent)
                    return True
            case data if isinstance(data, InstanceChange):
                return self._take_instance(data.instance)
        return False

    def _take_instance(self, instance: Instance) -> bool:
        name, is_over = instance.instance_id, has_started(instance)
        tells = is_over, instance.ready_at, instance.phases if is_over else (), instance.spells
        before = self._instances.get(name)
        if not (is_over or instance.spells) or before == tells:
            return False
        self._instances.put(name, tells)
        if is_over and not (before and before[0]):
            self._tell(instance, self._traceparents.get(instance.decision_id, "")).starts.put(name, instance)
        for traceparent in {spell.traceparent for spell in instance.spells}:
            self._tell(instance, traceparent).lives.put(name, instance)
        return True

    def _tell(self, instance: Instance, traceparent: str) -> Told:
        told = self._start(trace_of(traceparent) or trace_of_its_own(instance.instance_id))
        self._touch(told, traceparent)
        return told

    def _told(self, trace_id: str) -> Told:
        told = self._of_starts.get(trace_id) or self._of_requests.get(trace_id)
        if told is None:
            self._num_begun += 1
            told = Told(trace_id, self._num_begun)
            self._of_requests.put(trace_id, told)
        return told

    def _start(self, trace_id: str) -> Told:
        told = self._told(trace_id)
        if self._of_requests.pop(trace_id, None) is not None:
            self._of_starts.put(trace_id, told)
        return told

    def _touch(self, told: Told, traceparent: str) -> None:
        told.revision += 1
        told.is_sampled = told.is_sampled or not traceparent or is_sampled(traceparent)
        self._changed.put(told.trace_id, None)
        self.on_change(told)

    def get(self, trace_id: str) -> Told | None:
        """Short ids are zero-padded, as in Jaeger."""
        key = trace_id.strip().lower().rjust(32, "0")
        return self._of_starts.get(key) or self._of_requests.get(key)

    def of_request(self, request_id: str) -> Told | None:
        return self.get(self._by_request.get(request_id, ""))

    def rows(self, told: Told) -> list[Span]:
        return story(told, self)

    def newest(self) -> Iterator[TraceSummary]:
        rings = (reversed(ring.values()) for ring in (self._of_requests, self._of_starts))
        both = heapq.merge(*rings, key=lambda told: told.number, reverse=True)
        return (found for told in both if (found := self.summary(told)) is not None)

    def take_changed(self) -> list[TraceSummary]:
        """Return the summaries of those that changed since the last call."""
        changed = [told for trace_id in self._changed if (told := self.get(trace_id)) is not None]
        self._changed.clear()
        return [found for told in changed if (found := self.summary(told)) is not None]

    def summary(self, told: Told) -> TraceSummary | None:
        """None while nothing of it is over."""
        known = self._summaries.get(told.trace_id)
        if known is None or known.revision != told.revision:
            known = summary_of(told, self.rows(told))
            if known is not None:
                self._summaries.put(told.trace_id, known)
        return known


def summary_of(told: Told, rows: list[Span]) -> TraceSummary | None:
    if not rows:
        return None
    first, _, _ = next(tree(rows))
    start_at = min(row.started_at for row in rows)
    asked = [fact for fact, _ in told.requests.values()]
    models = (row.attributes.get(semconv.ATTR_MODEL) for row in rows)
    return TraceSummary(
        trace_id=told.trace_id,
        start_at=start_at,
        duration_s=max(row.ended_at for row in rows) - start_at,
        name=first.name,
        service=first.service,
        model=asked[0].model_key if asked else str(next(filter(None, models), "")),
        request_ids=tuple(fact.request_id for fact in asked[:MAX_REQUEST_IDS]),
        services=tuple(sorted({row.service for row in rows})),
        num_spans=len(rows),
        num_errors=sum(bool(row.error) for row in rows),
        is_cold=any(row.phase for row in rows),
        is_emulated=any(row.attributes.get(semconv.ATTR_EMULATED) is True for row in rows),
        revision=told.revision,
    )


class StoryDisk:
    """A file with an event of JSON per line. At `max_bytes` it replaces `<name>.1`, and a new one begins. `read` and
    `write` block. A disk that refuses costs only the copy, and is tried again."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)
        self._has_failed = False

    def read(self) -> Iterator[Event]:
        """Yield the events, oldest first. A line cut short by a kill, or written by a newer version, is left out."""
        for path in (self._older, self._path):
            try:
                lines = path.read_bytes().splitlines() if path.exists() else []
            except OSError as error:
                self._failed(error)
                continue
            for line in lines:
                try:
                    yield decode(line)
                except MalformedEvent:
                    continue

    def keep(self, event: Event) -> None:
        if isinstance(event.data, RouterRequestsFinished):
            ends = [end for end in event.data.traced() if is_sampled(end[1])]
            if not ends:
                return
            requests, traceparents = zip(*ends, strict=True)
            event = replace(event, data=replace(event.data, requests=requests, traceparents=traceparents))
        elif event.traceparent and not is_sampled(event.traceparent):
            return
        self._pending.append(encode(event))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            if self._pending:
                await asyncio.to_thread(self.write)

    def write(self) -> None:
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        if not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.write(b"\n" + b"\n".join(lines) + b"\n")  # behind the remains of a failed write
                num_bytes = file.tell()
            if num_bytes >= self._max_bytes:
                self._path.replace(self._older)
            self._has_failed = False
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            log.warning("the console cannot use %s and keeps traces in memory only: %s", self._path, error)
        self._has_failed = True
