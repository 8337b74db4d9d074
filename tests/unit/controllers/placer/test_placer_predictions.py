"""The placer's predictions, and learning from outcomes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.effects import Record, Remove, Save
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.hardware import CachedWeights, Link, Node
from glowplug.domain.instance import Phase, PhaseName
from glowplug.domain.model import Slo
from glowplug.events.commands import FetchWeights, StartInstance
from glowplug.events.facts import InstanceReady
from glowplug.policies.placement import hydraserve, union
from glowplug.policies.placement.first_fit import place as first_fit
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from tests.fleet_builder import MIB, a_model, a_node, an_event, an_instance
from tests.unit.controllers.placer.rig import a_placer, asked, beat, finished, payloads, told

MODEL = a_model("m", mib=300)
NODES = [a_node(f"node-{n}", revision=1) for n in (1, 2)]


def placer(placement: str = "first_fit") -> PlacerController:
    return a_placer(*NODES, place=placement, models=[MODEL], settle_s=0.0, node_lease_s=900.0)


def ask(controller: PlacerController, instance_id: str, now_s: float) -> tuple[StartInstance, dict[str, Any]]:
    effects = controller.handle(asked(MODEL, instance_id, wanted_at=now_s), now_s)
    (start,) = payloads(effects, StartInstance)
    (record,) = [e.decision for e in effects if isinstance(e, Record)]
    return start, dict(record.inputs)


def came(controller: PlacerController, start: StartInstance, now_s: float) -> list[Any]:
    """READY after 1 s of launch, 2 s of load and 3 s of warm-up."""
    at, phases = now_s - 6.0, []
    for name, seconds in (("launch", 1.0), ("load", 2.0), ("warmup", 3.0)):
        phases.append(Phase(name=PhaseName(name), started_at=at, ended_at=at + seconds))
        at += seconds
    row = an_instance(
        start.instance_id, "m", gpu_id=start.workers[0].gpu_id, mib=300, gpu_kind="host", start_kind="cached",
        phases=tuple(phases), created_at=now_s - 6.0, ready_at=now_s,
    )  # fmt: skip
    return controller.handle(an_event(InstanceReady(instance=row)), now_s)


@pytest.mark.parametrize("placement", ["first_fit", "union"])
def test_command_and_decision_carry_the_figures_from_the_first_start_on(placement: str) -> None:
    start, inputs = ask(placer(placement), "i-1", 1.0)
    load_s, fetch_s = 300 * MIB / 10e9, 300 * MIB / 2e9
    assert start.predicted == pytest.approx({"fetch": fetch_s, "launch": 2.0, "load": load_s, "warmup": 0.5})
    assert start.predicted_s == pytest.approx(2.5 + load_s, abs=0.1)
    assert inputs["predicted_start_s"] == pytest.approx(start.predicted_s, abs=1e-4)
    assert inputs["predicted_ttft_s"] > inputs["predicted_start_s"] and inputs["start_kind"] == "cold"


@pytest.mark.parametrize("placement", ["first_fit", "union"])
def test_the_second_start_is_predicted_as_the_first_went_on_another_node(placement: str) -> None:
    controller = placer(placement)
    first, _ = ask(controller, "i-1", 1.0)
    came(controller, first, 8.0)
    second, _ = ask(controller, "i-2", 20.0)
    assert second.target != first.target
    learned = {name: s for name, s in second.predicted.items() if name != "fetch"}
    assert learned == pytest.approx({"launch": 1.0, "load": 2.0, "warmup": 3.0})


def test_what_was_learned_is_kept_in_the_store_and_known_after_a_restart() -> None:
    controller = placer()
    first, _ = ask(controller, "i-1", 1.0)
    (saved,) = [e for e in came(controller, first, 8.0) if isinstance(e, Save) and e.table == "start_times"]
    assert saved.key == "m/emulated/host/cached"
    again = placer()
    assert again.restore("start_times", {saved.key: saved.value}, 9.0) == []
    assert ask(again, "i-2", 20.0)[0].predicted["warmup"] == pytest.approx(3.0)
    assert again.restore("start_times", {}, 21.0) == [saved], "an emptied store gets it again"


def test_a_standby_that_takes_over_knows_it_too() -> None:
    leader, standby = placer(), placer()
    came(leader, ask(leader, "i-1", 1.0)[0], 8.0)
    standby.inherit(leader, 9.0)
    assert ask(standby, "i-2", 20.0)[0].predicted["warmup"] == pytest.approx(3.0)


def test_of_a_model_that_is_gone_nothing_is_kept() -> None:
    controller = placer()
    came(controller, ask(controller, "i-1", 1.0)[0], 8.0)
    others = {"n": replace(MODEL, name="n", key="n")}
    assert controller.restore("models", others, 9.0) == [Remove("start_times", "m/emulated/host/cached")]


def halves(num_free: int, revision: int) -> list[Node]:
    """Two one-GPU nodes for stages, each with `num_free` of 300 MiB."""
    held = {0: [("other", 300 - num_free)]}
    return [
        a_node(node_id, revision=revision, grants=held, abilities=("emulated:stages",))
        for node_id in ("node-1", "node-2")
    ]


@pytest.mark.parametrize(
    ("slow_s", "fast_s", "asked_at"),
    [(30.0, 0.1, (2.0, 2.1)), (4.5, 4.5, (2.0, 2.9))],
    ids=["a slower start (section 4.1)", "a longer wait: 4.5 s of 5, after 0.95 s and after 0.05 s"],
)
def test_a_model_that_would_be_late_is_no_answer_for_one_that_would_not(
    slow_s: float, fast_s: float, asked_at: tuple[float, float]
) -> None:
    controller = a_placer(*halves(0, 1), place=hydraserve.place)
    for name, launch_s, now_s in (("slow", slow_s, asked_at[0]), ("fast", fast_s, asked_at[1])):
        model = a_model(name, mib=150, slo=Slo(ttft_s=5.0))
        launch = Phase(name=PhaseName.LAUNCH, started_at=1.0, ended_at=1.0 + launch_s)
        times = {"phases": (launch,), "created_at": 1.0, "ready_at": 1.0 + launch_s, "gpu_kind": "host"}
        assert controller.fleet.network.times.learn(an_instance(f"before-{name}", name, **times), model) is not None
        assert payloads(controller.handle(asked(model, f"i-{name}", wanted_at=now_s), now_s), StartInstance) == []
    started = payloads(beat(controller, 2.95, *halves(100, 2)), StartInstance)
    assert [start.instance_id for start in started] == ["i-fast", "i-fast.1"]


@pytest.mark.parametrize(("place", "learns"), [(first_fit, False), (hydraserve.place, True), (union.place, True)])
def test_requests_teach_only_a_placement_that_reads_seconds(place: Callable[..., Any], learns: bool) -> None:
    controller = a_placer(place=place)
    controller.handle(an_event(InstanceReady(instance=an_instance("i-1"))), 2.0)
    controller.handle(told(finished()), 12.0)
    assert ("m" in controller.fleet.network.seconds) == learns == controller.reads_ends


def test_stages_are_predicted_by_what_a_node_has_seen_of_the_layers() -> None:
    model = replace(MODEL, slo=Slo(ttft_s=1.15))
    whole = model.fetch_bytes
    link = Link(link_id="/nic", bytes_per_s=whole / 1.5)
    able = {"abilities": ("emulated:stages", "emulated:stream"), "links": (link,)}
    nodes = [a_node(f"node-{n}", revision=1, gpus_mib=(400,), **able) for n in (1, 2)]
    stages = {"start_stages": StageSeconds(container_s=0.1, library_s=0.01)}
    made = {"place": "hydraserve", "models": [model], "settle_s": 0.0, "node_lease_s": 900.0, **stages}
    parts = (whole * 7 // 10, whole * 4 // 10)
    seen = CachedWeights(digest=model.weights.digest, num_bytes=whole, stage_bytes=(*parts, 1, 1, 1))
    first = a_placer(*nodes, **made)
    beat(first, 1.0, replace(nodes[0], revision=2, cached=(seen,)))
    beat(first, 2.0, replace(nodes[0], revision=3))
    controller = a_placer(*nodes, **made)
    controller.inherit(first, 2.5)
    effects = controller.handle(asked(model, "i-1", wanted_at=3.0), 3.0)
    starts = payloads(effects, StartInstance)
    assert [start.predicted["fetch"] for start in starts] == pytest.approx([1.05, 0.6], abs=1e-3)
    (record,) = [e.decision for e in effects if isinstance(e, Record)]
    assert record.inputs["parts"] == "210 MiB, 120 MiB"
    fetches = payloads(effects, FetchWeights)
    assert [(one.first_byte, one.last_byte) for one in fetches] == [(0, whole // 2), (whole // 2, 0)], "as ever"
