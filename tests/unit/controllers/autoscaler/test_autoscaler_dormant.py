"""The autoscaler with dormant copies, forecasts and grouped starts."""

from dataclasses import replace

from glowplug.controllers import operator
from glowplug.controllers.effects import Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.commands import ResumeInstance, StopInstance
from glowplug.events.facts import (
    ForecastMade,
    InstanceReady,
    RouterLoadReported,
)
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import settle
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, published


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
