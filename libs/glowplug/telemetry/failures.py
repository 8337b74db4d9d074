"""Counts the instances that failed, from the facts a service tells: starts that came to nothing, engines that died."""

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from glowplug.events.facts import InstanceFailed
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap


class FailureCounter:
    """An observer of ShellMetrics. `code` is the fact's: a short list."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        labels = ["model", "code"]
        self._starts = Counter(semconv.START_FAILURES_TOTAL, "Starts that did not end READY", labels, registry=registry)
        self._deaths = Counter(
            semconv.ENGINE_DEATHS_TOTAL, "Instances that failed after they were ready", labels, registry=registry
        )
        self._model = LabelCap()

    def saw(self, effect: Any) -> None:
        """One effect of a controller; all but Publish(InstanceFailed) are passed over."""
        fact = getattr(effect, "payload", None)
        if isinstance(fact, InstanceFailed):
            counter = self._deaths if fact.instance.ready_at else self._starts
            counter.labels(self._model(fact.instance.model_key), fact.code).inc()
