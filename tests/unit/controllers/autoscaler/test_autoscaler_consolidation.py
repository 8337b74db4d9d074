"""HydraServe section 6.1: a pipeline becomes one instance, or one per stage."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Publish, Record, Tick
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import ConsolidateInstance, StopInstance
from glowplug.events.facts import InstanceReady
from glowplug.policies.scaling import hydraserve
from glowplug.policies.scaling.hydraserve import ConsolidationKind, consolidate
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler import rig


def a_pipeline(instance_id="x", num_stages=4, at=1.0):
    first = an_instance(instance_id, num_stages=num_stages, max_concurrency=8 * num_stages, created_at=at, ready_at=at)
    later = [
        an_instance(
            f"{instance_id}.{r}", gpu_id=f"node-{r + 1}/0", num_stages=num_stages, part_of=instance_id, created_at=at
        )
        for r in range(1, num_stages)
    ]
    return first, *later


def autoscaler(load, *rows):
    controller = rig.autoscaler(a_model(max_instances=32, keep_alive_s=30), scale=hydraserve.scale, policy="hydraserve")
    controller.handle(load_report(m=load), 1.0)
    controller.effects = rig.is_ready(controller, 1.5, *rows)
    return controller


def told(effects):
    return [command.instance_id for command in rig.published(effects, ConsolidateInstance)]


def decided(effects):
    return [e.decision for e in effects if isinstance(e, Record) and e.decision.chosen.startswith("consolidate")]


FEW = ModelLoad(num_in_flight=2, last_active_at=1.0, in_flight_by_instance={"x": 2})
MANY = ModelLoad(num_in_flight=32, last_active_at=1.0, in_flight_by_instance={"x": 32})


def test_a_group_whose_model_needs_one_instance_scales_down():
    first, *later = a_pipeline()
    controller = autoscaler(FEW, *later, first)
    assert told(controller.effects) == ["x"]
    (record,) = decided(controller.effects)
    assert (record.chosen, record.policy, record.inputs["stages"]) == (
        "consolidate_down", "hydraserve_consolidation", 4,
    )  # fmt: skip
    assert told(controller.handle(Tick(), 2.0)) == [], "told a moment ago"
    again = controller.handle(Tick(), 4.0)
    assert told(again) == ["x"] and decided(again) == [], "decided once, told until it is whole"
    whole = replace(first, num_stages=1, max_concurrency=8, revision=2)
    controller.handle(an_event(InstanceReady(instance=whole)), 5.0)
    assert told(controller.handle(Tick(), 9.0)) == []


def test_a_stage_that_does_not_become_whole_is_on_record_once_with_its_reason_and_told_again():
    first, *later = a_pipeline()
    controller = autoscaler(FEW, *later, first)
    grows = replace(first, consolidating=True, revision=2)
    controller.handle(an_event(InstanceReady(instance=grows)), 2.0)
    why = "stays stage 0 of 4: not whole after 600 s"
    failed = replace(first, reason=why, revision=3)
    effects = controller.handle(an_event(InstanceReady(instance=failed)), 602.0)
    (record,) = [e.decision for e in effects if isinstance(e, Record) and e.decision.chosen == "unconsolidated"]
    assert (record.instance_id, record.inputs["stages"]) == ("x", 4) and record.reason.endswith(why)
    assert "serves on" in record.reason and told(effects) == ["x"]
    later_on = [*controller.handle(Tick(), 604.0), *controller.handle(Tick(), 606.0)]
    assert not [e for e in later_on if isinstance(e, Record)] and told(later_on) == ["x"] * 2
    whole = replace(grows, num_stages=1, consolidating=False, revision=5)
    controller.handle(an_event(InstanceReady(instance=replace(grows, revision=4))), 610.0)
    assert not [e for e in controller.handle(an_event(InstanceReady(instance=whole)), 620.0) if isinstance(e, Record)]


def test_a_group_whose_model_needs_them_all_scales_up_its_head_last():
    first, *later = a_pipeline()
    controller = autoscaler(MANY, *later, first)
    assert told(controller.effects) == ["x.1", "x.2", "x.3"]
    assert [d.chosen for d in decided(controller.effects)] == ["consolidate_up"]
    for row in later:
        own = replace(row, num_stages=1, part_of="", revision=2)
        effects = controller.handle(an_event(InstanceReady(instance=own)), 2.5)
        assert told(effects) == (["x"] if row is later[-1] else [])
    assert not [e for e in controller.handle(Tick(), 3.0) if isinstance(e, Publish)], "four there are, no more, no less"


def test_a_stage_that_is_whole_does_not_go_before_its_pipeline_is_whole_and_over():
    """The first stage still runs the others' layers."""
    first, *later = a_pipeline()
    controller = autoscaler(MANY, *later, first)
    own = [replace(row, num_stages=1, part_of="", max_concurrency=8, revision=2) for row in later]
    for row in own:
        controller.handle(an_event(InstanceReady(instance=row)), 2.5)
    idle = load_report(m=ModelLoad(num_in_flight=1, last_active_at=1.0, in_flight_by_instance={"x": 1}))

    def stopped(from_s, to_s):
        effects = []
        for now_s in range(from_s, to_s):
            controller.handle(idle, now_s)
            effects += controller.handle(Tick(), now_s + 0.5)
        return {command.instance_id for command in rig.published(effects, StopInstance)}

    assert stopped(100, 105) == set()
    whole = replace(first, num_stages=1, max_concurrency=8, stages_busy=True, revision=2)
    controller.handle(an_event(InstanceReady(instance=whole)), 110.0)
    assert stopped(111, 200) == set(), "answers end in its stages"
    controller.handle(an_event(InstanceReady(instance=replace(whole, stages_busy=False, revision=3))), 200.0)
    assert stopped(201, 300) == {row.instance_id for row in own}


def test_a_decision_stands_while_the_load_changes():
    first, *later = a_pipeline()
    controller = autoscaler(FEW, *later, first)
    controller.handle(load_report(m=MANY), 2.0)
    assert told(controller.handle(Tick(), 4.0)) == ["x"]


def test_a_pipeline_is_not_drained_for_what_it_could_become():
    first, *later = a_pipeline()
    controller = autoscaler(FEW, *later, first)
    effects = controller.handle(Tick(), 100.0)
    assert [e for e in effects if isinstance(e, Publish) and isinstance(e.payload, StopInstance)] == []


def test_a_draining_pipeline_is_left_alone():
    first, *later = a_pipeline()
    controller = autoscaler(FEW, *later, replace(first, state=InstanceState.DRAINING))
    assert told(controller.effects) == []


@pytest.mark.parametrize(
    ("required", "whole", "expected"),
    [(1, 0, "DD"), (3, 0, "DD"), (4, 0, "UD"), (5, 0, "UD"), (8, 0, "UU"), (8, 4, "UD"), (8, 5, "DD")],
)
def test_groups_are_decided_on_together_oldest_first(required, whole, expected):
    groups = [a_pipeline("x")[0], a_pipeline("y")[0]]
    made = consolidate(groups, whole, required)
    wanted = [ConsolidationKind.UP if letter == "U" else ConsolidationKind.DOWN for letter in expected]
    assert [d.becomes for d in made] == wanted and [d.instance_id for d in made] == ["x", "y"]
