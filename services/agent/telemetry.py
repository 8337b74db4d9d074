"""An agent's metrics and spans: memory by owner, instances by state, starts and drains."""

import collections
from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import ReportConsolidation, ReportDrain, ReportStart
from glowplug.domain.hardware import SHARED, GrantOwner
from glowplug.domain.instance import BEFORE_START, Instance, InstanceState, Phase, PhaseName
from glowplug.events import Event
from glowplug.fleet.start_times import StartKind
from glowplug.runtime.shell import Executor
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS, LabelCap
from glowplug.telemetry.tracing import Tracing

_ENGINES_OWN = (PhaseName.LAUNCH, PhaseName.LOAD, PhaseName.WARMUP)
_WAKES = frozenset({StartKind.WAKE.value, StartKind.GROWTH.value})
_WAITS = {
    PhaseName.DECIDE: "agent.await_decision",
    PhaseName.ROOM: "agent.await_room",
    PhaseName.FETCH: "agent.await_weights",
}


class NodeCollector(Collector):
    """Read the controller at each scrape, so that gauges never lag the ledger."""

    def __init__(self, controller: AgentController) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(semconv.GPU_BYTES, "Bytes granted on a GPU, by owner", labels=["node", "gpu", "owner"])
        total = GaugeMetricFamily(semconv.GPU_TOTAL_BYTES, "Bytes a GPU has to grant", labels=["node", "gpu"])
        node = self._controller.node_id
        for gpu in self._controller.ledger.gpus:
            total.add_metric([node, gpu.gpu_id], gpu.total_bytes)
            held = gpu.bytes_by_owner
            for owner in (*(one.value for one in GrantOwner), SHARED):
                used.add_metric([node, gpu.gpu_id, owner], held.get(owner, 0))
        states = collections.Counter(instance.state for instance in self._controller.instances)
        instances = GaugeMetricFamily(
            semconv.INSTANCES, "Instances known to the agent, by state", labels=["node", "state"]
        )
        for state in InstanceState:
            instances.add_metric([node, state.value], states[state])
        yield from (used, total, instances)


Attributes = Mapping[str, str | float | int | bool]


class Reporter:
    """Execute ReportStart, ReportDrain and ReportConsolidation, as spans and histograms of seconds.

    A start's span has its phases below; a drain has a span, and its engine's falling asleep another; a
    consolidation's span has its waits below. The engine's own phases are under the engine's service name."""

    def __init__(self, tracing: Tracing, engine_tracing: Tracing, registry: CollectorRegistry = REGISTRY) -> None:
        self._tracing, self._engine_tracing = tracing, engine_tracing
        self._model = LabelCap()

        def histogram(name: str, doc: str, labels: list[str]) -> Histogram:
            return Histogram(name, doc, labels, registry=registry, buckets=SECONDS_BUCKETS)

        actual = "Seconds of each phase of a cold start; phase `total` is command to ready"
        self._seconds = histogram(semconv.COLD_START_SECONDS, actual, ["model", "phase"])
        expected = "What each phase was expected to take"
        self._predicted = histogram(semconv.COLD_START_PREDICTED_SECONDS, expected, ["phase"])
        self._error = histogram(
            semconv.COLD_START_ERROR_SECONDS, "How far the prediction was off, either way", ["phase"]
        )
        self._starts = Counter(
            semconv.STARTS_TOTAL,
            "Starts that ended READY, by where the weights were",
            ["model", "weights"],
            registry=registry,
        )

        self._drains = histogram(
            semconv.DRAIN_SECONDS,
            "Seconds of leaving a GPU: until nothing ran any more, and until the engine was asleep then",
            ["model", "part"],
        )

        self._consolidations = histogram(
            semconv.CONSOLIDATE_SECONDS,
            "Seconds until a stage of a pipeline ran all of its model, or gave that up",
            ["model", "result"],
        )

    def executors(self) -> dict[type, Executor]:
        return {ReportStart: self.started, ReportDrain: self.drained, ReportConsolidation: self.consolidated}

    async def consolidated(self, effect: ReportConsolidation, _: Event | None) -> None:
        instance = effect.instance
        attributes = _attributes(instance)
        whole = self._tracing.record(
            "agent.consolidate",
            effect.traceparent,
            effect.began_at,
            instance.changed_at,
            attributes | {semconv.ATTR_REASON: instance.reason},
            error=effect.error,
        )
        for phase in effect.phases:
            tracing, name = self._engine_tracing, "engine.consolidate"
            if phase.name is PhaseName.FETCH:
                tracing, name = self._tracing, "agent.await_rest"
            tracing.record(name, whole, phase.started_at, phase.ended_at, attributes)
        result = "failed" if effect.error else "whole"
        model = self._model(instance.model_key)
        self._consolidations.labels(model, result).observe(instance.changed_at - effect.began_at)

    async def drained(self, effect: ReportDrain, _: Event | None) -> None:
        """End the drain's span where the engine's sleep, a sibling, begins."""
        instance, model = effect.instance, self._model(effect.instance.model_key)
        why = {semconv.ATTR_REASON: instance.reason}
        self._tracing.record(
            "agent.drain", effect.traceparent, effect.began_at, effect.drained_at, _attributes(instance) | why
        )
        self._drains.labels(model, "drained").observe(effect.drained_at - effect.began_at)
        if effect.asleep_at:
            expected = {semconv.ATTR_PREDICTED_SECONDS: effect.predicted_s} if effect.predicted_s else {}
            attributes = _attributes(instance) | expected
            self._engine_tracing.record(
                "engine.sleep", effect.traceparent, effect.drained_at, effect.asleep_at, attributes
            )
            self._drains.labels(model, "asleep").observe(effect.asleep_at - effect.drained_at)

    async def started(self, effect: ReportStart, _: Event | None) -> None:
        instance, attributes = effect.instance, _attributes(effect.instance)
        is_ready = instance.state is InstanceState.READY
        ended_at = instance.ready_at if is_ready else instance.changed_at
        whole = self._tracing.record(
            "agent.start",
            effect.traceparent,
            instance.created_at,
            ended_at,
            attributes | {semconv.ATTR_DECISION_ID: instance.decision_id, semconv.ATTR_REASON: instance.reason},
            error="" if is_ready else instance.reason,
        )
        for phase in instance.phases:
            if phase.name in BEFORE_START:  # over before the agent knew of it: a sibling of its start
                self._phase(phase, effect.traceparent, attributes)
            else:
                self._phase(phase, whole, attributes, wakes=instance.start_kind in _WAKES)
        if is_ready:
            self._measure(instance, effect.is_cached)

    def _measure(self, instance: Instance, is_cached: bool) -> None:
        model = self._model(instance.model_key)
        weights = "asleep" if instance.source else "host" if is_cached else "fetched"
        self._starts.labels(model, weights).inc()
        for phase in instance.phases:
            name, actual_s = phase.name.value, max(phase.actual_s, 0.0)
            self._seconds.labels(model, name).observe(actual_s)
            if phase.predicted_s:
                self._predicted.labels(name).observe(phase.predicted_s)
                self._error.labels(name).observe(abs(actual_s - phase.predicted_s))
        self._seconds.labels(model, "total").observe(instance.ready_at - instance.created_at)

    def _phase(self, phase: Phase, parent: str, attributes: Attributes, *, wakes: bool = False) -> None:
        is_engines = phase.name in _ENGINES_OWN
        tracing = self._engine_tracing if is_engines else self._tracing
        does = "wake" if wakes and phase.name is PhaseName.LOAD else phase.name.value
        name = f"engine.{does}" if is_engines else _WAITS[phase.name]
        own = {semconv.ATTR_PHASE: phase.name.value, semconv.ATTR_PREDICTED_SECONDS: phase.predicted_s}
        tracing.record(name, parent, phase.started_at, phase.ended_at, {**attributes, **own})


def _attributes(instance: Instance) -> dict[str, str | float | int | bool]:
    attributes: dict[str, str | float | int | bool] = {
        semconv.ATTR_MODEL: instance.model_key,
        semconv.ATTR_INSTANCE_ID: instance.instance_id,
        semconv.ATTR_NODE_ID: instance.node_id,
        semconv.ATTR_GPU_ID: instance.gpu_id,
        semconv.ATTR_ENGINE: instance.engine,
        semconv.ATTR_EMULATED: instance.emulated,
    }
    if not instance.is_whole:
        attributes[semconv.ATTR_PIPELINE] = instance.part_of or instance.instance_id
    return attributes
