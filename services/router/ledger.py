"""The books: each finished request as a fact, the last of them for /v1/requests, and the load reports."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from glowplug.controllers.effects import Publish
from glowplug.domain.snapshot import LiveRequest
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, RouterRequestsReported
from glowplug.fleet.demand import LoadReporter
from services.router.desk import Desk

if TYPE_CHECKING:
    from services.router.proxy_exchange import Exchange

Put = Callable[[Publish], None]


class Ledger:
    def __init__(self, router_id: str, desk: Desk, put: Put, num_kept: int) -> None:
        self._router_id, self._desk, self._put = router_id, desk, put
        self._kept: deque[tuple[RequestFinished, str, str, str]] = deque(maxlen=num_kept)
        self._changed = asyncio.Event()
        desk.changed = self._changed.set

    def finished(self, exchange: "Exchange") -> None:
        """Called once per request, at its end. Clocks: `arrived_at` is epoch, the rest monotonic differences."""
        prompt_tokens, response_tokens, exact = exchange.token_counts()
        e2e_s = exchange.ended - exchange.arrived
        instance = exchange.instance
        fact = RequestFinished(
            model_key=exchange.model.key,
            request_id=exchange.request_id,
            router_id=self._router_id,
            instance_id=instance.instance_id if instance else "",
            status=exchange.status,
            arrived_at=exchange.arrived_at,
            finished_at=exchange.arrived_at + e2e_s,
            queue_s=exchange.queue_s if instance else e2e_s,
            ttft_s=exchange.first_byte - exchange.arrived if exchange.started else 0.0,
            e2e_s=e2e_s,
            prompt_tokens=prompt_tokens,
            response_tokens=response_tokens,
            tokens_exact=exact,
            cold=exchange.cold,
            emulated=bool(instance and instance.emulated),
            error_code=exchange.error_code,
            stream=exchange.stream,
        )
        if exchange.trace is not None:
            exchange.trace.finish(exchange, prompt_tokens, response_tokens)
        self._kept.append((fact, exchange.model.name, exchange.error_code, exchange.traceparent))
        self._put(Publish(fact, _cause(exchange)))

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """Live requests, oldest first, then finished ones, newest first."""
        live = [self._live(e) for e in self._desk.exchanges.values()]
        done = [_done(*kept) for kept in reversed(self._kept)]
        return (live + done)[:limit]

    def _live(self, exchange: "Exchange") -> dict[str, Any]:
        now_s = self._desk.clock()
        held = self._is_held(exchange)
        return {
            "request_id": exchange.request_id,
            "model": exchange.model.name,
            "model_key": exchange.model.key,
            "state": "held" if held else "streaming" if exchange.started else "dispatched",
            "instance_id": exchange.instance.instance_id if exchange.instance and not held else "",
            "arrived_at": exchange.arrived_at,
            "age_s": now_s - exchange.arrived_at,
            "eta_s": self._desk.eta_s(exchange.model.key) if held else 0.0,
            "ttft_s": exchange.first_byte - exchange.arrived if exchange.started else None,
            "response_tokens": exchange.num_events,
            "tokens_exact": False,
            "stream": exchange.stream,
            "trace_id": exchange.traceparent[3:35],
        }

    def _waiting(self, model_key: str) -> Any:
        queue = self._desk.controller.queues.get(model_key)
        return queue.waiting if queue else ()

    async def report_loads(self, soonest_s: float, every_s: float) -> None:
        """router.load_reported on change, but not closer together than `soonest_s`, and at least each `every_s`."""
        reporter = LoadReporter(self._router_id)
        while True:
            for report in reporter.reports(self._desk.controller.loads(), time.monotonic()):
                self._put(Publish(report))
            self._changed.clear()
            await asyncio.sleep(soonest_s)
            try:
                async with asyncio.timeout(max(every_s - soonest_s, 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def report_requests(self, every_s: float, limit: int) -> None:
        """router.requests_reported each `every_s` while there are any, and once when there are none any more."""
        told = False
        while limit:
            if told or self._desk.exchanges:
                report = self.live(limit)
                self._put(Publish(report))
                told = bool(report.num_live)
            await asyncio.sleep(every_s)

    def live(self, limit: int) -> RouterRequestsReported:
        """The oldest `limit` requests here. Exchanges stand in order of arrival, as the held ones of a model do."""
        num_held: dict[str, int] = {}
        etas: dict[str, float] = {}
        rows = []
        for exchange in islice(self._desk.exchanges.values(), limit):
            key = exchange.model.key
            held = self._is_held(exchange)
            if held:
                num_held[key] = num_held.get(key, 0) + 1
                if key not in etas:
                    etas[key] = self._desk.eta_s(key)
            rows.append(_live_request(exchange, num_held[key] if held else 0, etas[key] if held else 0.0))
        return RouterRequestsReported(
            router_id=self._router_id, num_live=len(self._desk.exchanges), requests=tuple(rows)
        )

    def _is_held(self, exchange: "Exchange") -> bool:
        return exchange.instance is None or exchange.ticket in self._waiting(exchange.model.key)


def _live_request(exchange: "Exchange", position: int, eta_s: float) -> LiveRequest:
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


def _done(fact: RequestFinished, model: str, error_code: str, traceparent: str) -> dict[str, Any]:
    return {
        "request_id": fact.request_id,
        "model": model,
        "model_key": fact.model_key,
        "state": "finished" if fact.status < 400 else "left" if fact.status == 499 else "failed",
        "status": fact.status,
        "error_code": error_code,
        "instance_id": fact.instance_id,
        "arrived_at": fact.arrived_at,
        "finished_at": fact.finished_at,
        "queue_s": fact.queue_s,
        "ttft_s": fact.ttft_s,
        "e2e_s": fact.e2e_s,
        "prompt_tokens": fact.prompt_tokens,
        "response_tokens": fact.response_tokens,
        "tokens_exact": fact.tokens_exact,
        "cold": fact.cold,
        "emulated": fact.emulated,
        "trace_id": traceparent[3:35],
    }


def _cause(exchange: "Exchange") -> Event:
    return Event(
        event_id=exchange.request_id,
        type="request.arrived",
        occurred_at=exchange.arrived_at,
        issuer="",
        data=None,
        traceparent=exchange.traceparent if exchange.trace is not None else "",
    )
