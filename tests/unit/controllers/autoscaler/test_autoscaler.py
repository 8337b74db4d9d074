"""The autoscaler: sole owner of models and instance counts."""

from dataclasses import replace

import pytest

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Publish, Record, Remove, Save, Tick
from glowplug.domain.errors import Conflict, ModelNotFound
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import CancelPlacement, PlaceInstance, ResumeInstance, StopInstance
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    ModelUndeployed,
)
from glowplug.policies.registry import choose
from glowplug.policies.scaling import union
from glowplug.policies.scaling.baselines import reactive as scale
from glowplug.policies.scaling.union import PlanState
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, holds, published, waiting


def test_a_thousand_waiters_ask_for_one_instance():
    controller = autoscaler(a_model())
    effects = [e for n in range(1, 1001) for e in controller.handle(waiting(n), 2.0)]
    (command,) = published(effects, PlaceInstance)
    assert command.wanted_at == 1.0 and command.is_awaited
    (record,) = [e.decision for e in effects if isinstance(e, Record)]
    assert record.request_id == "r-1" and record.inputs["waiting"] == 1


def test_a_queue_that_is_gathered_first_starts_nothing_until_it_is_so_old():
    controller = autoscaler(a_model(), gather_s=1.0)
    assert not published(controller.handle(waiting(1, since=1.0), 1.0), PlaceInstance)
    assert not published(controller.handle(waiting(2), 1.5), PlaceInstance)
    (command,) = published(controller.handle(waiting(9), 2.0), PlaceInstance)
    assert command.wanted_at == 1.0


def test_an_operator_waits_for_a_start_that_he_asks_for():
    (loaded,) = published(autoscaler(a_model()).handle(operator.Load("m"), 2.0), PlaceInstance)
    assert loaded.is_awaited
    controller = autoscaler(a_model())
    (first,) = published(controller.handle(an_event(holds(deadline_at=3.0)), 2.0), PlaceInstance)
    assert first.is_awaited
    assert published(controller.handle(Tick(), 3.1), CancelPlacement)
    effects = controller.handle(operator.Load("m"), 9.0)
    (later,), (decision,) = published(effects, PlaceInstance), decisions(effects)
    assert (later.is_awaited, later.wanted_at, decision.request_id) == (True, 9.0, "")


def decisions(effects):
    return [e.decision for e in effects if isinstance(e, Record)]


def test_whatever_an_operator_asks_is_decided_on_record():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstanceReady(instance=an_instance())), 1.0)
    controller.handle(load_report(m=ModelLoad(num_in_flight=2, in_flight_by_instance={"i-1": 2})), 1.1)
    (unload,) = decisions(controller.handle(operator.Unload("m"), 2.0))
    assert (unload.policy, unload.chosen, unload.instance_id) == ("operator", "unload", "i-1")
    assert unload.inputs == {"waiting": 0, "in_flight": 2, "running": 1, "in_flight_here": 2}
    assert decisions(controller.handle(operator.Unload("m"), 4.5)) == [], "it is on its way out: decided once"
    assert [d.chosen for d in decisions(controller.handle(operator.Suspend("m"), 5.0))] == ["suspend"]
    pins = [decisions(controller.handle(operator.Pin("m", on), 6.0))[0] for on in (True, False)]
    assert [(d.chosen, d.model_key, d.instance_id) for d in pins] == [("pin", "m", ""), ("unpin", "m", "")]


def test_a_start_an_operator_asked_for_says_so():
    (start,) = decisions(autoscaler(a_model()).handle(operator.Load("m"), 2.0))
    assert (start.chosen, start.reason) == ("start", "m gets an instance: an operator has loaded it")
    controller = autoscaler()
    effects = controller.handle(operator.Deploy(model=a_model(preload=True)), 1.0)
    (preload,), (command,) = decisions(effects), published(effects, PlaceInstance)
    assert preload.instance_id == command.instance_id
    assert preload.reason == "m gets an instance: its deployment asks for one at once"
    (gone,) = decisions(controller.handle(operator.Undeploy("m"), 2.0))
    assert (gone.chosen, gone.instance_id) == ("undeploy", preload.instance_id), "what was coming is cancelled"


def said(payload, occurred_at):
    return an_event(payload, occurred_at=occurred_at)


def test_a_start_is_not_cancelled_before_its_router_has_reported_again():
    controller = autoscaler(a_model())
    report = load_report(m=ModelLoad()).data
    controller.handle(said(report, 1.9), 1.9)
    (command,) = published(controller.handle(said(holds(), 2.0), 2.0), PlaceInstance)
    assert published(controller.handle(Tick(), 2.1), CancelPlacement) == []
    controller.handle(said(report, 1.95), 2.2)  # sent before the request, received after its fact
    assert published(controller.handle(Tick(), 2.2), CancelPlacement) == []
    controller.handle(said(load_report("router-2", m=ModelLoad()).data, 2.3), 2.3)
    assert published(controller.handle(Tick(), 2.4), CancelPlacement) == []
    controller.handle(said(report, 2.5), 2.5)
    (cancel,) = published(controller.handle(Tick(), 2.6), CancelPlacement)
    assert cancel.instance_id == command.instance_id


def test_what_a_router_that_died_sent_last_keeps_no_start():
    controller = autoscaler(a_model())
    published(controller.handle(said(holds(), 2.0), 2.0), PlaceInstance)
    assert published(controller.handle(Tick(), 4.9), CancelPlacement) == []
    assert len(published(controller.handle(Tick(), 5.1), CancelPlacement)) == 1
    assert published(controller.handle(Tick(), 5.6), PlaceInstance) == []


def test_a_request_past_its_deadline_keeps_no_start():
    controller = autoscaler(a_model())
    published(controller.handle(said(holds(deadline_at=3.0), 2.0), 2.0), PlaceInstance)
    assert len(published(controller.handle(Tick(), 3.1), CancelPlacement)) == 1


def test_a_fact_that_comes_after_a_newer_report_of_its_router_starts_nothing():
    controller = autoscaler(a_model())
    controller.handle(said(load_report(m=ModelLoad()).data, 2.5), 2.5)
    assert controller.handle(said(holds(), 2.0), 2.6) == []
    assert len(published(controller.handle(said(holds(router_id="router-2"), 2.0), 2.6), PlaceInstance)) == 1


def test_a_fact_that_a_report_has_overtaken_starts_at_once_and_is_the_cause_while_its_request_waits():
    """The bus stores facts before they are read; an unstored report may overtake them."""
    controller = autoscaler(a_model())
    assert controller.handle(said(load_report(m=ModelLoad(num_waiting=1)).data, 2.5), 2.5) == []
    late = said(holds(), 2.0)
    effects = controller.handle(late, 2.6)
    (place,) = [e for e in effects if isinstance(e, Publish) and isinstance(e.payload, PlaceInstance)]
    assert place.cause is late


def test_idle_for_keep_alive_is_drained_once_and_only_while_routers_speak():
    controller = autoscaler(a_model(keep_alive_s=10))
    controller.handle(an_event(InstanceReady(instance=an_instance(ready_at=5.0))), 5.0)
    assert published(controller.handle(Tick(), 20.0), StopInstance) == [], "no router has spoken"
    controller.handle(load_report(m=ModelLoad(last_active_at=6.0)), 20.0)
    (stop,) = published(controller.handle(Tick(), 20.1), StopInstance)
    assert (stop.target, stop.instance_id) == ("node-1", "i-1")
    assert published(controller.handle(Tick(), 20.6), StopInstance) == [], "sent a moment ago"


def test_a_drain_somebody_else_began_is_left_alone_and_a_new_instance_asked_for():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstanceDraining(instance=an_instance(state=InstanceState.DRAINING))), 20.0)
    effects = controller.handle(waiting(since=20.3), 20.3)
    assert published(effects, ResumeInstance) == []
    assert len(published(effects, PlaceInstance)) == 1


def test_failed_starts_back_off_and_an_operator_may_try_at_once():
    controller = autoscaler(a_model())
    failed = an_instance("i-1", state=InstanceState.FAILED, reason="no such file")
    controller.handle(an_event(InstanceFailed(instance=failed)), 10.0)
    assert published(controller.handle(waiting(), 10.1), PlaceInstance) == []
    assert len(published(controller.handle(waiting(), 10.6), PlaceInstance)) == 1
    other = autoscaler(a_model())
    other.handle(an_event(InstanceFailed(instance=failed)), 10.0)
    assert len(published(other.handle(operator.Load("m"), 10.1), PlaceInstance)) == 1


@pytest.mark.parametrize("of", [{"part_of": "i-1"}, {"replica": True}], ids=["stage", "replica"])
def test_a_stage_or_replica_that_fails_is_no_failed_start(of):
    controller = autoscaler(a_model())
    failed = an_instance("i-2", state=InstanceState.FAILED, reason="no such file", **of)
    controller.handle(an_event(InstanceFailed(instance=failed)), 10.0)
    assert len(published(controller.handle(waiting(), 10.1), PlaceInstance)) == 1


def test_a_start_that_may_be_tried_on_another_node_is_at_once_but_not_for_ever():
    controller = autoscaler(a_model())
    starts, num = published(controller.handle(waiting(), 9.0), PlaceInstance), 0
    while starts:
        failed = an_instance(starts[0].instance_id, state=InstanceState.FAILED, tries_left=2)
        effects = controller.handle(an_event(InstanceFailed(instance=failed, code="no_space")), 10.0)
        starts, num = published(effects, PlaceInstance), num + 1
    assert num == 9, "eight at once; the ninth that has failed is waited for"


def test_what_an_operator_has_loaded_is_tried_on_another_node():
    controller = autoscaler(a_model())
    (first,) = published(controller.handle(operator.Load("m"), 9.0), PlaceInstance)
    failed = an_instance(first.instance_id, state=InstanceState.FAILED, tries_left=1)
    (again,) = published(controller.handle(an_event(InstanceFailed(instance=failed)), 10.0), PlaceInstance)
    assert again.instance_id != first.instance_id and again.reason == "an operator has loaded it"
    last = an_instance(again.instance_id, state=InstanceState.FAILED)
    assert published(controller.handle(an_event(InstanceFailed(instance=last)), 11.0), PlaceInstance) == []


def test_a_failure_that_the_table_shows_before_its_fact_comes_counts_once():
    controller = autoscaler(a_model())
    starting = an_instance("i-1", state=InstanceState.STARTING)
    failed = replace(starting, state=InstanceState.FAILED, revision=starting.revision + 1)
    controller.handle(an_event(InstanceStarting(instance=starting)), 9.0)
    controller.restore("instances", {"i-1": failed}, 10.0)
    controller.handle(an_event(InstanceFailed(instance=failed)), 10.0)
    assert published(controller.handle(waiting(), 10.4), PlaceInstance) == []
    assert len(published(controller.handle(waiting(), 10.6), PlaceInstance)) == 1, "a second failure would wait for 1 s"
    later = autoscaler(a_model())
    later.restore("instances", {"i-1": failed}, 10.0)
    assert len(published(later.handle(waiting(), 10.1), PlaceInstance)) == 1, "of long ago, as far as is known"


def test_what_an_unloaded_instance_still_streams_brings_nothing_back_but_a_new_request_does():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1"))), 1.0)
    busy = ModelLoad(num_in_flight=1, last_active_at=2.0, in_flight_by_instance={"i-1": 1})
    controller.handle(load_report(m=busy), 2.0)
    assert published(controller.handle(operator.Unload("m"), 2.0), StopInstance)
    draining = an_instance("i-1", state=InstanceState.DRAINING, revision=2)
    effects = controller.handle(an_event(InstanceDraining(instance=draining)), 2.1) + controller.handle(Tick(), 2.5)
    assert published(effects, ResumeInstance) == published(effects, PlaceInstance) == []
    effects = controller.handle(waiting(), 2.6)
    assert published(effects, ResumeInstance) == [] and len(published(effects, PlaceInstance)) == 1


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


def test_deploy_same_again_changes_nothing_and_a_change_grows_the_revision():
    controller = autoscaler(a_model(keep_alive_s=5))
    before = controller.models["m"]
    assert controller.handle(operator.Deploy(model=a_model(keep_alive_s=5)), 9.0) == []
    controller.handle(operator.Deploy(model=a_model(keep_alive_s=6)), 9.0)
    assert controller.models["m"].revision > before.revision


@pytest.mark.parametrize("other", ["api", "/etc/models/m.yaml", "kubernetes:team/other"])
def test_what_a_custom_resource_declares_changes_only_there(other):
    mine = "kubernetes:team/m"
    for known, given in ((mine, other), (other, mine)):
        controller = autoscaler(a_model(source=known))
        with pytest.raises(Conflict, match=r"model 'm' is declared by .*, and changes only there"):
            controller.handle(operator.Deploy(model=a_model(source=given, priority=9)), 1.0)
    assert autoscaler(a_model(source=mine)).handle(operator.Pin("m", True), 1.0), "verbs are for everybody"
    own = autoscaler(a_model(source=mine))
    assert own.handle(operator.Deploy(model=a_model(source=mine, priority=9)), 1.0)


def test_conflicts_and_unknown_models_are_typed():
    controller = autoscaler(a_model("a", aliases=("x",)))
    with pytest.raises(Conflict):
        controller.handle(operator.Deploy(model=a_model("a"), create=True), 1.0)
    with pytest.raises(Conflict, match="'x'"):
        controller.handle(operator.Deploy(model=a_model("b", aliases=("x",))), 1.0)
    with pytest.raises(ModelNotFound):
        controller.handle(operator.Load("nope"), 1.0)


def test_undeploy_stops_instances_and_removes_the_row():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstanceReady(instance=an_instance())), 1.0)
    effects = controller.handle(operator.Undeploy("m"), 2.0)
    assert Remove("models", "m") in effects
    assert [s.instance_id for s in published(effects, StopInstance)] == ["i-1"]


def test_instances_of_an_unknown_model_are_stopped_only_after_the_models_had_time_to_load():
    controller = autoscaler()
    controller.restore("instances", {"i-1": an_instance()}, 0.0)
    assert controller.handle(Tick(), 1.0) == []
    assert len(published(controller.handle(Tick(), 12.0), StopInstance)) == 1


def test_a_store_that_lost_its_models_gets_them_back():
    controller = autoscaler(a_model())
    assert controller.restore("models", {}, 1.0) == [Save("models", "m", controller.models["m"])]


def test_a_load_of_a_hot_model_does_not_keep_it_for_ever():
    controller = autoscaler(a_model())
    controller.handle(an_event(InstanceReady(instance=an_instance(ready_at=1.0))), 1.0)
    controller.handle(operator.Load("m"), 2.0)
    controller.handle(load_report(), 100.0)
    (stop,) = published(controller.handle(Tick(), 100.0), StopInstance)
    assert "idle" in stop.reason


def test_rows_read_before_an_undeploy_was_written_do_not_bring_the_model_back():
    controller = autoscaler(a_model())
    rows = dict(controller.models)
    controller.handle(operator.Undeploy("m"), 1.0)
    for now_s in (1.1, 3.0):
        assert controller.restore("models", rows, now_s) == [Remove("models", "m")], "until the store has taken it"
    assert controller.restore("models", {}, 5.0) == []
    assert controller.models == {}


def test_a_model_deployed_again_is_newer_than_the_one_that_left():
    controller = autoscaler(a_model())
    rows = dict(controller.models)
    controller.handle(operator.Undeploy("m"), 0.0)
    controller.handle(operator.Deploy(model=a_model()), 0.0)
    assert controller.models["m"].revision > rows["m"].revision
    assert controller.restore("models", rows, 0.1) == []


def test_a_waiting_request_of_the_past_starts_nothing():
    fact_is_over_at = waiting().data.deadline_at
    assert published(autoscaler(a_model()).handle(waiting(), fact_is_over_at + 1.0), PlaceInstance) == []


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


def test_what_another_leader_has_undeployed_is_forgotten_and_what_was_deployed_since_is_not():
    standby = autoscaler()
    standby.restore("models", {"a": a_model("a", revision=5_000)}, 5.0)
    undeployed = an_event(ModelUndeployed(model_key="a"))
    standby.handle(replace(undeployed, occurred_at=4.0), 6.0)
    assert set(standby.models) == {"a"}, "an old fact, delivered late"
    standby.handle(replace(undeployed, occurred_at=7.0), 7.0)
    assert standby.models == {}
    assert standby.restore("models", {"a": a_model("a", revision=5_000)}, 7.1) == [Remove("models", "a")]


def test_a_successor_knows_the_demand_and_asks_anew_for_what_it_wants():
    earlier = autoscaler(a_model())
    earlier.handle(load_report(m=ModelLoad(num_waiting=3, last_active_at=1.0)), 1.0)
    earlier.handle(Tick(), 1.1)
    successor, _ = successor_of(earlier, dict(earlier.models), 1.5)
    (command,) = published(successor.handle(Tick(), 1.6), PlaceInstance)
    assert command.instance_id.startswith("m-9-"), "under an id of its own epoch"
