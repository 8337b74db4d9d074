"""Reactive scaling, the baseline of PreServe section 5.3, and the `settle` step of every policy."""

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.policies.scaling.baselines import reactive, why_now
from glowplug.policies.scaling.port import ScalingView, needed_by_pipeline, settle, worths
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
    assert asked(60.0, load(i1=8, i2=1), ready(2)).drain == (), "both are needed"
    assert asked(80.0, load(i1=3), ready(2)).drain == ()
    assert asked(89.9, load(i1=3), ready(2)).drain == ()
    assert asked(90.0, load(i1=3), ready(2)).drain == ("i-2",)


@pytest.mark.parametrize(
    ("demand", "said"),
    [
        (load(), "no request asks for it"),
        (load(1), "1 request waits, none is in flight, and one instance runs 8 at once"),
        (load(2, i1=1), "2 requests wait, 1 is in flight, and one instance runs 8 at once"),
        (load(i1=2), "no request waits, 2 are in flight, and one instance runs 8 at once"),
    ],
)
def test_demand_is_told_as_it_is(demand, said):
    assert why_now(ScalingView(now_s=1.0, model=a_model(), load=demand)) == said


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


def settled(target, *instances, demand=load(last_active_at=80.0), how=None, **model):
    given = a_model(**({"max_instances": 4, "keep_alive_s": 30.0} | model))
    view = ScalingView(now_s=100.0, model=given, instances=instances, load=demand)
    return settle(view, target, "it was asked", **(how or {}))


LONG_IDLE = load(last_active_at=60.0)
SETTLED = {  # target, instances, the model, how -> wanted in the end, left of these, why
    "the last one in its keep-alive": (0, ready(1), {"max_instances": 1}, {}, 0, 1, "its keep-alive is not over"),
    "the last one after it": (
        0, ready(1), {"demand": LONG_IDLE, "max_instances": 1}, {}, 0, 0, "it has been idle for its keep-alive of 30 s",
    ),
    "a keep-alive of the policy": (
        0, ready(1), {}, {"keep_alive_s": 20.0}, 0, 0, "it has been idle for its keep-alive of 20 s",
    ),
    "above the ceiling": (0, ready(2), {"max_instances": 1}, {}, 0, 1, "it was asked"),
    "above it and idle": (0, ready(2), {"max_instances": 1, "demand": LONG_IDLE}, {}, 0, 0, "it was asked"),
    "one starting above it": (0, [starting("i-1"), starting("i-2")], {"max_instances": 1}, {}, 0, 2, "it was asked"),
    "one may go and the other not": (1, ready(2), {}, {"may_go": lambda _: False}, 1, 2, "it was asked"),
    "as many as there are": (1, ready(1), {}, {}, 1, 1, "it was asked"),
    "the minimum": (1, ready(1), {"min_instances": 2}, {}, 2, 2, "at least 2 instances stay"),
    "as many as the minimum": (2, [], {"min_instances": 2}, {}, 2, 2, "it was asked"),
    "pinned": (0, [], {"pinned": True}, {}, 1, 1, "at least 1 instance stays: it is pinned"),
    "the maximum": (5, [], {}, {}, 4, 4, "it was asked"),
    "suspended": (3, ready(2), {"suspended": True, "min_instances": 1}, {}, 0, 0, "its operator has drained it"),
    "suspended, on its way": (3, [starting()], {"suspended": True}, {}, 0, 1, "its operator has drained it"),
    "suspended, without an instance": (3, [], {"suspended": True, "pinned": True}, {}, 0, 0,
        "its operator has drained it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "instances", "model", "how", "required", "left", "why"), SETTLED.values(), ids=SETTLED
)
def test_a_target_is_settled_within_the_models_bounds(target, instances, model, how, required, left, why):
    decision = settled(target, *instances, how=how, **model)
    assert (decision.num_required, decision.num_wanted, decision.reason) == (required, left, why)
    assert decision.group_size == 1
    assert len(decision.drain) == len(instances) - left if left < len(instances) else decision.drain == ()


def test_what_was_decided_on_is_told():
    demand = load(1, last_active_at=80.00049, i1=2)
    told = settled(1, *ready(2), demand=demand, min_instances=1, how={"inputs": {"min": 7, "planned": 3}}).inputs
    assert told == {
        "waiting": 1, "in_flight": 2, "per_instance": 8, "running": 2, "min": 7, "max": 4, "planned": 3, "idle_s": 20.0,
    }  # fmt: skip
    assert settled(0, *ready(1), demand=load()).inputs["idle_s"] == -1, "it never had a request"
    assert settled(0, *ready(1), demand=load(last_active_at=101.0)).inputs["idle_s"] == 0.0, "by another clock"
    assert "idle_s" not in settled(1, *ready(1)).inputs


def test_as_many_draining_ones_come_back_as_are_missing_the_oldest_first():
    draining = [an_instance(f"i-{n}", state=InstanceState.DRAINING, created_at=9.0 - n) for n in (1, 2, 3)]
    assert settled(0, *draining).resume == () == settled(1, *draining, *ready(1, first=7)).resume
    assert settled(2, *draining, *ready(1, first=7)).resume == ("i-3",)
    assert settled(2, *draining).resume == ("i-3", "i-2")
    assert settled(2, *draining, how={"take_back": False}).resume == ()
    pair = an_instance("i-4", state=InstanceState.DRAINING, num_stages=2)
    assert settled(2, pair, *draining).resume == ("i-4",), "two can be made of it"
    assert settled(2, *ready(1)).resume == ()


def test_of_those_alike_the_newest_goes_and_by_id_where_all_are_as_old():
    old, new = ready(1, created_at=1.0), ready(2, first=2, created_at=2.0)
    assert settled(2, *old, *new).drain == ("i-2",)
    assert settled(2, *old, *new, demand=load(i2=1)).drain == ("i-3",)
    assert settled(1, *old, *new, how={"may_go": lambda i: i.instance_id != "i-2"}).drain == ("i-3", "i-1")


def test_a_pipeline_is_worth_the_instances_that_its_stages_can_still_become():
    pair, four, other = (an_instance(name, num_stages=num) for name, num in (("p", 2), ("i-1", 4), ("other", 1)))
    stages = [an_instance(name) for name in ("i-1.1", "i-1.2", "p.1", "gone.1")]
    found = worths([pair, four, other, *stages])
    assert found == {"p": 1, "i-1": 2, "other": 1} | dict.fromkeys(("i-1.1", "i-1.2", "p.1", "gone.1"), 1)
    view = ScalingView(now_s=1.0, model=a_model(), instances=(four, starting(num_stages=3)), num_pending=2)
    assert (view.num_running, view.num_coming, view.num_coming_or_there) == (7, 5, 9)


@pytest.mark.parametrize(
    ("first", "is_needed"),
    [
        ({"num_stages": 2}, True),
        ({"num_stages": 1, "stages_busy": True}, True),
        ({"num_stages": 1}, False),
        ({"num_stages": 2, "state": InstanceState.FAILED}, False),
        ({"instance_id": "i-2", "num_stages": 2}, False),
    ],
)
def test_a_former_stage_is_needed_until_its_pipeline_is_whole_and_its_stages_idle(first, is_needed):
    row = an_instance(**first)
    assert needed_by_pipeline("i-1.1", {row.instance_id: row}) == ("i-1" if is_needed else "")
