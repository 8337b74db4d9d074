"""The agent's controller: each transition, and commands that come twice, late, stale or in the wrong order."""

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from glowplug.controllers.agent import AgentController
from glowplug.controllers.agent_words import (
    AgentMemory,
    AgentParams,
    AwaitWeights,
    CheckHealth,
    CountInFlight,
    EngineExited,
    EngineGone,
    EngineKind,
    EngineLaunched,
    EngineReady,
    EngineStartFailed,
    ForgetEngine,
    HealthSeen,
    InFlight,
    LaunchEngine,
    LoadEngine,
    NodeStopping,
    Recalled,
    Remember,
    ReportStart,
    StopAsked,
    StopEngine,
    Surroundings,
    WeightsComplete,
    WeightsFailed,
)
from glowplug.controllers.effects import Effect, Publish, Remove, Save, Tick
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.hardware import CachedWeights, Gpu
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.domain.model import Model
from glowplug.events.commands import ResumeInstance, StartInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.memory.ledger import ByteLedger
from tests.fleet_builder import MIB, a_model, an_event, an_instance

NODE = "node-1"
PARAMS = AgentParams(
    start_deadline_s=60,
    drain_quiet_s=0.3,
    stop_grace_s=5,
    health_every_s=1,
    health_misses=3,
    keep_gone_s=180,
    max_tick_gap_s=1000,
)
T = TypeVar("T")


def make(memory: AgentMemory | None = None, *, mib: int = 300) -> AgentController:
    ledger = ByteLedger([Gpu(gpu_id=f"{NODE}/0", total_bytes=mib * MIB)])
    engines = {
        "emulated": EngineKind(name="emulated", emulated=True),
        "vllm": EngineKind(name="vllm", unavailable="no vLLM here"),
    }
    return AgentController(NODE, ledger, engines, params=PARAMS, memory=memory, agent_url="http://a")


def start(instance_id: str = "i-1", *, mib: int = 100, epoch: int = 1, **fields: Any) -> Event:
    model: Model = fields.pop("model", None) or a_model(mib=mib)
    worker = Worker(worker_id=f"{instance_id}-0", node_id=NODE, gpu_id=f"{NODE}/0", num_bytes=model.memory_bytes)
    given: dict[str, Any] = {"target": NODE, "workers": (worker,), "decision_id": "d-1"}
    command = StartInstance(instance_id=instance_id, model=model, **(given | fields))
    return an_event(command, issuer="placer-1", epoch=epoch, traceparent="tp")


def stop(instance_id: str = "i-1", *, grace_s: float = 30.0, epoch: int = 1) -> Event:
    command = StopInstance(target=NODE, instance_id=instance_id, reason="idle", grace_s=grace_s)
    return an_event(command, issuer="autoscaler-1", epoch=epoch)


def resume(instance_id: str = "i-1") -> Event:
    return an_event(
        ResumeInstance(target=NODE, instance_id=instance_id, reason="wanted"), issuer="autoscaler-1", epoch=1
    )


def of(kind: type[T], effects: list[Effect]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]


def told(effects: list[Effect]) -> list[str]:
    """Types of the instance facts among `effects`."""
    return [e.payload.TYPE for e in of(Publish, effects) if e.payload.TYPE.startswith("instance.")]


def code(effects: list[Effect]) -> str:
    (only,) = [e.payload for e in of(Publish, effects) if e.payload.TYPE == "instance.failed"]
    found: str = only.code
    return found


def instance(agent: AgentController, instance_id: str = "i-1") -> Instance:
    return agent.holdings[instance_id].instance


def used(agent: AgentController) -> int:
    return agent.ledger.gpus[0].used_bytes // MIB


def ready(agent: AgentController, now_s: float = 10.0) -> AgentController:
    """i-1 through its whole start, READY three seconds after `now_s`."""
    agent.handle(start(), now_s)
    agent.handle(EngineLaunched("i-1"), now_s + 0.5)
    agent.handle(WeightsComplete("i-1", "/w"), now_s + 2)
    phases = (
        Phase(name=PhaseName.LAUNCH, started_at=now_s, ended_at=now_s + 0.5),
        Phase(name=PhaseName.LOAD, started_at=now_s + 2, ended_at=now_s + 3),
    )
    agent.handle(EngineReady("i-1", "http://e:1", phases), now_s + 3)
    return agent


def test_start_grants_first_then_launches_while_weights_come() -> None:
    agent = make()
    effects = agent.handle(start(), 10.0)
    assert used(agent) == 100
    assert [type(e) for e in effects[:3]] == [Remember, LaunchEngine, AwaitWeights]
    assert effects[0].memory.holdings[0].is_granted
    (launch,) = of(LaunchEngine, effects)
    assert launch.gpu_kind == "host" and launch.gpu_index == 0 and launch.traceparent == "tp"
    assert of(AwaitWeights, effects)[0].deadline_at == 70.0
    assert told(effects) == ["instance.starting"] and instance(agent).emulated
    assert [e.table for e in of(Save, effects)] == ["instances", "nodes"]


@pytest.mark.parametrize("launched_first", [True, False])
def test_loads_when_engine_and_weights_are_there(launched_first: bool) -> None:
    agent = make()
    agent.handle(start(), 10.0)
    halves = [EngineLaunched("i-1"), WeightsComplete("i-1", "/w")]
    first, second = halves if launched_first else halves[::-1]
    assert not of(LoadEngine, agent.handle(first, 11.0))
    effects = agent.handle(second, 12.0)
    assert of(LoadEngine, effects) == [LoadEngine("i-1", "/w")] and told(effects) == ["instance.loading"]
    assert not of(LoadEngine, agent.handle(second, 12.5))


def test_ready_tells_url_phases_and_trace() -> None:
    agent = make()
    agent.handle(start(phases=(Phase(name=PhaseName.DECIDE, started_at=9.0, ended_at=10.0),)), 10.0)
    agent.handle(EngineLaunched("i-1"), 10.5)
    agent.handle(WeightsComplete("i-1", "/w"), 12.0)
    phases = (Phase(name=PhaseName.LOAD, started_at=12.0, ended_at=13.0),)
    effects = agent.handle(EngineReady("i-1", "http://e:1", phases), 13.0)
    now = instance(agent)
    assert told(effects) == ["instance.ready"] and now.url == "http://e:1" and now.ready_at == 13.0
    assert [(p.name, p.actual_s) for p in now.phases] == [("decide", 1.0), ("fetch", 2.0), ("load", 1.0)]
    assert of(ReportStart, effects) == [ReportStart(now, "tp")]
    (fact,) = [e for e in of(Publish, effects) if e.payload.TYPE == "instance.ready"]
    assert fact.cause is not None and fact.cause.traceparent == "tp" and fact.cause.event_id == now.cause_id


def test_each_write_raises_the_revision() -> None:
    agent = make()
    revisions = []
    for stimulus, now_s in [
        (start(), 10.0),
        (EngineLaunched("i-1"), 11.0),
        (WeightsComplete("i-1", "/w"), 12.0),
        (EngineReady("i-1", "u"), 13.0),
        (stop(), 14.0),
        (InFlight("i-1", 0), 15.0),
        (EngineGone("i-1"), 16.0),
    ]:
        revisions += [e.value.revision for e in of(Save, agent.handle(stimulus, now_s)) if e.table == "instances"]
    assert revisions == [1, 2, 3, 4, 5]


def test_predictions_come_from_the_starts_before() -> None:
    agent = ready(make())
    assert all(p.predicted_s == 0 for p in instance(agent).phases)
    agent.handle(start("i-2"), 20.0)
    agent.handle(EngineLaunched("i-2"), 20.1)
    agent.handle(WeightsComplete("i-2", "/w"), 24.0)
    load = (Phase(name=PhaseName.LOAD, started_at=24.0, ended_at=26.0),)
    agent.handle(EngineReady("i-2", "u", load), 26.0)
    predicted = {p.name: p.predicted_s for p in instance(agent, "i-2").phases}
    assert predicted == {"fetch": 2.0, "load": 1.0}
    assert agent.history.predicted_s("m", PhaseName.FETCH) == pytest.approx(2.6)
    assert agent.history.predicted_s("m", PhaseName.LOAD) == pytest.approx(1.3)


def test_a_fetch_that_was_no_fetch_teaches_nothing() -> None:
    agent = make()
    agent.handle(start(), 10.0)
    agent.handle(WeightsComplete("i-1", "/w", cached=True), 10.0)
    agent.handle(EngineLaunched("i-1"), 10.5)
    agent.handle(EngineReady("i-1", "u"), 11.0)
    assert agent.history.predicted_s("m", PhaseName.FETCH) == 0.0


def test_no_room_fails_that_start_alone() -> None:
    agent = ready(make())
    effects = agent.handle(start("i-2", mib=201), 20.0)
    assert code(effects) == "out_of_memory" and not of(LaunchEngine, effects) and not of(StopEngine, effects)
    assert instance(agent).state is InstanceState.READY and used(agent) == 100
    assert told(agent.handle(start("i-3", mib=200), 21.0)) == ["instance.starting"]


def test_unknown_gpu_and_engine_fail_with_a_reason() -> None:
    agent = make()
    elsewhere = Worker(worker_id="w", node_id=NODE, gpu_id=f"{NODE}/9", num_bytes=1)
    assert code(agent.handle(start("i-1", workers=(elsewhere,)), 1.0)) == "bad_request"
    assert code(agent.handle(start("i-2", model=a_model(engine="vllm")), 2.0)) == "engine_unavailable"
    assert "no vLLM here" in instance(agent, "i-2").reason and used(agent) == 0


def test_duplicate_start_changes_nothing() -> None:
    agent = ready(make())
    before = instance(agent)
    effects = agent.handle(start(epoch=1), 13.1)
    assert instance(agent) == before and not told(effects) and not of(LaunchEngine, effects) and used(agent) == 100


def test_start_of_an_ended_instance_is_ignored() -> None:
    agent = ready(make())
    agent.handle(stop(grace_s=0), 20.0)
    agent.handle(EngineGone("i-1"), 21.0)
    assert not of(LaunchEngine, agent.handle(start(), 22.0)) and instance(agent).state is InstanceState.STOPPED


def test_start_that_its_stop_has_overtaken_ends_stopped() -> None:
    agent = make()
    assert not told(agent.handle(stop(), 1.0))
    effects = agent.handle(start(), 2.0)
    assert told(effects) == ["instance.stopped"] and not of(LaunchEngine, effects) and used(agent) == 0
    agent.handle(stop("i-9"), 3.0)
    agent.handle(Tick(), 3.0 + PARAMS.keep_gone_s)
    assert told(agent.handle(start("i-9"), 200.0)) == ["instance.starting"]


def test_stale_epoch_is_refused_and_remembered_over_a_restart() -> None:
    agent = make()
    effects = agent.handle(start(epoch=7), 1.0)
    with pytest.raises(StaleEpoch):
        agent.handle(start("i-2", epoch=6), 2.0)
    reborn = make(of(Remember, effects)[0].memory)
    with pytest.raises(StaleEpoch):
        reborn.handle(start("i-2", epoch=6), 3.0)
    assert used(reborn) == 100


def test_commands_to_another_node_are_not_ours() -> None:
    agent = make()
    assert not told(agent.handle(start(target="node-2"), 1.0)) and not agent.holdings


def test_drain_waits_for_quiet_and_for_zero() -> None:
    agent = ready(make())
    assert told(agent.handle(stop(), 20.0)) == ["instance.draining"]
    assert not of(CountInFlight, agent.handle(Tick(), 20.1))
    assert not of(StopEngine, agent.handle(InFlight("i-1", 0), 20.2))
    assert of(CountInFlight, agent.handle(Tick(), 20.3)) == [CountInFlight("i-1")]
    assert not of(StopEngine, agent.handle(InFlight("i-1", 2), 20.4))
    assert of(StopEngine, agent.handle(InFlight("i-1", 0), 20.5)) == [StopEngine("i-1", PARAMS.stop_grace_s)]
    assert not of(StopEngine, agent.handle(InFlight("i-1", 0), 20.6))
    assert used(agent) == 100
    effects = agent.handle(EngineGone("i-1"), 21.0)
    assert told(effects) == ["instance.stopped"] and used(agent) == 0


def test_grace_bounds_a_drain() -> None:
    agent = ready(make())
    agent.handle(stop(grace_s=5), 20.0)
    agent.handle(InFlight("i-1", 3), 24.0)
    assert not of(StopEngine, agent.handle(Tick(), 24.9))
    assert of(StopEngine, agent.handle(Tick(), 25.0))


def test_second_stop_may_only_hurry() -> None:
    agent = ready(make())
    agent.handle(stop(grace_s=30), 20.0)
    agent.handle(stop(grace_s=300), 21.0)
    assert of(StopEngine, agent.handle(stop(grace_s=0), 22.0))


def test_no_grace_stops_at_once() -> None:
    effects = ready(make()).handle(stop(grace_s=0), 20.0)
    assert told(effects) == ["instance.draining"] and of(StopEngine, effects)


def test_resume_ends_a_drain_until_the_engine_is_being_stopped() -> None:
    agent = ready(make())
    agent.handle(stop(), 20.0)
    assert told(agent.handle(resume(), 20.1)) == ["instance.ready"]
    assert not of(CountInFlight, agent.handle(Tick(), 30.0))
    agent.handle(stop(), 31.0)
    agent.handle(InFlight("i-1", 0), 32.0)
    assert not told(agent.handle(resume(), 32.1))
    assert instance(agent).state is InstanceState.DRAINING


def test_stop_gives_up_a_start_under_way() -> None:
    agent = make()
    agent.handle(start(), 10.0)
    effects = agent.handle(stop(), 11.0)
    assert of(StopEngine, effects) == [StopEngine("i-1", 0.0)] and told(effects) == ["instance.draining"]
    late = [EngineLaunched("i-1"), WeightsComplete("i-1", "/w"), EngineReady("i-1", "u"), resume()]
    assert not any(told(agent.handle(s, 12.0)) for s in late)
    assert told(agent.handle(EngineGone("i-1"), 13.0)) == ["instance.stopped"] and used(agent) == 0


@pytest.mark.parametrize(
    ("stimulus", "expected"),
    [
        (WeightsFailed("i-1", "weights_corrupt", "checksum"), "weights_corrupt"),
        (EngineStartFailed("i-1", "engine_failed", "log tail"), "engine_failed"),
        (EngineExited("i-1", "killed"), "engine_failed"),
    ],
)
def test_failed_start_frees_only_when_the_process_is_gone(stimulus: Any, expected: str) -> None:
    agent = make()
    agent.handle(start(), 10.0)
    effects = agent.handle(stimulus, 11.0)
    assert code(effects) == expected and used(agent) == 100
    assert of(StopEngine, effects) == [StopEngine("i-1", 0.0)]
    assert of(ReportStart, effects) == [ReportStart(instance(agent), "tp")]
    assert not told(agent.handle(EngineGone("i-1"), 12.0)) and used(agent) == 0
    assert instance(agent).state is InstanceState.FAILED


def test_start_deadline_says_what_was_missing() -> None:
    agent = make()
    agent.handle(start(), 10.0)
    assert code(agent.handle(Tick(), 70.0)) == "weights_unavailable"
    agent.handle(start("i-2"), 100.0)
    agent.handle(WeightsComplete("i-2", "/w"), 101.0)
    assert code(agent.handle(Tick(), 160.0)) == "start_timeout"


def test_dead_engine_fails_at_once() -> None:
    effects = ready(make()).handle(EngineExited("i-1", "signal 9\nlog"), 20.0)
    assert code(effects) == "engine_failed" and of(StopEngine, effects)
    assert not of(ReportStart, effects)


def test_hung_engine_fails_after_its_misses_in_a_row() -> None:
    agent = ready(make())
    miss = HealthSeen("i-1", ok=False, reason="no answer")
    agent.handle(miss, 20.0)
    agent.handle(miss, 21.0)
    agent.handle(HealthSeen("i-1", ok=True), 22.0)
    agent.handle(miss, 23.0)
    assert not told(agent.handle(miss, 24.0))
    assert code(agent.handle(miss, 25.0)) == "engine_failed" and "3 misses" in instance(agent).reason


def test_health_is_asked_at_its_pace() -> None:
    agent = ready(make())
    asked = [now for now in (20.0, 20.5, 21.0, 21.2, 22.0) if of(CheckHealth, agent.handle(Tick(), now))]
    assert asked == [20.0, 21.0, 22.0]


def test_process_that_outlives_its_stop_keeps_its_bytes_and_is_stopped_again() -> None:
    agent = ready(make())
    agent.handle(stop(grace_s=0), 20.0)
    assert not told(agent.handle(EngineGone("i-1", clean=False), 26.0)) and used(agent) == 100
    assert not of(StopEngine, agent.handle(Tick(), 27.0))
    assert of(StopEngine, agent.handle(Tick(), 31.0)) == [StopEngine("i-1", 0.0)]
    agent.handle(EngineGone("i-1"), 32.0)
    assert used(agent) == 0 and instance(agent).state is InstanceState.STOPPED


def test_ended_instances_are_kept_a_while_then_forgotten() -> None:
    agent = ready(make())
    agent.handle(stop(grace_s=0), 20.0)
    agent.handle(EngineGone("i-1"), 21.0)
    assert not of(Remove, agent.handle(Tick(), 200.0)) and agent.instances
    effects = agent.handle(Tick(), 201.0)
    assert of(Remove, effects) == [Remove("instances", "i-1")] and of(ForgetEngine, effects) and not agent.instances


def test_beats_each_second_and_when_grants_change() -> None:
    agent = make()

    def beats(stimulus: Any, now_s: float) -> bool:
        return any(e.payload.TYPE == "node.beat" for e in of(Publish, agent.handle(stimulus, now_s)))

    assert [beats(Tick(), t) for t in (1.0, 1.5, 2.0, 2.9, 3.0)] == [True, False, True, False, True]
    assert beats(start(), 3.1) and not beats(EngineLaunched("i-1"), 3.2)


def test_node_tells_engines_cache_and_grows_in_revision() -> None:
    agent = make()
    agent.handle(Surroundings(cached=(CachedWeights(digest="d", num_bytes=1),), host_cache_bytes=9), 1.0)
    rows = [e.value for t in (5.0, 6.0) for e in of(Save, agent.handle(Tick(), t)) if e.table == "nodes"]
    assert rows[0].engines == ("emulated",) and rows[0].cached[0].digest == "d" and rows[0].agent_url == "http://a"
    assert rows[1].revision > rows[0].revision and rows[1].heartbeat_at == 6.0


def test_clock_that_jumps_back_does_not_silence_the_beat() -> None:
    agent = make()
    agent.handle(Tick(), 1000.0)
    (row,) = of(Save, agent.handle(Tick(), 700.0))
    assert row.value.heartbeat_at == 700.0 and row.value.revision > 1000_000


def test_stopping_node_drains_all_and_starts_none() -> None:
    agent = ready(make())
    agent.handle(start("i-2"), 19.0)
    effects = agent.handle(NodeStopping("bye", 5.0), 20.0)
    assert told(effects) == ["instance.draining"] * 2 and of(StopEngine, effects) == [StopEngine("i-2", 0.0)]
    assert code(agent.handle(start("i-3"), 20.1)) == "node_stopping"
    assert agent.node(20.2).draining and agent.num_living == 2
    agent.handle(EngineGone("i-2"), 20.3)
    agent.handle(InFlight("i-1", 0), 20.5)
    agent.handle(EngineGone("i-1"), 20.6)
    assert agent.num_living == 0


def test_operator_stops_an_instance() -> None:
    effects = ready(make()).handle(StopAsked("i-1", "operator", 0.0), 20.0)
    assert of(StopEngine, effects) and told(effects) == ["instance.draining"]


def recalled(memory: AgentMemory, living: set[str], now_s: float = 50.0) -> tuple[AgentController, list[Effect]]:
    agent = make(memory)
    return agent, agent.handle(Recalled(frozenset(living)), now_s)


def test_living_engine_is_taken_back_as_it_was() -> None:
    before = ready(make())
    agent, effects = recalled(before.memory(), {"i-1"})
    now = instance(agent)
    assert told(effects) == ["instance.ready"] and now.url == "http://e:1" and used(agent) == 100
    assert now.revision == instance(before).revision + 1 and not of(StopEngine, effects)
    assert agent.history.predicted_s("m", PhaseName.LOAD) == 1.0


def test_engine_that_died_meanwhile_is_failed() -> None:
    agent, effects = recalled(ready(make()).memory(), set())
    assert code(effects) == "engine_failed" and of(StopEngine, effects)
    agent.handle(EngineGone("i-1"), 51.0)
    assert used(agent) == 0


def test_start_under_way_begins_again() -> None:
    before = make()
    before.handle(start(), 10.0)
    before.handle(EngineLaunched("i-1"), 11.0)
    agent, effects = recalled(before.memory(), {"i-1"})
    assert of(StopEngine, effects) == [StopEngine("i-1", 0.0)] and told(effects) == ["instance.starting"]
    effects = agent.handle(EngineGone("i-1"), 51.0)
    assert of(LaunchEngine, effects) and of(AwaitWeights, effects)[0].deadline_at == 110.0 and used(agent) == 100
    agent.handle(WeightsComplete("i-1", "/w"), 52.0)
    agent.handle(EngineLaunched("i-1"), 53.0)
    agent.handle(EngineReady("i-1", "u"), 54.0)
    assert instance(agent).state is InstanceState.READY


def test_drain_goes_on_over_a_restart() -> None:
    before = ready(make())
    before.handle(stop(), 20.0)
    agent, effects = recalled(before.memory(), {"i-1"}, 21.0)
    assert told(effects) == ["instance.draining"]
    agent.handle(InFlight("i-1", 0), 22.0)
    assert told(agent.handle(EngineGone("i-1"), 23.0)) == ["instance.stopped"]


def test_stop_under_way_is_asked_again_after_a_restart() -> None:
    before = ready(make())
    before.handle(stop(grace_s=0), 20.0)
    agent, effects = recalled(before.memory(), {"i-1"})
    assert of(StopEngine, effects) and used(agent) == 100
    assert told(agent.handle(EngineGone("i-1"), 51.0)) == ["instance.stopped"] and used(agent) == 0


def test_gpu_that_became_too_small_fails_what_does_not_fit() -> None:
    agent = make(ready(make()).memory(), mib=50)
    effects = agent.handle(Recalled(frozenset({"i-1"})), 50.0)
    assert code(effects) == "out_of_memory" and of(StopEngine, effects) and used(agent) == 0
    agent.handle(EngineGone("i-1"), 51.0)
    assert agent.num_living == 0


def test_store_is_healed_where_it_is_behind() -> None:
    agent = ready(make())
    current = instance(agent)
    assert of(Save, agent.restore("instances", {}, 20.0)) == [Save("instances", "i-1", current)]
    behind = {"i-1": replace(current, revision=1)}
    assert of(Save, agent.restore("instances", behind, 21.0)) == [Save("instances", "i-1", current)]
    assert not agent.restore("instances", {"i-1": current}, 22.0)


def test_store_that_is_ahead_is_overtaken() -> None:
    agent = ready(make())
    effects = agent.restore("instances", {"i-1": replace(instance(agent), revision=40)}, 20.0)
    assert instance(agent).revision == 41 and told(effects) == ["instance.ready"] and of(Remember, effects)


def test_node_given_up_too_early_is_taken_back() -> None:
    """A placer that missed the beats of a restarting agent has failed its instances, at the revision just told."""
    agent, _ = recalled(ready(make()).memory(), {"i-1"})
    told_dead = replace(instance(agent), state=InstanceState.FAILED, reason="its node has left")
    effects = agent.restore("instances", {"i-1": told_dead}, 51.0)
    (saved,) = of(Save, effects)
    assert told(effects) == ["instance.ready"] and saved.value.revision == told_dead.revision + 1


def test_rows_of_this_node_that_nobody_knows_are_ended_then_removed() -> None:
    agent = make()
    row = an_instance("i-7", gpu_id=f"{NODE}/0", revision=3)
    other = an_instance("i-8", gpu_id="node-2/0")
    effects = agent.restore("instances", {"i-7": row, "i-8": other}, 20.0)
    (saved,) = of(Save, effects)
    assert (
        saved.value.state is InstanceState.FAILED and saved.value.revision == 4 and told(effects) == ["instance.failed"]
    )
    assert not agent.restore("instances", {"i-7": saved.value}, 30.0)
    assert agent.restore("instances", {"i-7": saved.value}, 200.0) == [Remove("instances", "i-7")]


def test_outcomes_of_unknown_instances_are_ignored() -> None:
    agent = make()
    agent.handle(Tick(), 1.0)
    assert agent.handle(EngineGone("i-404"), 1.1) == [] and agent.handle(InFlight("i-404", 0), 1.2) == []


@pytest.mark.parametrize("jump_s", [300.0, -300.0])
def test_clock_jump_neither_ends_nor_stretches_a_wait(jump_s: float) -> None:
    agent = ready(make())
    agent.params = agent._life.params = replace(PARAMS, max_tick_gap_s=5)
    agent.handle(stop(grace_s=10), 20.0)
    agent.handle(Tick(), 20.1)
    effects = agent.handle(Tick(), 20.2 + jump_s)
    assert not of(StopEngine, effects) and not of(CountInFlight, effects)
    assert of(CheckHealth, agent.handle(Tick(), 21.4 + jump_s))
    for tenth in range(14, 102):
        effects = agent.handle(Tick(), 20.1 + tenth / 10 + jump_s)
        if of(StopEngine, effects):
            break
    assert tenth in (100, 101)


def test_instance_given_to_another_node_later_is_theirs() -> None:
    agent = ready(make())
    theirs = an_instance("i-1", gpu_id="node-2/0", created_at=15.0, revision=1)
    effects = agent.restore("instances", {"i-1": theirs}, 20.0)
    assert of(StopEngine, effects) and not told(effects) and not of(Save, effects)
    assert not told(agent.handle(EngineGone("i-1"), 21.0)) and used(agent) == 0
    assert not agent.restore("instances", {"i-1": theirs}, 22.0)
    effects = agent.handle(Tick(), 500.0)
    assert of(ForgetEngine, effects) and not of(Remove, effects)


def test_instance_given_to_this_node_later_is_ours() -> None:
    agent = ready(make())
    theirs = an_instance("i-1", gpu_id="node-2/0", created_at=5.0, revision=9)
    effects = agent.restore("instances", {"i-1": theirs}, 20.0)
    (saved,) = of(Save, effects)
    assert saved.value.node_id == NODE and saved.value.revision == 10 and told(effects) == ["instance.ready"]
