"""PreServe sections 4.1 and 4.3.2 (Algorithm 2), and its baselines "Proactive" and "Hybrid" (5.1)."""

from glowplug.policies.scaling import preserve
from glowplug.policies.scaling.port import ScalingView
from glowplug_lab.policies.preserve_baselines import hybrid, proactive
from tests.fleet_builder import a_model
from tests.unit.policies.scaling.rig import Asked, a_forecast, load, outlooks, ready, starting

MU = {"prompt_per_s": 10.0, "response_per_s": 5.0, "total_per_s": 12.0}


def test_a_window_is_planned_for_its_tokens_over_what_an_instance_takes():
    """N = ceil(max(P / mu_p, D / mu_d, (P + D) / mu_t)) per second: max(2.5, 1, 2.5) -> 3."""
    decision = Asked(preserve.scale)(100.5, load(i1=1), ready(1), forecast=a_forecast(2500, 500, **MU))
    assert decision.num_wanted == 3 and "2500 prompt" in decision.reason


def test_instances_for_the_next_window_are_there_when_it_begins_and_those_of_this_one_stay():
    """Two-step look-ahead."""
    low, high = a_forecast(900, 100, **MU), a_forecast(4500, 100, starts_at=200.0, **MU)
    assert Asked(preserve.scale)(100.5, load(i1=1), ready(1), forecast=low, next_forecast=high).num_wanted == 5
    assert Asked(preserve.scale)(100.5, load(i1=1), ready(5), forecast=high, next_forecast=low).num_wanted == 5


def test_within_the_window_each_instance_that_will_be_too_full_brings_one_more():
    """4.3.2."""
    asked, forecast = Asked(preserve.scale), a_forecast(1500, 100, **MU)
    calm = outlooks(load(i1=4, i2=4), i1=(0.5, 0.0), i2=(0.5, 0.0))
    assert asked(100.5, calm, ready(2), forecast=forecast).num_wanted == 2
    hot = outlooks(load(i1=8, i2=4), i1=(1.2, 0.3), i2=(0.5, 0.1))
    decision = asked(110.0, hot, ready(2), forecast=forecast)
    assert decision.num_wanted == 3 and "i-1" in decision.reason
    assert asked(110.5, hot, ready(2), num_pending=1, forecast=forecast).num_wanted == 3, (
        "one for each, not one each time"
    )


def test_once_a_window_it_shrinks_when_all_are_nearly_empty():
    """4.3.2 with erratum E36."""
    asked, forecast = Asked(preserve.scale), a_forecast(3500, 100, **MU)
    calm = outlooks(load(i1=1), i1=(0.2, 0.0), i2=(0.1, 0.0), i3=(0.1, 0.0), i4=(0.1, 0.0))
    assert asked(100.5, calm, ready(4), forecast=forecast).num_wanted == 4
    assert asked(101.0, calm, ready(4), forecast=forecast).drain == (), "the forecast is for four"
    asked, forecast = Asked(preserve.scale), a_forecast(100, 10, **MU)
    hot = outlooks(load(i1=8), i1=(1.2, 0.3))
    assert asked(100.5, hot, ready(1), forecast=forecast).num_wanted == 2
    assert asked(140.0, hot, ready(2), forecast=forecast).num_wanted == 3
    assert len(asked(145.0, calm, ready(4), forecast=forecast).drain) == 3, "0.5 / 0.8 of one instance"
    assert asked(146.0, calm, ready(1), forecast=forecast).num_wanted == 1, "planned again only by the next forecast"
    assert asked(200.5, calm, ready(1), forecast=a_forecast(3500, 100, made_at=200.0, **MU)).num_wanted == 4


def test_the_plan_begins_with_the_forecast_not_with_the_clock():
    asked = Asked(preserve.scale)
    assert asked(100.0, load(i1=1), ready(1)).num_wanted == 1
    assert asked(100.5, load(i1=1), ready(1), forecast=a_forecast(2500, 500, **MU)).num_wanted == 3


def test_with_cold_data_the_default_rule_holds_and_the_look_ahead_adds_to_it():
    """4.3.3's default mode, until days of data exist."""
    asked = Asked(preserve.scale)
    assert asked(100.0, load(waiting=9)).num_wanted == 2, "reactive: ceil(9 / 8), where no router looks ahead"
    assert asked(101.0, load(waiting=9), forecast=a_forecast(2500, 500)).num_wanted == 2, "mu is not known"
    asked = Asked(preserve.scale)
    hot = outlooks(load(i1=4), i1=(1.0, 0.5))
    decision = asked(102.0, hot, ready(1))
    assert decision.num_wanted == 2 and "no forecast" in decision.reason
    assert asked(102.5, hot, ready(1), num_pending=1).num_wanted == 2, "it stays wanted while the first is too full"


def test_with_cold_data_spare_ones_go_by_the_default_rule_where_no_router_looks_ahead():
    asked = Asked(preserve.scale)
    assert [asked(at, load(i1=3), ready(2)).drain for at in (100.0, 109.0, 110.0)] == [(), (), ("i-2",)]


def test_with_cold_data_the_look_ahead_begins_with_the_demand():
    calm = outlooks(load(waiting=9, i1=8), i1=(0.5, 0.0))
    assert Asked(preserve.scale)(100.0, calm, ready(1)).num_wanted == 3, "9 + 8 over 8"
    idle = outlooks(load(last_active_at=60.0), i1=(0.0, 0.0))
    decision = Asked(preserve.scale)(100.0, idle, ready(1))
    assert (decision.drain, decision.num_required) == (("i-1",), 0)


def test_a_plan_with_cold_data_is_for_what_there_is_and_one_more_for_each_too_full():
    def planned(demand, **fields):
        view = ScalingView(now_s=100.0, model=a_model(), instances=tuple(ready(2)), load=demand, **fields)
        plan, _ = preserve.plan_for(view, preserve.ScalerState(), preserve.PreserveParams())
        return plan.is_cold, plan.num_wanted, plan.reason.partition("; ")[0]

    calm, hot = (outlooks(load(i1=4), i1=(1.0, over), i2=(0.2, 0.0)) for over in (0.1, 0.2))
    assert planned(calm) == (True, 0, "no instance fills its KV cache too far")
    assert planned(hot) == (True, 3, "1 instance will fill more than 95% of the KV cache, or did a moment ago")
    assert planned(hot, num_pending=1)[1] == 3


def test_of_two_windows_for_as_many_instances_the_one_with_more_tokens_is_told():
    now, after = a_forecast(500, 10, **MU), a_forecast(480, 100, starts_at=200.0, **MU)
    assert "480 prompt" in Asked(preserve.scale)(100.5, load(), forecast=now, next_forecast=after).reason


def test_while_one_instance_is_not_looked_at_only_those_that_will_be_too_full_are():
    demand = outlooks(load(), i1=(0.2, 0.0), i2=(0.9, 0.05))
    views = [ScalingView(now_s=1.0, model=a_model(), instances=tuple(ready(num)), load=demand) for num in (2, 3)]
    assert [[name for name, _ in preserve.outlooks_of(view)] for view in views] == [["i-1", "i-2"], ["i-2"]]


def test_where_nothing_is_expected_the_keep_alive_ends_the_last_one():
    idle = load(last_active_at=60.0)
    assert Asked(preserve.scale)(100.5, idle, ready(1), forecast=a_forecast(0, 0, **MU)).drain == ("i-1",)
    assert Asked(preserve.scale)(100.5, idle, ready(1), forecast=a_forecast(1, 0, **MU)).drain == (), (
        "E32: at least one"
    )
    assert Asked(preserve.scale)(100.5, idle, ready(1), forecast=a_forecast(1, 1, **MU)).drain == ()
    assert Asked(preserve.scale)(100.5, load(waiting=1), forecast=a_forecast(0, 0, **MU)).num_wanted == 1


def test_proactive_is_the_forecast_alone():
    asked = Asked(proactive)
    assert asked(100.5, load(i1=8, i2=8), ready(2), forecast=a_forecast(900, 50, **MU)).drain, "whatever runs now"
    decision = asked(100.5, load(), forecast=a_forecast(concurrency_mean=9.0, concurrency_peak=20.0))
    assert decision.num_wanted == 3 and "20.00 requests at once" in decision.reason


def test_proactive_without_a_forecast_keeps_what_there_is_and_says_so():
    decision = Asked(proactive)(100.5, load(waiting=30), ready(2))
    assert decision.num_wanted == 2 and "no forecast" in decision.reason
    assert Asked(proactive)(100.5, load(waiting=3)).num_wanted == 1


def test_hybrid_is_the_larger_of_forecast_and_demand():
    low, high = a_forecast(900, 50, **MU), a_forecast(3500, 50, **MU)
    assert Asked(hybrid)(100.5, load(waiting=17), ready(1), forecast=low).num_wanted == 3
    assert Asked(hybrid)(100.5, load(waiting=17), ready(1), forecast=high).num_wanted == 4
    assert Asked(hybrid)(100.5, load(waiting=17), [starting()]).num_wanted == 3, "reactive without one"
