"""Reactive scaling, the baseline of PreServe section 5.3."""

from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.baselines import ReactiveParams, ReactiveState, reactive
from glowplug.policies.scaling.port import ScalingView, settle
from tests.fleet_builder import a_model, an_instance


def decide(model, load, *instances, now_s=100.0, state=ReactiveState(), params=ReactiveParams()) -> ScaleDecision:
    return reactive(ScalingView(now_s=now_s, model=model, instances=instances, load=load), state, params)[0]


def test_wants_enough_instances_for_waiting_and_running():
    model = a_model(max_concurrency=8, max_instances=4)
    decision = decide(model, ModelLoad(num_waiting=9, num_in_flight=8))
    assert decision.num_wanted == 3
    assert decision.inputs["waiting"] == 9


def test_an_engine_that_has_fewer_slots_than_declared_is_counted_with_those():
    """llama.cpp whose grant holds 3 contexts: 8 requests need three instances, not one."""
    model = a_model(max_concurrency=8, max_instances=4)
    small = an_instance(max_concurrency=3, kv_tokens=6144)
    decision = decide(model, ModelLoad(num_waiting=5, num_in_flight=3), small)
    assert decision.num_wanted == 3 and decision.inputs["per_instance"] == 3
    assert decide(model, ModelLoad(num_waiting=8)).num_wanted == 1, "while none has answered, what is declared"


def test_never_wants_more_than_max_instances():
    assert decide(a_model(max_instances=2), ModelLoad(num_waiting=1000)).num_wanted == 2


def test_pinned_and_min_instances_are_floors():
    assert decide(a_model(pinned=True), ModelLoad()).num_wanted == 1
    assert decide(a_model(min_instances=2, max_instances=3), ModelLoad()).num_wanted == 2


def test_an_instance_idle_for_its_keep_alive_drains():
    ready = an_instance(ready_at=10.0)
    model = a_model(keep_alive_s=30.0)
    assert decide(model, ModelLoad(last_active_at=80.0), ready).drain == ()
    decision = decide(model, ModelLoad(last_active_at=69.0), ready)
    assert decision.drain == ("i-1",)
    assert "keep-alive" in decision.reason


def test_keep_alive_minus_one_never_drains_and_zero_drains_at_once():
    ready = an_instance(ready_at=10.0)
    assert decide(a_model(keep_alive_s=-1), ModelLoad(), ready, now_s=1e9).drain == ()
    assert decide(a_model(keep_alive_s=0), ModelLoad(last_active_at=100.0), ready).drain == ("i-1",)


def test_a_fresh_instance_is_not_idle_even_without_requests():
    assert decide(a_model(keep_alive_s=30), ModelLoad(), an_instance(ready_at=99.0)).drain == ()


def test_an_instance_with_requests_in_flight_never_drains():
    busy = ModelLoad(num_in_flight=0, in_flight_by_instance={"i-1": 1})
    assert decide(a_model(keep_alive_s=0), busy, an_instance(ready_at=1.0)).drain == ()


def test_spare_instances_of_a_busy_model_drain_after_a_while_least_loaded_first():
    model = a_model(max_instances=3)
    load = ModelLoad(num_in_flight=3, in_flight_by_instance={"i-1": 3})
    pair = (an_instance("i-1", ready_at=1.0), an_instance("i-2", ready_at=1.0))
    assert decide(model, load, *pair).drain == ()
    spare = ReactiveState(80.0)
    assert decide(model, load, *pair, state=spare).drain == ("i-2",)


def test_nobody_who_serves_goes_for_one_that_is_still_on_its_way():
    model = a_model(max_concurrency=8, max_instances=4, keep_alive_s=0)
    coming = an_instance("i-9", state=InstanceState.STARTING)
    up = [an_instance(f"i-{n}", ready_at=1.0) for n in (1, 2)]
    busy = ModelLoad(num_in_flight=16, in_flight_by_instance={"i-1": 8, "i-2": 8}, last_active_at=99.0)
    view = ScalingView(now_s=100.0, model=model, instances=(*up, coming), load=busy)
    assert settle(view, 2, "two are enough").drain == ()
    assert len(settle(view, 1, "one is enough").drain) == 1


def test_a_view_gives_the_instances_that_serve_oldest_first():
    ages = {"i-2": 2.0, "i-1": 1.0, "i-0": 1.0}
    rows = [an_instance(instance_id, created_at=at) for instance_id, at in ages.items()]
    gone = an_instance("x", created_at=0.0, state=InstanceState.FAILED)
    view = ScalingView(now_s=3.0, model=a_model(), instances=(*rows, gone))
    assert [i.instance_id for i in view.serving] == ["i-0", "i-1", "i-2"]


def test_demand_takes_a_draining_instance_back():
    decision = decide(a_model(), ModelLoad(num_waiting=1), an_instance(state=InstanceState.DRAINING))
    assert decision.resume == ("i-1",)


def test_a_suspended_model_wants_nothing_and_drains_all():
    model = a_model(suspended=True, pinned=True)
    decision = decide(model, ModelLoad(num_waiting=5), an_instance())
    assert decision.num_wanted == 0
    assert decision.drain == ("i-1",)


def test_more_than_max_drains_the_surplus_at_once():
    model = a_model(max_instances=1)
    load = ModelLoad(num_in_flight=2, in_flight_by_instance={"i-1": 2})
    assert decide(model, load, an_instance("i-1"), an_instance("i-2")).drain == ("i-2",)
