"""Measure an agent: memory by owner, instances by state, starts and drains."""

import collections
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import ReportConsolidation, ReportDrain, ReportStart
from glowplug.domain.hardware import SHARED, GrantOwner
from glowplug.domain.instance import InstanceState, SpellName
from glowplug.events import Event
from glowplug.runtime.shell import Executor
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS, LabelCap


class NodeCollector(Collector):
    """Read the controller at each scrape, so that gauges never lag the ledger."""

    def __init__(self, controller: AgentController) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(semconv.GPU_BYTES, "Bytes granted on a GPU, by owner", labels=["node", "gpu", "owner"])
        total = GaugeMetricFamily(semconv.GPU_TOTAL_BYTES, "Bytes that a GPU can grant", labels=["node", "gpu"])
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


class Reporter:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._model = LabelCap()

        def histogram(name: str, doc: str, labels: list[str]) -> Histogram:
            return Histogram(name, doc, labels, registry=registry, buckets=SECONDS_BUCKETS)

        actual = "Seconds of each phase of a cold start; phase `total` is command to ready"
        self._seconds = histogram(semconv.COLD_START_SECONDS, actual, ["model", "phase"])
        expected = "Expected seconds of each phase"
        self._predicted = histogram(semconv.COLD_START_PREDICTED_SECONDS, expected, ["phase"])
        self._error = histogram(semconv.COLD_START_ERROR_SECONDS, "Absolute error of the prediction", ["phase"])
        self._starts = Counter(
            semconv.STARTS_TOTAL,
            "Starts that ended READY, by where the weights were",
            ["model", "weights"],
            registry=registry,
        )

        self._drains = histogram(
            semconv.DRAIN_SECONDS,
            "Seconds to leave a GPU: until the last request ended, then until the engine was asleep",
            ["model", "part"],
        )

        self._consolidations = histogram(
            semconv.CONSOLIDATE_SECONDS,
            "Seconds until a pipeline stage ran its whole model, or gave up",
            ["model", "result"],
        )

    def executors(self) -> dict[type, Executor]:
        return {ReportStart: self.started, ReportDrain: self.drained, ReportConsolidation: self.consolidated}

    async def consolidated(self, effect: ReportConsolidation, _: Event | None) -> None:
        spell = effect.spell
        result = "failed" if spell.error else "whole"
        self._consolidations.labels(self._model(effect.model_key), result).observe(spell.ended_at - spell.started_at)

    async def drained(self, effect: ReportDrain, _: Event | None) -> None:
        model = self._model(effect.model_key)
        for spell in effect.spells:
            part = "asleep" if spell.name is SpellName.SLEEP else "drained"
            self._drains.labels(model, part).observe(spell.ended_at - spell.started_at)

    async def started(self, effect: ReportStart, _: Event | None) -> None:
        instance = effect.instance
        model = self._model(instance.model_key)
        weights = "asleep" if instance.source else "host" if effect.is_cached else "fetched"
        self._starts.labels(model, weights).inc()
        for phase in instance.phases:
            name, actual_s = phase.name.value, max(phase.actual_s, 0.0)
            self._seconds.labels(model, name).observe(actual_s)
            if phase.predicted_s:
                self._predicted.labels(name).observe(phase.predicted_s)
                self._error.labels(name).observe(abs(actual_s - phase.predicted_s))
        self._seconds.labels(model, "total").observe(instance.ready_at - instance.created_at)
