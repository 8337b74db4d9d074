"""Keep the shell's Prometheus metrics and counters of failed instances, with capped label values against stray
clients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from glowplug import __version__
from glowplug.events.facts import InstanceFailed
from glowplug.telemetry import semconv

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

BUS_TOTALS = (  # fields of BusCounts
    (semconv.BUS_RECONNECTS_TOTAL, "Reconnections to the bus", "num_reconnects"),
    (semconv.BUS_REDELIVERIES_TOTAL, "Events redelivered", "num_redelivered"),
    (semconv.BUS_MALFORMED_TOTAL, "Messages that are not events", "num_malformed"),
    (semconv.BUS_GIVEN_UP_TOTAL, "Events given up after the last delivery failed", "num_given_up"),
    (semconv.BUS_OVERFLOWED_TOTAL, "Usage events that the bus discarded before they were read", "num_overflowed"),
)


class BusTotals(Protocol):
    """Bus counts besides BUS_TOTALS."""

    pending: dict[str, int]


class LabelCap:
    """Map label values past the first `limit` to "other"."""

    def __init__(self, limit: int = semconv.MAX_LABEL_VALUES) -> None:
        self._limit, self._seen = limit, set[str]()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return semconv.OTHER
        self._seen.add(value)
        return value


class _Totals:
    """Counters that mirror a record's fields: (metric, doc, field)."""

    def __init__(self, fields: Sequence[tuple[str, str, str]], service: str, registry: CollectorRegistry) -> None:
        self._counters = {
            field: Counter(name, doc, ["service"], registry=registry).labels(service) for name, doc, field in fields
        }
        self._seen = dict.fromkeys(self._counters, 0)

    def follow(self, record: object) -> None:
        for field, counter in self._counters.items():
            num = getattr(record, field)
            counter.inc(max(num - self._seen[field], 0))
            self._seen[field] = num


class ShellMetrics:
    """A service's metrics of itself. `observers` see every effect before it is performed."""

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(name, doc, labels, registry=registry)

        self.stimuli = counter(semconv.STIMULI_TOTAL, "Stimuli handled", "service", "type")
        self.effects = counter(semconv.EFFECTS_TOTAL, "Effects executed", "service", "effect")
        self.decisions = counter(semconv.DECISIONS_TOTAL, "Decisions made", "kind", "policy")
        self.bus_failures = counter(semconv.BUS_PUBLISH_FAILURES_TOTAL, "Events the bus refused", "service")
        self.store_failures = counter(semconv.STORE_FAILURES_TOTAL, "Calls the store refused", "service")
        self.stale = counter(semconv.STALE_COMMANDS_TOTAL, "Commands refused for an old epoch", "service")
        self.handle_s = Histogram(
            semconv.HANDLE_SECONDS,
            "Controller time per stimulus",
            ["service"],
            registry=registry,
            buckets=(0.00001, 0.0001, 0.001, 0.01, 0.1, 1),
        )
        self.bus_connected = Gauge(semconv.BUS_CONNECTED, "1 when the bus answers", registry=registry)
        self.bus_stores = Gauge(semconv.BUS_STORES, "1 while the bus stores events", registry=registry)
        self.bus_stores.set(1)
        self.store_writable = Gauge(semconv.STORE_WRITABLE, "1 while the store takes writes", registry=registry)
        self.store_writable.set(1)
        self.store_connected = Gauge(semconv.STORE_CONNECTED, "1 when the store answers", registry=registry)
        rows = Gauge(semconv.ROWS_UNREADABLE, "Rows left out of a table", ["service", "table"], registry=registry)
        self.unreadable_rows = partial(rows.labels, service)
        self.published = counter(semconv.EVENTS_PUBLISHED_TOTAL, "Events that the bus accepted", "service", "type")
        self.leader = Gauge(semconv.LEADER, "1 when this process leads", ["service"], registry=registry).labels(service)
        self.leader_changes = counter(semconv.LEADER_CHANGES_TOTAL, "New leaders seen", "service").labels(service)
        self.service = service
        self.observers: list[Callable[[Any], None]] = []
        self._build = Gauge(semconv.BUILD_INFO, "Who this is", ["service", "service_id", "version"], registry=registry)
        for seldom in (self.bus_failures, self.store_failures, self.stale):
            seldom.labels(service)  # shown from 0, so that the first is an increase
        self._watch(service, registry)

    def _watch(self, service: str, registry: CollectorRegistry) -> None:
        def gauge(name: str, doc: str) -> Gauge:
            return Gauge(name, doc, ["service"], registry=registry).labels(service)

        self.synced_at = gauge(semconv.TABLE_SYNC_TIMESTAMP_SECONDS, "When the tables were last read completely")
        self._inbox = gauge(semconv.INBOX_STIMULI, "Stimuli waiting for the controller")
        self._pending = gauge(semconv.BUS_PENDING, "Events kept for this service and not yet delivered")
        self._bus = _Totals(BUS_TOTALS, service, registry)
        self._lag = Histogram(
            semconv.LOOP_LAG_SECONDS, "How late a tick is", ["service"], registry=registry, buckets=LAG_BUCKETS
        ).labels(service)

    def introduce(self, service_id: str) -> None:
        """Name this process. Its tables count as read now."""
        self.synced_at.set_to_current_time()
        self._build.labels(self.service, service_id, __version__).set(1)

    def saw(self, effect: Any) -> None:
        self.effects.labels(self.service, type(effect).__name__).inc()
        for observer in self.observers:
            observer(effect)

    def ticked(self, lag_s: float, num_waiting: int, bus: BusTotals) -> None:
        self._lag.observe(max(lag_s, 0.0))
        self._inbox.set(num_waiting)
        self._pending.set(sum(bus.pending.values()))
        self._bus.follow(bus)


class FailureCounter:
    """Counts failed instances as an observer. `code`: one of a few."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        labels = ["model", "code"]
        self._starts = Counter(semconv.START_FAILURES_TOTAL, "Starts that did not end READY", labels, registry=registry)
        self._deaths = Counter(
            semconv.ENGINE_DEATHS_TOTAL, "Instances that failed after they were ready", labels, registry=registry
        )
        self._model = LabelCap()

    def saw(self, effect: Any) -> None:
        fact = getattr(effect, "payload", None)
        if isinstance(fact, InstanceFailed):
            counter = self._deaths if fact.instance.ready_at else self._starts
            counter.labels(self._model(fact.instance.model_key), fact.code).inc()
