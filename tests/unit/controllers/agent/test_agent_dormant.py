"""Engines that hold weights but do not serve: replicas and instances grown from them (WarmServe section 4)."""

from dataclasses import replace

import msgspec
import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Tick
from glowplug.domain.hardware import GpuRole
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from tests.agent_steps import (
    ALL,
    EQ1,
    MODEL,
    code,
    facts,
    make,
    of,
    start_of,
    stop,
    workers,
)
from tests.fleet_builder import MIB, a_model


def test_section_4_a_replica_holds_weights_alone_and_makes_its_gpu_universal() -> None:
    """WarmServe Fig. 5: IDLE -> UNIVERSAL."""
    agent = make(abilities=ALL)
    effects = agent.handle(start_of("r-1", replica=True), 10.0)
    (launch,) = of(msg.LaunchEngine, effects)
    assert launch.command.replica and agent.owned() == {("r-1", "prewarm"): 60}
    assert facts(agent.halves("r-1", 11.0)) == ["instance.loading"]
    effects = agent.handle(msg.EnginePrewarmed("r-1"), 12.0)
    row = agent.instance("r-1")
    assert facts(effects) == ["instance.prewarmed"] and row.replica and not row.serves and row.url == ""
    assert agent.ledger.gpus[0].role is GpuRole.UNIVERSAL
    assert not facts(agent.handle(msg.EnginePrewarmed("r-1"), 12.1))


@pytest.mark.parametrize(("holds_layers", "mib"), [(True, 20), (False, 60)])
def test_a_replica_of_the_first_layers_is_granted_what_its_engine_holds(holds_layers: bool, mib: int) -> None:
    """WarmServe section 4."""
    agent = make(abilities=ALL, holds_layers=holds_layers)
    effects = agent.handle(start_of("r-1", replica=True, workers=workers("r-1", 0, mib=20)), 10.0)
    assert agent.owned() == {("r-1", "prewarm"): mib} and agent.instance("r-1").workers[0].num_bytes == mib * MIB
    assert of(msg.LaunchEngine, effects)[0].devices.num_bytes == mib * MIB


def test_several_replicas_share_a_gpu() -> None:
    agent = make(abilities=ALL)
    for n in range(5):
        agent.replica(f"r-{n}", model=a_model(f"m{n}", weights_bytes=60 * MIB, kv_bytes=180 * MIB))
    assert agent.used() == 300 and {i.state for i in agent.instances} == {InstanceState.PREWARMED}


def test_section_4_a_hit_gives_the_whole_gpu_to_one_and_drops_the_others_in_one_turn() -> None:
    """WarmServe section 4.2."""
    agent = make(abilities=ALL).replica("r-1").replica("r-2", model=a_model("other", weights_bytes=200 * MIB))
    command = start_of("i-1", source="r-1", drops=("r-2",))
    effects = agent.handle(command, 20.0)
    assert of(msg.ActivateEngine, effects) == [msg.ActivateEngine(command.data)]
    assert not of(msg.LaunchEngine, effects) and not of(msg.AwaitWeights, effects)
    assert of(msg.StopEngine, effects) == [msg.StopEngine("r-2", 0.0)]
    assert agent.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): 180}
    assert facts(effects) == ["instance.stopped", "instance.loading", "instance.stopped"]
    assert agent.instance("r-1").reason == "it continues as i-1" and agent.instance().source == "r-1"
    load = (Phase(name=PhaseName.LOAD, started_at=20.0, ended_at=20.5),)
    effects = agent.handle(msg.EngineReady("i-1", "http://e", load), 20.5)
    assert facts(effects) == ["instance.ready"] and len(of(msg.ReportStart, effects)) == 1
    assert [(p.name.value, p.actual_s) for p in agent.instance().phases] == [("load", 0.5)]
    assert not facts(agent.handle(msg.EngineGone("r-2"), 21.0)) and agent.used() == 240


@pytest.mark.parametrize(("becomes", "asleep_at"), [("swapped_out", 22.0), ("stopped", 0.0)])
def test_a_drain_is_reported_under_the_trace_of_what_asked_for_it(becomes: str, asleep_at: float) -> None:
    agent = make(abilities=ALL).serving()
    agent.handle(replace(stop(becomes=becomes), traceparent="tp"), 20.0)
    effects = agent.handle(msg.InFlight("i-1", 0), 21.0)
    assert not (asleep_at and of(msg.ReportDrain, effects)), "it is reported once its engine is asleep"
    effects += agent.handle(msg.EngineAsleep("i-1"), 22.0)
    (seen,) = of(msg.ReportDrain, effects)
    spells = [("drain", 20.0, 21.0, "tp"), *([("sleep", 21.0, asleep_at, "tp")] if asleep_at else [])]
    assert [(s.name, s.started_at, s.ended_at, s.traceparent) for s in seen.spells] == spells
    agent.handle(msg.EngineGone("i-1"), 23.0)
    assert agent.instance().spells == seen.spells, "its row tells them, too"


def test_a_start_that_grew_says_so_and_carries_what_was_expected_of_it() -> None:
    agent = make(abilities=ALL).replica("r-1")
    command = start_of("i-1", source="r-1")
    agent.handle(replace(command, data=replace(command.data, predicted={"load": 0.5})), 20.0)
    load = (Phase(name=PhaseName.LOAD, started_at=20.0, ended_at=20.7),)
    agent.handle(msg.EngineReady("i-1", "u", load), 20.7)
    (phase,) = agent.instance().phases
    assert phase.predicted_s == 0.5 and agent.instance().start_kind == "growth"


def test_all_or_nothing_when_it_does_not_fit() -> None:
    agent = make(abilities=ALL).replica("r-1").replica("r-2", model=a_model("other", weights_bytes=200 * MIB))
    before = agent.ledger.gpus
    effects = agent.handle(start_of("i-1", source="r-1"), 20.0)
    assert code(effects) == "out_of_memory" and facts(effects) == ["instance.failed"]
    assert agent.ledger.gpus == before and agent.state("r-1") == agent.state("r-2") == "prewarmed"


def test_section_4_1_a_source_that_is_still_loading_streams_on() -> None:
    """WarmServe section 4.1."""
    agent = make(abilities=ALL).loading("r-1", replica=True)
    effects = agent.handle(start_of("i-1", source="r-1"), 12.0)
    assert of(msg.ActivateEngine, effects) and agent.state("i-1") == "loading"
    assert not facts(agent.handle(msg.EnginePrewarmed("r-1"), 12.1)) and agent.state("r-1") == "stopped"
    assert facts(agent.handle(msg.EngineReady("i-1", "u"), 13.0)) == ["instance.ready"]


@pytest.mark.parametrize("launched_first", [True, False])
def test_a_source_that_has_not_begun_to_load_hands_over_its_start(launched_first: bool) -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    first, second = [msg.EngineLaunched("r-1"), msg.WeightsComplete("r-1", "/w")][:: 1 if launched_first else -1]
    agent.handle(first, 10.5)
    effects = agent.handle(start_of("i-1", source="r-1"), 11.0)
    assert not of(msg.ActivateEngine, effects) and not of(msg.LaunchEngine, effects)
    assert agent.state("i-1") == "starting"
    assert agent.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): 180}
    effects = agent.handle(second, 12.0)
    load, activate = [e for e in effects if isinstance(e, msg.LoadEngine | msg.ActivateEngine)]
    assert load == msg.LoadEngine("r-1", "/w") and isinstance(activate, msg.ActivateEngine)
    assert facts(effects) == ["instance.loading"]
    assert facts(agent.handle(msg.EngineReady("i-1", "u"), 13.0)) == ["instance.ready"]


def test_a_start_taken_over_is_stopped_by_the_id_its_engine_has() -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    agent.handle(start_of("i-1", source="r-1"), 11.0)
    assert of(msg.StopEngine, agent.handle(stop(grace_s=0), 12.0)) == [msg.StopEngine("r-1", 0.0)]
    assert facts(agent.handle(msg.EngineGone("r-1"), 13.0)) == ["instance.stopped"] and agent.used() == 0


@pytest.mark.parametrize("why", ["unknown", "dropped", "other weights", "another gpu"])
def test_a_start_whose_source_is_gone_begins_from_scratch(why: str) -> None:
    agent = make(abilities=ALL, gpus=2)
    if why != "unknown":
        other = replace(MODEL, weights=replace(MODEL.weights, uri="file:/other"))
        agent.replica("r-1", model=other if why == "other weights" else MODEL)
    if why == "dropped":
        agent.handle(stop("r-1", grace_s=0), 12.0)
    gpu = int(why == "another gpu")
    effects = agent.handle(start_of("i-1", source="r-1", workers=workers("i-1", gpu)), 20.0)
    assert of(msg.LaunchEngine, effects) and of(msg.AwaitWeights, effects) and facts(effects) == ["instance.starting"]
    assert agent.instance().source == "" and not of(msg.ActivateEngine, effects)
    if why == "unknown":  # its start comes late: already given away
        assert facts(agent.handle(start_of("r-1", replica=True), 21.0)) == ["instance.stopped"]
    elif why != "dropped":
        assert agent.state("r-1") == "prewarmed"


def test_two_starts_want_one_source_and_only_one_gets_it() -> None:
    agent = make(abilities=ALL).replica("r-1")
    agent.handle(start_of("i-1", source="r-1"), 20.0)
    assert code(agent.handle(start_of("i-2", source="r-1"), 20.1)) == "out_of_memory"
    assert not facts(agent.handle(start_of("i-1", source="r-1"), 20.2)) and agent.used() == 240


def test_only_replicas_give_way() -> None:
    agent = make(abilities=ALL, mib=500).serving()
    effects = agent.handle(start_of("i-2", drops=("i-1", "nobody")), 20.0)
    assert facts(effects) == ["instance.starting"] and agent.state("i-1") == "ready" and agent.used() == 480


def test_a_replica_is_dropped_at_once_and_its_process_follows() -> None:
    """WarmServe section 4.2."""
    agent = make(abilities=ALL).replica("r-1")
    effects = agent.handle(stop("r-1", grace_s=0), 20.0)
    assert facts(effects) == ["instance.stopped"] and of(msg.StopEngine, effects) and agent.used() == 0
    assert agent.num_living == 1
    assert not facts(agent.handle(stop("r-1", grace_s=0), 20.1)) and not facts(
        agent.handle(msg.EngineGone("r-1"), 20.2)
    )
    assert agent.num_living == 0


@pytest.mark.parametrize("phase", ["starting", "loading"])
def test_a_replica_on_its_way_is_dropped_at_once_too(phase: str) -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    if phase == "loading":
        agent.halves("r-1", 11.0)
    assert facts(agent.handle(stop("r-1", grace_s=30), 12.0)) == ["instance.stopped"] and agent.used() == 0
    late = (msg.EnginePrewarmed("r-1"), msg.EngineGone("r-1"))
    assert not any(facts(agent.handle(stimulus, 13.0)) for stimulus in late)


def test_a_replica_whose_engine_dies_is_failed() -> None:
    agent = make(abilities=ALL).replica("r-1")
    assert code(agent.handle(msg.EngineExited("r-1", "killed"), 20.0)) == "engine_failed"
    assert of(msg.StopEngine, agent.handle(Tick(), 40.0)) and facts(agent.handle(msg.EngineGone("r-1"), 41.0)) == []
    assert agent.used() == 0


def test_engine_of_a_forgotten_source_is_not_forgotten_before_the_one_that_grew_from_it() -> None:
    agent = make(abilities=ALL).replica("r-1")
    agent.handle(start_of("i-1", source="r-1"), 20.0)
    agent.handle(msg.EngineReady("i-1", "u"), 21.0)
    agent.asleep("swapped_out", 22.0)
    agent.handle(start_of("i-2", source="i-1"), 25.0)
    agent.handle(msg.EngineReady("i-2", "u"), 26.0)
    assert not of(msg.ForgetEngine, agent.handle(Tick(), 300.0)) and list(agent.holdings) == ["i-2"]
    agent.stopped("i-2", 301.0)
    assert [e.instance_id for e in of(msg.ForgetEngine, agent.handle(Tick(), 500.0))] == ["i-2", "r-1", "i-1"]


def test_ready_of_another_engine_is_as_it_was() -> None:
    agent = make(abilities=ALL).loading("r-1", replica=True)
    assert not facts(agent.handle(msg.EngineReady("r-1", "u"), 12.0))
    assert make().ready().instance().state is InstanceState.READY


def test_a_start_from_a_source_begins_from_scratch_after_a_restart() -> None:
    """The engine's progress and its id are lost."""
    agent = make(abilities=ALL).replica("r-1")
    agent.handle(start_of("i-1", source="r-1"), 20.0)
    reborn, effects = agent.restarted({"r-1"}, abilities=ALL)
    assert {e.instance_id for e in of(msg.StopEngine, effects)} == {"i-1", "r-1"}
    reborn.handle(msg.EngineGone("r-1"), 50.5)
    effects = reborn.handle(msg.EngineGone("i-1"), 51.0)
    assert of(msg.LaunchEngine, effects) and reborn.used() == 240 and reborn.instance().source == ""
    reborn.halves("i-1", 52.0)
    assert facts(reborn.handle(msg.EngineReady("i-1", "u"), 53.0)) == ["instance.ready"]


def test_all_of_it_survives_being_written_down() -> None:
    agent = make(abilities=ALL, params=EQ1).draining()
    (written,) = of(msg.Remember, agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0))
    assert msgspec.json.decode(msgspec.json.encode(written.memory), type=msg.AgentMemory) == written.memory
