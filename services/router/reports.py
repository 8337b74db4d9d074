"""What a router reports: each finished request as a fact, its loads, the requests that are live; and how these leave.

The outbox never makes a request wait for the bus: its queues are bounded, and the oldest are dropped and counted.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from glowplug.bus.port import Bus, BusUnavailable
from glowplug.controllers.effects import Publish
from glowplug.domain.snapshot import LiveRequest
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, RouterRequestsReported
from glowplug.events.subjects import is_telemetry
from glowplug.fleet.demand import LoadReporter
from services.router.exchange import Exchange
from services.router.metrics import RouterMetrics
from services.router.request_table import RequestTable
from services.router.tracing import event_id

log = logging.getLogger(__name__)
Put = Callable[..., None]  # Outbox.put


@dataclass(slots=True)
class _Lane:
    """One queue, sent by one task, so that order is kept."""

    waiting: deque[tuple[Any, str, str]] = field(default_factory=deque)  # payload, id and trace of its cause
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """Facts and telemetry have a lane each: a fact waits for the bus to store it, telemetry waits for nothing."""

    def __init__(self, bus: Bus, router_id: str, metrics: RouterMetrics, limit: int) -> None:
        self._bus, self._router_id, self._metrics, self._limit = bus, router_id, metrics, limit
        self._facts, self._telemetry = _Lane(), _Lane()

    def put(self, payload: Any, cause_id: str = "", traceparent: str = "") -> None:
        """Send a fact or telemetry, with the id and the trace of what caused it."""
        lane = self._telemetry if is_telemetry(payload.TYPE) else self._facts
        if len(lane.waiting) >= self._limit:
            lane.waiting.popleft()
            self._metrics.dropped.inc()
        lane.waiting.append((payload, cause_id, traceparent))
        lane.filled.set()

    def publish(self, effect: Publish) -> None:
        """Send what the controller publishes."""
        cause = effect.cause
        self.put(effect.payload, cause.event_id if cause else "", cause.traceparent if cause else "")

    async def run(self) -> None:
        await asyncio.gather(self._send(self._facts), self._send(self._telemetry))

    async def _send(self, lane: _Lane) -> None:
        while True:
            await lane.filled.wait()
            lane.filled.clear()
            while lane.waiting:
                payload, cause_id, traceparent = lane.waiting.popleft()
                try:
                    event = Event(
                        event_id=event_id(),
                        type=payload.TYPE,
                        occurred_at=time.time(),
                        issuer=self._router_id,
                        data=payload,
                        cause_id=cause_id,
                        traceparent=traceparent,
                    )
                    await self._bus.publish(event)
                    self._metrics.published(event.type)
                except BusUnavailable as error:
                    self._metrics.dropped.inc()
                    log.debug("not published: %s", error)
                except Exception:  # one event that cannot be sent must not hold up those behind it
                    self._metrics.dropped.inc()
                    log.exception("%s cannot be published", payload.TYPE)


class Reports:
    """Reports go to `put`; the last `num_kept` finished requests are kept for /v1/requests."""

    def __init__(
        self, router_id: str, table: RequestTable[Exchange], metrics: RouterMetrics, put: Put, num_kept: int
    ) -> None:
        self._router_id, self._table, self._metrics, self._put = router_id, table, metrics, put
        self._kept: deque[tuple[RequestFinished, str, str]] = deque(maxlen=num_kept)

    def finished(self, exchange: Exchange) -> None:
        """Called once per request, at its end. Clocks: `arrived_at` is epoch, the rest monotonic differences."""
        prompt_tokens, response_tokens, exact = exchange.token_counts()
        arrived, arrived_at, instance, model = exchange.arrived, exchange.arrived_at, exchange.instance, exchange.model
        e2e_s = exchange.ended - arrived
        fact = RequestFinished(
            model_key=model.key,
            request_id=exchange.request_id,
            router_id=self._router_id,
            instance_id=instance.instance_id if instance else "",
            status=exchange.status,
            arrived_at=arrived_at,
            finished_at=arrived_at + e2e_s,
            queue_s=exchange.queue_s if instance else e2e_s,
            ttft_s=exchange.first_byte - arrived if exchange.started else 0.0,
            e2e_s=e2e_s,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            tokens_exact=exact,
            cold=exchange.cold,
            emulated=bool(instance and instance.emulated),
            error_code=exchange.error_code,
            stream=exchange.stream,
            num_continued=exchange.num_continued,
        )
        traceparent = ""
        if exchange.trace is not None:
            traceparent = exchange.traceparent
            first = "first token" if exchange.is_sse else "first byte"
            exchange.trace.finish(fact, first if exchange.started else "")
        self._metrics.finished(
            model,
            fact,
            begun=exchange.started,
            queue_s=exchange.queue_s,
            router_s=exchange.router_s,
            num_events=exchange.num_events,
        )
        self._kept.append((fact, model.name, exchange.traceparent))
        self._put(fact, exchange.request_id, traceparent)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Live requests, oldest first, then finished ones, newest first."""
        now_s = self._table.clock()
        live = [_live_row(exchange, request, now_s) for exchange, request in self._live(limit)]
        done = [_done_row(*kept) for kept in reversed(self._kept)]
        return (live + done)[:limit]

    def live(self, limit: int) -> RouterRequestsReported:
        """The oldest `limit` requests here."""
        requests = tuple(request for _, request in self._live(limit))
        return RouterRequestsReported(router_id=self._router_id, num_live=len(self._table.exchanges), requests=requests)

    def _live(self, limit: int) -> Iterator[tuple[Exchange, LiveRequest]]:
        """Exchanges stand in order of arrival, as the held ones of a model do."""
        num_held: Counter[str] = Counter()
        etas: dict[str, float] = {}
        queues = self._table.controller.queues
        for exchange in islice(self._table.exchanges.values(), limit):
            key, position = exchange.model.key, 0
            queue = queues.get(key)
            if exchange.instance is None or (queue is not None and exchange.ticket in queue.waiting):
                num_held[key] += 1
                position = num_held[key]
                if key not in etas:
                    etas[key] = self._table.eta_s(key)
            yield exchange, _live_request(exchange, position, etas[key] if position else 0.0)

    async def report_loads(self, soonest_s: float, every_s: float) -> None:
        """router.load_reported on change, but not closer together than `soonest_s`, and at least each `every_s`."""
        reporter = LoadReporter(self._router_id)
        while True:
            for report in reporter.reports(self._table.controller.loads(), time.monotonic()):
                self._put(report)
            self._table.changed.clear()
            await asyncio.sleep(soonest_s)
            try:
                async with asyncio.timeout(max(every_s - soonest_s, 0.0)):
                    await self._table.changed.wait()
            except TimeoutError:
                continue

    async def report_requests(self, every_s: float, limit: int) -> None:
        """router.requests_reported each `every_s` while there are any, and once when there are none any more."""
        has_live = False
        while limit:
            if has_live or self._table.exchanges:
                report = self.live(limit)
                self._put(report)
                has_live = bool(report.num_live)
            await asyncio.sleep(every_s)


def _live_request(exchange: Exchange, position: int, eta_s: float) -> LiveRequest:
    instance = None if position else exchange.instance
    return LiveRequest(
        request_id=exchange.request_id,
        model_key=exchange.model.key,
        state="held" if position else "streaming" if exchange.started else "dispatched",
        arrived_at=exchange.arrived_at,
        stream=exchange.stream,
        position=position,
        eta_s=eta_s,
        queue_s=exchange.queue_s,
        ttft_s=exchange.first_byte - exchange.arrived if exchange.started else 0.0,
        response_tokens=exchange.num_events,
        instance_id=instance.instance_id if instance else "",
        cold=exchange.cold,
        emulated=bool(instance and instance.emulated),
        trace_id=exchange.traceparent[3:35] if exchange.trace is not None else "",
    )


def _live_row(exchange: Exchange, request: LiveRequest, now_s: float) -> dict[str, Any]:
    return asdict(request) | {
        "model": exchange.model.name,
        "age_s": now_s - exchange.arrived_at,
        "ttft_s": request.ttft_s if exchange.started else None,
        "tokens_exact": False,
        "trace_id": exchange.traceparent[3:35],
    }


def _done_row(fact: RequestFinished, model: str, traceparent: str) -> dict[str, Any]:
    state = "finished" if fact.status < 400 else "left" if fact.status == 499 else "failed"
    return asdict(fact) | {"model": model, "state": state, "trace_id": traceparent[3:35]}
