"""Metrics of the console."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from glowplug.telemetry import semconv


class ConsoleMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def of_console(name: str, doc: str) -> Counter:
            return Counter(name, doc, ["service"], registry=registry).labels("console")

        self.spans_exported = of_console(semconv.SPANS_EXPORTED_TOTAL, "Spans that the receiver accepted")
        self.spans_dropped = of_console(semconv.SPANS_DROPPED_TOTAL, "Spans that never reached the receiver")
        self.traces = Gauge(semconv.TRACES_KEPT, "Traces kept", registry=registry)
        self.usage_records = Counter(semconv.USAGE_RECORDS_TOTAL, "Usage records put in the ledger", registry=registry)
        self.usage_repeated = Counter(
            semconv.USAGE_REPEATED_TOTAL, "Usage records that were in the ledger already", registry=registry
        )
        self.ledger_failures = Counter(
            semconv.LEDGER_FAILURES_TOTAL, "Failed uses of the ledger's database", registry=registry
        )
        self.stream_clients = Gauge(semconv.STREAM_CLIENTS, "Open pages", registry=registry)
        self.stream_dropped = Counter(
            semconv.STREAM_DROPPED_TOTAL, "Messages dropped because a page read too slowly", registry=registry
        )
