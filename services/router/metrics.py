"""Prometheus instruments of the data port, with the children of each model looked up once."""

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from glowplug.domain.snapshot import ModelLoad
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS, LabelCap

if TYPE_CHECKING:
    from services.router.proxy_exchange import Exchange

OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1)


class _OfModel:
    """One model's children."""

    __slots__ = ("chunks", "codes", "cold_ttft", "e2e", "hot_ttft", "queue")

    def __init__(self, metrics: "RouterMetrics", model: str) -> None:
        self.codes: dict[int, Counter] = {}
        self.hot_ttft = metrics.ttft.labels(model, "hot")
        self.cold_ttft = metrics.ttft.labels(model, "cold")
        self.queue = metrics.queue.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.chunks = metrics.chunks.labels(model)


class RouterMetrics:
    """Label values are bounded: models by LabelCap, codes by the HTTP statuses there are."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def histogram(name: str, doc: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
            return Histogram(name, doc, labels, registry=registry, buckets=buckets)

        self.requests = Counter(semconv.REQUESTS_TOTAL, "Requests ended", ["model", "code"], registry=registry)
        self.ttft = histogram(semconv.REQUEST_TTFT_SECONDS, "Arrival to first byte", "model", "temperature")
        self.queue = histogram(semconv.REQUEST_QUEUE_SECONDS, "Arrival to dispatch", "model")
        self.e2e = histogram(semconv.REQUEST_E2E_SECONDS, "Arrival to last byte", "model")
        self.overhead = histogram(
            semconv.ROUTER_OVERHEAD_SECONDS, "Time in the router, queue excluded", buckets=OVERHEAD_BUCKETS
        )
        self.chunks = Counter(semconv.RESPONSE_CHUNKS_TOTAL, "SSE events passed on", ["model"], registry=registry)
        self.in_flight = Gauge(semconv.REQUESTS_IN_FLIGHT, "Requests at engines", ["model"], registry=registry)
        self.held = Gauge(semconv.REQUESTS_HELD, "Requests held", ["model"], registry=registry)
        self.retries = Counter(semconv.UPSTREAM_RETRIES_TOTAL, "Engines lost before a first byte", registry=registry)
        self.connections = Gauge(semconv.CONNECTIONS, "Client connections open", registry=registry)
        self.dropped = Counter(semconv.TELEMETRY_DROPPED_TOTAL, "Telemetry the bus did not take", registry=registry)
        self._refused = Counter(
            semconv.REQUESTS_REFUSED_TOTAL, "Requests refused before a model was known", ["code"], registry=registry
        )
        self._cap = LabelCap()
        self._models: dict[str, _OfModel] = {}

    def refused(self, status: int) -> None:
        """One request answered before its model was known."""
        self._refused.labels(str(status)).inc()

    def finished(self, exchange: "Exchange") -> None:
        """One request's end."""
        key = exchange.model.key
        mine = self._models.get(key)
        if mine is None:
            mine = self._models[key] = _OfModel(self, self._cap(key))
        code = mine.codes.get(exchange.status)
        if code is None:
            code = mine.codes[exchange.status] = self.requests.labels(self._cap(key), str(exchange.status))
        code.inc()
        if exchange.started:
            ttft = mine.cold_ttft if exchange.cold else mine.hot_ttft
            ttft.observe(exchange.first_byte - exchange.arrived)
            self.overhead.observe(exchange.router_s)
            if exchange.num_events:
                mine.chunks.inc(exchange.num_events)
        mine.queue.observe(exchange.queue_s)
        mine.e2e.observe(exchange.ended - exchange.arrived)

    def show_loads(self, loads: dict[str, ModelLoad]) -> None:
        """Set the gauges; done with each load report, not per request."""
        for key, load in loads.items():
            label = self._cap(key)
            self.in_flight.labels(label).set(load.num_in_flight)
            self.held.labels(label).set(load.num_waiting)
