"""The router's metrics: queues, models past the cap, service levels."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import RequestArrived, RequestEnded
from glowplug.controllers.router.queue import ModelQueue
from glowplug.domain.model import Slo
from glowplug.services.router.metrics import RouterMetrics, SloCount, SloCounts
from glowplug.telemetry.metrics import LabelCap
from tests.contract.data_port_rig import a_model

SLO = Slo(ttft_s=2.0, tpot_s=0.1)
NONE = -1.0


def shown(**model: Any) -> tuple[CollectorRegistry, RouterController, RouterMetrics]:
    registry, controller = CollectorRegistry(), RouterController()
    controller.restore("models", {"m": a_model(**model)}, 100.0)
    metrics = RouterMetrics(registry, controller=controller)
    metrics.cap = LabelCap(1)
    return registry, controller, metrics


def test_held_requests_are_those_of_the_moment() -> None:
    registry, controller, _ = shown()
    controller.handle(RequestArrived(1, "m", "r-1"), 100.0)
    assert registry.get_sample_value("glowplug_requests_held", {"model": "m"}) == 1
    controller.handle(RequestEnded(1), 100.0)
    assert not registry.get_sample_value("glowplug_requests_held", {"model": "m"})


def test_levels_are_shown_from_0_before_anybody_asks() -> None:
    registry, _, _ = shown(slo=Slo(ttft_s=2.0))
    assert registry.get_sample_value("glowplug_slo_missed_total", {"model": "m", "level": "ttft"}) == 0
    assert registry.get_sample_value("glowplug_slo_missed_total", {"model": "m", "level": "tpot"}) is None


def test_models_past_the_cap_are_one_sample() -> None:
    registry, controller, metrics = shown()
    for key in ("a", "b", "c"):
        metrics.slo.counts[key, "ttft"] = SloCount(2, 1)
        controller.queues[key] = ModelQueue(num_running=3)
    text = generate_latest(registry).decode()
    assert registry.get_sample_value("glowplug_slo_missed_total", {"model": "other", "level": "ttft"}) == 2
    assert text.count('glowplug_slo_requests_total{level="ttft",model="other"}') == 1
    assert registry.get_sample_value("glowplug_requests_in_flight", {"model": "other"}) == 6


@pytest.mark.parametrize(
    ("status", "ttft_s", "tpot_s", "e2e_s", "ttft", "tpot"),
    [
        (200, 1.0, 0.05, 3.0, (1, 0), (1, 0)),
        (200, 2.5, 0.05, 3.0, (1, 1), (1, 0)),
        (200, 1.0, 0.2, 3.0, (1, 0), (1, 1)),
        (200, 1.0, NONE, 3.0, (1, 0), (0, 0)),  # one token, or not a stream
        (503, NONE, NONE, 0.1, (1, 1), (1, 1)),
        (429, NONE, NONE, 0.1, (1, 1), (1, 1)),
        (502, 1.0, 0.05, 3.0, (1, 1), (1, 1)),  # the engine died midstream
        (400, NONE, NONE, 0.1, (0, 0), (0, 0)),
        (499, NONE, NONE, 1.0, (0, 0), (0, 0)),  # left before it counted as late
        (499, NONE, NONE, 9.0, (1, 1), (0, 0)),
        (499, 1.0, 0.2, 9.0, (0, 0), (0, 0)),
    ],
)
def test_what_counts_and_what_is_missed(
    status: int, ttft_s: float, tpot_s: float, e2e_s: float, ttft: tuple[int, int], tpot: tuple[int, int]
) -> None:
    counted = SloCounts()
    counted.judge("m", SLO, status, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=tpot_s)
    counts = {level: (count.num, count.num_missed) for (_, level), count in counted.counts.items()}
    assert counts.get("ttft", (0, 0)) == ttft
    assert counts.get("tpot", (0, 0)) == tpot


def test_a_model_without_levels_is_not_judged() -> None:
    counted = SloCounts()
    counted.judge("m", Slo(), 503, e2e_s=9.0, ttft_s=NONE, tpot_s=NONE)
    assert counted.counts == {}
