"""Operator verbs beside placement."""

from dataclasses import replace

import pytest

from glowplug.controllers.effects import Record, Tick
from glowplug.controllers.operator import DropFromHost, FetchToHost
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.errors import Conflict, NotFound
from glowplug.domain.hardware import CachedWeights, Node
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import KeptAt, Model, Rung, WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import DropWeights, FetchWeights, StartInstance, StopInstance
from glowplug.events.facts import WeightsFetchFailed
from tests.fleet_builder import a_model, a_node, an_event, an_instance, instance_event, load_report
from tests.unit.controllers.placer.rig import a_placer, asked, beat, payloads

S = InstanceState
M, OTHER = a_model("m", mib=150), a_model("other", mib=150, weights=WeightsRef(uri="file:/other"))
HERE = CachedWeights(digest=M.weights.digest, num_bytes=7, model_keys=("m",))


def serving(controller: PlacerController, now_s: float, row: Instance | None = None) -> None:
    """Another model's idle instance holds the GPU."""
    row = row or an_instance("i-1", "other", mib=150, ready_at=2.0)
    beat(controller, now_s, a_node(gpus_mib=(200,), grants={0: [("i-1", 150)]}, revision=round(now_s * 10)))
    controller.handle(instance_event(row), now_s)
    controller.handle(load_report(other=ModelLoad()), now_s)


def a_full_one(**params: object) -> PlacerController:
    controller = a_placer(a_node(gpus_mib=(200,)), models=(M, OTHER), **params)
    serving(controller, 2.0)
    serving(controller, 9.0)
    return controller


@pytest.mark.parametrize(("kept_at", "becomes"), [(KeptAt.ASLEEP, "swapped_out"), (KeptAt.NOWHERE, "stopped")])
def test_what_leaves_of_a_model_that_is_kept_asleep_sleeps(kept_at: KeptAt, becomes: str):
    controller = a_placer(a_node(gpus_mib=(200,)), models=(M, replace(OTHER, kept_at=kept_at)))
    serving(controller, 2.0)
    serving(controller, 9.0)
    (stop,) = payloads(controller.handle(asked(M), 9.1), StopInstance)
    assert stop.becomes == becomes


def test_what_is_placed_anew_takes_no_bytes_that_are_promised():
    controller = a_placer(a_node("node-1"), a_node("node-2"), models=(M,), give_up_s=1.0)
    taken, silent = (
        payloads(controller.handle(asked(a_model(name, mib=200), f"i-{name}"), 1.0), StartInstance)[0].target
        for name in ("a", "b")
    )
    row = an_instance("i-a", "a", S.STARTING, gpu_id=f"{taken}/0", mib=200)
    controller.handle(instance_event(row), 1.1)
    for at in (1.5, 2.5, 2.7):
        beat(controller, at, *(a_node(name, revision=round(at * 10)) for name in (taken, silent)))
        effects = controller.handle(Tick(), at)
    assert taken != silent and payloads(effects, StartInstance) == [], f"{taken} has 100 MiB left of 300"


def with_prefetchers(*nodes: Node, models: tuple[Model, ...] = (M,)) -> PlacerController:
    shown = [replace(node, prefetcher_url="http://p") for node in nodes]
    controller = a_placer(*shown, models=models)
    controller.handle(Tick(), 3.0)
    for node in shown:
        beat(controller, 3.0, replace(node, revision=30))
    return controller


def test_weights_are_brought_where_the_disk_has_a_copy_and_it_costs_what_that_disk_takes():
    large = a_node("node-1", prefetcher_url="http://1")
    on_disk = a_node("node-2", gpus_mib=(200,), prefetcher_url="http://2", on_disk=(HERE,), disk_bytes_per_s=1e8)
    controller = a_placer(large, on_disk, models=(M,))
    cost = controller.costs.of("m", "load", 1.0, rung=Rung.HOST)
    assert (cost.node_id, cost.seconds) == ("node-2", pytest.approx(M.fetch_bytes / 1e8, abs=1e-3))
    assert (cost.scope, cost.num_measured) == ("disk", 0)
    (command,) = payloads(controller.handle(FetchToHost("m"), 1.0), FetchWeights)
    assert command.target == "node-2"
    cost = controller.costs.of("m", "load", 1.0, node_id="node-2")
    assert (cost.kind, cost.fetch_bytes) == ("disk", M.fetch_bytes)


def test_a_start_from_disk_says_so_in_its_decision():
    controller = a_placer(a_node(on_disk=(HERE,), disk_bytes_per_s=1e8), models=(M,))
    (record,) = (effect.decision for effect in controller.handle(asked(M), 1.0) if isinstance(effect, Record))
    assert record.inputs["start_kind"] == "disk" and record.inputs["read_from_disk"] == "node-1"
    assert record.inputs["disk_bytes_per_s"] == 1e8 and "from the disk of node-1" in record.reason


def started(instance_id: str, at: float, load_s: float, kind: str, **fields: object) -> Instance:
    phases = (Phase(name=PhaseName.LOAD, started_at=at, ended_at=at + load_s),)
    return an_instance(
        instance_id, created_at=at, ready_at=at + load_s, phases=phases, start_kind=kind, gpu_kind="host", mib=150,
        **fields,
    )  # fmt: skip


def test_a_cost_says_how_many_starts_it_comes_from_and_a_default_that_it_is_one():
    controller = a_placer(a_node(), models=(M,), priors={})
    cost = controller.costs.of("m", "load", 1.0)
    assert (cost.kind, cost.scope, cost.num_measured) == ("cold", "prior", 0)
    assert cost.fetch_bytes == M.fetch_bytes and cost.gpu_bytes == M.memory_bytes and cost.is_possible_now
    assert cost.source.startswith("default of emulated") and cost.node_id == "node-1"
    for number, load_s in enumerate((1.0, 9.0, 2.0)):
        row = started(f"i-{number}", 10.0 * number + 1.0, load_s, "cold")
        controller.handle(instance_event(row), 10.0 * number + 11.0)
        controller.handle(instance_event(replace(row, state=S.STOPPED, revision=2)), 10.0 * number + 11.1)
    beat(controller, 40.0, a_node(revision=400))
    cost = controller.costs.of("m", "load", 40.0)
    assert (cost.scope, cost.num_measured, cost.phases["load"]) == ("model", 3, 2.0)
    assert "measured on this fleet: the last 3 starts that were cold" in cost.source and "modelled" in cost.source


def test_a_cost_names_who_would_leave_and_changes_nothing():
    controller = a_full_one(evict_becomes="swapped_out")
    cost = controller.costs.of("m", "load", 9.1)
    (leaving,) = cost.leaving
    assert (leaving.instance_id, leaving.becomes, leaving.num_bytes) == ("i-1", "swapped_out", 150 * 1024**2)
    assert controller.handle(Tick(), 9.2) == [] and controller.placements == {}
    asleep = controller.costs.of("m", "load", 9.1, rung=Rung.ASLEEP)
    assert not asleep.is_possible_now and asleep.leaving == (), "nobody leaves for one that is to sleep"
    busy = ModelLoad(num_in_flight=2, in_flight_by_instance={"i-1": 2})
    controller.handle(load_report(other=busy), 9.3)
    cost = controller.costs.of("m", "load", 9.4)
    assert not cost.is_possible_now and "other stays: it has 2 requests in flight" in cost.reason


def test_what_is_there_already_costs_nothing_and_a_replica_is_no_pin():
    controller = a_placer(a_node(cached=(HERE,), prefetcher_url="http://p"), models=(M,))
    controller.handle(instance_event(an_instance("i-1", state=S.PREWARMED, replica=True, mib=150)), 1.0)
    assert controller.costs.of("m", "load", 1.1, rung=Rung.ASLEEP).seconds == 0.0
    assert controller.costs.of("m", "pin", 1.1, rung=Rung.ASLEEP).kind == "growth"
    assert controller.costs.of("m", "pin", 1.1, rung=Rung.HOST).fetch_bytes == 0
    controller.handle(instance_event(an_instance("i-2", ready_at=1.0, mib=150)), 1.2)
    assert "i-2 is ready" in controller.costs.of("m", "wake", 1.3).reason


def test_what_leaving_takes_is_learned_from_those_that_left():
    controller = a_placer(a_node(abilities=("emulated:swap",)), models=(M,))
    row = an_instance("i-1", ready_at=1.0, mib=150)
    controller.handle(instance_event(row), 1.0)
    cost = controller.costs.of("m", "sleep", 1.1)
    assert (cost.scope, cost.freed_gpu_bytes, cost.leaving[0].becomes) == ("prior", 150 * 1024**2, "swapped_out")
    controller.handle(instance_event(replace(row, state=S.DRAINING, changed_at=2.0, revision=2)), 2.0)
    controller.handle(instance_event(replace(row, state=S.SWAPPED_OUT, changed_at=2.25, revision=3)), 2.3)
    controller.handle(instance_event(an_instance("i-2", ready_at=3.0, mib=150)), 3.0)
    cost = controller.costs.of("m", "sleep", 3.1)
    assert (cost.seconds, cost.num_measured, [one.instance_id for one in cost.leaving]) == (0.25, 1, ["i-2"])
    every = controller.costs.of("m", "unload", 3.1)
    assert {one.instance_id for one in every.leaving} == {"i-1", "i-2"}


def test_an_engine_that_cannot_sleep_would_be_stopped_and_what_is_kept_comes_back():
    controller = a_placer(a_node(), models=(replace(M, pinned=True),))
    controller.handle(instance_event(an_instance("i-1", ready_at=1.0, mib=150)), 1.0)
    cost = controller.costs.of("m", "sleep", 1.1)
    assert cost.leaving[0].becomes == "stopped" and "cannot sleep on node-1" in cost.reason
    assert "it is kept ready, and comes back" in controller.costs.of("m", "unload", 1.1).reason
    with pytest.raises(NotFound):
        controller.costs.of("m", "load", 1.1, node_id="node-9")


def test_one_node_is_named_in_vain_while_a_copy_is_as_near_on_another():
    controller = a_placer(a_node("node-1"), a_node("node-2"), models=(M,))
    controller.handle(instance_event(an_instance("i-1", ready_at=1.0, mib=150)), 1.0)
    with pytest.raises(Conflict, match="i-1 is ready on node-1: unload it first"):
        controller.costs.of("m", "load", 1.1, node_id="node-2")
    assert "i-1 is ready" in controller.costs.of("m", "load", 1.1, node_id="node-1").reason


def test_instances_stay_where_weights_leave_the_host_memory_of_one_node():
    controller = a_placer(a_node(cached=(HERE,)), models=(M,))
    controller.handle(instance_event(an_instance("i-1", ready_at=1.0, mib=150)), 1.0)
    cost = controller.costs.of("m", "unload", 1.1, rung=Rung.HOST, node_id="node-1")
    assert (cost.leaving, cost.freed_gpu_bytes, cost.freed_host_bytes) == ((), 0, HERE.num_bytes)
    assert len(controller.costs.of("m", "unload", 1.1, rung=Rung.HOST).leaving) == 1
    assert controller.costs.of("m", "unload", 1.1, rung=Rung.READY).freed_host_bytes == 0


@pytest.mark.parametrize(("node_id", "num_dropped"), [("", 1), ("node-1", 1), ("node-2", 0)])
def test_a_drop_withdraws_the_fetch_that_is_under_way(node_id: str, num_dropped: int):
    nodes = [replace(a_node(name), prefetcher_url="http://p") for name in ("node-1", "node-2")]
    controller = with_prefetchers(*nodes)
    assert payloads(controller.handle(FetchToHost("m", "node-1"), 3.1), FetchWeights)
    drops = payloads(controller.handle(DropFromHost("m", node_id), 3.2), DropWeights)
    assert [(drop.target, drop.digest) for drop in drops] == [("node-1", M.weights.digest)] * num_dropped
    beat(controller, 30.0, *(replace(node, revision=300) for node in nodes))
    again = payloads(controller.handle(Tick(), 30.1), FetchWeights)
    assert len(again) == 1 - num_dropped, "asked again only where nobody has withdrawn it"


def test_a_fetch_that_a_start_needs_goes_on_where_an_operator_withdraws_his():
    controller = with_prefetchers(a_node())
    controller.handle(FetchToHost("m"), 3.1)
    assert payloads(controller.handle(asked(M), 3.15), StartInstance)
    assert payloads(controller.handle(DropFromHost("m"), 3.2), DropWeights) == []


def test_what_failed_is_remembered_of_pins_alone_and_while_their_model_is_deployed():
    kept = replace(OTHER, kept_at=KeptAt.HOST)
    controller = with_prefetchers(a_node(), models=(M, kept))
    controller.handle(FetchToHost("m"), 3.1)
    for model in (M, kept):
        digest = model.weights.digest
        fact = WeightsFetchFailed(node_id="node-1", model_key=model.key, digest=digest, code="x", message="no")
        controller.handle(an_event(fact), 3.2)
    assert [*controller.host_memory._failed] == ["other"]
    leaving = an_instance("i-1", state=S.DRAINING)
    controller.handle(instance_event(leaving), 3.3)
    assert [*controller.fleet.network._leaving_since] == ["i-1"]
    for at in (100.0, 200.0):
        controller.restore("instances", {}, at)
    controller.restore("models", {"m": M}, 201.0)
    assert not controller.host_memory._failed and not controller.fleet.network._leaving_since
