"""The books: each finished request as a fact, the last of them for /v1/requests, and the load reports."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from glowplug.controllers.effects import Publish
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, RouterLoadReported
from services.router.desk import Desk
from services.router.metrics import RouterMetrics

if TYPE_CHECKING:
    from services.router.proxy_exchange import Exchange

Put = Callable[[Publish], None]


class Ledger:
    def __init__(self, router_id: str, desk: Desk, metrics: RouterMetrics, put: Put, num_kept: int) -> None:
        self._router_id, self._desk, self._metrics, self._put = router_id, desk, metrics, put
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
        held = exchange.instance is None or exchange.ticket in self._waiting(exchange.model.key)
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
        while True:
            loads = self._desk.controller.loads()
            self._metrics.show_loads(loads)
            self._put(Publish(RouterLoadReported(router_id=self._router_id, loads=loads)))
            self._changed.clear()
            await asyncio.sleep(soonest_s)
            try:
                async with asyncio.timeout(max(every_s - soonest_s, 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue


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
