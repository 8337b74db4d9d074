"""What the router shows: queues as they are at the scrape, and models past the cap added up, never twice."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import ClientLeft, RequestArrived
from glowplug.controllers.router.queue import ModelQueue
from glowplug.domain.model import Slo
from glowplug.telemetry.metrics import LabelCap, ShellMetrics
from services.router.desk import Desk
from services.router.metrics import RouterMetrics
from services.router.slo import Count
from tests.contract.data_port_rig import a_model


def test_held_requests_are_those_of_the_moment() -> None:
    registry = CollectorRegistry()
    desk = Desk(RouterController())
    desk.restore("models", {"m": a_model()})
    RouterMetrics(registry).join(ShellMetrics("router", CollectorRegistry()), desk.controller)
    desk.controller.handle(RequestArrived(1, "m", "r-1"), desk.clock())
    assert registry.get_sample_value("glowplug_requests_held", {"model": "m"}) == 1
    desk.controller.handle(ClientLeft(1), desk.clock())
    assert not registry.get_sample_value("glowplug_requests_held", {"model": "m"})


def test_levels_are_shown_from_0_before_anybody_asks() -> None:
    registry, controller = CollectorRegistry(), RouterController()
    desk = Desk(controller)
    desk.restore("models", {"m": replace(a_model(), slo=Slo(ttft_s=2.0))})
    RouterMetrics(registry).join(ShellMetrics("router", CollectorRegistry()), controller)
    assert registry.get_sample_value("glowplug_slo_missed_total", {"model": "m", "level": "ttft"}) == 0
    assert registry.get_sample_value("glowplug_slo_missed_total", {"model": "m", "level": "tpot"}) is None


def test_models_past_the_cap_are_one_sample() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.cap = LabelCap(1)
    for key in ("a", "b", "c"):
        metrics.slo.counts[key, "ttft"] = Count(2, 1)
    text = generate_latest(registry).decode()
    assert registry.get_sample_value("glowplug_slo_missed_total", {"model": "other", "level": "ttft"}) == 2
    assert text.count('glowplug_slo_requests_total{level="ttft",model="other"}') == 1


def test_queues_past_the_cap_are_one_sample() -> None:
    registry, controller = CollectorRegistry(), RouterController()
    metrics = RouterMetrics(registry)
    metrics.join(ShellMetrics("router", CollectorRegistry()), controller)
    metrics.cap = LabelCap(1)
    for key in ("a", "b", "c"):
        controller.queues[key] = ModelQueue(num_running=3)
    assert registry.get_sample_value("glowplug_requests_in_flight", {"model": "other"}) == 6
