"""Prometheus instruments of batches, shown by the router that runs them."""

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from glowplug.domain.batch import BatchStatus
from glowplug.telemetry import semconv

RUNNING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._batches = Gauge(semconv.BATCHES, "Batches that are not over", ["state"], registry=registry)
        self._ended = Counter(semconv.BATCHES_ENDED_TOTAL, "Batches ended", ["state"], registry=registry)
        self._lines = Counter(semconv.BATCH_LINES_TOTAL, "Lines of batches answered", ["outcome"], registry=registry)

    def states(self, running: Iterable[BatchStatus], num_waiting: int) -> None:
        """Show the number of batches in each state; waiting ones count as validating."""
        tally = Tally(running)
        tally[BatchStatus.VALIDATING] += max(num_waiting, 0)
        for state in RUNNING:
            self._batches.labels(state.value).set(tally[state])

    def forget_states(self) -> None:
        """Show no batches: another router runs them."""
        self._batches.clear()

    def ended(self, status: BatchStatus) -> None:
        self._ended.labels(status.value).inc()

    def line(self, outcome: str) -> None:
        """Count a line. `outcome`: "completed", "failed", or "retried" for one sent again."""
        self._lines.labels(outcome).inc()
