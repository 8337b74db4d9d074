"""The router's metrics: queues, models past the cap, service levels."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import RequestArrived, RequestEnded
from glowplug.controllers.router.queue import ModelQueue
from glowplug.domain.model import Slo
from glowplug.events.facts import RequestFinished
from glowplug.services.router.metrics import RouterMetrics, SloCount, SloCounts
from glowplug.telemetry.metrics import LabelCap, ShellMetrics
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


def test_blocks_of_prompts_are_those_that_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, controller, _ = shown()
    monkeypatch.setattr(controller.balances, "num_blocks", lambda: {"m": 3, "n": 4, "o": 5})
    assert registry.get_sample_value("glowplug_router_prefix_blocks", {"model": "m"}) == 3
    assert registry.get_sample_value("glowplug_router_prefix_blocks", {"model": "other"}) == 9


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


ENDED = RequestFinished(
    model_key="m", request_id="r", router_id="router-1", instance_id="i", status=200, arrived_at=1.0, finished_at=5.0,
    queue_s=0.0, ttft_s=1.0, e2e_s=4.0, prompt_tokens=7, response_tokens=2, tokens_exact=True, cold=False,
)  # fmt: skip


def ends(metrics: RouterMetrics, fact: RequestFinished = ENDED, *, num_events: int = 3, **over: Any) -> None:
    given = {"begun": True, "queue_s": 0.5, "router_s": 0.002} | over
    metrics.finished(a_model(slo=SLO), fact, num_events=num_events, **given)


def read(registry: CollectorRegistry) -> dict[str, float]:
    """Without what is zero, and without buckets."""
    samples = (one for family in registry.collect() for one in family.samples)
    return {
        f"{one.name.removeprefix('glowplug_')}{'/'.join(['', *one.labels.values()])}": one.value
        for one in samples
        if one.value and not one.name.endswith(("_bucket", "_created"))
    }


ALWAYS = {"request_queue_seconds_count/m": 1, "request_queue_seconds_sum/m": 0.5, "request_e2e_seconds_count/m": 1}
ALWAYS |= {"request_e2e_seconds_sum/m": 4.0, "requests_total/m/200": 1}
LEVELS = {"slo_requests_total/m/ttft": 1, "slo_requests_total/m/tpot": 1, "slo_missed_total/m/tpot": 1}
BEGUN = {"router_overhead_seconds_count": 1, "router_overhead_seconds_sum": 0.002, "response_tokens_total/m": 2}
HOT = {"request_ttft_seconds_count/m/hot": 1, "request_ttft_seconds_sum/m/hot": 1.0}
STREAMED = {"response_chunks_total/m": 3, "request_tpot_seconds_count/m": 1, "request_tpot_seconds_sum/m": 3.0}


@pytest.mark.parametrize(
    ("over", "given", "expected"),
    [
        ({}, {}, ALWAYS | LEVELS | BEGUN | HOT | STREAMED | {"prompt_tokens_total/m": 7}),
        ({"tokens_exact": False}, {}, ALWAYS | LEVELS | BEGUN | HOT | STREAMED),
        ({}, {"has_levels": False}, ALWAYS | BEGUN | HOT | STREAMED | {"prompt_tokens_total/m": 7}),
        ({}, {"num_events": 0}, ALWAYS | {"slo_requests_total/m/ttft": 1} | BEGUN | HOT | {"prompt_tokens_total/m": 7}),
        (
            {"cold": True, "response_tokens": 1},
            {"num_events": 1},
            ALWAYS | {"slo_requests_total/m/ttft": 1} | BEGUN | {"response_tokens_total/m": 1} | {
                "request_ttft_seconds_count/m/cold": 1, "request_ttft_seconds_sum/m/cold": 1.0,
                "response_chunks_total/m": 1, "prompt_tokens_total/m": 7,
            },
        ),
        (
            {"status": 503},
            {"begun": False, "num_events": 0},
            {name.replace("200", "503"): num for name, num in ALWAYS.items()} | LEVELS | {"slo_missed_total/m/ttft": 1},
        ),
    ],
)  # fmt: skip
def test_what_one_ended_request_counts(over: dict[str, Any], given: dict[str, Any], expected: dict[str, float]) -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    ends(metrics, replace(ENDED, **over), **given)
    assert read(registry) == pytest.approx(expected)


def test_the_models_of_ended_requests_past_the_cap_are_one() -> None:
    registry, _, metrics = shown()
    for key in ("m", "n", "o", "o"):
        metrics.finished(a_model(key), ENDED, begun=False, queue_s=0.0, router_s=0.0, num_events=0)
    ends(metrics, replace(ENDED, status=502))
    assert registry.get_sample_value("glowplug_requests_total", {"model": "m", "code": "200"}) == 1
    assert registry.get_sample_value("glowplug_requests_total", {"model": "m", "code": "502"}) == 1
    assert registry.get_sample_value("glowplug_requests_total", {"model": "other", "code": "200"}) == 3


@pytest.mark.parametrize("slo", [Slo(ttft_s=0.5), Slo(tpot_s=0.1)])
def test_a_model_with_one_level_is_judged_by_that_one(slo: Slo) -> None:
    metrics = RouterMetrics(CollectorRegistry())
    metrics.finished(a_model(slo=slo), ENDED, begun=True, queue_s=0.0, router_s=0.0, num_events=3)
    assert [(count.num, count.num_missed) for count in metrics.slo.counts.values()] == [(1, 1)]


@pytest.mark.parametrize(
    ("status", "ttft_s", "e2e_s", "counts"),
    [
        (399, 2.0, 9.0, (1, 0)),
        (399, 0.0, 9.0, (1, 0)),
        (400, 9.0, 9.0, (0, 0)),
        (500, 1.0, 1.0, (1, 1)),
        (428, 1.0, 1.0, (0, 0)),
        (499, NONE, 2.0, (0, 0)),
    ],
)
def test_an_objective_is_kept_when_it_is_just_reached(
    status: int, ttft_s: float, e2e_s: float, counts: tuple[int, int]
) -> None:
    counted = SloCounts()
    counted.judge("m", Slo(ttft_s=2.0), status, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=NONE)
    assert [(count.num, count.num_missed) for count in counted.counts.values()] == ([counts] if counts[0] else [])
    counted = SloCounts()
    for tpot_s in (0.0, 0.1):
        counted.judge("m", Slo(tpot_s=0.1), 200, e2e_s=1.0, ttft_s=1.0, tpot_s=tpot_s)
    assert [(count.num, count.num_missed) for count in counted.counts.values()] == [(2, 0)]


def test_tenants_past_the_cap_are_one() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics._tenant_cap = LabelCap(1)
    for tenant in ("a", "a", "b", "c"):
        metrics.used(tenant, 3, 4)
    assert read(registry) == {
        f"tenant_{name}/{tenant}{kind}": 2.0 * num
        for tenant in ("a", "other")
        for name, kind, num in (
            ("requests_total", "", 1),
            ("tokens_total", "/prompt", 3),
            ("tokens_total", "/response", 4),
        )
    }


def test_events_refusals_and_continuations_are_counted_by_kind() -> None:
    registry = CollectorRegistry()
    shell = ShellMetrics("router", CollectorRegistry())
    metrics = RouterMetrics(registry, shell=shell)
    for _ in range(2):
        metrics.published("a.b")
        metrics.refused(503)
        metrics.continued("moved", "stayed")
    assert shell.published.labels("router", "a.b")._value.get() == 2
    assert read(registry) == {"requests_refused_total/503": 2, "stream_continuations_total/moved/stayed": 2}
    RouterMetrics(CollectorRegistry()).published("a.b")
