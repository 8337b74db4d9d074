"""The predictor's past: WarmServe section 5.1, average is time-weighted, peak is the maximum of a window."""

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.params import PredictorParams
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


def test_windows_in_which_nothing_happened_take_no_room_and_are_told_all_the_same():
    controller = PredictorController(PredictorParams(window_s=60, num_windows=1440))
    for key in ("a", "b"):
        controller.handle(finished(model_key=key), 0.0)
    for minute in range(1, 2000):
        controller.handle(load_report(a=ModelLoad(), b=ModelLoad()), minute * 60.0)
        controller.handle(Tick(), minute * 60.0 + 30)
    assert [len(series.windows) for series in controller._series.values()] == [0, 0]
    told = controller.windows("a")
    assert len(told) == 1440 and [w.started_at for w in told[-2:]] == [1998 * 60.0, 1999 * 60.0]
    assert not any(w.num_requests for w in told)


def test_load_that_lasts_over_a_silence_of_ours_fills_the_windows_that_are_kept():
    controller = PredictorController(PredictorParams(window_s=60, num_windows=10))
    controller.handle(load_report(m=ModelLoad(num_in_flight=2)), 30.0)
    controller._series["m"].advance(6030.0)
    told = controller.windows("m")
    assert len(told) == 10 and {w.concurrency_peak for w in told} == {2}
    assert [w.concurrency_seconds for w in told] == [pytest.approx(120.0)] * 9 + [pytest.approx(60.0)]


def test_a_successor_has_the_past_of_the_one_before():
    earlier, successor = PredictorController(), PredictorController()
    earlier.handle(finished(), 1.0)
    successor.inherit(earlier, 2.0)
    assert successor.windows("m")[0].num_requests == 1
