"""Prometheus instruments of the data port, with the children of each model looked up once."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from glowplug.controllers.router.controller import RouterController
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS, LabelCap, ShellMetrics
from glowplug.telemetry.tally import CountChild, TallyCounter, TallyHistogram, TallyRows
from services.router.slo import Count, SloBook

if TYPE_CHECKING:
    from services.router.proxy_exchange import Exchange

OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
Rows = Iterable[tuple[tuple[str, ...], float]]


class _OfModel:
    """One model's children."""

    __slots__ = ("chunks", "codes", "cold_ttft", "e2e", "hot_ttft", "prompt_tokens", "queue", "response_tokens", "tpot")

    def __init__(self, metrics: "RouterMetrics", model: str) -> None:
        self.codes: dict[int, CountChild] = {}
        self.hot_ttft = metrics.ttft.labels(model, "hot")
        self.cold_ttft = metrics.ttft.labels(model, "cold")
        self.queue = metrics.queue.labels(model)
        self.tpot = metrics.tpot.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.chunks = metrics.chunks.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.response_tokens = metrics.response_tokens.labels(model)


class RouterMetrics:
    """Label values are bounded: models by LabelCap, codes by the HTTP statuses there are."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def histogram(
            name: str, doc: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS
        ) -> TallyHistogram:
            return TallyHistogram(name, doc, labels, buckets, registry)

        def counter(name: str, doc: str, *labels: str) -> TallyCounter:
            return TallyCounter(name, doc, labels, registry)

        self.requests = counter(semconv.REQUESTS_TOTAL, "Requests ended", "model", "code")
        self.ttft = histogram(semconv.REQUEST_TTFT_SECONDS, "Arrival to first byte", "model", "temperature")
        self.queue = histogram(semconv.REQUEST_QUEUE_SECONDS, "Arrival to dispatch", "model")
        self.tpot = histogram(
            semconv.REQUEST_TPOT_SECONDS, "Seconds per token after the first", "model", buckets=TPOT_BUCKETS
        )
        self.e2e = histogram(semconv.REQUEST_E2E_SECONDS, "Arrival to last byte", "model")
        self.chunks = counter(semconv.RESPONSE_CHUNKS_TOTAL, "SSE events passed on", "model")
        self.prompt_tokens = counter(semconv.PROMPT_TOKENS_TOTAL, "Prompt tokens read", "model")
        self.response_tokens = counter(semconv.RESPONSE_TOKENS_TOTAL, "Tokens answered", "model")
        self.overhead = Histogram(
            semconv.ROUTER_OVERHEAD_SECONDS,
            "Time in the router, queue excluded",
            buckets=OVERHEAD_BUCKETS,
            registry=registry,
        )
        self.retries = Counter(semconv.UPSTREAM_RETRIES_TOTAL, "Engines lost before a first byte", registry=registry)
        self.connections = Gauge(semconv.CONNECTIONS, "Client connections open", registry=registry)
        self.dropped = Counter(semconv.TELEMETRY_DROPPED_TOTAL, "Telemetry the bus did not take", registry=registry)
        self._refused = Counter(
            semconv.REQUESTS_REFUSED_TOTAL, "Requests refused before a model was known", ["code"], registry=registry
        )
        self.cap = LabelCap()
        self.models: dict[str, _OfModel] = {}
        self.slo = SloBook()
        self.controller: RouterController | None = None
        self._events: Counter | None = None
        self._read_at_each_scrape(registry)

    def _read_at_each_scrape(self, registry: CollectorRegistry) -> None:
        """Gauges are never behind the queues, and a model that left leaves none."""
        level = ["model", "level"]
        TallyRows(
            semconv.SLO_REQUESTS_TOTAL, "Requests of models that set this level", level, self._judged, registry=registry
        )
        TallyRows(semconv.SLO_MISSED_TOTAL, "Of these, the missed", level, self._missed, registry=registry)
        TallyRows(
            semconv.REQUESTS_IN_FLIGHT, "Requests at engines", ["model"], self._running, kind="gauge", registry=registry
        )
        TallyRows(semconv.REQUESTS_HELD, "Requests held", ["model"], self._held, kind="gauge", registry=registry)

    def join(self, shell: ShellMetrics, controller: RouterController) -> None:
        """Count published events as every service does, and show what is held and in flight."""
        self._events, self.controller = shell.published, controller

    def published(self, event_type: str) -> None:
        """One event the bus has taken."""
        if self._events is not None:
            self._events.labels("router", event_type).inc()

    def refused(self, status: int) -> None:
        """One request answered before its model was known."""
        self._refused.labels(str(status)).inc()

    def finished(self, exchange: "Exchange") -> None:
        """One request's end."""
        key = exchange.model.key
        mine = self.models.get(key)
        if mine is None:
            mine = self.models[key] = _OfModel(self, self.cap(key))
        code = mine.codes.get(exchange.status)
        if code is None:
            code = mine.codes[exchange.status] = self.requests.labels(self.cap(key), str(exchange.status))
        code.value += 1
        e2e_s, ttft_s, tpot_s = exchange.ended - exchange.arrived, -1.0, -1.0
        if exchange.started:
            ttft_s = exchange.first_byte - exchange.arrived
            ttft = mine.cold_ttft if exchange.cold else mine.hot_ttft
            ttft.observe(ttft_s)
            self.overhead.observe(exchange.router_s)
            num_prompt, num_response, exact = exchange.token_counts()
            mine.prompt_tokens.value += num_prompt if exact else 0
            mine.response_tokens.value += num_response
            if exchange.num_events:
                mine.chunks.value += exchange.num_events
                if num_response > 1:
                    tpot_s = (e2e_s - ttft_s) / (num_response - 1)
                    mine.tpot.observe(tpot_s)
        mine.queue.observe(exchange.queue_s)
        mine.e2e.observe(e2e_s)
        self.slo.judge(key, exchange.model.slo, exchange.status, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=tpot_s)

    def _counts(self) -> list[tuple[tuple[str, str], Count]]:
        for model in self.controller.fleet.models.values() if self.controller else ():
            self.slo.expect(model.key, model.slo)
        return list(self.slo.counts.items())

    def _judged(self) -> Rows:
        return self._summed((labels, count.num) for labels, count in self._counts())

    def _missed(self) -> Rows:
        return self._summed((labels, count.num_missed) for labels, count in self._counts())

    def _running(self) -> Rows:
        queues = self.controller.queues if self.controller else {}
        return self._summed(((key,), queue.num_running) for key, queue in queues.items())

    def _held(self) -> Rows:
        queues = self.controller.queues if self.controller else {}
        return self._summed(((key,), len(queue.waiting)) for key, queue in queues.items())

    def _summed(self, rows: Iterator[tuple[tuple[str, ...], float]]) -> Rows:
        """One row per set of labels, the first of which is a model: those past the cap are added up."""
        summed: dict[tuple[str, ...], float] = {}
        for (key, *others), value in rows:
            labels = (self.cap(key), *others)
            summed[labels] = summed.get(labels, 0) + value
        return summed.items()
