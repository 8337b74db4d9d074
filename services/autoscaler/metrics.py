"""Metrics of the autoscaler: models by temperature, and the instances of each model."""

import collections
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.model import Temperature
from glowplug.fleet.status import temperature
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap


class ModelCollector(Collector):
    """A collector that reads the autoscaler's controller at each scrape; `controller()` is None while the service
    connects."""

    def __init__(self, controller: Callable[[], AutoscalerController | None]) -> None:
        self._controller, self._cap = controller, LabelCap()

    def collect(self) -> Iterator[Metric]:
        models = GaugeMetricFamily(semconv.MODELS, "Models deployed, by temperature", labels=["temperature"])
        instances = GaugeMetricFamily(
            semconv.MODEL_INSTANCES, "Instances that are not gone, by state", labels=["model", "state"]
        )
        controller = self._controller()
        if controller is not None:
            rows = {key: controller.instances.living(key).values() for key in controller.models}
            temperatures = collections.Counter(map(temperature, rows.values()))
            for one in Temperature:
                models.add_metric([one.value], temperatures[one])
            counts = collections.Counter(
                (self._cap(key), row.state.value) for key, mine in rows.items() for row in mine
            )
            for labels, count in sorted(counts.items()):
                instances.add_metric(labels, count)
        yield from (models, instances)
