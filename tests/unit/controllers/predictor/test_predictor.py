"""The predictor: learned windows, and what a request says of its objectives (PreServe section 4.1)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.predictor.controller import ModelForecasts, PredictorController, Window, served
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.domain.model import Slo
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import ForecastMade, InstanceReady, RequestFinished, RouterRequestsFinished
from glowplug.fleet.throughput import CapacityParams
from glowplug.policies.prediction.port import WindowTotals
from glowplug_lab.policies.warmserve_csp import WarmserveCsp
from glowplug_lab.policies.windows import LastWindow
from tests.control import Effects
from tests.fleet_builder import a_model, an_event, an_instance, load_report

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def predictor(make=LastWindow, *, model=None, **given) -> PredictorController:
    controller = PredictorController(PredictorParams(window_s=60, num_windows=100), make, **given)
    controller.restore("models", {"m": model or a_model(max_concurrency=4, slo=SLO)}, 0.0)
    return controller


def finished(**fields):
    return an_event(RouterRequestsFinished(router_id="router-1", requests=(ended(**fields),)))


def ended(**fields):
    given = {
        "model_key": "m", "request_id": "r", "router_id": "router-1", "instance_id": "i-1", "status": 200,
        "arrived_at": 0.0, "finished_at": 1.0, "queue_s": 0.0, "ttft_s": 0.5, "e2e_s": 1.5, "prompt_tokens": 600,
        "response_tokens": 21, "tokens_exact": True, "cold": False,
    }  # fmt: skip
    return RequestFinished(**(given | fields))


def made(effects):
    return Effects(effects).of(ForecastMade)


def busy(num=4):
    return load_report(m=ModelLoad(num_in_flight=num, in_flight_by_instance={"i-1": 1}))


def test_windows_in_which_nothing_happened_take_no_memory_and_are_listed_all_the_same():
    controller = PredictorController(PredictorParams(window_s=60, num_windows=1440))
    for key in ("a", "b"):
        controller.handle(finished(model_key=key), 0.0)
    for minute in range(1, 2000):
        controller.handle(load_report(a=ModelLoad(), b=ModelLoad()), minute * 60.0)
        controller.handle(Tick(), minute * 60.0 + 30)
    assert [len(series.windows) for series in controller._series.values()] == [0, 0]
    windows = controller.windows("a")
    assert len(windows) == 1440 and [w.started_at for w in windows[-2:]] == [1998 * 60.0, 1999 * 60.0]
    assert not any(w.num_requests for w in windows)


def test_every_window_is_learned_empty_ones_too_and_none_twice():
    seen = []

    class Listener(LastWindow):
        def closed(self, window):
            seen.append((window.started_at, window.num_requests))

    controller = predictor(Listener)
    controller.handle(finished(), 10.0)
    controller.handle(Tick(), 200.0)
    controller.handle(Tick(), 250.0)
    assert seen == [(0.0, 1), (60.0, 0), (120.0, 0), (180.0, 0)]


def test_forecasts_of_some_windows_ahead_are_kept():
    controller = PredictorController(PredictorParams(window_s=60, num_ahead=20), LastWindow)
    for number in range(25):
        controller.handle(busy(), number * 60.0)
        controller.handle(Tick(), (number + 1) * 60.0)
    of_last = [1440.0 - f.made_at for f in controller.past_forecasts("m") if f.starts_at == 1440.0]
    assert of_last == [19 * 60.0, 11 * 60.0, 5 * 60.0, 120.0, 60.0, 0.0], "20, 12, 6, 3, 2 and 1 ahead"


def test_forecasts_reach_a_day_ahead_at_most():
    class FollowsStarts(LastWindow):
        FOLLOWS_STARTS = True

    controller = predictor(FollowsStarts)
    row = replace(an_instance("a"), start_kind="cold", created_at=100.0, ready_at=1e9)
    controller.handle(an_event(InstanceReady(instance=row)), 0.0)
    controller.handle(busy(), 0.0)
    (fact,) = made(controller.handle(Tick(), 60.5))
    assert len(fact.forecasts) == 288


def test_a_history_is_learned_before_the_first_request():
    day = [
        WindowTotals(started_at=60.0 * n, window_s=60.0, concurrency_mean=float(n % 1440 == 3)) for n in range(-1440, 0)
    ]
    controller = predictor(WarmserveCsp, history={"m": day})
    (fact,) = made(controller.handle(Tick(), 0.0))
    assert fact.forecasts[0].starts_at == 0.0
    for at in (60.0, 120.0, 180.0):
        (fact,) = made(controller.handle(Tick(), at))
    assert fact.forecasts[0].starts_at == 180.0
    assert fact.forecasts[0].concurrency_mean == pytest.approx(1.0), "as yesterday at that time"


@pytest.mark.parametrize(
    ("fields", "is_missed"),
    [
        ({}, False),
        ({"ttft_s": 1.1}, True),
        ({"ttft_s": 1.1, "cold": True}, False),
        ({"e2e_s": 3.0}, True),
        ({"error_code": "engine_failed", "status": 502}, True),
        ({"error_code": "client_left", "status": 499}, False),
    ],
)
def test_a_request_misses_by_its_models_objectives_unless_it_waited_for_a_start(fields, is_missed):
    one = served(ended(**fields), a_model(slo=SLO), CapacityParams())
    assert one is not None and one.missed is is_missed


def test_a_model_without_objectives_is_held_to_the_papers_normalized_latency():
    """Section 5.1: 0.2 s per response token."""
    for e2e_s, is_missed in ((4.1, False), (4.3, True)):
        one = served(ended(e2e_s=e2e_s), a_model(), CapacityParams())
        assert one is not None and one.missed is is_missed


def test_after_a_window_that_missed_nothing_a_model_that_has_become_slow_is_known_again():
    """From 0.01, 1 % a window reaches 0.5 after 394 windows."""
    forecasts = ModelForecasts(forecaster=LastWindow(60.0), next_number=0, num_kept=1)
    clean, slow = (Window(started_at=0.0, num_judged=100, objective_sum=100 * ratio) for ratio in (0.0, 3.0))
    assert forecasts._held_against_the_least(clean) == 0.0
    found = [forecasts._held_against_the_least(slow) for _ in range(800)]
    assert found[0] == found[380] == 3.0 and found[420] < 3.0 and found[-1] == pytest.approx(0.5)


@pytest.mark.parametrize("fields", [{"instance_id": ""}, {"num_continued": 1}, {"response_tokens": 0}])
def test_what_no_single_instance_answered_says_nothing_of_one(fields):
    assert served(ended(**fields), a_model(), CapacityParams()) is None
