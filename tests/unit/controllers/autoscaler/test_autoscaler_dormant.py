"""The autoscaler with dormant copies, forecasts and grouped starts."""

from dataclasses import replace

import pytest

from glowplug.controllers import operator
from glowplug.controllers.effects import Publish, Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.commands import CancelPlacement, PlaceInstance, ResumeInstance, StopInstance
from glowplug.events.facts import (
    ForecastMade,
    InstanceFailed,
    InstancePrewarmed,
    InstanceReady,
    InstanceSwappedOut,
    RouterLoadReported,
)
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import settle
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, published, waiting


def prewarmed(instance_id="p-1", **fields):
    return an_instance(instance_id, state=InstanceState.PREWARMED, replica=True, **fields)


def test_a_prewarmed_copy_is_no_instance_of_its_model():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstancePrewarmed(instance=prewarmed())), 1.0)
    assert len(published(controller.handle(waiting(), 2.0), PlaceInstance)) == 1


def test_a_replica_that_fails_is_no_failed_start():
    controller = autoscaler(a_model())
    failed = an_instance("p-1", state=InstanceState.FAILED, replica=True)
    controller.handle(an_event(InstanceFailed(instance=failed)), 1.0)
    assert len(published(controller.handle(waiting(), 1.1), PlaceInstance)) == 1, "no pause holds it back"
    controller = autoscaler(a_model())
    controller.handle(an_event(InstanceFailed(instance=an_instance("i-1", state=InstanceState.FAILED))), 1.0)
    assert published(controller.handle(waiting(), 1.1), PlaceInstance) == []


@pytest.mark.parametrize("by", ["fact", "table"])
def test_a_sleeper_that_dies_is_no_failed_start(by):
    controller = autoscaler(a_model())
    asleep = an_instance("i-1", state=InstanceState.SWAPPED_OUT)
    controller.handle(an_event(InstanceSwappedOut(instance=asleep)), 1.0)
    failed = replace(asleep, state=InstanceState.FAILED, revision=asleep.revision + 1)
    if by == "fact":
        controller.handle(an_event(InstanceFailed(instance=failed, code="engine_failed")), 2.0)
    else:
        controller.restore("instances", {"i-1": failed}, 2.0)
    assert len(published(controller.handle(waiting(), 2.1), PlaceInstance)) == 1, "no pause holds it back"


def test_a_later_stage_is_none_either_and_does_not_end_a_pause():
    controller = autoscaler(a_model())
    stage = an_instance("x.1", part_of="x", num_stages=2)
    controller.handle(an_event(InstanceReady(instance=stage)), 1.0)
    assert len(published(controller.handle(waiting(), 1.1), PlaceInstance)) == 1


def test_undeployed_and_unloaded_models_lose_their_sleepers_too():
    for request in (operator.Undeploy("m"), operator.Unload("m")):
        controller = autoscaler(a_model())
        controller.handle(an_event(InstancePrewarmed(instance=prewarmed())), 1.0)
        (stop,) = published(controller.handle(request, 2.0), StopInstance)
        assert (stop.instance_id, stop.grace_s, stop.becomes) == ("p-1", 0.0, "stopped")


def test_a_drain_of_its_own_may_leave_a_prewarmed_copy_but_none_of_an_operator_does():
    controller = autoscaler(a_model(keep_alive_s=1), stop_becomes="prewarmed")
    controller.handle(an_event(InstanceReady(instance=an_instance(ready_at=5.0))), 5.0)
    controller.handle(load_report(m=ModelLoad(last_active_at=6.0)), 20.0)
    (stop,) = published(controller.handle(Tick(), 20.1), StopInstance)
    assert (stop.becomes, stop.grace_s) == ("prewarmed", 300.0)
    asleep = an_instance("i-1", state=InstanceState.PREWARMED, replica=True, revision=2)
    controller.handle(an_event(InstancePrewarmed(instance=asleep)), 21.0)
    (stop,) = published(controller.handle(operator.Suspend("m"), 21.5), StopInstance)
    assert stop.becomes == "stopped", "and it is asked at once: the drain is over"


def test_what_ran_on_an_instance_that_sleeps_is_no_demand():
    controller = autoscaler(a_model(keep_alive_s=1))
    controller.handle(load_report(m=ModelLoad(num_in_flight=2, in_flight_by_instance={"p-1": 2})), 1.0)
    effects = controller.handle(an_event(InstancePrewarmed(instance=prewarmed())), 1.1)
    assert published(effects, PlaceInstance) == []


def test_who_was_told_to_go_is_not_chosen_again_while_the_word_is_on_its_way():
    controller = autoscaler(a_model(max_instances=4, max_concurrency=8), scale=lean)
    for n in range(4):
        ready = an_instance(f"i-{n}", ready_at=1.0, max_concurrency=8)
        controller.handle(an_event(InstanceReady(instance=ready)), 1.0)
    controller.handle(load_report(m=ModelLoad(num_in_flight=2, in_flight_by_instance={"i-3": 2})), 1.5)
    told = published(controller.handle(Tick(), 2.0), StopInstance)
    assert sorted(stop.instance_id for stop in told) == ["i-0", "i-1", "i-2"]
    controller.handle(load_report(m=ModelLoad(num_in_flight=4, in_flight_by_instance={"i-0": 4})), 2.1)
    assert published(controller.handle(Tick(), 2.5), StopInstance) == []
    again = published(controller.handle(Tick(), 4.5), StopInstance)
    assert len(again) == 3, "nothing was heard of it: chosen anew and told again"


def test_who_was_told_to_come_back_counts_before_it_is_heard():
    controller = autoscaler(a_model(keep_alive_s=1, max_instances=2))
    ready = an_instance(ready_at=1.0)
    controller.handle(an_event(InstanceReady(instance=ready)), 1.0)
    controller.handle(load_report(m=ModelLoad(last_active_at=1.0)), 10.0)
    assert published(controller.handle(Tick(), 10.1), StopInstance)
    leaving = replace(ready, state=InstanceState.DRAINING, revision=2)
    controller.handle(an_event(InstanceReady(instance=leaving)), 10.2)
    effects = controller.handle(waiting(), 10.3)
    assert len(published(effects, ResumeInstance)) == 1
    assert [e for e in controller.handle(Tick(), 10.5) if isinstance(e, Publish)] == [], "no start, no second command"


def test_a_policy_that_cannot_make_up_its_mind_is_not_followed_at_every_event():
    """It drains at one and wants one while draining: commands would alternate without a pause."""

    def torn(view, state):
        return settle(view, 0 if view.num_running else 1, "torn", keep_alive_s=0.0), None

    controller = autoscaler(a_model(), scale=torn)
    row = an_instance(ready_at=1.0)
    controller.handle(load_report(m=ModelLoad(last_active_at=1.0)), 1.0)
    sent = []
    for tick in range(100):
        effects = controller.handle(an_event(InstanceReady(instance=row)), 2.0 + tick * 0.01)
        sent += published(effects, StopInstance) + published(effects, ResumeInstance)
        draining = InstanceState.DRAINING if sent and isinstance(sent[-1], StopInstance) else InstanceState.READY
        row = replace(row, state=draining, revision=row.revision + 1)
    assert [type(command).__name__ for command in sent] == ["StopInstance", "ResumeInstance"]


def lean(view, state):
    return settle(view, view.needed, "lean"), None


def wants(num, group_size=1):
    seen = []

    def policy(view, state):
        seen.append((view, state))
        decision = ScaleDecision(model_key=view.model.key, num_wanted=num, group_size=group_size, reason="as told")
        return decision, (state or 0) + 1

    return policy, seen


def test_one_start_may_be_laid_out_for_several_and_the_pending_count_as_many():
    """HydraServe section 6.1."""
    policy, seen = wants(6, group_size=4)
    controller = autoscaler(a_model(max_instances=8), scale=policy)
    controller.handle(Tick(), 1.0)
    assert seen[-1][0].num_pending == 6
    placed = [p.payload for p in controller.handle(Tick(), 4.0) if isinstance(p, Publish)]
    assert sorted(p.num_required for p in placed) == [2, 4], "asked again as they were"
    group = an_instance(placed[0].instance_id, state=InstanceState.STARTING, num_stages=placed[0].num_required)
    assert published(controller.handle(an_event(InstanceReady(instance=group)), 4.5), PlaceInstance) == []


def test_pending_starts_are_cancelled_only_as_far_as_they_are_too_many():
    policy, _ = wants(6, group_size=4)
    controller = autoscaler(a_model(max_instances=8), scale=policy)
    controller.handle(Tick(), 1.0)
    controller._scale = wants(5)[0]
    assert published(controller.handle(Tick(), 1.5), CancelPlacement) == [], "neither 4 nor 2 may go of 6 for 5"
    controller._scale = wants(3)[0]
    (cancelled,) = published(controller.handle(Tick(), 2.0), CancelPlacement)
    assert [p.num_required for p in published(controller.handle(Tick(), 4.0), PlaceInstance)] == [4]
    assert cancelled.reason == "it is no longer wanted"


def forecast(starts_at, made_at=0.0):
    return Forecast(
        made_at=made_at, window_s=10.0, starts_at=starts_at, concurrency_mean=1.0, concurrency_peak=starts_at
    )


def test_policies_see_the_forecast_of_the_window_of_now_and_of_the_next_while_they_last():
    policy, seen = wants(0)
    controller = autoscaler(a_model(), scale=policy)
    controller.handle(an_event(ForecastMade(model_key="m", forecasts=(forecast(10.0), forecast(20.0)))), 10.0)
    for at, now, after in ((10.5, 10.0, 20.0), (25.0, 20.0, None), (30.0, None, None)):
        controller.handle(Tick(), at)
        view = seen[-1][0]
        found = [f.starts_at if f else None for f in (view.forecast, view.next_forecast)]
        assert found == [now, after], at


def test_a_later_forecast_stays_and_a_lead_looks_ahead():
    policy, seen = wants(0)
    controller = autoscaler(a_model(), scale=policy, lead_s=5.0)
    later = ForecastMade(model_key="m", forecasts=(forecast(10.0, 9.0), forecast(20.0, 9.0)))
    controller.handle(an_event(later), 10.0)
    controller.handle(an_event(ForecastMade(model_key="m", forecasts=(forecast(10.0, 8.0),))), 10.1)
    controller.handle(Tick(), 16.0)
    assert seen[-1][0].forecast.starts_at == 20.0


def test_a_forecast_of_a_clock_that_was_ahead_is_replaced():
    policy, seen = wants(0)
    controller = autoscaler(a_model(), scale=policy)
    for made_at in (3610.0, 10.0):
        controller.handle(an_event(ForecastMade(model_key="m", forecasts=(forecast(10.0, made_at),))), 10.0)
    controller.handle(Tick(), 10.5)
    assert seen[-1][0].forecast.made_at == 10.0


def test_what_a_policy_remembers_is_kept_for_each_model_and_forgotten_with_it():
    policy, seen = wants(0)
    controller = autoscaler(a_model(), a_model("other"), scale=policy)
    controller.handle(Tick(), 10.0)
    controller.handle(Tick(), 20.0)
    assert [state for _, state in seen] == [None, None, 1, 1, 2, 2]
    controller.handle(operator.Undeploy("m"), 23.0)
    controller.handle(operator.Deploy(model=a_model()), 24.0)
    assert seen[-1][1] is None


def test_a_model_with_nothing_to_do_is_left_in_peace_until_it_is_spoken_of():
    policy, seen = wants(0)
    controller = autoscaler(a_model(), scale=policy)
    for at in (0.5, 1.0, 1.5):
        controller.handle(Tick(), at)
    assert len(seen) == 1
    loads = {"m": ModelLoad(num_in_flight=1, last_active_at=1.6)}
    controller.handle(an_event(RouterLoadReported(router_id="r", loads=loads)), 1.6)
    controller.handle(Tick(), 2.0)
    controller.handle(Tick(), 2.5)
    assert len(seen) == 3


def test_a_model_that_is_put_to_sleep_keeps_its_engine_asleep_and_its_replicas():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstancePrewarmed(instance=prewarmed())), 1.0)
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1", ready_at=1.0))), 1.0)
    (stop,) = published(controller.handle(operator.Sleep("m"), 2.0), StopInstance)
    assert (stop.instance_id, stop.becomes) == ("i-1", "swapped_out")
    assert stop.grace_s > 0, "it finishes what it runs"
    assert published(controller.handle(Tick(), 2.5), StopInstance) == [], "asked once"
