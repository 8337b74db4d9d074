"""Pipelines on the agents of their nodes: stages, the join, consolidation (HydraServe sections 4 and 6)."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Tick
from glowplug.domain.instance import EngineFigures, InstanceState, Phase, PhaseName, StageAddress, Worker
from glowplug.events.commands import ConsolidateInstance, JoinStages
from glowplug.events.envelope import Event
from tests.agent_steps import NODE, PARAMS, CheckedAgent, code, facts, make, of, resume, start, stop, workers
from tests.fleet_builder import MIB, a_model, an_event

MODEL = a_model(weights_bytes=120 * MIB, kv_bytes=80 * MIB, max_concurrency=8)  # 200 whole, 100 for each of 2 stages
FAR = Worker(worker_id="i-1.1-0", node_id="node-2", gpu_id="node-2/0", num_bytes=100 * MIB, rank=0)
STAGES = ("stages", "prewarm", "swap")


LATER = (StageAddress(instance_id="i-1.1", url="http://node-2:9", key_id="k"),)


def join(instance_id: str = "i-1") -> Event:
    command = JoinStages(target=NODE, instance_id=instance_id, stages=LATER)
    return an_event(command, issuer="placer-1", epoch=1)


def consolidate(instance_id: str = "i-1") -> Event:
    command = ConsolidateInstance(target=NODE, instance_id=instance_id, reason="quiet")
    return an_event(command, issuer="autoscaler-1", epoch=1)


def first_start(**fields: Any) -> Event:
    given = {"model": MODEL, "workers": (*workers("i-1", 0, mib=100), FAR), "num_stages": 2}
    return start("i-1", **(given | fields))


def first(agent: CheckedAgent, **fields: Any) -> CheckedAgent:
    """The first of two stages, its part loaded at 12.0."""
    agent.handle(first_start(**fields), 10.0)
    agent.halves("i-1", 11.0)
    phases = (Phase(name=PhaseName.LOAD, started_at=11.0, ended_at=12.0),)
    agent.handle(msg.EngineReady("i-1", "http://e", phases), 12.0)
    return agent


def later(agent: CheckedAgent, instance_id: str = "i-9.1") -> CheckedAgent:
    """A stage of another pipeline, READY."""
    given = {"model": MODEL, "workers": workers(instance_id, 0, mib=100), "num_stages": 2, "stage": 1}
    agent.handle(start(instance_id, part_of="i-9", **given), 10.0)
    agent.halves(instance_id, 11.0)
    agent.handle(msg.EngineReady(instance_id, "http://s"), 12.0)
    return agent


def serving(agent: CheckedAgent) -> CheckedAgent:
    first(agent).handle(join(), 12.5)
    warmup = (Phase(name=PhaseName.WARMUP, started_at=12.5, ended_at=13.0),)
    agent.handle(msg.EngineReady("i-1", "http://e", warmup, figures=EngineFigures(kv_tokens=900)), 13.0)
    return agent


def consolidating() -> CheckedAgent:
    """i-1 consolidates from 20.0 on."""
    agent = serving(make(abilities=STAGES))
    agent.handle(consolidate(), 20.0)
    return agent


def given_up() -> tuple[CheckedAgent, float]:
    """A consolidation that just timed out, and the time."""
    agent, now_s = consolidating(), 20.0 + PARAMS.consolidate_deadline_s
    agent.handle(Tick(), now_s)
    return agent, now_s


def test_one_that_becomes_whole_in_another_process_answers_there() -> None:
    agent = consolidating()
    agent.handle(msg.EngineConsolidated("i-1", 1200, "http://whole", "key-2"), 25.0)
    row = agent.instance("i-1")
    assert (row.url, row.key_id, row.is_whole) == ("http://whole", "key-2", True)


def finishing() -> tuple[CheckedAgent, msg.FinishStages]:
    """i-1, whole in another process since 25.0, and the request to its agent."""
    agent = consolidating()
    (asked,) = of(msg.FinishStages, agent.handle(msg.EngineConsolidated("i-1", 1200, "http://whole", "key-2"), 25.0))
    return agent, asked


@pytest.mark.parametrize("cut", [False, True])
def test_the_stages_of_one_that_is_whole_elsewhere_end_what_they_began(cut: bool) -> None:
    agent, asked = finishing()
    assert asked.deadline_at == 25.0 + PARAMS.consolidate_deadline_s
    row = agent.instance("i-1")
    assert row.stages_busy and row.state is InstanceState.READY and row.url == "http://whole"
    effects = agent.handle(msg.StagesFinished("i-1", cut), 40.0)
    row = agent.instance("i-1")
    assert facts(effects) == ["instance.ready"] and not row.stages_busy
    assert ("were ended with what still ran there after 600 s" in row.reason) is cut
    assert facts(agent.handle(msg.StagesFinished("i-1"), 40.5)) == [], "it comes twice"


def test_stages_that_are_busy_are_finished_after_a_restart_and_within_the_same_time() -> None:
    agent, asked = finishing()
    again, effects = agent.restarted(("i-1",))
    assert of(msg.FinishStages, effects) == [asked] and again.instance("i-1").stages_busy


def test_a_later_stage_that_is_whole_elsewhere_ends_with_its_pipeline() -> None:
    agent = later(make(abilities=STAGES))
    agent.handle(consolidate("i-9.1"), 20.0)
    (asked,) = of(msg.FinishStages, agent.handle(msg.EngineConsolidated("i-9.1", 0, "http://whole"), 25.0))
    assert asked.deadline_at == 0.0 and agent.instance("i-9.1").stages_busy


def test_a_drain_of_one_whose_stages_are_busy_is_as_any_other() -> None:
    agent, _ = finishing()
    agent.handle(stop("i-1", grace_s=30), 30.0)
    assert agent.instance("i-1").state is InstanceState.DRAINING and agent.instance("i-1").stages_busy
    agent.handle(msg.StagesFinished("i-1"), 31.0)
    assert agent.instance("i-1").state is InstanceState.DRAINING and not agent.instance("i-1").stages_busy
    agent.handle(Tick(), 60.0)
    assert facts(agent.handle(msg.StagesFinished("i-1"), 60.5)) == []


def test_section_4_a_stage_holds_its_part_of_the_layers() -> None:
    agent = make(abilities=STAGES)
    effects = agent.handle(first_start(rendezvous="10.0.0.1:29500"), 10.0)
    (launch,) = of(msg.LaunchEngine, effects)
    assert launch.command.rendezvous == "10.0.0.1:29500"
    assert (launch.command.stage, launch.command.num_stages) == (0, 2) and launch.devices.ordinals == (0,)
    assert agent.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): 40}
    (wait,) = of(msg.AwaitWeights, effects)
    assert (wait.command.stage, wait.command.num_stages) == (0, 2)


def test_a_pipeline_whose_first_stage_is_elsewhere_is_refused() -> None:
    agent = make(abilities=STAGES)
    effects = agent.handle(first_start(workers=(FAR, *workers("i-1", 0, mib=100))), 10.0)
    assert not of(msg.LaunchEngine, effects) and not agent.used()
    assert (agent.instance().state, code(effects)) == (InstanceState.FAILED, "bad_request")


def test_two_stages_of_one_pipeline_may_share_a_node() -> None:
    agent = make(abilities=STAGES, gpus=2)
    both = (*workers("i-1", 0, mib=100), *workers("i-1.1", 1, mib=100))
    agent.handle(start("i-1", model=MODEL, workers=both, num_stages=2), 10.0)
    assert [agent.used(n) for n in (0, 1)] == [100, 0]
    later_one = {"model": MODEL, "workers": both[1:], "num_stages": 2, "stage": 1, "part_of": "i-1"}
    (launch,) = of(msg.LaunchEngine, agent.handle(start("i-1.1", **later_one), 10.0))
    assert [agent.used(n) for n in (0, 1)] == [100, 100]
    assert (launch.command.stage, launch.devices.ordinals) == (1, (1,))


def drained_by_its_node() -> CheckedAgent:
    """A later stage on a node that drains from 20.0 for at most 30 s."""
    agent = later(make(abilities=STAGES))
    agent.handle(msg.NodeStopping("the agent was asked to stop", 30.0), 20.0)
    return agent


def test_a_later_stage_runs_its_layers_until_its_pipeline_has_ended() -> None:
    agent = drained_by_its_node()
    assert agent.instance("i-9.1").drain_ends_at == 50.0
    effects = [*agent.handle(Tick(), 21.0), *agent.handle(msg.InFlight("i-9.1", 0), 21.0)]
    assert not of(msg.CountInFlight, effects) and not of(msg.StopEngine, effects)
    effects = agent.handle(stop("i-9.1", grace_s=0.0), 22.0)
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-9.1", PARAMS.stop_grace_s)]


def test_a_later_stage_whose_pipeline_does_not_end_drains_for_its_grace() -> None:
    agent = drained_by_its_node()
    assert not of(msg.StopEngine, agent.handle(Tick(), 49.9))
    assert of(msg.StopEngine, agent.handle(Tick(), 50.0))


def test_a_later_stage_reads_in_the_store_that_its_pipeline_has_ended() -> None:
    agent = drained_by_its_node()
    mine = agent.instance("i-9.1")
    running = replace(mine, instance_id="i-9", part_of="", workers=(FAR, *mine.workers), state=InstanceState.DRAINING)
    assert not of(msg.StopEngine, agent.restore("instances", {"i-9": running, "i-9.1": mine}, 22.0))
    assert not of(msg.StopEngine, agent.restore("instances", {"i-9.1": mine}, 22.5)), "an emptied store says nothing"
    gone = replace(running, state=InstanceState.STOPPED)
    assert of(msg.StopEngine, agent.restore("instances", {"i-9": gone, "i-9.1": mine}, 23.0))


def test_stages_may_be_tensor_groups() -> None:
    agent = make(abilities=STAGES, gpus=4)
    model = a_model(weights_bytes=240 * MIB, kv_bytes=160 * MIB, num_gpus=2)
    agent.handle(start("i-1", model=model, workers=workers("i-1", 0, 1, 2, 3), num_stages=2), 10.0)
    assert [agent.used(n) for n in range(4)] == [100, 100, 0, 0] and agent.owned(1)[("i-1", "weights")] == 60


def test_a_later_stage_is_ready_without_serving() -> None:
    row = later(make(abilities=STAGES)).instance("i-9.1")
    assert row.state is InstanceState.READY and not row.serves and row.part_of == "i-9" and not row.is_whole
    assert row.max_concurrency == 8


def test_section_4_the_first_stage_serves_once_it_is_joined() -> None:
    agent = first(make(abilities=STAGES))
    assert agent.instance().state is InstanceState.LOADING and "others are not" in agent.instance().reason
    effects = agent.handle(join(), 12.5)
    assert of(msg.ServeStages, effects) == [msg.ServeStages("i-1", LATER)] and not facts(effects)
    assert not of(msg.ServeStages, agent.handle(join(), 12.6))  # repeated until READY
    warmup = (Phase(name=PhaseName.WARMUP, started_at=12.5, ended_at=13.0),)
    effects = agent.handle(msg.EngineReady("i-1", "", warmup, figures=EngineFigures(kv_tokens=900)), 13.0)
    row = agent.instance()
    assert facts(effects) == ["instance.ready"] and row.url == "http://e" and row.serves and row.kv_tokens == 900
    assert row.num_stages == 2 and row.max_concurrency == 16 and len(row.workers) == 2
    assert [p.name.value for p in row.phases] == ["fetch", "load", "warmup"] and len(of(msg.ReportStart, effects)) == 1
    assert not of(msg.ServeStages, agent.handle(join(), 13.1))


def test_a_join_before_its_own_stage_is_loaded_is_remembered() -> None:
    agent = make(abilities=STAGES)
    agent.handle(join(), 9.0)  # before its start: it will be repeated
    agent.handle(first_start(), 10.0)
    agent.halves("i-1", 11.0)
    assert not of(msg.ServeStages, agent.handle(join(), 11.5))
    assert of(msg.ServeStages, agent.handle(msg.EngineReady("i-1", "u"), 12.0)) == [msg.ServeStages("i-1", LATER)]


def test_a_pipeline_that_is_never_joined_ends_at_its_deadline() -> None:
    agent = first(make(abilities=STAGES))
    assert code(agent.handle(Tick(), 70.0)) == "start_timeout"
    assert not of(msg.ServeStages, agent.handle(join(), 70.1))


def test_a_join_of_what_is_no_pipeline_changes_nothing() -> None:
    agent = later(make(abilities=STAGES))
    assert not of(msg.ServeStages, agent.handle(join("i-9.1"), 13.0)) and not facts(agent.handle(join("i-404"), 13.1))


@pytest.mark.parametrize("given_bytes", [100, 200])
def test_section_6_scale_down_makes_the_first_stage_whole(given_bytes: int) -> None:
    """Both of Algorithm 1's worker sizes: part of the memory, or all from the start."""
    agent = make(abilities=STAGES)
    first(agent, workers=(*workers("i-1", 0, mib=given_bytes), FAR)).handle(join(), 12.5)
    agent.handle(msg.EngineReady("i-1", "http://e"), 13.0)
    effects = agent.handle(consolidate(), 20.0)
    assert of(msg.ConsolidateEngine, effects) == [msg.ConsolidateEngine("i-1", MODEL)]
    assert facts(effects) == ["instance.ready"]
    assert agent.owned() == {("i-1", "weights"): 120, ("i-1", "kv"): 80}
    assert agent.instance().num_stages == 2  # routers still see a pipeline
    assert not of(msg.ConsolidateEngine, agent.handle(consolidate(), 20.1))
    effects = agent.handle(msg.EngineConsolidated("i-1", 1200), 25.0)
    row = agent.instance()
    assert facts(effects) == ["instance.ready"] and row.is_whole and row.serves and row.max_concurrency == 8
    assert [(w.node_id, w.num_bytes) for w in row.workers] == [(NODE, 200 * MIB)] and row.kv_tokens == 1200
    assert not of(msg.ConsolidateEngine, agent.handle(consolidate(), 26.0))


def test_section_6_scale_up_makes_each_stage_an_instance_of_its_own() -> None:
    agent = later(make(abilities=STAGES))
    assert of(msg.ConsolidateEngine, agent.handle(consolidate("i-9.1"), 20.0))
    assert agent.instance("i-9.1").consolidating
    agent.handle(msg.EngineConsolidated("i-9.1"), 25.0)
    row = agent.instance("i-9.1")
    assert not row.consolidating
    assert row.part_of == "" and row.is_whole and row.serves and row.url == "http://s" and agent.used() == 200


def test_without_memory_a_stage_stays_and_says_why() -> None:
    agent = serving(make(abilities=STAGES))
    agent.handle(start("i-2", mib=150), 15.0)
    before = agent.ledger.gpus
    effects = agent.handle(consolidate(), 20.0)
    assert not of(msg.ConsolidateEngine, effects) and agent.ledger.gpus == before
    assert "stays stage 0 of 2" in agent.instance().reason and agent.instance().state is InstanceState.READY
    assert not facts(agent.handle(consolidate(), 21.0))
    agent.stopped("i-2", 22.0)
    assert of(msg.ConsolidateEngine, agent.handle(consolidate(), 24.0)) and agent.used() == 200


def test_a_pipeline_is_not_consolidated_before_it_is_ready() -> None:
    agent = first(make(abilities=STAGES))
    assert not of(msg.ConsolidateEngine, agent.handle(consolidate(), 12.5)) and agent.used() == 100


def test_an_engine_that_dies_while_it_consolidates_is_failed_once() -> None:
    agent = consolidating()
    assert code(agent.handle(msg.EngineExited("i-1", "killed"), 21.0)) == "engine_failed"
    assert not agent.instance().consolidating, "else the rest of its weights would be asked for"
    assert not facts(agent.handle(msg.EngineConsolidated("i-1"), 21.5))
    agent.handle(msg.EngineGone("i-1"), 22.0)
    assert agent.used() == 0 and agent.instance().state is InstanceState.FAILED


def test_an_engine_that_fails_to_become_whole_serves_on_as_a_stage_and_is_asked_again_later() -> None:
    agent = consolidating()
    effects = agent.handle(msg.ConsolidationFailed("i-1", "the rest is corrupt"), 25.0)
    row = agent.instance()
    assert facts(effects) == ["instance.ready"] and (row.num_stages, row.consolidating) == (2, False)
    assert "failed to consolidate, again in 10 s" in row.reason and "the rest is corrupt" in row.reason
    assert agent.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): 40}, "the rest of the GPU is free again"
    assert not of(msg.ConsolidateEngine, agent.handle(consolidate(), 34.9))
    assert of(msg.ConsolidateEngine, agent.handle(consolidate(), 35.0)) and agent.used() == 200
    agent.handle(msg.ConsolidationFailed("i-1", "again"), 40.0)
    assert not of(msg.ConsolidateEngine, agent.handle(consolidate(), 59.9)), "twice as long"
    assert of(msg.ConsolidateEngine, agent.handle(consolidate(), 60.0))
    agent.handle(msg.EngineConsolidated("i-1"), 65.0)
    assert agent.instance().is_whole and not facts(agent.handle(msg.ConsolidationFailed("i-1", "late"), 66.0))


def test_a_stage_whose_weights_prove_to_be_wrong_serves_no_more() -> None:
    agent = consolidating()
    effects = agent.handle(msg.ConsolidationFailed("i-1", "sha256 is a, expected b", "weights_corrupt"), 21.0)
    assert code(effects) == "weights_corrupt" and of(msg.StopEngine, effects)
    assert of(msg.ReportConsolidation, effects)[0].spell.error == "sha256 is a, expected b"
    agent.handle(msg.EngineGone("i-1"), 22.0)
    assert agent.used() == 0


def test_the_pause_after_a_failed_consolidation_is_bounded_and_outlives_a_restart() -> None:
    agent = serving(make(abilities=STAGES))
    now_s = 20.0
    for _ in range(50):
        now_s += PARAMS.consolidate_retry_max_s
        assert of(msg.ConsolidateEngine, agent.handle(consolidate(), now_s))
        agent.handle(msg.ConsolidationFailed("i-1", "again"), now_s)
    again, _ = agent.restarted({"i-1"}, now_s + 1, abilities=STAGES)
    assert not of(msg.ConsolidateEngine, again.handle(consolidate(), now_s + PARAMS.consolidate_retry_max_s - 1))
    assert of(msg.ConsolidateEngine, again.handle(consolidate(), now_s + PARAMS.consolidate_retry_max_s))


def test_a_consolidation_that_says_nothing_is_given_up_after_its_time_and_the_pipeline_serves_on() -> None:
    agent = consolidating()
    due_s = 20.0 + PARAMS.consolidate_deadline_s
    assert not of(msg.AbandonConsolidation, agent.handle(Tick(), due_s - 0.1)) and agent.instance().consolidating
    effects = agent.handle(Tick(), due_s)
    row = agent.instance()
    assert of(msg.AbandonConsolidation, effects) == [msg.AbandonConsolidation("i-1")]
    assert facts(effects) == ["instance.ready"]
    assert (row.state, row.num_stages, row.consolidating) == (InstanceState.READY, 2, False)
    assert "failed to consolidate, again in 10 s" in row.reason and "not whole after 600 s" in row.reason
    assert agent.used() == 200, "what its engine may hold stays its own"
    assert not facts(agent.handle(msg.ConsolidationFailed("i-1", "given up"), due_s + 0.1)), "that has been said"
    assert agent.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): 40} and agent.instance().reason == row.reason
    assert not of(msg.ConsolidateEngine, agent.handle(consolidate(), due_s + 9.9))
    assert of(msg.ConsolidateEngine, agent.handle(consolidate(), due_s + 10.0)) and agent.used() == 200
    agent.handle(msg.EngineConsolidated("i-1"), due_s + 20.0)
    assert agent.instance().is_whole and not of(msg.AbandonConsolidation, agent.handle(Tick(), 2 * due_s))


def test_an_engine_that_does_not_answer_is_asked_to_give_up_again_and_never_to_begin_anew() -> None:
    agent, now_s = given_up()
    for pause_s in (10.0, 20.0, 40.0):
        assert not of(msg.AbandonConsolidation, agent.handle(consolidate(), now_s + pause_s - 0.1))
        now_s += pause_s
        effects = agent.handle(consolidate(), now_s)
        assert of(msg.AbandonConsolidation, effects) and not of(msg.ConsolidateEngine, effects) and agent.used() == 200
    assert "does not say how its last consolidation ended" in agent.instance().reason
    assert agent.instance().state is InstanceState.READY


def test_one_that_became_whole_while_it_was_given_up_is_whole() -> None:
    agent, now_s = given_up()
    agent.handle(msg.EngineConsolidated("i-1", 1200), now_s + 0.1)
    assert agent.instance().is_whole and agent.owned() == {("i-1", "weights"): 120, ("i-1", "kv"): 80}
    assert not facts(agent.handle(msg.ConsolidationFailed("i-1", "late"), now_s + 0.2)) and agent.instance().is_whole


def test_what_is_given_up_outlives_a_restart_and_a_drain_taken_back() -> None:
    agent, now_s = given_up()
    agent.handle(stop(), now_s + 1)
    assert facts(agent.handle(resume(), now_s + 2)) == ["instance.ready"] and agent.used() == 200
    again, effects = agent.restarted({"i-1"}, now_s + 3, abilities=STAGES)
    assert of(msg.AbandonConsolidation, effects) and again.used() == 200
    again.handle(msg.ConsolidationFailed("i-1", "given up"), now_s + 4)
    assert again.used() == 100 and again.instance().state is InstanceState.READY


def test_a_jump_of_the_clock_is_no_time_to_become_whole_in() -> None:
    agent = serving(make(abilities=STAGES, params=replace(PARAMS, max_tick_gap_s=5.0)))
    agent.handle(Tick(), 19.0)
    agent.handle(consolidate(), 20.0)
    assert not of(msg.AbandonConsolidation, agent.handle(Tick(), 9_000.0)) and agent.instance().consolidating


@pytest.mark.parametrize(
    ("outcome", "mib"), [(msg.ConsolidationFailed("i-1", "broken"), 100), (msg.EngineConsolidated("i-1"), 200)]
)
def test_a_drain_goes_on_whatever_the_consolidation_under_it_comes_to(outcome: msg.Outcome, mib: int) -> None:
    agent = consolidating()
    agent.handle(stop(), 21.0)
    assert facts(agent.handle(outcome, 22.0)) == ["instance.draining"]
    assert agent.used() == mib and agent.instance().is_whole is (mib == 200)
    assert of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 23.0))


def test_a_stage_never_sleeps() -> None:
    agent = serving(make(abilities=STAGES))
    agent.handle(stop(becomes="prewarmed"), 20.0)
    assert of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 21.0))


def test_stages_are_taken_back_after_a_restart() -> None:
    agent = later(serving(make(abilities=STAGES)))
    again, effects = agent.restarted({"i-1", "i-9.1"}, abilities=STAGES)
    assert facts(effects) == ["instance.ready"] * 2 and again.owned() == agent.owned()


def test_a_first_stage_on_its_way_starts_again_with_its_join() -> None:
    agent = first(make(abilities=STAGES))
    agent.handle(join(), 12.5)
    again, _ = agent.restarted({"i-1"}, abilities=STAGES)
    (launch,) = of(msg.LaunchEngine, again.handle(msg.EngineGone("i-1"), 50.5))
    assert (launch.command.stage, launch.command.num_stages) == (0, 2)
    again.halves("i-1", 51.0)
    assert of(msg.ServeStages, again.handle(msg.EngineReady("i-1", "u"), 52.0))


def test_a_consolidation_under_way_is_asked_for_again_after_a_restart() -> None:
    agent = consolidating()
    again, effects = agent.restarted({"i-1"}, abilities=STAGES)
    assert of(msg.ConsolidateEngine, effects) and again.used() == 200
    again.handle(msg.EngineConsolidated("i-1"), 55.0)
    assert again.instance().is_whole


def test_a_drain_that_is_taken_back_while_it_consolidates_keeps_its_memory() -> None:
    agent = consolidating()
    agent.handle(stop(), 21.0)
    assert facts(agent.handle(resume(), 22.0)) == ["instance.ready"] and agent.used() == 200
    agent.handle(msg.EngineConsolidated("i-1"), 23.0)
    assert agent.instance().is_whole and agent.owned() == {("i-1", "weights"): 120, ("i-1", "kv"): 80}


def test_a_consolidation_is_reported_once_however_it_ends() -> None:
    agent = consolidating()
    phases = (Phase(name=PhaseName.FETCH, started_at=20.0, ended_at=25.0),)
    (report,) = of(msg.ReportConsolidation, agent.handle(msg.EngineConsolidated("i-1", 900, phases=phases), 26.0))
    spell = report.spell
    assert (spell.started_at, spell.ended_at, spell.phases, spell.error) == (20.0, 26.0, phases, "")
    assert agent.instance().is_whole and agent.instance().spells == (spell,)
    agent = consolidating()
    (report,) = of(msg.ReportConsolidation, agent.handle(msg.ConsolidationFailed("i-1", "no memory"), 21.0))
    assert report.spell.error == "no memory" and agent.instance().spells == (report.spell,)
    agent, now_s = consolidating(), 20.0 + PARAMS.consolidate_deadline_s
    (report,) = of(msg.ReportConsolidation, agent.handle(Tick(), now_s))
    assert "not whole after" in report.spell.error
    assert not of(msg.ReportConsolidation, agent.handle(msg.ConsolidationFailed("i-1", "given up"), now_s + 1.0))
