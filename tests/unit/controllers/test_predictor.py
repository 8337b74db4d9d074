"""The predictor's past: WarmServe section 4.1, average is time-weighted, peak is the maximum of a window."""

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.predictor import PredictorController, PredictorParams
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RequestFinished
from tests.fleet_builder import a_model, an_event, load_report


def finished(**fields):
    given = {
        "model_key": "m",
        "request_id": "r",
        "router_id": "router-1",
        "instance_id": "i",
        "status": 200,
        "arrived_at": 0.0,
        "finished_at": 1.0,
        "queue_s": 0.0,
        "ttft_s": 0.1,
        "e2e_s": 1.0,
        "prompt_tokens": 10,
        "response_tokens": 20,
        "tokens_exact": True,
        "cold": False,
    }
    return an_event(RequestFinished(**(given | fields)))


def test_concurrency_is_weighted_by_time_and_carried_over_windows():
    controller = PredictorController(PredictorParams(window_s=60))
    controller.handle(load_report(m=ModelLoad(num_in_flight=4)), 0.0)
    for at in (30.0, 60.0, 89.0):
        controller.handle(load_report(m=ModelLoad(num_in_flight=1)), at)
    controller.handle(Tick(), 90.0)
    first, second = controller.windows("m")
    assert first.concurrency_seconds == pytest.approx(4 * 30 + 1 * 30)
    assert first.concurrency_peak == 4
    assert second.concurrency_seconds == pytest.approx(30)
    assert second.concurrency_peak == 1


def test_tokens_are_counted_and_marked_when_not_exact():
    controller = PredictorController()
    controller.handle(finished(), 1.0)
    controller.handle(finished(tokens_exact=False, cold=True), 2.0)
    (window,) = controller.windows("m")
    assert (window.num_requests, window.prompt_tokens, window.response_tokens) == (2, 20, 40)
    assert (window.num_tokens_exact, window.num_cold) == (1, 1)


def test_memory_is_bounded_in_windows_and_models():
    controller = PredictorController(PredictorParams(window_s=1, num_windows=5, max_models=1))
    controller.handle(finished(), 0.0)
    controller.handle(finished(model_key="other"), 0.0)
    controller.handle(Tick(), 1000.0)
    assert controller.model_keys == ["m"]
    assert len(controller.windows("m")) == 5


def test_series_of_an_undeployed_model_is_dropped_and_forecasts_are_empty():
    controller = PredictorController()
    controller.handle(finished(), 1.0)
    controller.restore("models", {}, 2.0)
    assert controller.model_keys == ["m"], "an emptied store takes no past away"
    controller.restore("models", {"other": a_model("other")}, 3.0)
    assert controller.model_keys == [] and controller.forecasts == {}


def test_a_router_that_starts_anew_has_nothing_of_its_past_in_flight():
    controller = PredictorController(PredictorParams(window_s=60))
    controller.handle(load_report(m=ModelLoad(num_in_flight=4)), 0.0)
    controller.handle(load_report(), 15.0)
    controller.handle(Tick(), 61.0)
    first, second = controller.windows("m")
    assert first.concurrency_seconds == pytest.approx(4 * 15)
    assert second.concurrency_peak == 0


def test_a_router_that_is_silent_is_counted_no_more():
    controller = PredictorController(PredictorParams(window_s=60, router_lease_s=30))
    controller.handle(load_report("router-1", m=ModelLoad(num_in_flight=4)), 0.0)
    for at in (20.0, 31.0, 50.0):
        controller.handle(load_report("router-2", m=ModelLoad(num_in_flight=1)), at)
        controller.handle(Tick(), at)
    controller.handle(Tick(), 61.0)
    assert controller.windows("m")[-1].concurrency_peak == 1
