"""The predictor: past windows (WarmServe section 5.1: time-weighted average, peak as maximum), forecasts at each
close, their errors, and mu (PreServe section 4.1, Algorithm 1).
"""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.predictor.controller import ModelForecasts, PredictorController, Window, served
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.domain.snapshot import ClassLoad, ModelLoad
from glowplug.events.facts import ForecastMade, InstanceDraining, InstanceReady, RequestFinished, RouterRequestsFinished
from glowplug.fleet.throughput import Capacity, CapacityParams
from glowplug.policies.prediction.port import WindowTotals
from glowplug_lab.policies.warmserve_csp import WarmserveCsp
from glowplug_lab.policies.windows import LastWindow
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


def test_batch_requests_are_no_demand_to_come_until_they_count_as_standard_ones():
    controller = predictor()
    batch = {"batch": ClassLoad(num_waiting=7, in_flight_by_instance={"i-1": 3})}
    load = ModelLoad(num_waiting=9, num_in_flight=4, in_flight_by_instance={"i-1": 4}, by_class=batch)
    controller.handle(load_report(m=load), 0.0)
    controller.handle(finished(priority="batch"), 10.0)
    controller.handle(finished(priority="interactive"), 20.0)
    controller.handle(load_report(m=replace(load, num_in_flight=3, in_flight_by_instance={"i-1": 3})), 30.0)
    controller.handle(load_report(m=replace(load, by_class={})), 60.0)
    controller.handle(Tick(), 60.0)
    first, second = controller.windows("m")
    assert (first.num_requests, first.prompt_tokens, first.num_judged) == (1, 600, 1)
    assert first.concurrency_seconds == 30 * 3 + 30 * 2 and first.instance_seconds == 30
    assert second.concurrency_peak == 13


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


def test_of_a_window_gone_by_the_forecasts_of_several_windows_ahead_are_kept():
    controller = PredictorController(PredictorParams(window_s=60, num_windows=5, num_ahead=4), LastWindow)
    for number in range(9):
        controller.handle(busy(number + 1), number * 60.0)
        controller.handle(Tick(), (number + 1) * 60.0)
    past = controller.past_forecasts("m")
    assert {f.starts_at for f in past} == {240.0, 300.0, 360.0, 420.0, 480.0}, "as many windows as are kept"
    newest = [(f.made_at, f.concurrency_mean) for f in past if f.starts_at == 480.0]
    assert newest == [(300.0, 5.0), (360.0, 6.0), (420.0, 7.0), (480.0, 8.0)], "4, 3, 2 and 1 ahead"
    long = PredictorController(PredictorParams(window_s=60, num_ahead=20), LastWindow)
    for number in range(25):
        long.handle(busy(), number * 60.0)
        long.handle(Tick(), (number + 1) * 60.0)
    of_last = [1440.0 - f.made_at for f in long.past_forecasts("m") if f.starts_at == 1440.0]
    assert of_last == [19 * 60.0, 11 * 60.0, 5 * 60.0, 120.0, 60.0, 0.0], "20, 12, 6, 3, 2 and 1 ahead"


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


def one_window(controller, *requests):
    controller.handle(busy(4), 0.0)
    for request in requests:
        controller.handle(request, 30.0)
    (fact,) = made(controller.handle(Tick(), 60.0))
    return fact.forecasts[0]


def serving(controller, num=40, *, at_s=0.0, **row):
    """Three minutes of a busy instance: answers of 21 tokens, 0.1 s each, where a step alone takes 0.05 s."""
    known = a_row(**row)
    controller.restore("instances", {"i-1": known}, at_s + 60.0)
    for number in range(3 * num):
        sent_at = at_s + 60.0 + number * 60.0 / num
        times = {"arrived_at": sent_at, "finished_at": sent_at + 2.5, "ttft_s": 0.5, "e2e_s": 2.5}
        controller.handle(finished(**times), sent_at + 2.5)
    controller.restore("instances", {"i-1": known}, at_s + 400.0)
    (fact,) = made(controller.handle(Tick(), at_s + 420.0))
    return fact.forecasts[0]


@pytest.mark.parametrize(("drains", "source"), [(False, "measured"), (True, "")])
def test_what_an_instance_is_comes_by_facts_too_and_the_last_minutes_are_read_with_later_requests(drains, source):
    controller = predictor(model=PLAIN)
    controller.handle(an_event(InstanceReady(instance=a_row())), 10.0)
    for number in range(60 * 6):
        sent_at = 60.0 + number
        times = {"arrived_at": sent_at, "finished_at": sent_at + 2.5, "ttft_s": 0.5, "e2e_s": 2.5}
        controller.handle(finished(**times), sent_at + 2.5)
        if drains and number == 30:
            leaving = replace(a_row(), state=InstanceState.DRAINING, revision=2)
            controller.handle(an_event(InstanceDraining(instance=leaving)), sent_at)
    assert controller.throughput("m").source == source


def a_row(**fields):
    return replace(an_instance("i-1"), **{"ready_at": 1.0, "max_concurrency": 64, "step_s": 0.05} | fields)


PLAIN = a_model(max_concurrency=64)


def test_mu_comes_from_what_an_instance_served_and_what_its_engine_says_of_itself():
    """Section 4.1: steps of 0.1 s use three quarters of the allowed 3 x 0.05 s."""
    controller = predictor(model=PLAIN)
    found = serving(controller)
    assert found.rates_from == "measured"
    assert found.prompt_per_s == pytest.approx(600 * 40 / 60 / 0.75, rel=0.02)
    assert found.response_per_s == pytest.approx(21 * 40 / 60 / 0.75, rel=0.02)
    assert found.total_per_s == pytest.approx(found.prompt_per_s + found.response_per_s)
    assert controller.throughput("m").num_windows == 3


def test_slots_that_the_engine_has_bound_what_it_takes():
    """Of 64 declared slots memory allows 2, so 2.5 requests at a time are too many."""
    wide, narrow = serving(predictor(model=PLAIN)), serving(predictor(model=PLAIN), max_concurrency=2)
    assert narrow.prompt_per_s == pytest.approx(
        wide.prompt_per_s * 0.75 / (0.5 + 0.5 * min(1.0, 2.5 * 40 / 60 / 2) / 0.8), rel=0.03
    )


@pytest.mark.parametrize(
    "row",
    [{"state": InstanceState.DRAINING}, {"ready_at": 300.0}, {"consolidating": True}],
    ids=lambda row: next(iter(row)),
)
def test_an_instance_that_has_not_served_all_the_time_shows_nothing(row):
    assert serving(predictor(model=PLAIN), **row).rates_from == ""


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


PATIENT = a_model(slo=SLO)
LATE, LEFT = {"ttft_s": 1.1}, {"error_code": "client_left", "ttft_s": 9.0}


@pytest.mark.parametrize(
    ("model", "requests", "ratio"),
    [
        (PATIENT, [{}] * 39 + [LATE], 0.5),  # one of 40; two may
        (PATIENT, [{}, {"status": 503, "error_code": "wait_timeout"}], 0.5),  # the best window so far
        (PATIENT, [LATE | {"cold": True}, LEFT, {}], 0.0),
        (PLAIN, [{"e2e_s": 21 * 0.1}, {"e2e_s": 21 * 0.5}, {"e2e_s": 99.0, "cold": True}], 0.5),
        (PATIENT, [], 0.0),
    ],
)
def test_forecasts_say_how_much_of_its_objective_the_last_window_took(model, requests, ratio):
    """The missed share over the allowed 5 %, or seconds a token over section 5.1's 0.2."""
    controller = predictor(model=model)
    controller.handle(busy(), 0.0)
    for fields in requests:
        controller.handle(finished(**fields), 1.0)
    (first,), (second,) = made(controller.handle(Tick(), 60.0)), made(controller.handle(Tick(), 120.0))
    assert [one.objective_ratio for one in first.forecasts] == [pytest.approx(ratio)] * 2
    assert second.forecasts[0].objective_ratio == 0.0, "nothing ended in that window"


def test_a_window_is_held_against_the_best_ones_where_those_take_more_than_half_of_the_objective():
    controller = predictor(model=PLAIN)
    controller.handle(busy(), 0.0)
    found = []
    for number, e2e_s in enumerate((21.0, 21.0, 84.0, 2.1)):
        controller.handle(finished(e2e_s=e2e_s), 60.0 * number + 1)
        found.append(made(controller.handle(Tick(), 60.0 * number + 60))[0].forecasts[0].objective_ratio)
    assert found == [pytest.approx(ratio, rel=0.03) for ratio in (0.5, 0.5, 2.0, 0.5)]


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


def test_capacities_measured_elsewhere_stand_until_windows_have_shown():
    known = Capacity(prompt_per_s=99.0, response_per_s=0.1, total_per_s=99.0)
    quiet = one_window(predictor(capacities={"m": known}), finished())
    assert (quiet.prompt_per_s, quiet.response_per_s, quiet.rates_from) == (99.0, 0.1, "declared")
    assert serving(predictor(model=PLAIN, capacities={"m": known})).rates_from == "measured"


def test_who_leads_next_knows_what_was_measured_and_a_model_that_is_gone_is_forgotten():
    first, second = predictor(model=PLAIN), predictor(model=PLAIN)
    found = serving(first)
    second.inherit(first, 421.0)
    assert second.throughput("m").capacity.total_per_s == found.total_per_s
    second.restore("models", {"other": a_model("other")}, 430.0)
    assert second.throughput("m").source == ""


def test_who_leads_next_knows_until_when_an_instance_did_not_serve_alone():
    first, second = predictor(model=PLAIN), predictor(model=PLAIN)
    first.restore("instances", {"i-1": a_row(consolidating=True)}, 250.0)
    second.inherit(first, 251.0)
    assert serving(second).rates_from == ""


def test_who_leads_next_forecasts_on():
    first, second = predictor(), predictor()
    first.handle(busy(4), 0.0)
    first.handle(Tick(), 60.0)
    first.handle(busy(4), 60.0)
    second.inherit(first, 61.0)
    (fact,) = made(second.handle(Tick(), 120.0))
    assert fact.forecasts[0].concurrency_mean == pytest.approx(4.0)
    assert len(second.past_forecasts("m")) == 1


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
    """Median of each model's last three; duplicates count once."""
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
