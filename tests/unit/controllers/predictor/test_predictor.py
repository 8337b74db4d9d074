"""The predictor's past (WarmServe section 5.1: average is time-weighted, peak is the maximum of a window), forecasts at
each window's close, how far off they were, and mu (PreServe section 4.1, Algorithm 1)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.params import CapacityParams, PredictorParams
from glowplug.domain.model import Slo
from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.events.facts import ForecastMade, InstanceReady, RequestFinished
from glowplug.policies.prediction.baselines import LastWindow
from glowplug.policies.prediction.port import WindowTotals
from glowplug.policies.prediction.warmserve_csp import WarmserveCsp
from glowplug.policies.scaling.preserve import Capacity
from tests.fleet_builder import a_model, an_event, an_instance, load_report

SLO = Slo(ttft_s=1.0, tpot_s=0.1)


def predictor(make=LastWindow, *, model=None, busy_ratio=0.5, **given) -> PredictorController:
    params = PredictorParams(window_s=60, num_windows=100, capacity=CapacityParams(busy_ratio=busy_ratio))
    controller = PredictorController(params, make, **given)
    controller.restore("models", {"m": model or a_model(max_concurrency=4, slo=SLO)}, 0.0)
    return controller


def finished(**fields):
    given = {
        "model_key": "m", "request_id": "r", "router_id": "router-1", "instance_id": "i-1", "status": 200,
        "arrived_at": 0.0, "finished_at": 1.0, "queue_s": 0.0, "ttft_s": 0.5, "e2e_s": 1.5, "prompt_tokens": 600,
        "response_tokens": 21, "tokens_exact": True, "cold": False,
    }  # fmt: skip
    return an_event(RequestFinished(**(given | fields)))


def made(effects):
    return [e.payload for e in effects if isinstance(e, Publish) and isinstance(e.payload, ForecastMade)]


def busy(num=4, *ids):
    return load_report(m=ModelLoad(num_in_flight=num, in_flight_by_instance=dict.fromkeys(ids or ("i-1",), 1)))


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
    controller.handle(finished(prompt_tokens=10, response_tokens=20), 1.0)
    controller.handle(finished(prompt_tokens=10, response_tokens=20, tokens_exact=False, cold=True), 2.0)
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


def test_load_that_lasts_over_a_silence_of_ours_fills_the_windows_that_are_kept():
    controller = PredictorController(PredictorParams(window_s=60, num_windows=10))
    controller.handle(load_report(m=ModelLoad(num_in_flight=2)), 30.0)
    controller._series["m"].advance(6030.0)
    windows = controller.windows("m")
    assert len(windows) == 10 and {w.concurrency_peak for w in windows} == {2}
    assert [w.concurrency_seconds for w in windows] == [pytest.approx(120.0)] * 9 + [pytest.approx(60.0)]


def test_a_successor_has_the_past_of_the_one_before():
    earlier, successor = PredictorController(), PredictorController()
    earlier.handle(finished(), 1.0)
    successor.inherit(earlier, 2.0)
    assert successor.windows("m")[0].num_requests == 1


# forecasts


def test_a_forecast_is_published_when_a_window_closes_and_only_then():
    controller = predictor()
    controller.handle(busy(4), 0.0)
    assert made(controller.handle(Tick(), 30.0)) == []
    (fact,) = made(controller.handle(Tick(), 60.5))
    first, second = fact.forecasts
    assert (first.starts_at, second.starts_at, first.made_at, first.source) == (60.0, 120.0, 60.5, "last_window")
    assert first.concurrency_mean == pytest.approx(4.0)
    assert made(controller.handle(Tick(), 61.0)) == []
    assert controller.forecasts == {"m": (first, second)}


def test_without_a_forecaster_nothing_is_expected_of_anybody():
    controller = PredictorController(PredictorParams(window_s=60))
    controller.handle(busy(4), 0.0)
    assert controller.handle(Tick(), 130.0) == [] and controller.forecasts == {} and controller._expected == {}


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


def test_what_was_expected_is_kept_beside_what_came_with_its_error():
    controller = predictor()
    controller.handle(busy(4), 0.0)
    controller.handle(Tick(), 60.0)
    controller.handle(busy(2), 60.0)
    (fact,) = made(controller.handle(Tick(), 120.0))
    assert [f.concurrency_mean for f in controller.past_forecasts("m")] == [pytest.approx(4.0)]
    assert fact.forecasts[0].error_ratio == pytest.approx((4.0 - 2.0) / 2.0)


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


def one_window(controller, *requests, num=4, ids=("i-1",), load=None):
    controller.handle(load_report(m=load) if load else busy(num, *ids), 0.0)
    for request in requests:
        controller.handle(request, 30.0)
    (fact,) = made(controller.handle(Tick(), 60.0))
    return fact.forecasts[0]


def test_mu_is_what_one_instance_took_in_a_window_in_which_every_request_met_its_objectives():
    """Section 4.1: tokens of the window over its seconds and instances (erratum E31)."""
    found = one_window(predictor(), finished(), finished(), num=8, ids=("i-1", "i-2"))
    assert found.prompt_per_s == pytest.approx(1200 / 60 / 2)
    assert found.response_per_s == pytest.approx(42 / 60 / 2)
    assert found.total_per_s == pytest.approx(1242 / 60 / 2)


@pytest.mark.parametrize(
    "late",
    [{"ttft_s": 1.1}, {"e2e_s": 3.0}, {"error_code": "engine_failed", "status": 502}],
)
def test_one_request_that_missed_makes_the_window_say_nothing(late):
    assert one_window(predictor(), finished(), finished(**late)).total_per_s == 0.0


def test_of_many_requests_a_few_may_be_late_unless_read_literally():
    many = [finished() for _ in range(39)]
    assert one_window(predictor(), *many, finished(ttft_s=1.1)).total_per_s > 0
    assert one_window(predictor(), *many, *[finished(ttft_s=1.1)] * 3).total_per_s == 0.0


def test_a_model_without_objectives_is_held_to_the_papers_normalized_latency():
    """Section 5.1: 0.2 s per response token."""
    plain = a_model(max_concurrency=4)
    assert one_window(predictor(model=plain), finished(e2e_s=4.1)).total_per_s > 0
    assert one_window(predictor(model=plain), finished(e2e_s=4.3)).total_per_s == 0.0


def test_a_quiet_window_says_nothing_of_what_an_instance_can_take_unless_read_literally():
    assert one_window(predictor(), finished(), num=1).total_per_s == 0.0
    assert one_window(predictor(busy_ratio=0.0), finished(), num=1).total_per_s > 0


def test_a_window_with_a_full_cache_is_not_quiet_however_wide_the_batch():
    wide = a_model(max_concurrency=256, slo=SLO)
    outlook = {"i-1": Outlook(peak_ratio=0.6, over_share=0.0)}
    load = ModelLoad(num_in_flight=4, in_flight_by_instance={"i-1": 4}, outlook_by_instance=outlook)
    assert one_window(predictor(model=wide), finished(), load=load).prompt_per_s == pytest.approx(10.0)
    assert one_window(predictor(model=wide), finished()).prompt_per_s == 0.0


def test_a_batch_is_full_when_every_slot_that_engines_really_have_is_taken():
    """Of 8 declared slots memory allows 3: three requests at once are a full batch, and mu is learned."""
    declared = a_model(max_concurrency=8, slo=SLO)
    three = ModelLoad(num_in_flight=3, in_flight_by_instance={"i-1": 3})
    for load, is_learned in ((three, False), (replace(three, slots_per_instance=3), True)):
        assert (one_window(predictor(model=declared), finished(), load=load).total_per_s > 0) is is_learned


def test_capacities_measured_elsewhere_are_the_least_there_is():
    known = Capacity(prompt_per_s=99.0, response_per_s=0.1, total_per_s=99.0)
    found = one_window(predictor(capacities={"m": known}), finished())
    assert (found.prompt_per_s, found.total_per_s) == (99.0, 99.0)
    assert found.response_per_s == pytest.approx(21 / 60)


def test_who_leads_next_forecasts_on():
    first, second = predictor(), predictor()
    first.handle(busy(4), 0.0)
    first.handle(Tick(), 60.0)
    first.handle(busy(4), 60.0)
    second.inherit(first, 61.0)
    (fact,) = made(second.handle(Tick(), 120.0))
    assert fact.forecasts[0].concurrency_mean == pytest.approx(4.0)
    assert len(second.past_forecasts("m")) == 1


# how far ahead


class FollowsStarts(LastWindow):
    FOLLOWS_STARTS = True


def started(instance_id, took_s, kind="cold"):
    times = {"created_at": 100.0, "ready_at": 100.0 + took_s}
    return replace(an_instance(instance_id), model_key="m", start_kind=kind, **times)


@pytest.mark.parametrize(
    ("starts", "horizon_s", "num_ahead"),
    [
        ([], 0.0, 2),
        ([("a", 30.0, "cold")], 30.0, 2),
        ([("a", 200.0, "cold"), ("b", 210.0, "cached"), ("b", 999.0, "cold"), ("c", 1.0, "wake")], 205.0, 5),
        ([(name, 1e9, "cold") for name in "abcd"], 1e9, 288),
    ],
)
def test_forecasts_reach_as_far_as_starts_from_nothing_take(starts, horizon_s, num_ahead):
    """Median of the last three of each model; one counted twice counts once."""
    controller = predictor(FollowsStarts)
    for start in starts:
        controller.handle(an_event(InstanceReady(instance=started(*start))), 0.0)
    controller.handle(busy(4), 0.0)
    (fact,) = made(controller.handle(Tick(), 60.5))
    assert (fact.horizon_s, len(fact.forecasts)) == (horizon_s, num_ahead)


def test_the_horizon_is_read_from_the_table_inherited_and_no_matter_to_policies_that_do_not_follow_it():
    rows = {"a": started("a", 150.0), "b": started("b", 170.0)}
    first, second, constant = predictor(FollowsStarts), predictor(FollowsStarts), predictor(LastWindow)
    for controller in (first, constant):
        controller.restore("instances", rows, 0.0)
        controller.handle(busy(4), 0.0)
    second.inherit(first, 1.0)
    assert second.horizon_s("m") == 160.0
    (fact,) = made(constant.handle(Tick(), 60.5))
    assert (fact.horizon_s, len(fact.forecasts)) == (0.0, 2)
