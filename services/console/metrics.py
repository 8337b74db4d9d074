"""What the console counts."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from glowplug.telemetry import semconv


class ConsoleMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.spans = Counter(semconv.SPANS_RECEIVED_TOTAL, "Spans taken by the receiver", registry=registry)
        self.spans_refused = Counter(
            semconv.SPANS_REFUSED_TOTAL, "Spans refused: malformed, or past the bound of a trace", registry=registry
        )
        self.exports_refused = Counter(
            semconv.EXPORTS_REFUSED_TOTAL, "Exports refused, by status", ["code"], registry=registry
        )
        self.traces = Gauge(semconv.TRACES_KEPT, "Traces kept", registry=registry)
        self.trace_bytes = Gauge(semconv.TRACES_BYTES, "Bytes of the traces kept", registry=registry)
        self.traces_evicted = Counter(semconv.TRACES_EVICTED_TOTAL, "Traces that left the ring", registry=registry)
        self.disk_bytes = Gauge(semconv.TRACES_DISK_BYTES, "What the file of traces takes", registry=registry)
        self.disk_dropped = Counter(
            semconv.TRACES_DISK_DROPPED_TOTAL, "Spans the disk did not take; they are in memory only", registry=registry
        )
        self.usage_records = Counter(semconv.USAGE_RECORDS_TOTAL, "Usage records put in the ledger", registry=registry)
        self.usage_repeated = Counter(
            semconv.USAGE_REPEATED_TOTAL, "Usage records that were in the ledger already", registry=registry
        )
        self.ledger_failures = Counter(
            semconv.LEDGER_FAILURES_TOTAL, "Tries at which the ledger's database failed", registry=registry
        )
        self.stream_clients = Gauge(semconv.STREAM_CLIENTS, "Open pages", registry=registry)
        self.stream_dropped = Counter(
            semconv.STREAM_DROPPED_TOTAL, "Messages dropped because a page read too slowly", registry=registry
        )
