"""The router's controller, stimulus by stimulus."""

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import OnCold, Temperature, WeightsRef
from glowplug.events import facts
from glowplug.fleet.start_times import StartTimes
from tests.fleet_builder import an_event
from tests.router_steps import NOW, Run, dispatched, instance, model, published, rejected, warm


def test_a_ready_instance_with_room_takes_the_request_at_once() -> None:
    run = warm()
    [effect] = run.arrive()
    assert isinstance(effect, msg.Dispatch) and (effect.held_s, effect.cold) == (0.0, False)


def test_an_unknown_model_is_404() -> None:
    assert rejected(Run().arrive("nobody")) == [(1, 404, "model_not_found")]


def test_a_cold_request_is_held_and_the_fleet_is_told_once_per_period() -> None:
    run = Run()
    first, second = run.arrive(), run.arrive()
    assert isinstance(first[0], msg.Hold) and len(published(first, facts.RequestWaiting)) == 1
    assert not published(second, facts.RequestWaiting)
    assert not published(run.handle(Tick(), 0.2), facts.RequestWaiting)
    [waiting] = published(run.handle(Tick(), 0.4), facts.RequestWaiting)
    assert (waiting.num_waiting, waiting.request_id, waiting.waiting_since) == (2, "r-1", NOW)
    assert waiting.deadline_at == NOW + 10.0


def test_ready_releases_in_order_up_to_max_concurrency() -> None:
    run = Run()
    for _ in range(3):
        run.arrive()
    assert dispatched(run.instance(after_s=2.0)) == [(1, "i-1"), (2, "i-1")]
    assert dispatched(run.handle(msg.RequestEnded(1, 1.0))) == [(3, "i-1")]


def test_a_released_request_says_that_it_was_cold_and_how_long_it_waited() -> None:
    run = Run()
    run.arrive()
    [effect] = run.instance(after_s=2.0)
    assert (effect.cold, effect.held_s) == (True, 2.0)


def test_a_request_whose_engine_died_and_that_waited_for_the_next_was_cold_too() -> None:
    run = warm()
    run.arrive()
    run.handle(msg.DispatchFailed(1, False, "refused"))
    run.instance(state=InstanceState.FAILED, revision=2, code="engine_failed")
    [effect] = run.instance("i-2", ready_at=NOW + 3.0, after_s=3.0)
    assert (effect.instance.instance_id, effect.cold) == ("i-2", True)


def test_nobody_overtakes_those_who_wait() -> None:
    run = warm(max_concurrency=1)
    run.arrive()
    run.arrive()
    assert not dispatched(run.arrive())
    assert dispatched(run.handle(msg.RequestEnded(1))) == [(2, "i-1")]


def test_a_full_queue_is_429_with_retry_after() -> None:
    run = Run()
    for _ in range(3):
        run.arrive()
    effects = run.arrive()
    assert rejected(effects) == [(4, 429, "queue_full")] and effects[0].error.retry_after_s >= 1
    assert published(effects, facts.RequestRejected)[0].status == 429


def test_a_wait_that_is_too_long_is_503_with_retry_after() -> None:
    run = Run()
    run.arrive()
    assert not rejected(run.handle(Tick(), 9.9))
    effects = run.handle(Tick(), 0.1)
    assert rejected(effects) == [(1, 503, "wait_timeout")] and effects[0].error.retry_after_s >= 1


def test_a_sleeper_that_dies_is_no_start_that_failed() -> None:
    for state, says_so in ((InstanceState.SWAPPED_OUT, False), (InstanceState.LOADING, True)):
        run = Run()
        run.instance(state=state, revision=1)
        run.arrive()
        run.instance(state=InstanceState.FAILED, revision=2, reason="killed", code="engine_failed")
        (refused,) = [e for e in run.handle(Tick(), 11.0) if isinstance(e, msg.Reject)]
        assert ("The last start failed: killed" in refused.error.message) is says_so


def test_on_cold_refuse_is_503_and_publishes_no_waiting() -> None:
    run = Run(model(on_cold=OnCold.REFUSE))
    effects = run.arrive()
    assert rejected(effects) == [(1, 503, "model_cold")] and not published(effects, facts.RequestWaiting)


def test_on_cold_refuse_still_queues_when_the_model_runs() -> None:
    run = warm(model(on_cold=OnCold.REFUSE), max_concurrency=1)
    run.arrive()
    assert isinstance(run.arrive()[0], msg.Hold)


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.LOADING, InstanceState.SWAPPED_OUT])
def test_only_ready_instances_are_given_requests(state: InstanceState) -> None:
    run = Run()
    run.controller.restore("instances", {"i-1": instance(state=state)}, NOW)
    assert not dispatched(run.arrive())


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.STOPPED])
def test_an_older_revision_never_wins_not_even_over_an_instance_that_is_gone(state: InstanceState) -> None:
    run = Run()
    run.instance(state=state, revision=5)
    run.instance(revision=4)
    assert not dispatched(run.arrive())


@pytest.mark.parametrize("code", ["weights_corrupt", "weights_unavailable", "engine_misconfigured"])
def test_bad_weights_answer_all_who_wait_and_who_come_soon_after(code: str) -> None:
    run = Run()
    run.arrive()
    effects = run.instance(state=InstanceState.FAILED, reason="sha256 differs", code=code)
    assert rejected(effects) == [(1, 503, code)] and "sha256" in effects[0].error.message
    assert rejected(run.arrive()) == [(2, 503, code)]
    run.now_s += 6.0
    assert isinstance(run.arrive()[0], msg.Hold)


def test_bad_weights_on_one_node_do_not_matter_while_another_instance_comes() -> None:
    run = Run()
    run.instance("i-2", InstanceState.LOADING)
    run.arrive()
    assert not rejected(run.instance(state=InstanceState.FAILED, code="weights_corrupt"))


def test_who_waits_is_refused_when_the_last_node_has_failed() -> None:
    run, bad = Run(), {"state": InstanceState.FAILED, "reason": "no space left", "code": "no_space"}
    run.arrive()
    assert not rejected(run.instance("i-1", tries_left=2, **bad))
    assert isinstance(run.arrive()[0], msg.Hold), "who comes between two tries waits too"
    run.instance("i-2", InstanceState.STARTING)
    assert not rejected(run.instance("i-2", tries_left=1, revision=2, gpu_id="node-2/0", **bad))
    assert not rejected(run.instance("i-3", tries_left=1, gpu_id="node-2/0", **bad)), "the same node once more"
    effects = run.instance("i-4", gpu_id="node-3/0", **bad)
    assert rejected(effects) == [(1, 503, "no_space"), (2, 503, "no_space")]
    assert effects[0].error.message.endswith("no space left (it was tried on 3 nodes)")
    assert rejected(run.arrive()) == [(3, 503, "no_space")]


def test_a_try_elsewhere_ends_what_an_earlier_failure_said() -> None:
    run, bad = Run(), {"state": InstanceState.FAILED, "code": "weights_unavailable"}
    run.instance("i-1", **bad)
    assert rejected(run.arrive())
    run.instance("i-2", tries_left=1, **bad)
    assert isinstance(run.arrive()[0], msg.Hold)


def test_another_failure_leaves_the_waiters_and_is_told_when_their_time_is_out() -> None:
    run = Run()
    run.arrive()
    assert not rejected(run.instance(state=InstanceState.FAILED, reason="exit code 9", code="engine_failed"))
    assert "exit code 9" in run.handle(Tick(), 10.0)[0].error.message


def test_an_engine_lost_before_its_first_byte_is_tried_once_elsewhere() -> None:
    run = Run()
    run.instance("i-1")
    run.instance("i-2")
    assert dispatched(run.arrive()) == [(1, "i-1")]
    assert dispatched(run.handle(msg.DispatchFailed(1, True, "died"))) == [(1, "i-2")]
    assert rejected(run.handle(msg.DispatchFailed(1, True, "died"))) == [(1, 502, "engine_failed")]
    assert run.controller.in_flight == {}


def test_an_engine_that_cannot_be_reached_is_left_alone_for_a_while() -> None:
    run = Run(quarantine_s=1.0)
    run.instance()
    run.arrive()
    assert isinstance(run.handle(msg.DispatchFailed(1, False, "refused"))[0], msg.Hold)
    assert not dispatched(run.handle(Tick(), 0.5))
    assert dispatched(run.handle(Tick(), 0.6)) == [(1, "i-1")]


def test_a_request_that_comes_back_waits_before_those_who_came_later() -> None:
    run = warm(max_concurrency=2)
    run.arrive()
    run.arrive()
    run.arrive()
    run.handle(msg.DispatchFailed(2, False, "refused"))
    run.handle(msg.DispatchFailed(1, False, "refused"))
    assert dispatched(run.instance("i-2", max_concurrency=3)) == [(1, "i-2"), (2, "i-2"), (3, "i-2")]


def test_eta_is_what_the_last_starts_took_less_what_has_passed() -> None:
    run = Run(model(engine="unheard-of"), default_start_s=7.0)
    assert run.controller.eta_s("m", run.now_s) == 7.0
    run.instance("i-1", engine="unheard-of", created_at=100.0, ready_at=104.0)
    assert run.controller.eta_s("m", run.now_s) == 0.0
    run.instance("i-1", InstanceState.STOPPED, revision=2)
    assert run.controller.eta_s("m", run.now_s) == 4.0
    run.instance("i-2", InstanceState.LOADING, created_at=run.now_s - 1.0)
    assert run.controller.eta_s("m", run.now_s) == 3.0
    assert run.controller.eta_s("m", run.now_s + 100) == 0.5


def test_a_retry_after_is_what_the_placer_predicts() -> None:
    declared = model(engine="emulated", weights=WeightsRef(uri=""), weights_bytes=20 * 10**9, on_cold=OnCold.REFUSE)
    run = Run(declared, default_start_s=70.0)
    refused = next(e for e in run.arrive() if isinstance(e, msg.Reject))
    assert refused.error.retry_after_s == 5.0, "2 s of launch, 20 GB at 10 GB/s, 0.5 s of warm-up, and polls"
    run.instance("i-1", InstanceState.STARTING, created_at=run.now_s, predicted_s=11.5)
    assert run.controller.eta_s("m", run.now_s + 0.5) == 11.0
    run.instance("i-1", InstanceState.SWAPPED_OUT, revision=2)
    learner, woken = StartTimes(), instance("i-0", engine="emulated", created_at=1.0, ready_at=4.0, start_kind="wake")
    row = learner.learn(woken, run.controller.fleet.models["m"])
    run.controller.restore("start_times", {row.key: row}, run.now_s)
    assert run.controller.eta_s("m", run.now_s) == 3.0


def test_retry_after_counts_the_queue_before_it() -> None:
    run = warm(model(max_queue=4, max_concurrency=2), max_concurrency=2)
    for _ in range(2):
        run.arrive()
    run.handle(msg.RequestEnded(1, 8.0))
    for _ in range(5):
        run.arrive()
    [effect] = [e for e in run.arrive() if isinstance(e, msg.Reject)]
    assert effect.error.retry_after_s == 16.0  # four ahead, two at a time, 8 s each


def test_an_alias_reaches_its_model_and_a_name_wins_over_an_alias() -> None:
    run = warm(model("m", aliases=("x", "other")), model("other"))
    assert dispatched(run.arrive("x")) == [(1, "i-1")]
    assert isinstance(run.arrive("other")[0], msg.Hold)


def test_an_undeployed_model_answers_those_who_wait() -> None:
    run = Run()
    run.arrive()
    effects = run.handle(an_event(facts.ModelUndeployed(model_key="m")))
    assert rejected(effects) == [(1, 404, "model_not_found")]
    assert rejected(run.arrive()) == [(2, 404, "model_not_found")]


def test_a_row_missing_from_the_store_is_dropped_only_after_the_grace() -> None:
    run = warm()
    run.controller.restore("instances", {}, run.now_s)
    assert dispatched(run.arrive())
    run.controller.restore("instances", {}, run.now_s + 16)
    assert isinstance(run.arrive()[0], msg.Hold)
    run.controller.restore("instances", {"i-1": instance()}, run.now_s + 17)
    assert run.controller.fleet.temperature("m") is Temperature.HOT


def test_an_emptied_store_takes_no_model_away_but_a_missing_row_does() -> None:
    run = Run(model("m"), model("n"))
    for after_s in (0.0, 60.0):
        run.controller.restore("models", {}, NOW + after_s)
    assert run.controller.fleet.lookup("m") and run.controller.fleet.lookup("n")
    for after_s in (60.0, 76.0):
        run.controller.restore("models", {"m": model("m")}, NOW + after_s)
    assert run.controller.fleet.lookup("m") and run.controller.fleet.lookup("n") is None


def test_a_router_that_stops_takes_nothing_new() -> None:
    run = warm()
    run.handle(msg.DrainStarted())
    assert rejected(run.arrive()) == [(1, 503, "no_capacity")]


def test_loads_count_waiting_and_running() -> None:
    run = warm(max_concurrency=1)
    run.arrive()
    run.arrive()
    load = run.controller.loads()["m"]
    assert (load.num_waiting, load.num_in_flight, load.in_flight_by_instance) == (1, 1, {"i-1": 1})
    assert load.last_active_at == NOW


def test_ends_that_are_told_twice_count_once() -> None:
    run = warm()
    run.arrive()
    run.handle(msg.RequestEnded(1))
    assert run.handle(msg.RequestEnded(1)) == []
    assert run.handle(msg.DispatchFailed(1, True, "late")) == []
    assert run.controller.loads()["m"].num_in_flight == 0


def test_nothing_is_kept_of_a_model_that_was_undeployed() -> None:
    run = warm(model(), model("n"))
    run.arrive()
    run.handle(msg.RequestEnded(1, 2.0))
    run.arrive()
    run.instance(state=InstanceState.FAILED, revision=2, code="engine_failed")
    run.handle(msg.DispatchFailed(2, True, "gone"))
    run.handle(an_event(facts.ModelUndeployed(model_key="m")))
    run.handle(Tick(), 5.0)
    controller = run.controller
    assert controller.loads() == {} and controller.requests == {} and controller.fleet.instances == {}
    assert controller.estimates.service_s == {} and controller.estimates.starts.times.rows == {}
    assert controller._failures.of("m") is None and controller.balances.quarantined == {}


def test_a_request_that_runs_on_after_its_model_left_is_still_counted() -> None:
    run = warm(model(), model("n"))
    run.arrive()
    run.handle(an_event(facts.ModelUndeployed(model_key="m")))
    run.handle(Tick(), 5.0)
    assert run.controller.load("m").num_in_flight == 1
    run.handle(msg.RequestEnded(1, 2.0))
    run.handle(Tick(), 1.0)
    assert run.controller.loads() == {}


def test_what_was_missed_once_and_came_back_has_its_whole_grace_again() -> None:
    run = Run(model(), model("n"))
    rows = {"n": model("n")}
    run.controller.restore("models", rows, NOW)
    run.handle(an_event(facts.ModelUndeployed(model_key="m")))
    run.controller.restore("models", rows, NOW + 5)
    run.handle(an_event(facts.ModelDeployed(model=model(revision=5))))
    run.controller.restore("models", rows, NOW + 60)
    assert "m" in run.controller.fleet.models


FULL = "the bus answers but stores no events (its disk may be full)"


def test_a_bus_that_has_stored_nothing_for_its_grace_refuses_cold_requests_with_the_reason() -> None:
    run = Run(bus_grace_s=5.0)
    run.handle(msg.BusRefuses(FULL))
    assert isinstance(run.arrive()[0], msg.Hold), "its servers may be electing"
    assert rejected(run.handle(Tick(), 5.0)) == [(1, 503, "control_plane_unavailable")]
    effects = run.arrive()
    assert rejected(effects) == [(2, 503, "control_plane_unavailable")]
    [reject] = [e for e in effects if isinstance(e, msg.Reject)]
    assert FULL in reject.error.message and reject.error.retry_after_s > 0
    run.handle(msg.BusRefuses(""))
    assert isinstance(run.arrive()[0], msg.Hold)


def test_while_the_bus_stores_nothing_warm_requests_and_those_of_a_start_under_way_go_on() -> None:
    run = warm(model(), model("other"))
    run.instance("i-2", InstanceState.STARTING, model_key="other")
    run.handle(msg.BusRefuses(FULL))
    assert isinstance(run.arrive()[0], msg.Dispatch)
    assert isinstance(run.arrive("other")[0], msg.Hold)
    assert not rejected(run.handle(Tick(), 8.0)), "the instance may come yet"
    assert dispatched(run.instance("i-2", model_key="other", revision=2)) == [(2, "i-2")]


def test_who_was_held_already_waits_a_little_for_the_bus_and_is_told_then() -> None:
    run = Run(bus_grace_s=5.0)
    run.arrive()
    run.handle(msg.BusRefuses(FULL), 1.0)
    assert not rejected(run.handle(Tick(), 4.9))
    assert rejected(run.handle(Tick(), 0.2)) == [(1, 503, "control_plane_unavailable")]


def test_a_bus_that_stores_again_in_time_costs_nobody_an_answer() -> None:
    run = Run(bus_grace_s=5.0)
    run.arrive()
    run.handle(msg.BusRefuses(FULL), 1.0)
    run.handle(msg.BusRefuses(""), 4.0)
    effects = run.handle(Tick(), 2.0)
    assert not rejected(effects) and published(effects, facts.RequestWaiting)


def test_a_broken_stream_goes_to_another_instance_at_once() -> None:
    run = warm()
    run.arrive()
    run.instance("i-2")
    assert dispatched(run.handle(msg.StreamBroken(1, "killed", 5), 3.0)) == [(1, "i-2")]
    load = run.controller.load("m")
    assert (load.num_arrived, load.num_dispatched, load.num_in_flight) == (1, 1, 1)


def test_a_broken_stream_waits_first_in_line_for_as_long_as_it_may() -> None:
    run = Run(model(max_wait_s=10.0), continue_within_s=30.0)
    run.instance()
    run.arrive()
    [hold, waiting] = run.handle(msg.StreamBroken(1, "killed"), 100.0)
    assert isinstance(hold, msg.Hold)
    fact = published([waiting], facts.RequestWaiting)[0]
    assert (fact.waiting_since, fact.deadline_at) == (NOW + 100.0, NOW + 130.0)
    run.instance("i-1", InstanceState.FAILED)
    run.arrive()
    assert rejected(run.handle(Tick(), 11.0)) == [(2, 503, "wait_timeout")], "that one waits no longer than others"
    assert rejected(run.handle(Tick(), 19.0)) == [(1, 502, "engine_failed")]


def test_a_stream_that_was_moved_is_not_nearer_to_its_bound() -> None:
    run = Run(max_continuations=1)
    run.instance("i-1")
    run.instance("i-2")
    run.arrive()
    for _ in range(3):
        assert dispatched(run.handle(msg.StreamBroken(1, "drained", is_lost=False)))
    assert dispatched(run.handle(msg.StreamBroken(1, "killed")))
    assert rejected(run.handle(msg.StreamBroken(1, "killed again"))) == [(1, 502, "engine_failed")]


def test_streams_of_an_instance_are_recalled_when_its_address_changes() -> None:
    run = warm()
    run.arrive()
    run.arrive()
    effects = run.instance("i-1", url="http://elsewhere:2", revision=9)
    assert effects == [msg.Recall(ticket, "the instance has another address", moved=True) for ticket in (1, 2)]


def test_an_engine_that_fails_at_one_stream_is_sent_others_and_that_one_goes_elsewhere() -> None:
    run = Run(max_continuations=2)
    run.instance("i-1")
    run.arrive()
    run.instance("i-2")
    assert dispatched(run.handle(msg.StreamBroken(1, "an error", is_reached=True))) == [(1, "i-2")]
    assert not run.controller.balances.quarantined
    run.instance("i-2", InstanceState.FAILED, revision=9)
    assert dispatched(run.arrive()) == [(2, "i-1")], "others are sent there"
    assert dispatched(run.handle(msg.StreamBroken(1, "an error", is_reached=True))) == [(1, "i-1")], "there is no other"
    assert rejected(run.handle(msg.StreamBroken(1, "again", is_reached=True))) == [(1, 502, "engine_failed")]


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.FAILED])
def test_streams_are_recalled_from_an_address_that_changes_in_any_state(state: InstanceState) -> None:
    run = warm()
    run.arrive()
    effects = run.instance("i-1", state, url="http://elsewhere:2", revision=9)
    assert msg.Recall(1, "the instance has another address", moved=True) in effects


def test_a_next_instance_that_dies_counts_as_one_more() -> None:
    run = Run(max_continuations=2)
    run.instance("i-1")
    run.instance("i-2")
    run.instance("i-3")
    run.arrive()
    run.handle(msg.StreamBroken(1, "killed"))
    assert dispatched(run.handle(msg.DispatchFailed(1, True, "died")))
    assert rejected(run.handle(msg.DispatchFailed(1, True, "died"))) == [(1, 502, "engine_failed")]
