"""The autoscaler: sole owner of models and instance counts."""

from dataclasses import replace

import pytest

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Publish, Save, Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import PlaceInstance, StopInstance
from glowplug.events.facts import (
    InstanceFailed,
    InstanceReady,
    InstanceStopped,
)
from glowplug.policies.registry import choose
from glowplug.policies.scaling import union
from glowplug.policies.scaling.baselines import reactive as scale
from glowplug.policies.scaling.union import PlanState
from tests.fleet_builder import a_model, an_event, an_instance, instance_event, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, holds, is_ready, published, waiting


@pytest.mark.parametrize("policy", ["reactive", "warmserve", "hydraserve", "preserve", "union"])
def test_the_load_of_the_last_seconds_brings_nothing_back_that_was_unloaded(policy):
    controller = autoscaler(a_model(keep_alive_s=60), scale=choose("scaling", policy), policy=policy)
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1"))), 1.0)
    for n in range(8):
        busy = ModelLoad(num_in_flight=1, last_active_at=2.0 + n / 2, in_flight_by_instance={"i-1": 1})
        controller.handle(load_report(m=busy), 2.0 + n / 2)
        controller.handle(Tick(), 2.0 + n / 2)
    controller.handle(load_report(m=ModelLoad(last_active_at=6.0)), 6.0)
    assert published(controller.handle(operator.Unload("m"), 6.1), StopInstance)
    stopped = an_instance("i-1", state=InstanceState.STOPPED, revision=2)
    effects = controller.handle(an_event(InstanceStopped(instance=stopped)), 6.2)
    effects += [e for n in range(20) for e in controller.handle(Tick(), 6.5 + n / 2)]
    assert published(effects, PlaceInstance) == []


def test_what_the_unions_plan_has_learned_of_a_model_outlives_an_unload():
    seen = []

    def learns(view, state=None):
        seen.append(state)
        decision, after = union.scale(view, state)
        return decision, replace(after, plan=replace(after.plan, m=0.3, made_at=1.0, num_held=4))

    controller = autoscaler(a_model(), scale=learns, policy="union")
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1"))), 1.0)
    controller.handle(Tick(), 1.5)
    controller.handle(operator.Unload("m"), 2.0)
    seen.clear()
    controller.handle(waiting(), 2.5)
    assert seen[0] == union.UnionState(plan=PlanState(m=0.3), start_s=seen[0].start_s), "and no demand"


def test_nothing_is_kept_of_a_model_that_was_undeployed():
    controller = autoscaler(a_model())
    controller.handle(waiting(), 1.0)
    failed = an_instance(state=InstanceState.FAILED)
    controller.handle(an_event(InstanceFailed(instance=failed, code="engine_failed")), 2.0)
    controller.handle(operator.Load("m"), 3.0)
    controller.handle(operator.Undeploy("m"), 4.0)
    controller.handle(an_event(InstanceFailed(instance=failed, code="engine_failed")), 4.5)
    controller.restore("models", {}, 5.0)
    controller.restore("instances", {}, 40.0)
    controller.restore("instances", {}, 60.0)
    controller.handle(Tick(), 61.0)
    assert controller._models.records == {} and controller.loads.of("m").last_active_at == 0.0


def successor_of(earlier: AutoscalerController, rows, now_s):
    successor = AutoscalerController(scale, "reactive", epoch=9)
    successor.inherit(earlier, now_s)
    return successor, successor.restore("models", rows, now_s)


def test_a_successor_writes_what_an_emptied_store_has_lost():
    earlier = autoscaler(a_model("a"), a_model("b"))
    for now_s in (1.0, 20.0, 60.0):
        earlier, effects = successor_of(earlier, {}, now_s)
    assert sorted(e.key for e in effects if isinstance(e, Save)) == ["a", "b"]


def test_a_successor_lets_go_of_a_model_whose_row_alone_has_been_gone_for_long():
    earlier = autoscaler(a_model("a"), a_model("b"))
    rows = {"b": earlier.models["b"]}
    earlier, _ = successor_of(earlier, rows, 1.0)
    earlier, _ = successor_of(earlier, rows, 20.0)
    assert set(earlier.models) == {"a", "b"}, "its row may have been read too early"
    earlier, effects = successor_of(earlier, rows, 40.0)
    assert set(earlier.models) == {"b"} and effects == []


def test_a_start_that_waits_is_no_reason_for_others_to_leave():
    seen: list[int] = []

    def looks(view, state, **_):
        seen.append(view.short_elsewhere + view.num_pending)
        return scale(view, state)

    controller = autoscaler(a_model("other"), scale=looks)
    (place,) = published(controller.handle(operator.Deploy(model=a_model(asleep=True)), 1.0), PlaceInstance)
    effects = [e for n in range(30) for e in controller.handle(Tick(), 4.0 + n)]
    assert seen and not any(seen)
    again = [e.payload for e in effects if isinstance(e, Publish)]
    assert {(p.instance_id, p.waits) for p in again} == {(place.instance_id, True)}


def test_a_row_that_vanishes_without_an_end_is_remembered_no_more():
    controller = autoscaler(a_model())
    controller.handle(instance_event(an_instance("i-1", state=InstanceState.SWAPPED_OUT)), 1.0)
    kept = controller._models.of("m").kept
    assert kept.asleep_since == {"i-1": 1.0}
    for at in (100.0, 200.0):
        controller.restore("instances", {}, at)
        controller.handle(Tick(), at + 0.1)
    assert kept.asleep_since == {}


def test_a_late_start_for_batch_is_no_lack_of_memory_elsewhere():
    controller = autoscaler(a_model("m"), a_model("other"))
    for by_class, is_short in (({"batch": 1}, False), ({}, True)):
        controller.handle(an_event(replace(holds(), by_class=by_class)), 1.0)
        assert controller._models.is_short_elsewhere("other", 9.0) is is_short


def test_200_adapters_come_and_go_and_nothing_of_them_is_kept():
    scaler = autoscaler(a_model("m"))
    is_ready(scaler, 1.0, an_instance("i-1", "m", adapter_slots=8))
    sizes = []
    for turn in range(200):
        key, now_s = f"a-{turn}", 10.0 + turn
        scaler.handle(operator.Deploy(model=a_model(key, base="m")), now_s)
        scaler.handle(an_event(replace(holds(), model_key=key)), now_s)
        is_ready(scaler, now_s, an_instance(f"i-{turn}", key, host_id="i-1"))
        scaler.handle(operator.Undeploy(model_key=key), now_s)
        is_ready(scaler, now_s, an_instance(f"i-{turn}", key, InstanceState.STOPPED, host_id="i-1", revision=2))
        scaler.restore("instances", {"i-1": scaler.instances.by_id["i-1"]}, now_s + 0.5)
        scaler.restore("models", {"m": scaler.models["m"]}, now_s + 0.5)
        scaler.handle(Tick(), now_s + 0.9)
        sizes.append((len(scaler._models.records), len(scaler.instances.by_id), len(scaler.models)))
    assert max(sizes[100:]) == max(sizes[20:100]), "rows of gone instances stay for seconds, and not for ever"
    assert max(num for num, _, _ in sizes) < 40 and sizes[-1][2] == 1
