"""Prometheus instruments of the shell, and a cap on label values so that a stray client cannot grow memory."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from glowplug.telemetry import semconv

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class LabelCap:
    """Values past the first `limit` distinct ones become "other"."""

    def __init__(self, limit: int = semconv.MAX_LABEL_VALUES) -> None:
        self._limit, self._seen = limit, set[str]()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return semconv.OTHER
        self._seen.add(value)
        return value


class ShellMetrics:
    """What every service counts about itself."""

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(name, doc, labels, registry=registry)

        self.stimuli = counter(semconv.STIMULI_TOTAL, "Stimuli handled", "service", "type")
        self.effects = counter(semconv.EFFECTS_TOTAL, "Effects executed", "service", "effect")
        self.decisions = counter(semconv.DECISIONS_TOTAL, "Decisions made", "kind", "policy")
        self.bus_failures = counter(semconv.BUS_PUBLISH_FAILURES_TOTAL, "Events the bus refused", "service")
        self.store_failures = counter(semconv.STORE_FAILURES_TOTAL, "Calls the store refused", "service")
        self.stale = counter(semconv.STALE_COMMANDS_TOTAL, "Commands of an old epoch", "service")
        self.handle_s = Histogram(
            semconv.HANDLE_SECONDS,
            "Controller time per stimulus",
            ["service"],
            registry=registry,
            buckets=(0.00001, 0.0001, 0.001, 0.01, 0.1, 1),
        )
        self.bus_connected = Gauge(semconv.BUS_CONNECTED, "1 when the bus answers", registry=registry)
        self.store_connected = Gauge(semconv.STORE_CONNECTED, "1 when the store answers", registry=registry)
        self.service = service
