"""Pipelines in the placer (HydraServe sections 4 and 6)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.operator import Cordon
from glowplug.domain.instance import InstanceState
from glowplug.events.commands import CancelPlacement, FetchWeights, StartInstance, StopInstance
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceReady,
    InstanceStarting,
)
from glowplug.policies.decisions import PlaceDecision, StageDecision
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance
from tests.unit.controllers.placer.rig import a_placer, asked
from tests.unit.controllers.placer.rig import payloads as sent

NODES = [a_node("node-1"), a_node("node-2")]


def two_stages(request, view):
    if any(view.fleet.reserved.get(f"{n.node_id}/0", 0) + n.gpus[0].used_bytes > 250 * MIB for n in view.nodes):
        return PlaceDecision(reason="no room")
    half = request.model.weights.num_bytes // 2
    stages = tuple(
        StageDecision(
            node_id=f"node-{n + 1}",
            gpu_ids=(f"node-{n + 1}/0",),
            bytes_per_gpu=50 * MIB,
            first_byte=n * half,
            fetch_bytes=half,
        )
        for n in range(2)
    )
    return PlaceDecision(stages=stages, reason="two stages")


def placer(**params):
    return a_placer(*NODES, place=two_stages, settle_s=0.0, **params)


def place(controller, now_s=1.0):
    return controller.handle(asked(a_model(mib=100), "x", wanted_at=0.5), now_s)


def rows(command):
    return {
        start.instance_id: replace(
            an_instance(start.instance_id, state=InstanceState.STARTING),
            workers=start.workers,
            part_of=start.part_of,
            num_stages=start.num_stages,
        )
        for start in command
    }


def heard(controller, now_s=1.1):
    made = rows(sent(place(controller), StartInstance))
    for row in made.values():
        controller.handle(an_event(InstanceStarting(instance=row)), now_s)
    return made


def as_state(row, state, revision=2):
    return replace(row, state=state, revision=revision)


@pytest.mark.parametrize("waits", [True, False])
def test_a_policy_is_told_of_a_copy_that_is_to_sleep_and_of_a_start_that_a_request_waits_for(waits):
    told = []

    def policy(request, view):
        told.append((request.is_to_sleep, request.is_awaited))
        return two_stages(request, view)

    command = replace(asked(a_model(mib=100), "x").data, waits=waits, is_awaited=not waits)
    controller = a_placer(*NODES, place=policy, settle_s=0.0)
    controller.handle(an_event(command, issuer="autoscaler-1", epoch=1), 1.0)
    assert set(told) == {(waits, not waits)}


@pytest.mark.parametrize("ends", ["it says so", "a stage fails", "it sleeps"])
def test_later_stages_stay_while_what_runs_there_ends(ends):
    controller = placer()
    made = heard(controller)
    ready = {name: as_state(row, InstanceState.READY) for name, row in made.items()}
    for name in ("x.1", "x"):
        controller.handle(an_event(InstanceReady(instance=ready[name])), 2.0)
    whole = replace(ready["x"], num_stages=1, workers=ready["x"].workers[:1], stages_busy=True, revision=3)
    controller.handle(an_event(InstanceReady(instance=whole)), 3.0)
    assert not [e for n in range(4, 7) for e in sent(controller.handle(Tick(), n), StopInstance)]
    if ends == "it says so":
        said = InstanceReady(instance=replace(whole, stages_busy=False, revision=4))
    elif ends == "it sleeps":
        said = InstanceReady(instance=replace(whole, state=InstanceState.SWAPPED_OUT, revision=4))
    else:
        said = InstanceFailed(instance=as_state(ready["x.1"], InstanceState.FAILED, 3), code="engine_failed")
    stops = sent(controller.handle(an_event(said), 7.0), StopInstance)
    assert [one.instance_id for one in stops] == ([] if ends == "a stage fails" else ["x.1"])
    assert not controller.fleet.instances.by_id["x"].state.is_gone


def test_a_late_fact_of_a_stage_that_has_ended_fetches_nothing():
    model, controller = a_model(mib=100), placer(follows_parts=True)
    controller.restore("models", {model.key: model}, 0.5)
    made = heard(controller)
    growing = replace(as_state(made["x"], InstanceState.READY, 3), consolidating=True)
    gone = replace(as_state(made["x"], InstanceState.FAILED, 4))
    controller.restore("instances", {row.instance_id: row for row in (gone, made["x.1"])}, 2.0)
    links = dict(controller.fleet.network.links)
    assert sent(controller.handle(an_event(InstanceReady(instance=growing)), 3.0), FetchWeights) == []
    assert controller.fleet.network.links == links, "nothing would end the fetch"


@pytest.mark.parametrize(("ends_at", "grace_s"), [(22.0, 12.5), (100.0, 30.0), (9.2, 0.0)])
def test_the_first_stage_ends_before_one_that_drains_does(ends_at, grace_s):
    controller = placer(evict_grace_s=30.0)
    made = heard(controller)
    controller.handle(an_event(InstanceReady(instance=as_state(made["x"], InstanceState.READY))), 2.0)
    draining = replace(as_state(made["x.1"], InstanceState.DRAINING), drain_ends_at=ends_at)
    (stop,) = sent(controller.handle(an_event(InstanceDraining(instance=draining)), 9.0), StopInstance)
    assert stop.instance_id == "x" and stop.grace_s == grace_s


def test_a_later_stage_that_drains_runs_what_an_engine_that_is_whole_has_left_there():
    controller = placer(evict_grace_s=30.0)
    made = heard(controller)
    draining = as_state(made["x.1"], InstanceState.DRAINING)
    controller.handle(an_event(InstanceDraining(instance=draining)), 2.0)
    first = replace(as_state(made["x"], InstanceState.READY, 3), num_stages=1, workers=made["x"].workers[:1])
    busy = replace(first, stages_busy=True)
    assert sent(controller.handle(an_event(InstanceReady(instance=busy)), 5.0), StopInstance) == []
    ended = replace(first, revision=4)
    (stop,) = sent(controller.handle(an_event(InstanceReady(instance=ended)), 6.0), StopInstance)
    assert (stop.instance_id, stop.grace_s) == ("x.1", 0.0)


def test_a_node_with_a_later_stage_is_drained_by_its_first_one_or_once_that_is_whole():
    def drained(**changes):
        controller = placer(evict_grace_s=30.0)
        made = heard(controller)
        controller.handle(an_event(InstanceReady(instance=as_state(made["x.1"], InstanceState.READY))), 2.0)
        first = replace(as_state(made["x"], InstanceState.READY, 3), **changes)
        effects = controller.handle(an_event(InstanceReady(instance=first)), 3.0)
        effects += controller.handle(Cordon("node-2", True), 4.0)
        return [(s.instance_id, s.target, s.grace_s) for s in sent(effects, StopInstance)]

    assert drained() == [("x", "node-1", 30.0)]
    assert drained(consolidating=True) == []
    whole = [("x.1", "node-2", 0.0), ("x.1", "node-2", 30.0)]  # since the first one serves alone, and for the drain
    assert drained(num_stages=1, workers=an_instance("x").workers) == whole
    assert drained(num_stages=1, workers=an_instance("x").workers, stages_busy=True) == []


def test_a_drain_waits_for_the_pipeline_that_needs_a_stage_which_serves_for_itself():
    """Section 6.2, scale up."""

    def drained(**changes):
        controller = placer(evict_grace_s=30.0)
        made = heard(controller)
        first = replace(as_state(made["x"], InstanceState.READY, 3), **changes)
        whole = replace(as_state(made["x.1"], InstanceState.READY), part_of="", num_stages=1)
        for row in (whole, first):
            controller.handle(an_event(InstanceReady(instance=row)), 2.0)
        return [s.instance_id for s in sent(controller.handle(Cordon("node-2", True), 4.0), StopInstance)]

    assert drained() == ["x"]
    assert drained(consolidating=True) == []
    alone = {"num_stages": 1, "workers": an_instance("x").workers}
    assert drained(**alone, stages_busy=True) == []
    assert drained(**alone) == ["x.1"]


def test_a_stage_that_ends_while_it_becomes_whole_is_fetched_for_no_more():
    model = a_model(mib=100)
    controller = placer(models=(model,), follows_parts=True)
    made = heard(controller)
    growing = replace(as_state(made["x"], InstanceState.READY, 3), consolidating=True)
    assert sent(controller.handle(an_event(InstanceReady(instance=growing)), 3.0), FetchWeights)
    failed = replace(growing, state=InstanceState.FAILED, revision=4)
    controller.handle(an_event(InstanceFailed(instance=failed)), 4.0)
    assert controller.fleet.network.links.keys() == {"node-2"}, "that of the later stage"
    assert sent(controller.handle(Tick(), 9.0), FetchWeights) == []


def test_cancelling_stops_every_stage_and_gives_the_bytes_back():
    controller = placer()
    place(controller)
    assert set(controller.fleet.capacity.reserved) == {"node-1/0", "node-2/0"}
    cancel = an_event(CancelPlacement(instance_id="x", reason="gone"), issuer="autoscaler-1", epoch=1)
    assert [s.instance_id for s in sent(controller.handle(cancel, 2.0), StopInstance)] == ["x", "x.1"]
    assert controller.fleet.capacity.reserved == {}
