"""The router's controller, stimulus by stimulus."""

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import OnCold, WeightsRef
from glowplug.events import facts
from glowplug.fleet.start_times import StartTimes
from tests.fleet_builder import an_event
from tests.router_steps import NOW, Run, dispatched, instance, model, rejected, warm


@pytest.mark.parametrize("code", ["weights_corrupt", "weights_unavailable", "engine_misconfigured"])
def test_bad_weights_answer_all_who_wait_and_who_come_soon_after(code: str) -> None:
    run = Run()
    run.arrive()
    effects = run.instance(state=InstanceState.FAILED, reason="sha256 differs", code=code)
    assert rejected(effects) == [(1, 503, code)] and "sha256" in effects[0].error.message
    assert rejected(run.arrive()) == [(2, 503, code)]
    run.now_s += 6.0
    assert isinstance(run.arrive()[0], msg.Hold)


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


def test_an_emptied_store_takes_no_model_away_but_a_missing_row_does() -> None:
    run = Run(model("m"), model("n"))
    for after_s in (0.0, 60.0):
        run.controller.restore("models", {}, NOW + after_s)
    assert run.controller.fleet.lookup("m") and run.controller.fleet.lookup("n")
    for after_s in (60.0, 76.0):
        run.controller.restore("models", {"m": model("m")}, NOW + after_s)
    assert run.controller.fleet.lookup("m") and run.controller.fleet.lookup("n") is None


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


def test_what_was_missed_once_and_came_back_has_its_whole_grace_again() -> None:
    run = Run(model(), model("n"))
    rows = {"n": model("n")}
    run.controller.restore("models", rows, NOW)
    run.handle(an_event(facts.ModelUndeployed(model_key="m")))
    run.controller.restore("models", rows, NOW + 5)
    run.handle(an_event(facts.ModelDeployed(model=model(revision=5))))
    run.controller.restore("models", rows, NOW + 60)
    assert "m" in run.controller.fleet.models


def test_a_stream_that_was_moved_is_not_nearer_to_its_bound() -> None:
    run = Run(max_continuations=1)
    run.instance("i-1")
    run.instance("i-2")
    run.arrive()
    for _ in range(3):
        assert dispatched(run.handle(msg.StreamBroken(1, "drained", is_lost=False)))
    assert dispatched(run.handle(msg.StreamBroken(1, "killed")))
    assert rejected(run.handle(msg.StreamBroken(1, "killed again"))) == [(1, 502, "engine_failed")]


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.FAILED])
def test_streams_are_recalled_from_an_address_that_changes_in_any_state(state: InstanceState) -> None:
    run = warm()
    run.arrive()
    effects = run.instance("i-1", state, url="http://elsewhere:2", revision=9)
    assert msg.Recall(1, "the instance has another address", moved=True) in effects
