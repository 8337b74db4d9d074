"""Copies kept asleep: started once, put away, and made again when lost."""

from dataclasses import replace

import pytest

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Effect, Publish, Record, Save, Tick
from glowplug.domain.errors import Conflict, EngineMisconfigured, NotFound
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import KeptAt, Model, Rung
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import CancelPlacement, PlaceInstance, ResumeInstance, StopInstance
from glowplug.policies.scaling.baselines import reactive
from tests.fleet_builder import a_model, a_node, an_instance, instance_event, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, published, waiting

S = InstanceState
ABLE = ("emulated:swap", "emulated:prewarm")


def fact(controller: AutoscalerController, state: S, now_s: float, instance_id: str, **fields: object) -> list[Effect]:
    row = an_instance(instance_id, state=state, revision=round(now_s * 1000), **fields)
    return controller.handle(instance_event(row), now_s)


def deployed(**fields: object) -> tuple[AutoscalerController, str]:
    """An autoscaler with a model deployed asleep, and the instance it asks for."""
    controller = autoscaler()
    effects = controller.handle(operator.Deploy(model=a_model(**({"asleep": True} | fields))), 1.0)
    (place,) = published(effects, PlaceInstance)
    assert place.waits, "nobody leaves for it"
    return controller, place.instance_id


def put_away(controller: AutoscalerController, instance_id: str, now_s: float) -> list[Effect]:
    fact(controller, S.STARTING, now_s, instance_id)
    controller.handle(load_report(m=ModelLoad()), now_s + 0.1)
    return fact(controller, S.READY, now_s + 0.2, instance_id, ready_at=now_s + 0.2)


def test_a_model_deployed_asleep_is_started_once_and_put_to_sleep():
    controller, instance_id = deployed()
    effects = put_away(controller, instance_id, 2.0)
    (stop,) = published(effects, StopInstance)
    assert (stop.instance_id, stop.becomes) == (instance_id, "swapped_out")
    (decided,) = [e.decision for e in effects if isinstance(e, Record)]
    assert (decided.policy, decided.chosen) == ("kept", "sleep")
    assert fact(controller, S.DRAINING, 2.3, instance_id) == []
    fact(controller, S.SWAPPED_OUT, 2.6, instance_id)
    later = [e for at in (3.0, 9.0, 60.0) for e in controller.handle(Tick(), at)]
    assert published(later, PlaceInstance) == published(later, StopInstance) == [], "it sleeps, and that is all"


def test_it_is_not_put_away_while_no_router_says_that_nothing_is_asked_of_it():
    controller, instance_id = deployed()
    fact(controller, S.STARTING, 2.0, instance_id)
    assert published(fact(controller, S.READY, 2.2, instance_id, ready_at=2.2), StopInstance) == []
    controller.handle(load_report(m=ModelLoad()), 2.5)
    assert len(published(controller.handle(Tick(), 2.6), StopInstance)) == 1


def test_a_request_that_comes_meanwhile_is_waited_for_by_nothing_and_the_instance_stays():
    controller, instance_id = deployed()
    (place,) = published(controller.handle(waiting(), 2.0), PlaceInstance)
    assert (place.instance_id, place.waits) == (instance_id, False), "the same start, and others leave for it now"
    fact(controller, S.READY, 3.0, instance_id, ready_at=3.0)
    controller.handle(load_report(m=ModelLoad(num_in_flight=1, in_flight_by_instance={instance_id: 1})), 3.1)
    controller.handle(load_report(m=ModelLoad(last_active_at=4.0)), 4.0)
    assert published(controller.handle(Tick(), 4.1), StopInstance) == [], "it has its keep-alive"
    controller.handle(load_report(m=ModelLoad(last_active_at=4.0)), 40.0)
    (stop,) = published(controller.handle(Tick(), 40.1), StopInstance)
    assert stop.becomes == "swapped_out", "whatever others become when they idle"


def test_one_copy_asleep_is_enough():
    controller = autoscaler(a_model(asleep=True, keep_alive_s=1), stop_becomes="prewarmed")
    fact(controller, S.SWAPPED_OUT, 2.0, "i-1")
    fact(controller, S.READY, 3.0, "i-2", ready_at=3.0)
    controller.handle(load_report(m=ModelLoad(last_active_at=3.0)), 9.0)
    (stop,) = published(controller.handle(Tick(), 9.1), StopInstance)
    assert (stop.instance_id, stop.becomes) == ("i-2", "prewarmed")


def test_what_is_lost_is_made_again_later_each_time_until_one_has_lasted():
    controller, instance_id = deployed()
    at, gaps = 2.0, []
    for _ in range(3):
        put_away(controller, instance_id, at)
        fact(controller, S.SWAPPED_OUT, at + 0.5, instance_id)
        lost_at = at + 1.0
        assert published(fact(controller, S.STOPPED, lost_at, instance_id), PlaceInstance) == []
        now_s = lost_at
        while not (places := published(controller.handle(Tick(), now_s), PlaceInstance)):
            now_s += 0.1
        gaps.append(now_s - lost_at)
        instance_id, at = places[0].instance_id, now_s + 0.1
    assert gaps[0] < gaps[1] < gaps[2]
    put_away(controller, instance_id, at)
    fact(controller, S.SWAPPED_OUT, at + 0.5, instance_id)
    fact(controller, S.FAILED, at + 100.0, instance_id)
    again = [p for n in range(60) for p in published(controller.handle(Tick(), at + 100.0 + n / 10), PlaceInstance)]
    assert again and again[0].wanted_at - at - 100.0 < 2 * gaps[0], "that one had lasted"


def test_a_start_that_fails_for_a_sleeper_makes_no_request_wait():
    controller, instance_id = deployed()
    fact(controller, S.FAILED, 2.0, instance_id)
    (place,) = published(controller.handle(waiting(), 2.1), PlaceInstance)
    assert not place.waits


def test_what_wakes_is_not_lost():
    controller, instance_id = deployed()
    put_away(controller, instance_id, 2.0)
    fact(controller, S.SWAPPED_OUT, 3.0, instance_id)
    (place,) = published(controller.handle(waiting(), 4.0), PlaceInstance)
    fact(controller, S.STARTING, 4.1, place.instance_id, source=instance_id)
    fact(controller, S.STOPPED, 4.2, instance_id)
    assert published(fact(controller, S.READY, 4.3, place.instance_id, ready_at=4.3), PlaceInstance) == []
    assert controller.models["m"].pinned_at is Rung.ASLEEP


def test_where_no_node_of_its_engine_can_sleep_the_deployment_is_refused_with_the_reason():
    controller = autoscaler()
    node = replace(a_node(), gpus=(Gpu(gpu_id="node-1/0", total_bytes=1, kind="cuda"),))
    controller.restore("nodes", {"node-1": node}, 0.5)
    with pytest.raises(EngineMisconfigured, match=r"asleep: emulated cannot sleep on cuda \(node-1\)") as refused:
        controller.handle(operator.Deploy(model=a_model(asleep=True)), 1.0)
    assert refused.value.param == "asleep" and controller.models == {}
    controller.restore("nodes", {"node-1": node, "node-2": replace(a_node("node-2"), abilities=ABLE)}, 2.0)
    assert published(controller.handle(operator.Deploy(model=a_model(asleep=True)), 3.0), PlaceInstance)


def test_nothing_is_started_to_sleep_where_the_nodes_that_came_cannot():
    controller, instance_id = deployed()
    controller.restore("nodes", {"node-1": a_node()}, 2.0)
    fact(controller, S.FAILED, 3.0, instance_id)
    assert published([e for n in range(200) for e in controller.handle(Tick(), 4.0 + n)], PlaceInstance) == []


def rows(effects: list[Effect]) -> list[Model]:
    return [e.value for e in effects if isinstance(e, Save)]


def test_a_pin_is_in_the_row_of_the_model_and_outlives_its_next_deployment():
    controller = autoscaler(a_model())
    effects = controller.handle(operator.Pin("m", True, Rung.ASLEEP), 1.0)
    (row,) = rows(effects)
    assert (row.kept_at, row.pinned, row.pinned_at) == (KeptAt.ASLEEP, False, Rung.ASLEEP)
    assert len(published(effects, PlaceInstance)) == 1
    (row,) = rows(controller.handle(operator.Deploy(model=a_model(max_queue=9)), 2.0))
    assert row.kept_at is KeptAt.ASLEEP
    (row,) = rows(controller.handle(operator.Pin("m", True), 3.0))
    assert (row.kept_at, row.pinned) == (KeptAt.NOWHERE, True), "one rung at a time"
    assert row.is_declared_as(2000) and not row.is_declared_as(1000), "copies from before the pin are of it still"
    after = AutoscalerController(reactive, "reactive", 8)
    after.restore("models", {"m": row}, 4.0)
    (row,) = rows(after.handle(operator.Pin("m", False), 5.0))
    assert row.pinned_at is None


def test_a_pin_that_is_taken_back_calls_the_start_off():
    controller, instance_id = autoscaler(a_model()), ""
    (place,) = published(controller.handle(operator.Pin("m", True, Rung.ASLEEP), 1.0), PlaceInstance)
    (cancel,) = published(controller.handle(operator.Pin("m", False), 2.0), CancelPlacement)
    assert cancel.instance_id == place.instance_id != instance_id


@pytest.mark.parametrize(("to", "becomes"), [(Rung.ASLEEP, "swapped_out"), (Rung.PREWARMED, "prewarmed")])
def test_a_model_is_brought_to_a_rung_once(to: Rung, becomes: str):
    controller = autoscaler(a_model())
    controller.restore("nodes", {"node-1": a_node(abilities=ABLE)}, 0.5)
    (place,) = published(controller.handle(operator.Load("m", to, "node-1"), 1.0), PlaceInstance)
    assert place.waits and place.node_id == "node-1"
    (stop,) = published(put_away(controller, place.instance_id, 2.0), StopInstance)
    assert stop.becomes == becomes
    fact(controller, S(becomes), 3.0, place.instance_id)
    fact(controller, S.STOPPED, 4.0, place.instance_id)
    assert published([e for n in range(60) for e in controller.handle(Tick(), 5.0 + n)], PlaceInstance) == []


def test_a_model_is_loaded_on_the_node_that_an_operator_names():
    controller = autoscaler(a_model())
    controller.restore("nodes", {"node-1": a_node()}, 0.5)
    with pytest.raises(NotFound, match="no node 'node-7'"):
        controller.handle(operator.Load("m", node_id="node-7"), 1.0)
    with pytest.raises(EngineMisconfigured, match="cannot be prewarmed"):
        controller.handle(operator.Load("m", Rung.PREWARMED), 1.0)
    (place,) = published(controller.handle(operator.Load("m", node_id="node-1"), 1.0), PlaceInstance)
    assert (place.node_id, place.waits) == ("node-1", False)


def test_an_operator_unloads_what_stands_on_one_rung():
    def stopped(rung: Rung | None) -> set[str]:
        controller = autoscaler(a_model(max_instances=3))
        states = {"i-ready": S.READY, "i-asleep": S.SWAPPED_OUT, "i-copy": S.PREWARMED}
        there: list[Instance] = [an_instance(name, state=state, ready_at=1.0) for name, state in states.items()]
        for row in there:
            controller.handle(instance_event(row), 1.0)
        return {
            stop.instance_id for stop in published(controller.handle(operator.Unload("m", rung), 2.0), StopInstance)
        }

    assert stopped(None) == {"i-ready", "i-asleep", "i-copy"}
    assert stopped(Rung.READY) == {"i-ready"}
    assert stopped(Rung.ASLEEP) == {"i-asleep"}
    assert stopped(Rung.PREWARMED) == {"i-copy"}


def test_a_start_that_waits_is_no_reason_for_others_to_leave():
    seen: list[int] = []

    def scale(view, state, **_):
        seen.append(view.short_elsewhere + view.num_pending)
        return reactive(view, state)

    controller = autoscaler(a_model("other"), scale=scale)
    (place,) = published(controller.handle(operator.Deploy(model=a_model(asleep=True)), 1.0), PlaceInstance)
    effects = [e for n in range(30) for e in controller.handle(Tick(), 4.0 + n)]
    assert seen and not any(seen)
    again = [e.payload for e in effects if isinstance(e, Publish)]
    assert {(p.instance_id, p.waits) for p in again} == {(place.instance_id, True)}


def test_a_start_that_a_request_waits_for_has_waited_no_longer_than_the_request():
    controller, instance_id = deployed()
    (place,) = published(controller.handle(waiting(since=49.0), 50.0), PlaceInstance)
    assert (place.instance_id, place.wanted_at) == (instance_id, 49.0)


@pytest.mark.parametrize("rung", [None, Rung.READY])
def test_a_load_that_is_unloaded_before_it_is_ready_is_asked_for_no_more(rung: Rung | None):
    controller = autoscaler(a_model())
    (place,) = published(controller.handle(operator.Load("m"), 1.0), PlaceInstance)
    (cancel,) = published(controller.handle(operator.Unload("m", rung), 1.1), CancelPlacement)
    assert cancel.instance_id == place.instance_id
    assert published([e for n in range(30) for e in controller.handle(Tick(), 1.2 + n / 2)], PlaceInstance) == []


def test_what_an_unloaded_instance_still_streams_is_no_demand():
    controller = autoscaler(a_model())
    fact(controller, S.READY, 1.0, "i-1", ready_at=1.0)
    fact(controller, S.SWAPPED_OUT, 1.0, "i-2")
    streams = ModelLoad(num_in_flight=1, in_flight_by_instance={"i-1": 1}, last_active_at=2.0)
    controller.handle(load_report(m=streams), 2.0)
    controller.handle(Tick(), 2.0)
    (stop,) = published(controller.handle(operator.Unload("m", Rung.READY), 2.1), StopInstance)
    assert stop.instance_id == "i-1"
    effects = fact(controller, S.DRAINING, 2.2, "i-1")
    for step in range(60):
        controller.handle(load_report(m=streams), 2.3 + step / 2)
        effects += controller.handle(Tick(), 2.3 + step / 2)
    assert published(effects, PlaceInstance) == []


@pytest.mark.parametrize("rung", [None, Rung.READY, Rung.ASLEEP])
@pytest.mark.parametrize("state", [None, S.STARTING, S.READY, S.DRAINING])
def test_a_copy_that_is_unloaded_on_its_way_to_sleep_stops_and_is_not_started_again(state: S | None, rung: Rung | None):
    controller = autoscaler(a_model())
    (place,) = published(controller.handle(operator.Load("m", Rung.ASLEEP), 1.0), PlaceInstance)
    instance_id = place.instance_id
    if state is not None:
        put_away(controller, instance_id, 1.1) if state is not S.STARTING else None
        fact(controller, state, 1.5, instance_id)
    effects = controller.handle(operator.Unload("m", rung), 1.6)
    asked = published(effects, CancelPlacement if state is None else StopInstance)
    assert [a.instance_id for a in asked] == [instance_id]
    assert state is None or asked[0].becomes == "stopped"
    later = [e for n in range(4) for e in controller.handle(Tick(), 1.7 + n)]
    assert "swapped_out" not in {s.becomes for s in published(later, StopInstance)}
    if state is not None:
        later += fact(controller, S.STOPPED, 6.0, instance_id)
    later += [e for n in range(60) for e in controller.handle(Tick(), 6.1 + n)]
    assert published(later, PlaceInstance) == []


def test_an_unload_of_what_sleeps_leaves_what_serves_as_it_was():
    controller = autoscaler(a_model(keep_alive_s=1), stop_becomes="swapped_out")
    fact(controller, S.READY, 1.0, "i-1", ready_at=1.0)
    fact(controller, S.SWAPPED_OUT, 1.0, "i-2")
    controller.handle(load_report(m=ModelLoad(last_active_at=1.0)), 9.0)
    (idle,) = published(controller.handle(Tick(), 9.1), StopInstance)
    (stop,) = published(controller.handle(operator.Unload("m", Rung.ASLEEP), 9.2), StopInstance)
    assert (idle.instance_id, stop.instance_id) == ("i-1", "i-2")
    resumed = controller.handle(waiting(since=9.3), 9.3)
    assert [r.instance_id for r in published(resumed, ResumeInstance)] == ["i-1"], "no operator has unloaded that one"


def test_the_node_of_one_load_is_no_bound_of_a_later_pin():
    controller = autoscaler(a_model())
    controller.restore("nodes", {"node-1": a_node(abilities=ABLE), "node-2": a_node("node-2", abilities=ABLE)}, 0.5)
    (place,) = published(controller.handle(operator.Load("m", Rung.ASLEEP, "node-1"), 1.0), PlaceInstance)
    put_away(controller, place.instance_id, 2.0)
    fact(controller, S.SWAPPED_OUT, 3.0, place.instance_id)
    fact(controller, S.STOPPED, 4.0, place.instance_id)
    controller.restore("nodes", {"node-1": a_node(), "node-2": a_node("node-2", abilities=ABLE)}, 5.0)
    (place,) = published(controller.handle(operator.Pin("m", True, Rung.ASLEEP), 70.0), PlaceInstance)
    assert place.node_id == ""


@pytest.mark.parametrize("to", [Rung.READY, Rung.ASLEEP, Rung.PREWARMED])
@pytest.mark.parametrize("state", [S.READY, S.STARTING, S.PREWARMED, S.SWAPPED_OUT])
def test_a_load_on_one_node_is_refused_where_a_copy_is_as_near_on_another(state: S, to: Rung):
    controller = autoscaler(a_model())
    controller.restore("nodes", {name: a_node(name, abilities=ABLE) for name in ("node-1", "node-2")}, 0.5)
    fact(controller, state, 1.0, "i-1")
    if to is Rung.ASLEEP or state in (S.READY, S.STARTING) or (state, to) == (S.PREWARMED, Rung.PREWARMED):
        with pytest.raises(Conflict, match=f"i-1 is {state.word} on node-1") as refused:
            controller.handle(operator.Load("m", to, "node-2"), 2.0)
        assert refused.value.param == "node"
        controller.handle(operator.Load("m", to, "node-1"), 2.1)
    else:
        (place,) = published(controller.handle(operator.Load("m", to, "node-2"), 2.0), PlaceInstance)
        assert place.node_id == "node-2"


def test_a_load_on_one_node_does_not_take_back_what_drains_on_another():
    controller = autoscaler(a_model(keep_alive_s=1))
    controller.restore("nodes", {name: a_node(name) for name in ("node-1", "node-2")}, 0.5)
    fact(controller, S.READY, 1.0, "i-1", ready_at=1.0)
    controller.handle(load_report(m=ModelLoad(last_active_at=1.0)), 9.0)
    assert published(controller.handle(Tick(), 9.1), StopInstance)
    fact(controller, S.DRAINING, 9.2, "i-1")
    effects = controller.handle(operator.Load("m", node_id="node-2"), 9.3)
    assert [p.node_id for p in published(effects, PlaceInstance)] == ["node-2"]
    assert published(effects, ResumeInstance) == []
    with pytest.raises(Conflict, match="already requested, on node-2"):
        controller.handle(operator.Load("m", node_id="node-1"), 9.4)


def test_a_row_that_vanishes_without_an_end_is_remembered_no_more():
    controller = autoscaler(a_model())
    fact(controller, S.SWAPPED_OUT, 1.0, "i-1")
    kept = controller._models.of("m").kept
    assert kept.asleep_since == {"i-1": 1.0}
    for at in (100.0, 200.0):
        controller.restore("instances", {}, at)
        controller.handle(Tick(), at + 0.1)
    assert kept.asleep_since == {}
