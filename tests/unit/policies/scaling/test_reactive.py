"""Reactive scaling, the baseline of PreServe section 5.3, and the `settle` step of every policy."""

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.policies.scaling.baselines import reactive
from glowplug.policies.scaling.port import ScalingView, settle
from tests.fleet_builder import a_model, an_instance
from tests.unit.policies.scaling.rig import Asked, load, ready, starting

FEW_SLOTS = ready(1, max_concurrency=3, kv_tokens=6144)
WANTED = {
    "what waits and runs, over the batch": ({"max_instances": 4}, load(9, i1=8), [], 3),
    "never more than max_instances": ({"max_instances": 2}, load(1000), [], 2),
    "one of a pinned model": ({"pinned": True}, load(), [], 1),
    "no fewer than min_instances": ({"min_instances": 2}, load(), [], 2),
    "slots as an engine has them, llama.cpp with 3 contexts": ({"max_instances": 4}, load(5, i1=3), FEW_SLOTS, 3),
    "slots as declared while no engine has answered": ({"max_instances": 4}, load(8), [], 1),
    "none of a suspended model, pinned or not": ({"suspended": True, "pinned": True}, load(5), ready(1), 0),
}


@pytest.mark.parametrize(("model", "demand", "instances", "wanted"), WANTED.values(), ids=WANTED)
def test_how_many_are_wanted(model, demand, instances, wanted):
    decision = Asked(reactive, **model)(100.0, demand, instances)
    assert decision.num_wanted == wanted and decision.inputs["waiting"] == demand.num_waiting
    assert decision.inputs["per_instance"] == (3 if instances is FEW_SLOTS else 8)


LAGGING = ModelLoad(num_in_flight=0, in_flight_by_instance={"i-1": 1})


def pipeline(instance_id, ready_at):
    return [an_instance(instance_id, state=InstanceState.READY, num_stages=2, created_at=5.0, ready_at=ready_at)]


DRAINED = {
    "idle for 20 s of its keep-alive": ({}, load(last_active_at=80.0), ready(1), ()),
    "idle for longer than its keep-alive": ({}, load(last_active_at=69.0), ready(1), ("i-1",)),
    "a keep-alive without end": ({"keep_alive_s": -1}, load(last_active_at=-1e9), ready(1), ()),
    "no keep-alive": ({"keep_alive_s": 0}, load(last_active_at=100.0), ready(1), ("i-1",)),
    "fresh, though it had no request": ({}, load(), ready(1, ready_at=99.0), ()),
    "with a request that only its own count has": ({"keep_alive_s": 0}, LAGGING, ready(1), ()),
    "more than max_instances": ({"max_instances": 1}, load(i1=2), ready(2), ("i-2",)),
    "a pipeline of more stages than max_instances, fresh": ({"max_instances": 1}, load(), pipeline("i-1", 99.0), ()),
    "a pipeline, idle for its keep-alive": (
        {"max_instances": 1},
        load(last_active_at=69.0),
        pipeline("i-1", 8.0),
        ("i-1",),
    ),
    "a pipeline beside max_instances": ({"max_instances": 1}, load(i1=2), [*ready(1), *pipeline("i-2", 8.0)], ("i-2",)),
    "suspended": ({"suspended": True, "pinned": True}, load(5), ready(1), ("i-1",)),
}


@pytest.mark.parametrize(("model", "demand", "instances", "drained"), DRAINED.values(), ids=DRAINED)
def test_which_instances_go(model, demand, instances, drained):
    assert Asked(reactive, **model)(100.0, demand, instances).drain == drained


def test_the_end_of_a_keep_alive_is_the_reason():
    assert "keep-alive" in Asked(reactive)(100.0, load(last_active_at=69.0), ready(1)).reason


def test_a_spare_instance_goes_for_the_rules_reason_while_another_stays_for_its_keep_alive():
    model, idle = a_model(max_instances=4, keep_alive_s=30.0), load(last_active_at=80.0)
    view = ScalingView(now_s=100.0, model=model, instances=tuple(ready(2)), load=idle)
    decision = settle(view, 0, "no request waits")
    assert (len(decision.drain), decision.reason) == (1, "no request waits")


def test_spare_instances_of_a_busy_model_drain_after_a_while_least_loaded_first():
    asked = Asked(reactive)
    assert asked(80.0, load(i1=3), ready(2)).drain == ()
    assert asked(100.0, load(i1=3), ready(2)).drain == ("i-2",)


def test_nobody_who_serves_goes_for_one_that_is_still_on_its_way():
    model = a_model(max_concurrency=8, max_instances=4, keep_alive_s=0)
    busy = load(i1=8, i2=8, last_active_at=99.0)
    view = ScalingView(now_s=100.0, model=model, instances=(*ready(2), starting()), load=busy)
    assert settle(view, 2, "two are enough").drain == ()
    assert len(settle(view, 1, "one is enough").drain) == 1


def test_a_view_gives_the_instances_that_serve_oldest_first():
    ages = {"i-2": 2.0, "i-1": 1.0, "i-0": 1.0}
    rows = [an_instance(instance_id, created_at=at) for instance_id, at in ages.items()]
    gone = an_instance("x", created_at=0.0, state=InstanceState.FAILED)
    view = ScalingView(now_s=3.0, model=a_model(), instances=(*rows, gone))
    assert [i.instance_id for i in view.serving] == ["i-0", "i-1", "i-2"]


def test_demand_takes_a_draining_instance_back():
    assert Asked(reactive)(100.0, load(1), [an_instance(state=InstanceState.DRAINING)]).resume == ("i-1",)
