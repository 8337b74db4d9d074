"""Replicas, engines asleep, and a draining engine's KV cache (WarmServe section 4, SwapServeLLM section 3)."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from glowplug.controllers.agent import AgentController
from glowplug.controllers.agent_words import (
    ActivateEngine,
    AgentMemory,
    AwaitWeights,
    CheckHealth,
    CountInFlight,
    EngineAsleep,
    EngineExited,
    EngineGone,
    EngineLaunched,
    EnginePrewarmed,
    EngineReady,
    ForgetEngine,
    HealthSeen,
    InFlight,
    LaunchEngine,
    LimitKv,
    LoadEngine,
    NodeStopping,
    Recalled,
    Remember,
    ReportStart,
    SleepEngine,
    StopEngine,
    WeightsComplete,
)
from glowplug.controllers.effects import Tick
from glowplug.domain.hardware import GpuRole
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from tests.agent_steps import PARAMS, code, halves, instance, make, of, owned, ready, resume, start, stop, told, used
from tests.fleet_builder import MIB, a_model

MODEL = a_model(weights_bytes=60 * MIB, kv_bytes=180 * MIB)  # 240 of a GPU's 300
ALL = ("prewarm", "swap")


def start_of(instance_id: str, **fields: Any) -> Any:
    """A start on GPU 0 whose worker names no bytes."""
    (worker,) = start(instance_id).data.workers
    given = {"model": MODEL, "workers": (replace(worker, num_bytes=0),)}
    return start(instance_id, **(given | fields))


def replica(agent: AgentController, instance_id: str, now_s: float = 10.0, **fields: Any) -> AgentController:
    """A replica through its whole start."""
    agent.handle(start_of(instance_id, replica=True, **fields), now_s)
    halves(agent, instance_id, now_s)
    agent.handle(EnginePrewarmed(instance_id), now_s + 1)
    return agent


def serving(agent: AgentController, instance_id: str = "i-1", now_s: float = 10.0, model: Any = MODEL) -> Any:
    """An instance of `model`, READY a second after `now_s`."""
    agent.handle(start_of(instance_id, model=model), now_s)
    halves(agent, instance_id, now_s)
    agent.handle(EngineReady(instance_id, "http://e"), now_s + 1)
    return agent


def state(agent: AgentController, instance_id: str) -> str:
    return instance(agent, instance_id).state.value


# Replicas


def test_section_4_a_replica_holds_weights_alone_and_makes_its_gpu_universal() -> None:
    """WarmServe Fig. 5: IDLE -> UNIVERSAL."""
    agent = make(abilities=ALL)
    effects = agent.handle(start_of("r-1", replica=True), 10.0)
    (launch,) = of(LaunchEngine, effects)
    assert launch.replica and owned(agent) == {("r-1", "prewarm"): 60}
    assert told(halves(agent, "r-1", 11.0)) == ["instance.loading"]
    effects = agent.handle(EnginePrewarmed("r-1"), 12.0)
    row = instance(agent, "r-1")
    assert told(effects) == ["instance.prewarmed"] and row.replica and not row.serves and row.url == ""
    assert agent.ledger.gpus[0].role is GpuRole.UNIVERSAL
    assert not told(agent.handle(EnginePrewarmed("r-1"), 12.1))


def test_several_replicas_share_a_gpu() -> None:
    agent = make(abilities=ALL)
    for n in range(5):
        replica(agent, f"r-{n}", model=a_model(f"m{n}", weights_bytes=60 * MIB, kv_bytes=180 * MIB))
    assert used(agent) == 300 and {i.state for i in agent.instances} == {InstanceState.PREWARMED}


def test_section_4_a_hit_gives_the_whole_gpu_to_one_and_drops_the_others_in_one_turn() -> None:
    """WarmServe section 4.2: the other models' pages are unmapped, the hit's slot takes all the rest as KV cache."""
    agent = replica(replica(make(abilities=ALL), "r-1"), "r-2", model=a_model("other", weights_bytes=200 * MIB))
    effects = agent.handle(start_of("i-1", source="r-1", drops=("r-2",)), 20.0)
    assert of(ActivateEngine, effects) == [ActivateEngine("i-1", "r-1", MODEL, instance(agent).workers)]
    assert not of(LaunchEngine, effects) and not of(AwaitWeights, effects)
    assert of(StopEngine, effects) == [StopEngine("r-2", 0.0)]
    assert owned(agent) == {("i-1", "weights"): 60, ("i-1", "kv"): 180}
    assert told(effects) == ["instance.stopped", "instance.stopped", "instance.loading"]
    assert instance(agent, "r-1").reason == "continues as i-1" and instance(agent).source == "r-1"
    load = (Phase(name=PhaseName.LOAD, started_at=20.0, ended_at=20.5),)
    effects = agent.handle(EngineReady("i-1", "http://e", load), 20.5)
    assert told(effects) == ["instance.ready"] and len(of(ReportStart, effects)) == 1
    assert [(p.name.value, p.actual_s) for p in instance(agent).phases] == [("load", 0.5)]
    assert not told(agent.handle(EngineGone("r-2"), 21.0)) and used(agent) == 240


def test_warm_starts_are_predicted_from_warm_starts() -> None:
    agent = serving(make(abilities=ALL))  # a cold load first: it must not count
    agent.handle(stop(grace_s=0), 15.0)
    agent.handle(EngineGone("i-1"), 15.1)
    for n, took_s in enumerate((0.5, 0.7)):
        at = 20.0 + 10 * n
        replica(agent, f"r-{n}", at)
        agent.handle(start_of(f"j-{n}", source=f"r-{n}"), at + 5)
        load = (Phase(name=PhaseName.LOAD, started_at=at + 5, ended_at=at + 5 + took_s),)
        agent.handle(EngineReady(f"j-{n}", "u", load), at + 6)
        agent.handle(stop(f"j-{n}", grace_s=0), at + 7)
        agent.handle(EngineGone(f"j-{n}"), at + 7)
    (phase,) = instance(agent, "j-1").phases
    assert phase.predicted_s == pytest.approx(0.5)
    assert agent.history.predicted_s("m", PhaseName.LOAD) == 0.0


def test_all_or_nothing_when_it_does_not_fit() -> None:
    agent = replica(replica(make(abilities=ALL), "r-1"), "r-2", model=a_model("other", weights_bytes=200 * MIB))
    before = agent.ledger.gpus
    effects = agent.handle(start_of("i-1", source="r-1"), 20.0)
    assert code(effects) == "out_of_memory" and told(effects) == ["instance.failed"]
    assert agent.ledger.gpus == before and state(agent, "r-1") == state(agent, "r-2") == "prewarmed"


def test_section_4_1_a_source_that_is_still_loading_streams_on() -> None:
    """WarmServe section 4.1: partially prewarmed weights are immediately operational."""
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    halves(agent, "r-1", 11.0)
    effects = agent.handle(start_of("i-1", source="r-1"), 12.0)
    assert of(ActivateEngine, effects) and state(agent, "i-1") == "loading"
    assert not told(agent.handle(EnginePrewarmed("r-1"), 12.1)) and state(agent, "r-1") == "stopped"
    assert told(agent.handle(EngineReady("i-1", "u"), 13.0)) == ["instance.ready"]


@pytest.mark.parametrize("launched_first", [True, False])
def test_a_source_that_has_not_begun_to_load_hands_over_its_start(launched_first: bool) -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    first, second = [EngineLaunched("r-1"), WeightsComplete("r-1", "/w")][:: 1 if launched_first else -1]
    agent.handle(first, 10.5)
    effects = agent.handle(start_of("i-1", source="r-1"), 11.0)
    assert not of(ActivateEngine, effects) and not of(LaunchEngine, effects) and state(agent, "i-1") == "starting"
    assert owned(agent) == {("i-1", "weights"): 60, ("i-1", "kv"): 180}
    effects = agent.handle(second, 12.0)
    assert [type(e) for e in effects if isinstance(e, LoadEngine | ActivateEngine)] == [LoadEngine, ActivateEngine]
    assert of(LoadEngine, effects) == [LoadEngine("r-1", "/w")] and told(effects) == ["instance.loading"]
    assert told(agent.handle(EngineReady("i-1", "u"), 13.0)) == ["instance.ready"]


def test_a_start_taken_over_is_stopped_by_the_id_its_engine_has() -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    agent.handle(start_of("i-1", source="r-1"), 11.0)
    assert of(StopEngine, agent.handle(stop(grace_s=0), 12.0)) == [StopEngine("r-1", 0.0)]
    assert told(agent.handle(EngineGone("r-1"), 13.0)) == ["instance.stopped"] and used(agent) == 0


@pytest.mark.parametrize("why", ["unknown", "dropped", "other weights", "another gpu"])
def test_a_start_whose_source_is_gone_begins_from_scratch(why: str) -> None:
    agent = make(abilities=ALL, gpus=2)
    if why != "unknown":
        other = replace(MODEL, weights=replace(MODEL.weights, uri="file:/other"))
        replica(agent, "r-1", model=other if why == "other weights" else MODEL)
    if why == "dropped":
        agent.handle(stop("r-1", grace_s=0), 12.0)
    workers = instance_workers(1) if why == "another gpu" else start_of("i-1").data.workers
    effects = agent.handle(start_of("i-1", source="r-1", workers=workers), 20.0)
    assert of(LaunchEngine, effects) and of(AwaitWeights, effects) and told(effects) == ["instance.starting"]
    assert instance(agent).source == "" and not of(ActivateEngine, effects)
    if why == "unknown":  # its start comes late: it was given away already
        assert told(agent.handle(start_of("r-1", replica=True), 21.0)) == ["instance.stopped"]
    elif why != "dropped":
        assert state(agent, "r-1") == "prewarmed"


def instance_workers(gpu: int) -> Any:
    (worker,) = start("i-1").data.workers
    return (replace(worker, gpu_id=worker.gpu_id.replace("/0", f"/{gpu}"), num_bytes=0),)


def test_two_starts_want_one_source_and_only_one_gets_it() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    agent.handle(start_of("i-1", source="r-1"), 20.0)
    assert code(agent.handle(start_of("i-2", source="r-1"), 20.1)) == "out_of_memory"
    assert not told(agent.handle(start_of("i-1", source="r-1"), 20.2)) and used(agent) == 240


def test_only_replicas_give_way() -> None:
    agent = serving(make(abilities=ALL, mib=500))
    effects = agent.handle(start_of("i-2", drops=("i-1", "nobody")), 20.0)
    assert told(effects) == ["instance.starting"] and state(agent, "i-1") == "ready" and used(agent) == 480


def test_a_replica_is_dropped_at_once_and_its_process_follows() -> None:
    """WarmServe section 4.2: its pages are free as they are unmapped."""
    agent = replica(make(abilities=ALL), "r-1")
    effects = agent.handle(stop("r-1", grace_s=0), 20.0)
    assert told(effects) == ["instance.stopped"] and of(StopEngine, effects) and used(agent) == 0
    assert agent.num_living == 1
    assert not told(agent.handle(stop("r-1", grace_s=0), 20.1)) and not told(agent.handle(EngineGone("r-1"), 20.2))
    assert agent.num_living == 0


@pytest.mark.parametrize("phase", ["starting", "loading"])
def test_a_replica_on_its_way_is_dropped_at_once_too(phase: str) -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    if phase == "loading":
        halves(agent, "r-1", 11.0)
    assert told(agent.handle(stop("r-1", grace_s=30), 12.0)) == ["instance.stopped"] and used(agent) == 0
    assert not told(agent.handle(EnginePrewarmed("r-1"), 12.1)) and not told(agent.handle(EngineGone("r-1"), 13.0))


def test_a_replica_whose_engine_dies_is_failed() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    assert code(agent.handle(EngineExited("r-1", "killed"), 20.0)) == "engine_failed"
    assert of(StopEngine, agent.handle(Tick(), 40.0)) and told(agent.handle(EngineGone("r-1"), 41.0)) == []
    assert used(agent) == 0


def test_engine_of_a_forgotten_source_is_not_forgotten_before_its_heir() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    agent.handle(start_of("i-1", source="r-1"), 20.0)
    agent.handle(EngineReady("i-1", "u"), 21.0)
    drained(agent, "swapped_out", 22.0)
    agent.handle(EngineAsleep("i-1"), 24.0)
    agent.handle(start_of("i-2", source="i-1"), 25.0)
    agent.handle(EngineReady("i-2", "u"), 26.0)
    assert not of(ForgetEngine, agent.handle(Tick(), 300.0)) and list(agent.holdings) == ["i-2"]
    agent.handle(stop("i-2", grace_s=0), 301.0)
    agent.handle(EngineGone("i-2"), 302.0)
    assert [e.instance_id for e in of(ForgetEngine, agent.handle(Tick(), 500.0))] == ["i-2", "r-1", "i-1"]


# Sleep


def drained(agent: AgentController, becomes: str, now_s: float = 20.0) -> list[Any]:
    agent.handle(stop(becomes=becomes), now_s)
    return agent.handle(InFlight("i-1", 0), now_s + 1)


def test_section_4_1_a_drained_engine_keeps_its_weights_as_a_replica() -> None:
    """WarmServe section 4.2: the GPU holds the prewarm slots of the new models and of the one that ran before."""
    agent = serving(make(abilities=ALL))
    assert of(SleepEngine, drained(agent, "prewarmed")) == [SleepEngine("i-1", "prewarmed")]
    assert used(agent) == 240 and state(agent, "i-1") == "draining"
    effects = agent.handle(EngineAsleep("i-1"), 22.0)
    row = instance(agent)
    assert told(effects) == ["instance.prewarmed"] and owned(agent) == {("i-1", "prewarm"): 60}
    assert row.replica and not row.serves and row.url == "" and row.workers[0].num_bytes == 60 * MIB
    assert of(ActivateEngine, agent.handle(start_of("i-2", source="i-1"), 30.0)) and used(agent) == 240


def test_a_swapped_out_engine_holds_no_gpu_bytes_and_wakes_on_any_gpu() -> None:
    """SwapServeLLM section 3.5: a snapshot holds nothing of the GPU."""
    agent = serving(make(abilities=ALL, gpus=2))
    assert of(SleepEngine, drained(agent, "swapped_out")) == [SleepEngine("i-1", "swapped_out")]
    assert told(agent.handle(EngineAsleep("i-1"), 22.0)) == ["instance.swapped_out"]
    assert used(agent) == 0 and not instance(agent).serves
    effects = agent.handle(start_of("i-2", source="i-1", workers=instance_workers(1)), 30.0)
    assert of(ActivateEngine, effects) and used(agent, 1) == 240 and state(agent, "i-1") == "stopped"
    assert told(agent.handle(EngineReady("i-2", "u"), 31.0)) == ["instance.ready"]


@pytest.mark.parametrize(("becomes", "abilities"), [("prewarmed", ("swap",)), ("swapped_out", ("prewarm",))])
def test_without_the_ability_a_drain_ends_in_a_stop(becomes: str, abilities: tuple[str, ...]) -> None:
    agent = serving(make(abilities=abilities))
    effects = drained(agent, becomes)
    assert of(StopEngine, effects) and not of(SleepEngine, effects)
    assert told(agent.handle(EngineGone("i-1"), 22.0)) == ["instance.stopped"]


def test_over_the_budget_of_host_memory_an_engine_simply_stops() -> None:
    params = replace(PARAMS, swap_host_bytes=100 * MIB)  # one snapshot of 84 MiB
    agent = serving(make(abilities=ALL, gpus=2, params=params))
    agent.handle(start_of("i-2", workers=instance_workers(1)), 12.0)
    halves(agent, "i-2", 12.5)
    agent.handle(EngineReady("i-2", "u"), 13.0)
    agent.handle(stop("i-2", becomes="swapped_out"), 14.0)
    assert of(StopEngine, drained(agent, "swapped_out"))  # promised to i-2, though that still drains
    agent.handle(EngineGone("i-1"), 22.0)
    assert of(SleepEngine, agent.handle(InFlight("i-2", 0), 22.5))
    agent.handle(EngineAsleep("i-2"), 23.0)
    agent.handle(stop("i-2", grace_s=0), 24.0)
    agent.handle(EngineGone("i-2"), 25.0)
    serving(agent, "i-3", 30.0)
    agent.handle(stop("i-3", becomes="swapped_out"), 40.0)
    assert of(SleepEngine, agent.handle(InFlight("i-3", 0), 41.0))


def test_grace_that_is_over_puts_to_sleep_too() -> None:
    agent = serving(make(abilities=ALL))
    agent.handle(stop(grace_s=5, becomes="swapped_out"), 20.0)
    agent.handle(InFlight("i-1", 3), 24.0)
    assert of(SleepEngine, agent.handle(Tick(), 25.0))


def test_a_sleep_that_never_ends_is_a_stop() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "swapped_out")
    assert not of(StopEngine, agent.handle(Tick(), 22.0)) and not of(CountInFlight, agent.handle(Tick(), 23.0))
    assert of(StopEngine, agent.handle(Tick(), 81.0))
    assert not told(agent.handle(EngineAsleep("i-1"), 82.0))
    assert told(agent.handle(EngineGone("i-1"), 83.0)) == ["instance.stopped"] and used(agent) == 0


def test_an_engine_that_could_not_sleep_is_stopped() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    assert told(agent.handle(EngineGone("i-1"), 22.0)) == ["instance.stopped"] and used(agent) == 0


def test_a_stop_is_stronger_than_a_sleep() -> None:
    agent = serving(make(abilities=ALL))
    agent.handle(stop(becomes="prewarmed"), 20.0)
    agent.handle(stop(), 20.1)
    assert of(StopEngine, agent.handle(InFlight("i-1", 0), 21.0))
    other = serving(make(abilities=ALL))
    drained(other, "prewarmed")
    assert of(StopEngine, other.handle(stop(), 21.5)) and not told(other.handle(EngineAsleep("i-1"), 21.6))


def test_commands_that_come_twice_do_not_wake_or_drop_what_sleeps() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    assert not of(StopEngine, agent.handle(stop(grace_s=0, becomes="prewarmed"), 21.5))
    assert not told(agent.handle(resume(), 21.6))
    agent.handle(EngineAsleep("i-1"), 22.0)
    assert not told(agent.handle(stop(grace_s=0, becomes="prewarmed"), 22.1)) and not told(agent.handle(resume(), 22.2))
    assert not told(agent.handle(EngineAsleep("i-1"), 22.3)) and state(agent, "i-1") == "prewarmed"


def test_resume_takes_the_sleep_back() -> None:
    agent = serving(make(abilities=ALL))
    agent.handle(stop(becomes="swapped_out"), 20.0)
    assert told(agent.handle(resume(), 20.5)) == ["instance.ready"]
    agent.handle(stop(), 30.0)
    assert of(StopEngine, agent.handle(InFlight("i-1", 0), 31.0))


def test_a_start_under_way_has_nothing_to_keep() -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("i-1"), 10.0)
    assert of(StopEngine, agent.handle(stop(becomes="prewarmed"), 11.0)) == [StopEngine("i-1", 0.0)]


def test_what_sleeps_is_not_asked_for_its_health() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    for _ in range(5):
        agent.handle(HealthSeen("i-1", ok=False, reason="frozen"), 21.5)
    agent.handle(EngineAsleep("i-1"), 22.0)
    effects = agent.handle(Tick(), 30.0)
    assert not of(CheckHealth, effects) and not of(CountInFlight, effects) and state(agent, "i-1") == "prewarmed"


def test_a_stopping_node_ends_what_sleeps() -> None:
    agent = replica(serving(make(abilities=ALL)), "r-1", 15.0)
    effects = agent.handle(NodeStopping("bye", 0.0), 20.0)
    assert {e.instance_id for e in of(StopEngine, effects)} == {"i-1", "r-1"}
    agent.handle(EngineGone("i-1"), 21.0)
    agent.handle(EngineGone("r-1"), 21.0)
    assert agent.num_living == 0 and used(agent) == 0


# Proactive prewarming: WarmServe section 4.1, Eq. 1

EQ1 = replace(PARAMS, reservation="paper", reservation_step_bytes=1)
WIDE = replace(MODEL, kv_bytes=160 * MIB, max_concurrency=32)  # M = 160 MiB, M/C = 5 MiB


def draining(agent: AgentController) -> AgentController:
    serving(agent, model=WIDE)
    agent.handle(stop(becomes="prewarmed"), 20.0)
    return agent


@pytest.mark.parametrize(
    ("reservation", "kept_mib"),
    [("paper", 69), ("literal_code", 104)],  # at R/C = 8/32 and K = 40 %: 57 % and 35 % are freed (erratum E3)
)
def test_eq_1_frees_what_running_requests_cannot_need(reservation: str, kept_mib: int) -> None:
    agent = draining(make(abilities=ALL, params=replace(EQ1, reservation=reservation)))
    effects = agent.handle(InFlight("i-1", 8, 64 * MIB), 21.0)
    assert of(LimitKv, effects) == [LimitKv("i-1", kept_mib * MIB)]
    assert owned(agent) == {("i-1", "weights"): 60, ("i-1", "kv"): kept_mib}
    assert any(e.payload.TYPE == "node.beat" for e in effects if hasattr(e, "payload"))
    assert not of(LimitKv, agent.handle(InFlight("i-1", 8, 64 * MIB), 21.1))


def test_eq_1_keeps_a_buffer_above_what_is_used() -> None:
    agent = draining(make(abilities=ALL, params=EQ1))
    agent.handle(InFlight("i-1", 2, 10 * MIB), 21.0)
    assert owned(agent)[("i-1", "kv")] == 15  # max(160 x 2/32, 10 + 160/32)
    assert not of(LimitKv, agent.handle(InFlight("i-1", 2, 13 * MIB), 21.1))  # the buffer is for that


def test_section_4_1_a_cache_that_became_too_small_evicts_the_recently_loaded_weights() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(InFlight("i-1", 2, 10 * MIB), 21.0)
    for n in range(2):
        replica(agent, f"r-{n}", 22.0 + n, model=a_model(f"m{n}", weights_bytes=70 * MIB))
    assert used(agent) == 215
    effects = agent.handle(InFlight("i-1", 2, 14 * MIB), 25.0)  # 5 MiB are free, and 19 wanted
    assert of(LimitKv, effects) == [LimitKv("i-1", 19 * MIB)] and not told(effects)
    effects = agent.handle(InFlight("i-1", 2, 18 * MIB), 26.0)
    assert (
        told(effects) == ["instance.stopped"] and state(agent, "r-1") == "stopped" and state(agent, "r-0") != "stopped"
    )
    assert of(LimitKv, effects) == [LimitKv("i-1", 23 * MIB)] and owned(agent)[("i-1", "kv")] == 23


def test_a_cache_takes_what_there_is_when_nobody_can_give_way() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(InFlight("i-1", 2, 10 * MIB), 21.0)
    agent.handle(start("i-2", mib=142), 22.0)
    effects = agent.handle(InFlight("i-1", 2, 15 * MIB), 23.0)
    assert of(LimitKv, effects) == [LimitKv("i-1", 18 * MIB)] and used(agent) == 220
    assert not of(LimitKv, agent.handle(InFlight("i-1", 2, 18 * MIB), 24.0))


@pytest.mark.parametrize("case", ["off", "no ability", "unknown use", "before routers have heard", "not draining"])
def test_eq_1_is_left_alone(case: str) -> None:
    agent = make(abilities=() if case == "no ability" else ALL, params=PARAMS if case == "off" else EQ1)
    serving(agent, model=WIDE)
    if case != "not draining":
        agent.handle(stop(becomes="prewarmed"), 20.0)
    seen = InFlight("i-1", 1, -1 if case == "unknown use" else 0)
    effects = agent.handle(seen, 20.1 if case == "before routers have heard" else 21.0)
    assert not of(LimitKv, effects) and used(agent) == 220


def test_eq_1_shrinks_each_gpu_of_a_group_evenly() -> None:
    agent = make(abilities=ALL, params=EQ1, gpus=2)
    pair = replace(WIDE, num_gpus=2)
    agent.handle(start_of("i-1", model=pair, workers=(*instance_workers(0), *instance_workers(1))), 10.0)
    halves(agent, "i-1", 10.0)
    agent.handle(EngineReady("i-1", "u"), 11.0)
    agent.handle(stop(), 20.0)
    assert of(LimitKv, agent.handle(InFlight("i-1", 8, 64 * MIB), 21.0))[0].num_bytes == 69 * MIB
    assert [owned(agent, n)[("i-1", "kv")] for n in (0, 1)] == [34, 34]  # 34.5


def test_a_replica_is_prewarmed_beside_a_draining_engine_and_outlives_it() -> None:
    """WarmServe Fig. 5(b): dedicated in its grace -> universal, without another load."""
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    other = a_model("other", weights_bytes=90 * MIB, kv_bytes=100 * MIB)
    assert code(agent.handle(start_of("r-0", replica=True, model=other), 20.9)) == "out_of_memory"
    agent.handle(InFlight("i-1", 8, 64 * MIB), 21.0)
    replica(agent, "r-1", 21.1, model=other)
    assert agent.ledger.gpus[0].role is GpuRole.DEDICATED
    agent.handle(InFlight("i-1", 0, 0), 23.0)
    agent.handle(EngineAsleep("i-1"), 23.1)
    assert owned(agent) == {("i-1", "prewarm"): 60, ("r-1", "prewarm"): 90}
    assert agent.ledger.gpus[0].role is GpuRole.UNIVERSAL


def test_resume_takes_the_kv_cache_back_or_the_drain_goes_on() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(InFlight("i-1", 8, 64 * MIB), 21.0)
    effects = agent.handle(resume(), 21.5)
    assert told(effects) == ["instance.ready"] and of(LimitKv, effects) == [LimitKv("i-1", 160 * MIB)]
    assert used(agent) == 220
    agent.handle(stop(), 22.0)
    agent.handle(InFlight("i-1", 8, 64 * MIB), 23.0)
    replica(agent, "r-1", 24.0, model=a_model("other", weights_bytes=90 * MIB))
    assert told(agent.handle(resume(), 25.5)) == ["instance.draining"] and "given away" in instance(agent).reason
    assert not told(agent.handle(resume(), 25.6))


def test_an_unknown_way_to_reserve_is_refused() -> None:
    with pytest.raises(ValueError, match="reservation is one of"):
        make(params=replace(PARAMS, reservation="guess"))


# Restarts


def again(agent: AgentController, living: set[str], **fields: Any) -> tuple[AgentController, list[Any]]:
    reborn = make(agent.memory(), abilities=ALL, **fields)
    return reborn, reborn.handle(Recalled(frozenset(living)), 50.0)


def test_what_sleeps_is_taken_back_after_a_restart() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    serving(agent)
    drained(agent, "swapped_out")
    agent.handle(EngineAsleep("i-1"), 22.0)
    reborn, effects = again(agent, {"r-1", "i-1"})
    assert sorted(told(effects)) == ["instance.prewarmed", "instance.swapped_out"] and not of(StopEngine, effects)
    assert owned(reborn) == {("r-1", "prewarm"): 60}
    assert of(ActivateEngine, reborn.handle(start_of("i-2", source="i-1"), 51.0))


def test_what_slept_and_is_gone_after_a_restart_is_stopped() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    serving(agent)
    drained(agent, "swapped_out")
    agent.handle(EngineAsleep("i-1"), 22.0)
    reborn, effects = again(agent, set())
    assert told(effects) == ["instance.stopped"] * 2 and used(reborn) == 0
    assert {e.instance_id for e in of(StopEngine, effects)} == {"i-1", "r-1"}
    reborn.handle(EngineGone("i-1"), 51.0)
    reborn.handle(EngineGone("r-1"), 51.0)
    assert reborn.num_living == 0


def test_a_cut_kv_cache_is_still_cut_after_a_restart() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(InFlight("i-1", 8, 64 * MIB), 21.0)
    replica(agent, "r-1", 22.0, model=a_model("other", weights_bytes=90 * MIB))
    reborn, _ = again(agent, {"i-1", "r-1"}, mib=220, params=EQ1)
    assert owned(reborn) == {("i-1", "weights"): 60, ("i-1", "kv"): 69, ("r-1", "prewarm"): 90}


def test_a_sleep_under_way_is_asked_for_again_after_a_restart() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    reborn, effects = again(agent, {"i-1"})
    assert told(effects) == ["instance.draining"]
    assert of(SleepEngine, reborn.handle(InFlight("i-1", 0), 51.0))


def test_a_start_from_a_source_begins_from_scratch_after_a_restart() -> None:
    """Nobody knows how far the engine had come, nor under which id it is known."""
    agent = replica(make(abilities=ALL), "r-1")
    agent.handle(start_of("i-1", source="r-1"), 20.0)
    reborn, effects = again(agent, {"r-1"})
    assert {e.instance_id for e in of(StopEngine, effects)} == {"i-1", "r-1"}
    reborn.handle(EngineGone("r-1"), 50.5)
    effects = reborn.handle(EngineGone("i-1"), 51.0)
    assert of(LaunchEngine, effects) and used(reborn) == 240 and instance(reborn).source == ""
    halves(reborn, "i-1", 52.0)
    assert told(reborn.handle(EngineReady("i-1", "u"), 53.0)) == ["instance.ready"]


def test_all_of_it_survives_being_written_down() -> None:
    agent = draining(make(abilities=ALL, params=EQ1))
    (written,) = of(Remember, agent.handle(InFlight("i-1", 8, 64 * MIB), 21.0))
    assert msgspec.json.decode(msgspec.json.encode(written.memory), type=AgentMemory) == written.memory


def test_ready_of_another_engine_is_as_it_was() -> None:
    """A replica's load never makes it serve."""
    agent = make(abilities=ALL)
    agent.handle(start_of("r-1", replica=True), 10.0)
    halves(agent, "r-1", 11.0)
    assert not told(agent.handle(EngineReady("r-1", "u"), 12.0))
    assert instance(ready(make())).state is InstanceState.READY
