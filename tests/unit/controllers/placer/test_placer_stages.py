"""Pipelines in the placer (HydraServe sections 4 and 6)."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.operator import Cordon
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import InstanceState, StageAddress
from glowplug.events.commands import CancelPlacement, FetchWeights, JoinStages, StartInstance, StopInstance
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    NodeBeat,
    WeightsFetched,
    WeightsPartFetched,
)
from glowplug.policies.decisions import PlaceDecision, StageDecision
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance
from tests.unit.controllers.placer.rig import a_placer, asked
from tests.unit.controllers.placer.rig import payloads as sent

NODES = [a_node("node-1"), a_node("node-2")]
PART = {"node_id": "node-1", "model_key": "m", "digest": "d", "num_bytes": 1, "seconds": 1.0, "source": "file"}


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


def test_stages_meet_at_a_port_that_the_first_ones_node_offers():
    nodes = [replace(node, stages_at=f"10.0.0.{n}:29500-29509") for n, node in enumerate(NODES)]
    controller = a_placer(*nodes, place=two_stages, settle_s=0.0)
    first, later = sent(place(controller), StartInstance)
    host, _, port = first.rendezvous.partition(":")
    assert first.rendezvous == later.rendezvous and host == "10.0.0.0" and 29500 <= int(port) <= 29509
    again = sent(place(a_placer(*nodes, place=two_stages, settle_s=0.0)), StartInstance)
    assert again[0].rendezvous == first.rendezvous, "another placer repeats it"
    assert {start.rendezvous for start in sent(place(placer()), StartInstance)} == {""}


def test_only_the_stages_nobody_has_spoken_of_are_asked_for_again():
    controller = placer()
    made = rows(sent(place(controller), StartInstance))
    controller.handle(an_event(InstanceStarting(instance=made["x"])), 1.1)
    assert "x" in controller.placements
    again = [e for n in range(3, 9) for e in controller.handle(Tick(), n / 2)]
    assert {s.instance_id for s in sent(again, StartInstance)} == {"x.1"}
    controller.handle(an_event(InstanceStarting(instance=made["x.1"])), 4.5)
    assert controller.placements == {}


def test_they_are_joined_when_the_later_ones_are_ready_and_again_until_it_serves():
    controller = placer()
    made = heard(controller)
    ready = an_event(InstanceReady(instance=as_state(made["x.1"], InstanceState.READY)))
    (join,) = sent(controller.handle(ready, 2.0), JoinStages)
    assert (join.instance_id, join.target) == ("x", "node-1")
    assert sent(controller.handle(Tick(), 2.5), JoinStages) == []
    assert len(sent(controller.handle(Tick(), 4.1), JoinStages)) == 1
    controller.handle(an_event(InstanceReady(instance=as_state(made["x"], InstanceState.READY))), 4.2)
    assert sent(controller.handle(Tick(), 7.0), JoinStages) == []


def test_the_first_stage_learns_where_the_later_ones_answer():
    controller = placer()
    made = heard(controller)
    answers = replace(as_state(made["x.1"], InstanceState.READY), url="http://node-2:9", key_id="k")
    (join,) = sent(controller.handle(an_event(InstanceReady(instance=answers)), 2.0), JoinStages)
    assert join.stages == (StageAddress(instance_id="x.1", url="http://node-2:9", key_id="k"),)


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


def test_a_stage_that_becomes_whole_gets_the_rest_of_its_weights_until_they_are_there():
    model = a_model(mib=100)
    controller = placer(follows_parts=True, repeat_s=2.0)
    controller.restore("models", {model.key: model}, 0.5)
    made = heard(controller)
    controller.handle(an_event(WeightsPartFetched(instance_id="x", **PART)), 1.5)
    assert "node-1" not in controller.fleet.network.links
    for name in ("x.1", "x"):
        controller.handle(an_event(InstanceReady(instance=as_state(made[name], InstanceState.READY))), 2.0)
    growing = replace(as_state(made["x"], InstanceState.READY, 3), consolidating=True)
    (rest,) = sent(controller.handle(an_event(InstanceReady(instance=growing)), 3.0), FetchWeights)
    assert (rest.instance_id, rest.first_byte, rest.last_byte, rest.background) == ("x", 0, 0, True)
    assert [f.is_background for f in controller.fleet.network.links["node-1"].fetches] == [True]
    assert sent(controller.handle(Tick(), 4.0), FetchWeights) == []
    assert len(sent(controller.handle(Tick(), 5.1), FetchWeights)) == 1
    controller.handle(an_event(WeightsFetched(**PART)), 6.0)
    assert "node-1" not in controller.fleet.network.links
    there = CachedWeights(digest=model.weights.digest, num_bytes=1, model_keys=(model.key,))
    controller.handle(an_event(NodeBeat(node=replace(NODES[0], cached=(there,), revision=9))), 7.0)
    assert sent(controller.handle(Tick(), 9.0), FetchWeights) == []


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


def test_a_stage_that_becomes_whole_has_a_moment_to_go_on_without_one_that_is_gone():
    controller = placer(follows_parts=True, hole_grace_s=3.0)
    made = heard(controller)
    for name in ("x.1", "x"):
        controller.handle(an_event(InstanceReady(instance=as_state(made[name], InstanceState.READY))), 2.0)
    growing = replace(as_state(made["x"], InstanceState.READY, 3), consolidating=True)
    controller.handle(an_event(InstanceReady(instance=growing)), 3.0)
    failed = replace(as_state(made["x.1"], InstanceState.FAILED, 3), changed_at=4.0)
    assert sent(controller.handle(an_event(InstanceFailed(instance=failed)), 4.0), StopInstance) == []
    assert sent(controller.handle(Tick(), 6.9), StopInstance) == []
    assert [s.instance_id for s in sent(controller.handle(Tick(), 7.1), StopInstance)] == ["x"]


def test_a_stage_that_fails_takes_the_others_with_it():
    controller = placer()
    made = heard(controller)
    failed = as_state(made["x.1"], InstanceState.FAILED)
    effects = controller.handle(an_event(InstanceFailed(instance=failed)), 2.0)
    (stop,) = sent(effects, StopInstance)
    assert (stop.instance_id, stop.grace_s) == ("x", 0.0) and "x.1" in stop.reason


def test_later_stages_end_with_the_first_and_when_it_serves_alone():
    for last in (InstanceState.STOPPED, InstanceState.READY):
        controller = placer()
        made = heard(controller)
        controller.handle(an_event(InstanceReady(instance=as_state(made["x.1"], InstanceState.READY))), 2.0)
        whole = replace(as_state(made["x"], last, 3), num_stages=1, workers=made["x"].workers[:1])
        effects = controller.handle(an_event(InstanceReady(instance=whole)), 3.0)
        assert [s.instance_id for s in sent(effects, StopInstance)] == ["x.1"], last


def test_a_later_stage_that_grows_whole_itself_is_spared():
    """Section 6.2, scale up."""
    controller = placer()
    made = heard(controller)
    growing = replace(as_state(made["x.1"], InstanceState.READY), consolidating=True)
    controller.handle(an_event(InstanceReady(instance=growing)), 2.0)
    whole = replace(as_state(made["x"], InstanceState.READY, 3), num_stages=1, workers=made["x"].workers[:1])
    assert sent(controller.handle(an_event(InstanceReady(instance=whole)), 3.0), StopInstance) == []


def test_a_stage_that_drains_lets_the_others_finish():
    controller = placer(evict_grace_s=30.0)
    made = heard(controller)
    draining = as_state(made["x.1"], InstanceState.DRAINING)
    growing = replace(as_state(made["x"], InstanceState.READY), consolidating=True)
    controller.handle(an_event(InstanceReady(instance=growing)), 2.0)
    assert not sent(controller.handle(an_event(InstanceDraining(instance=draining)), 2.0), StopInstance)
    stays = replace(growing, consolidating=False, revision=3)
    (stop,) = sent(controller.handle(an_event(InstanceReady(instance=stays)), 9.0), StopInstance)
    assert (stop.instance_id, stop.grace_s) == ("x", 30.0)


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


def test_what_an_earlier_placer_has_begun_by_half_ends_and_is_asked_for_anew():
    made = heard(placer())
    first, later = (replace(row, created_at=1.0) for row in made.values())
    controller = placer(give_up_s=8.0, node_lease_s=60.0)
    controller.handle(an_event(InstanceStarting(instance=first)), 1.0)
    assert sent(controller.handle(Tick(), 8.9), StopInstance) == []
    (stop,) = sent(controller.handle(Tick(), 9.1), StopInstance)
    assert stop.instance_id == "x" and "0 of its 1 later stages" in stop.reason
    controller = placer(give_up_s=8.0, node_lease_s=60.0)
    controller.handle(an_event(InstanceStarting(instance=later)), 1.0)
    assert place(controller, 3.0) == []
    assert [s.instance_id for s in sent(controller.handle(Tick(), 9.1), StopInstance)] == ["x.1"]
    controller.handle(an_event(InstanceStopped(instance=as_state(later, InstanceState.STOPPED))), 9.2)
    (failed,) = sent(place(controller, 10.0), InstanceFailed)
    assert (failed.instance.instance_id, failed.code) == ("x", "no_answer")
    assert controller.placements == {} and controller.fleet.capacity.reserved == {}


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


def test_an_agent_that_does_not_answer_fails_the_whole_and_says_so():
    controller = placer(node_lease_s=60.0)
    made = rows(sent(place(controller), StartInstance))
    controller.handle(an_event(InstanceStarting(instance=made["x.1"])), 1.1)
    effects = [e for n in range(3, 24) for e in controller.handle(Tick(), n / 2)]
    (failed,) = sent(effects, InstanceFailed)
    assert (failed.instance.instance_id, failed.code) == ("x", "no_answer")
    assert {s.instance_id for s in sent(effects, StopInstance)} == {"x", "x.1"}


def test_cancelling_stops_every_stage_and_gives_the_bytes_back():
    controller = placer()
    place(controller)
    assert set(controller.fleet.capacity.reserved) == {"node-1/0", "node-2/0"}
    cancel = an_event(CancelPlacement(instance_id="x", reason="gone"), issuer="autoscaler-1", epoch=1)
    assert [s.instance_id for s in sent(controller.handle(cancel, 2.0), StopInstance)] == ["x", "x.1"]
    assert controller.fleet.capacity.reserved == {}
