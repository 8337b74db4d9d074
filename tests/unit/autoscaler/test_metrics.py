"""The autoscaler's metrics of models."""

from prometheus_client import CollectorRegistry

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.instance import InstanceState
from glowplug.policies.registry import choose
from glowplug.services.autoscaler.main import ModelCollector
from tests.fleet_builder import a_model, an_instance


def test_temperature_and_instances_of_each_model() -> None:
    controller = AutoscalerController(choose("scaling", "reactive"), "reactive", 1)
    models = {name: a_model(name) for name in ("hot", "asleep", "cold")}
    controller.restore("models", dict(models), 0.0)
    rows = [
        an_instance("i-1", "hot"),
        an_instance("i-2", "hot", InstanceState.STARTING),
        an_instance("i-3", "asleep", InstanceState.SWAPPED_OUT),
        an_instance("i-4", "cold", InstanceState.FAILED),
    ]
    controller.restore("instances", {row.instance_id: row for row in rows}, 0.0)
    registry = CollectorRegistry()
    registry.register(ModelCollector(lambda: controller))
    temperatures = {
        t: registry.get_sample_value("glowplug_models", {"temperature": t}) for t in ("hot", "warm", "cold")
    }
    assert temperatures == {"hot": 1, "warm": 1, "cold": 1}
    states = {
        (s.labels["model"], s.labels["state"]): s.value
        for metric in registry.collect()
        for s in metric.samples
        if metric.name == "glowplug_model_instances"
    }
    assert states == {("hot", "ready"): 1, ("hot", "starting"): 1, ("asleep", "swapped_out"): 1}
