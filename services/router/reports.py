"""Reports of a router and the outbox that publishes them.

No request waits for the bus: queues are bounded, and the oldest events are dropped and counted.
"""

import asyncio
import heapq
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Final

from glowplug.bus.port import Bus, BusUnavailable
from glowplug.controllers.effects import Publish
from glowplug.domain.access import Priority, prefix_of
from glowplug.domain.errors import GlowplugError
from glowplug.domain.snapshot import LiveRequest
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, RequestRejected, RouterRequestsFinished, RouterRequestsReported
from glowplug.events.subjects import is_telemetry
from glowplug.fleet.demand import LoadReporter
from glowplug.runtime.clock import CLOCK, now_s, published
from glowplug.services.router.conversation import TextReader
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.exchange_states import HELD
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.request_table import RequestTable
from glowplug.services.router.tracing import event_id
from glowplug.services.router.usage import UsageLog
from glowplug.telemetry.tracing import is_sampled, trace_id_of

# Any client can cause refusals at any rate: they are sampled, without the request or the message, which may quote it.

BURST: Final = 20  # refusals listed in a burst
PER_S: Final = 1.0  # refusals listed per second in the long run


class RefusalSample:
    """The sampled refusals: the last `num_kept` for /v1/requests, and each to `put`. `clock`: epoch seconds."""

    def __init__(
        self, router_id: str, put: Callable[..., None], num_kept: int, clock: Callable[[], float] = now_s
    ) -> None:
        self._router_id, self._put, self._clock = router_id, put, clock
        self._kept: deque[tuple[float, RequestRejected]] = deque(maxlen=num_kept)
        self._room, self._since = float(BURST), clock()
        self._num_unlisted = 0

    def take(self, request: HttpRequest, error: GlowplugError) -> None:
        now = self._clock()
        self._room = min(self._room + max(now - self._since, 0.0) * PER_S, float(BURST))
        self._since = now
        if self._room < 1:
            self._num_unlisted += 1
            return
        self._room -= 1
        fact = RequestRejected(
            model_key="",
            request_id=request.request_id,
            router_id=self._router_id,
            status=error.status,
            code=error.code,
            retry_after_s=error.retry_after_s or 0.0,
            num_unlisted=self._num_unlisted,
            tenant=request.caller.tenant if request.caller.key_id else "",
            key_id=request.caller.key_id,
        )
        self._num_unlisted = 0
        self._kept.append((now, fact))
        self._put(fact)

    def rows(self) -> list[dict[str, Any]]:
        return [_row(*kept) for kept in reversed(self._kept)]


def _row(at: float, fact: RequestRejected) -> dict[str, Any]:
    known = asdict(fact) | {"key": prefix_of(fact.key_id)}
    code = known.pop("code")
    return known | {"model": "", "state": "refused", "error_code": code, "arrived_at": at, "finished_at": at}


# Log at most MOST_A_S lines per second for requests that waited for a start, lost their instance or failed.

MOST_A_S: Final = 10
log = logging.getLogger(__name__)


class SlowLines:
    def __init__(self) -> None:
        self._second, self._num, self._num_unsaid = -1, 0, 0

    def take(self, fact: RequestFinished, traceparent: str) -> None:
        second = math.floor(fact.finished_at)
        if second != self._second:
            self._second, self._num = second, 0
        self._num += 1
        if self._num > MOST_A_S:
            self._num_unsaid += 1
            return
        unsaid = f" ({self._num_unsaid} such requests before it have no line)" if self._num_unsaid else ""
        self._num_unsaid = 0
        log.log(
            logging.WARNING if fact.status >= 500 else logging.INFO,
            "%s%s",
            sentence(fact),
            unsaid,
            extra={
                "request_id": fact.request_id,
                "model": fact.model_key,
                "instance": fact.instance_id or None,
                "error_code": fact.error_code or None,
                "trace_id": traceparent[3:35] or None,
                "event_id": None,  # else that of the connection's cause
                "event_type": None,
            },
        )


def sentence(fact: RequestFinished) -> str:
    waited = f"waited {fact.queue_s:.2f} s for {'a start of its model' if fact.cold else 'an instance'}"
    end = f"was answered with {fact.status} after {fact.e2e_s:.2f} s"
    lost = f", and its stream continued elsewhere {fact.num_continued} times" if fact.num_continued else ""
    return f"a request for {fact.model_key} {waited} and {end}{lost}"


Put = Callable[..., None]  # Outbox.put
OUTBOX_LIMIT = 10_000  # per lane
LOAD_EVERY_S = 0.5  # longest time between load reports
LOAD_SOONEST_S = 0.2  # shortest time between load reports
REQUESTS_EVERY_S = 0.5  # time between reports of live requests
ENDS_REPORTED = 500  # per report
REQUESTS_REPORTED = 100  # per report, the oldest ones


@dataclass(slots=True)
class _Lane:
    """One queue, sent by one task to keep its order."""

    waiting: deque[tuple[Any, str, str]] = field(default_factory=deque)  # payload, id and trace of its cause
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class Outbox:
    """The events to publish, in two lanes: facts wait until the bus has stored them, telemetry does not."""

    def __init__(self, bus: Bus, router_id: str, metrics: RouterMetrics, limit: int = OUTBOX_LIMIT) -> None:
        self._bus, self._router_id, self._metrics, self._limit = bus, router_id, metrics, limit
        self._facts, self._telemetry = _Lane(), _Lane()

    def put(self, payload: Any, cause_id: str = "", traceparent: str = "") -> None:
        lane = self._telemetry if is_telemetry(payload.TYPE) else self._facts
        if len(lane.waiting) >= self._limit:
            lane.waiting.popleft()
            self._metrics.dropped.inc()
        lane.waiting.append((payload, cause_id, traceparent))
        lane.filled.set()

    def publish(self, effect: Publish) -> None:
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
                        occurred_at=now_s() + CLOCK.behind_s,
                        issuer=self._router_id,
                        data=published(payload),
                        cause_id=cause_id,
                        traceparent=traceparent,
                    )
                    await self._bus.publish(event)
                    self._metrics.published(event.type)
                except BusUnavailable as error:
                    self._metrics.dropped.inc()
                    log.debug("the outbox dropped %s: %s", payload.TYPE, error)
                except Exception:  # one bad event must not hold up the next
                    self._metrics.dropped.inc()
                    log.exception("the outbox failed to publish %s and dropped it", payload.TYPE)


class Reports:
    """The reports of one router, to `put` and `usage`. The last `num_kept` finished requests stay for /v1/requests."""

    def __init__(
        self,
        router_id: str,
        table: RequestTable[Exchange],
        metrics: RouterMetrics,
        put: Put,
        num_kept: int,
        usage: UsageLog | None = None,
    ) -> None:
        self._router_id, self._table, self._metrics, self._put = router_id, table, metrics, put
        self._usage, self._slow = usage, SlowLines()
        self._kept: deque[tuple[RequestFinished, str, str]] = deque(maxlen=num_kept)
        self._ended: deque[tuple[RequestFinished, str]] = deque(maxlen=OUTBOX_LIMIT)  # since the last report
        self.refusals = RefusalSample(router_id, put, num_kept)

    def finished(self, exchange: Exchange) -> None:
        """Report a request's end, once. `arrived_at` is epoch seconds, the rest are monotonic differences."""
        prompt_tokens, response_tokens, exact, cached_tokens = exchange.token_counts()
        request, model, answer, ending = exchange.request, exchange.model, exchange.answer, exchange.ending
        assert ending is not None
        arrived, arrived_at, attempt, caller = request.complete, request.complete_at, exchange.attempt, request.caller
        instance = attempt.instance if attempt is not None else None
        e2e_s, way = ending.at - arrived, exchange.way
        if caller.has_limits:
            used = (prompt_tokens, response_tokens) if answer is not None else (0, 0)
            is_whole = ending.status == 200 and not exchange.client.counts_all
            self._table.limits.end(exchange.ticket, model.key, *used, is_whole=is_whole)
        controller = self._table.controller
        known = controller.requests.get(exchange.ticket)
        priority = Priority.STANDARD if known is not None and known.has_aged else request.priority
        fact = RequestFinished(
            model_key=model.key,
            request_id=request.request_id,
            router_id=self._router_id,
            instance_id=instance.instance_id if instance else "",
            status=ending.status,
            arrived_at=arrived_at,
            finished_at=arrived_at + e2e_s,
            queue_s=exchange.queue_s if instance else e2e_s,
            ttft_s=answer.first_byte - arrived if answer is not None else 0.0,
            e2e_s=e2e_s,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            tokens_exact=exact,
            cold=exchange.cold,
            emulated=bool(instance and instance.emulated),
            error_code=ending.error_code,
            stream=exchange.stream,
            num_continued=exchange.num_continued,
            tenant=caller.tenant,
            key_id=caller.key_id,
            priority="" if priority is Priority.STANDARD else priority.value,
            operation=way.operation,
            dispatched_s=way.dispatched_s,
            held=way.held,
            eta_s=way.eta_s,
            moves=way.ended(arrived_at + e2e_s) if way.moves is not None else (),
            parent_span=way.parent_span,
            dropped_tools=request.dropped_tools,
        )
        if self._usage is not None:
            gpu_s = controller.balances.stays.taken(known, self._table.clock())
            self._usage.take(fact, exchange.ticket, request.path, cached_tokens, gpu_s)
            self._usage.journal.clear(exchange)
        self._metrics.finished(
            model,
            fact,
            begun=answer is not None,
            queue_s=exchange.queue_s,
            router_s=exchange.router_s,
            num_events=answer.num_events if answer is not None else 0,
            has_levels=request.priority is not Priority.BATCH,
        )
        if fact.cold or fact.num_continued or fact.status >= 500:
            self._slow.take(fact, exchange.traceparent if is_sampled(exchange.traceparent) else "")
        self._kept.append((fact, model.name, exchange.traceparent))
        self._ended.append((fact, exchange.traceparent))

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Return live requests, oldest first, then ended ones, newest first."""
        now_s = self._table.clock()
        live = [_live_row(exchange, request, now_s) for exchange, request in self._live(limit)]
        done = [_done_row(*kept) for kept in reversed(self._kept)]
        ended = heapq.merge(done, self.refusals.rows(), key=lambda row: -row["finished_at"])
        return (live + list(ended))[:limit]

    def live(self, limit: int) -> RouterRequestsReported:
        requests = tuple(request for _, request in self._live(limit))
        return RouterRequestsReported(router_id=self._router_id, num_live=len(self._table.exchanges), requests=requests)

    def _live(self, limit: int) -> Iterator[tuple[Exchange, LiveRequest]]:
        num_held: Counter[str] = Counter()
        etas: dict[str, float] = {}
        for exchange in islice(self._table.exchanges.values(), limit):
            key, position = exchange.model.key, 0
            if exchange.state in HELD:
                num_held[key] += 1
                position = num_held[key]
                if key not in etas:
                    etas[key] = self._table.eta_s(key)
            yield exchange, _live_request(exchange, position, etas[key] if position else 0.0)

    async def report_loads(self, texts: TextReader | None = None) -> None:
        """Report loads on each change, and ended requests, every LOAD_SOONEST_S to LOAD_EVERY_S. `texts` first reads
        some running requests."""
        reporter = LoadReporter(self._router_id)
        while True:
            if texts is not None:
                texts.late(self._table.exchanges.values())
            for report in reporter.reports(self._table.controller.loads(), time.monotonic()):
                self._put(report)
            self.report_ended()
            self._table.changed.clear()
            await asyncio.sleep(LOAD_SOONEST_S)
            try:
                async with asyncio.timeout(LOAD_EVERY_S - LOAD_SOONEST_S):
                    await self._table.changed.wait()
            except TimeoutError:
                continue

    def report_ended(self) -> None:
        while self._ended:
            part = [self._ended.popleft() for _ in range(min(len(self._ended), ENDS_REPORTED))]
            requests, traceparents = zip(*part, strict=True)
            self._put(RouterRequestsFinished(router_id=self._router_id, requests=requests, traceparents=traceparents))

    async def report_requests(self, every_s: float = REQUESTS_EVERY_S, limit: int = REQUESTS_REPORTED) -> None:
        """Report live requests each `every_s`, and once more when none is left."""
        has_live = False
        while True:
            if has_live or self._table.exchanges:
                report = self.live(limit)
                self._put(report)
                has_live = bool(report.num_live)
            await asyncio.sleep(every_s)


def _live_request(exchange: Exchange, position: int, eta_s: float) -> LiveRequest:
    request, answer = exchange.request, exchange.answer
    instance = None if position else exchange.instance
    return LiveRequest(
        request_id=request.request_id,
        model_key=exchange.model.key,
        state="held" if position else "dispatched" if answer is None else "streaming",
        arrived_at=request.complete_at,
        stream=exchange.stream,
        position=position,
        eta_s=eta_s,
        queue_s=exchange.queue_s,
        ttft_s=answer.first_byte - request.complete if answer is not None else 0.0,
        response_tokens=answer.num_events if answer is not None else 0,
        instance_id=instance.instance_id if instance else "",
        cold=exchange.cold,
        emulated=bool(instance and instance.emulated),
        trace_id=trace_id_of(exchange.traceparent),
        tenant=request.caller.tenant,
        key_id=request.caller.key_id,
    )


def _live_row(exchange: Exchange, request: LiveRequest, now_s: float) -> dict[str, Any]:
    return asdict(request) | {
        "model": exchange.model.name,
        "age_s": now_s - request.arrived_at,
        "ttft_s": request.ttft_s if exchange.answer is not None and exchange.stream else None,
        "tokens_exact": False,
        "trace_id": exchange.traceparent[3:35],
        "key": exchange.request.caller.prefix,
    }


def _done_row(fact: RequestFinished, model: str, traceparent: str) -> dict[str, Any]:
    state = "finished" if fact.status < 400 else "left" if fact.status == 499 else "failed"
    known = {"model": model, "state": state, "ttft_s": fact.first_token_s or None, "trace_id": traceparent[3:35]}
    return asdict(fact) | known | {"key": prefix_of(fact.key_id)}
