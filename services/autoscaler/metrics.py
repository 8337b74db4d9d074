"""What the autoscaler shows of the models it owns: their temperature, and the instances of each."""

import collections
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Temperature
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap


class ModelCollector(Collector):
    """Reads the controller at each scrape; `controller()` is None while the service connects."""

    def __init__(self, controller: Callable[[], AutoscalerController | None]) -> None:
        self._controller, self._cap = controller, LabelCap()

    def collect(self) -> Iterator[Metric]:
        models = GaugeMetricFamily(semconv.MODELS, "Models deployed, by temperature", labels=["temperature"])
        instances = GaugeMetricFamily(
            semconv.MODEL_INSTANCES, "Instances that are not gone, by state", labels=["model", "state"]
        )
        controller = self._controller()
        if controller is not None:
            rows = {key: list(controller.instances.of(key).values()) for key in controller.models}
            temperatures = collections.Counter(map(temperature, rows.values()))
            for one in Temperature:
                models.add_metric([one.value], temperatures[one])
            counts = collections.Counter(
                (self._cap(key), row.state.value) for key, mine in rows.items() for row in mine if not row.state.is_gone
            )
            for labels, count in sorted(counts.items()):
                instances.add_metric(labels, count)
        yield from (models, instances)


def temperature(instances: list[Instance]) -> Temperature:
    """Of a model with these instances."""
    if any(i.state is InstanceState.READY and i.serves for i in instances):
        return Temperature.HOT
    return Temperature.WARM if any(i.state.is_dormant for i in instances) else Temperature.COLD
