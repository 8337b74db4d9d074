"""The agent's controller: transitions, groups, and repeated, late or misordered commands."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Publish, Remove, Save, Tick
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.hardware import CachedWeights, Devices, GrantOwner, Link
from glowplug.domain.instance import EngineFigures, Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.fleet.start_times import StartKind
from tests.agent_steps import NODE, PARAMS, code, facts, make, of, resume, start, stop, workers
from tests.fleet_builder import MIB, a_model

PAIR = a_model(weights_bytes=101 * MIB, kv_bytes=100 * MIB, num_gpus=2)


@pytest.mark.parametrize("launched_first", [True, False])
def test_loads_when_engine_and_weights_are_there(launched_first: bool) -> None:
    agent = make()
    agent.handle(start(), 10.0)
    halves = [msg.EngineLaunched("i-1"), msg.WeightsComplete("i-1", "/w")]
    first, second = halves if launched_first else halves[::-1]
    assert not of(msg.LoadEngine, agent.handle(first, 11.0))
    effects = agent.handle(second, 12.0)
    assert of(msg.LoadEngine, effects) == [msg.LoadEngine("i-1", "/w")] and facts(effects) == ["instance.loading"]
    assert not of(msg.LoadEngine, agent.handle(second, 12.5))


def test_ready_tells_url_phases_and_trace() -> None:
    agent = make()
    agent.handle(start(phases=(Phase(name=PhaseName.DECIDE, started_at=9.0, ended_at=10.0),)), 10.0)
    agent.handle(msg.EngineLaunched("i-1"), 10.5)
    agent.handle(msg.WeightsComplete("i-1", "/w"), 12.0)
    phases = (Phase(name=PhaseName.LOAD, started_at=12.0, ended_at=13.0),)
    effects = agent.handle(msg.EngineReady("i-1", "http://e:1", phases), 13.0)
    now = agent.instance()
    assert facts(effects) == ["instance.ready"] and now.url == "http://e:1" and now.ready_at == 13.0
    assert [(p.name, p.actual_s) for p in now.phases] == [("decide", 1.0), ("fetch", 2.0), ("load", 1.0)]
    assert of(msg.ReportStart, effects) == [msg.ReportStart(now)]
    (fact,) = [e for e in of(Publish, effects) if e.payload.TYPE == "instance.ready"]
    assert fact.cause is not None and fact.cause.traceparent == "tp" and fact.cause.event_id == now.cause_id


def test_slots_kv_tokens_and_steps_are_what_the_engine_says_and_else_what_the_model_declares() -> None:
    """Memory allows llama.cpp fewer slots than max_concurrency; more requests would wait inside it, unseen."""
    agent = make()
    for n, said in enumerate(({"num_slots": 3, "kv_tokens": 6144, "lacks": ("tool_choice",), "step_s": 0.02}, {})):
        instance_id, at = f"i-{n + 1}", 10.0 + 10 * n
        agent.loading(instance_id, at, model=a_model())
        agent.handle(msg.EngineReady(instance_id, "u", figures=EngineFigures(**said)), at + 3)
    rows = [agent.instance("i-1"), agent.instance("i-2")]
    said = [(r.max_concurrency, r.kv_tokens, r.lacks, r.step_s) for r in rows]
    assert said == [(3, 6144, ("tool_choice",), 0.02), (8, 0, (), 0.0)]


def test_each_write_raises_the_revision() -> None:
    agent = make()
    revisions = []
    for stimulus, now_s in [
        (start(), 10.0),
        (msg.EngineLaunched("i-1"), 11.0),
        (msg.WeightsComplete("i-1", "/w"), 12.0),
        (msg.EngineReady("i-1", "u"), 13.0),
        (stop(), 14.0),
        (msg.InFlight("i-1", 0), 15.0),
        (msg.EngineGone("i-1"), 16.0),
    ]:
        revisions += [e.value.revision for e in of(Save, agent.handle(stimulus, now_s)) if e.table == "instances"]
    assert revisions == [1, 2, 3, 4, 5]


def test_phases_carry_what_the_command_expected_on_whatever_node_they_are() -> None:
    agent = make()
    command = replace(start(), data=replace(start().data, predicted={"fetch": 1.5, "load": 0.8}, predicted_s=3.0))
    agent.handle(command, 10.0)
    assert agent.instance().predicted_s == 3.0
    agent = agent.ready()
    assert {p.name: p.predicted_s for p in agent.instance().phases} == {"fetch": 1.5, "launch": 0.0, "load": 0.8}


@pytest.mark.parametrize("found", [StartKind.CACHED, StartKind.DISK, StartKind.COLD])
def test_a_start_says_what_it_found(found: StartKind) -> None:
    agent = make()
    agent.handle(start(), 10.0)
    agent.handle(msg.WeightsComplete("i-1", "/w", found), 10.0)
    agent.handle(msg.EngineLaunched("i-1"), 10.5)
    agent.handle(msg.EngineReady("i-1", "u"), 11.0)
    assert (agent.instance().start_kind, agent.instance().gpu_kind) == (found.value, "host")


def test_no_room_fails_that_start_alone() -> None:
    agent = make().ready()
    effects = agent.handle(start("i-2", mib=201), 20.0)
    assert code(effects) == "out_of_memory" and not of(msg.LaunchEngine, effects) and not of(msg.StopEngine, effects)
    assert agent.instance().state is InstanceState.READY and agent.used() == 100
    assert facts(agent.handle(start("i-3", mib=200), 21.0)) == ["instance.starting"]


def test_unknown_gpu_and_engine_fail_with_a_reason() -> None:
    agent = make()
    elsewhere = Worker(worker_id="w", node_id=NODE, gpu_id=f"{NODE}/9", num_bytes=1)
    assert code(agent.handle(start("i-1", workers=(elsewhere,)), 1.0)) == "bad_request"
    assert code(agent.handle(start("i-2", model=a_model(engine="vllm")), 2.0)) == "engine_unavailable"
    assert "no vLLM here" in agent.instance("i-2").reason and agent.used() == 0


def test_duplicate_start_changes_nothing() -> None:
    agent = make().ready()
    before = agent.instance()
    effects = agent.handle(start(epoch=1), 13.1)
    assert (
        agent.instance() == before and not facts(effects) and not of(msg.LaunchEngine, effects) and agent.used() == 100
    )


def test_start_of_an_ended_instance_is_ignored() -> None:
    agent = make().ready()
    agent.stopped()
    assert not of(msg.LaunchEngine, agent.handle(start(), 22.0)) and agent.instance().state is InstanceState.STOPPED


def test_start_that_its_stop_has_overtaken_ends_stopped() -> None:
    agent = make()
    assert not facts(agent.handle(stop(), 1.0))
    effects = agent.handle(start(), 2.0)
    assert facts(effects) == ["instance.stopped"] and not of(msg.LaunchEngine, effects) and agent.used() == 0
    agent.handle(stop("i-9"), 3.0)
    agent.handle(Tick(), 3.0 + PARAMS.keep_gone_s)
    assert facts(agent.handle(start("i-9"), 200.0)) == ["instance.starting"]


def test_stale_epoch_is_refused_and_remembered_over_a_restart() -> None:
    agent = make()
    effects = agent.handle(start(epoch=7), 1.0)
    with pytest.raises(StaleEpoch):
        agent.handle(start("i-2", epoch=6), 2.0)
    reborn = make(of(msg.Remember, effects)[0].memory)
    with pytest.raises(StaleEpoch):
        reborn.handle(start("i-2", epoch=6), 3.0)
    assert reborn.used() == 100


def test_commands_to_another_node_are_not_ours() -> None:
    agent = make()
    assert not facts(agent.handle(start(target="node-2"), 1.0)) and not agent.holdings


def test_drain_waits_for_quiet_and_for_zero() -> None:
    agent = make().ready()
    assert facts(agent.handle(stop(), 20.0)) == ["instance.draining"]
    assert not of(msg.CountInFlight, agent.handle(Tick(), 20.1))
    assert not of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 20.2))
    assert of(msg.CountInFlight, agent.handle(Tick(), 20.3)) == [msg.CountInFlight("i-1")]
    assert not of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 2), 20.4))
    (asked,) = of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 20.5))
    assert asked == msg.StopEngine("i-1", PARAMS.stop_grace_s)
    assert not of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 20.6))
    assert agent.used() == 100
    effects = agent.handle(msg.EngineGone("i-1"), 21.0)
    assert facts(effects) == ["instance.stopped"] and agent.used() == 0


def test_grace_bounds_a_drain() -> None:
    agent = make().ready()
    agent.handle(stop(grace_s=5), 20.0)
    agent.handle(msg.InFlight("i-1", 3), 24.0)
    assert not of(msg.StopEngine, agent.handle(Tick(), 24.9))
    assert of(msg.StopEngine, agent.handle(Tick(), 25.0))


def test_second_stop_may_only_hurry() -> None:
    agent = make().ready()
    agent.handle(stop(grace_s=30), 20.0)
    agent.handle(stop(grace_s=300), 21.0)
    assert of(msg.StopEngine, agent.handle(stop(grace_s=0), 22.0))


@pytest.mark.parametrize("asked", [stop(grace_s=0), msg.StopAsked("i-1", "operator", 0.0)], ids=["command", "operator"])
def test_no_grace_stops_at_once(asked: Any) -> None:
    effects = make().ready().handle(asked, 20.0)
    assert facts(effects) == ["instance.draining"] and of(msg.StopEngine, effects)


def test_resume_ends_a_drain_until_the_engine_is_being_stopped() -> None:
    agent = make().ready()
    agent.handle(stop(), 20.0)
    assert facts(agent.handle(resume(), 20.1)) == ["instance.ready"]
    assert not of(msg.CountInFlight, agent.handle(Tick(), 30.0))
    agent.handle(stop(), 31.0)
    agent.handle(msg.InFlight("i-1", 0), 32.0)
    assert not facts(agent.handle(resume(), 32.1))
    assert agent.instance().state is InstanceState.DRAINING


def test_stop_gives_up_a_start_under_way() -> None:
    agent = make()
    agent.handle(start(), 10.0)
    effects = agent.handle(stop(), 11.0)
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-1", 0.0)] and facts(effects) == ["instance.draining"]
    late = [msg.EngineLaunched("i-1"), msg.WeightsComplete("i-1", "/w"), msg.EngineReady("i-1", "u"), resume()]
    assert not any(facts(agent.handle(s, 12.0)) for s in late)
    assert facts(agent.handle(msg.EngineGone("i-1"), 13.0)) == ["instance.stopped"] and agent.used() == 0


@pytest.mark.parametrize(
    ("stimulus", "expected"),
    [
        (msg.WeightsFailed("i-1", "weights_corrupt", "checksum"), "weights_corrupt"),
        (msg.EngineStartFailed("i-1", "engine_failed", "log tail"), "engine_failed"),
        (msg.EngineExited("i-1", "killed"), "engine_failed"),
        (msg.EngineOverLimit("i-1", "took 9 GiB"), "engine_failed"),
    ],
)
def test_failed_start_frees_only_when_the_process_is_gone(stimulus: Any, expected: str) -> None:
    agent = make()
    agent.handle(start(), 10.0)
    effects = agent.handle(stimulus, 11.0)
    assert code(effects) == expected and agent.used() == 100
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-1", 0.0)]
    assert not of(msg.ReportStart, effects), "only a start that ended READY is measured"
    assert not facts(agent.handle(msg.EngineGone("i-1"), 12.0)) and agent.used() == 0
    assert agent.instance().state is InstanceState.FAILED


def test_start_deadline_says_what_was_missing() -> None:
    agent = make()
    agent.handle(start(), 10.0)
    assert code(agent.handle(Tick(), 70.0)) == "weights_unavailable"
    agent.handle(start("i-2"), 100.0)
    agent.handle(msg.WeightsComplete("i-2", "/w"), 101.0)
    assert code(agent.handle(Tick(), 160.0)) == "start_timeout"


def test_dead_engine_fails_at_once() -> None:
    effects = make().ready().handle(msg.EngineExited("i-1", "signal 9\nlog"), 20.0)
    assert code(effects) == "engine_failed" and of(msg.StopEngine, effects)
    assert not of(msg.ReportStart, effects)


def test_hung_engine_fails_after_its_misses_in_a_row() -> None:
    agent = make().ready()
    miss = msg.HealthSeen("i-1", ok=False, reason="no answer")
    agent.handle(miss, 20.0)
    agent.handle(miss, 21.0)
    agent.handle(msg.HealthSeen("i-1", ok=True), 22.0)
    agent.handle(miss, 23.0)
    assert not facts(agent.handle(miss, 24.0))
    assert code(agent.handle(miss, 25.0)) == "engine_failed" and "3 health checks failed" in agent.instance().reason


def test_health_is_asked_at_its_pace() -> None:
    agent = make().ready()
    asked = [now for now in (20.0, 20.5, 21.0, 21.2, 22.0) if of(msg.CheckHealth, agent.handle(Tick(), now))]
    assert asked == [20.0, 21.0, 22.0]


def test_process_that_outlives_its_stop_keeps_its_bytes_and_is_stopped_again() -> None:
    agent = make().ready()
    agent.handle(stop(grace_s=0), 20.0)
    assert not facts(agent.handle(msg.EngineGone("i-1", clean=False), 26.0)) and agent.used() == 100
    assert not of(msg.StopEngine, agent.handle(Tick(), 27.0))
    assert of(msg.StopEngine, agent.handle(Tick(), 31.0)) == [msg.StopEngine("i-1", 0.0)]
    agent.handle(msg.EngineGone("i-1"), 32.0)
    assert agent.used() == 0 and agent.instance().state is InstanceState.STOPPED


def test_ended_instances_are_kept_a_while_then_forgotten() -> None:
    agent = make().ready()
    agent.stopped()
    assert not of(Remove, agent.handle(Tick(), 200.0)) and agent.instances
    effects = agent.handle(Tick(), 201.0)
    assert of(Remove, effects) == [Remove("instances", "i-1")] and of(msg.ForgetEngine, effects) and not agent.instances


def test_beats_each_second_and_when_grants_change() -> None:
    agent = make()

    def beats(stimulus: Any, now_s: float) -> bool:
        return any(e.payload.TYPE == "node.beat" for e in of(Publish, agent.handle(stimulus, now_s)))

    assert [beats(Tick(), t) for t in (1.0, 1.5, 2.0, 2.9, 3.0)] == [True, False, True, False, True]
    assert beats(start(), 3.1) and not beats(msg.EngineLaunched("i-1"), 3.2)


def test_a_rate_of_a_link_goes_out_at_once_and_bytes_in_flight_with_the_next_beat() -> None:
    agent = make()
    agent.handle(Tick(), 5.0)

    def rates(now_s: float, link: Link) -> list[float]:
        effects = agent.handle(msg.Surroundings(links=(link,)), now_s)
        beats = [e.payload.node for e in of(Publish, effects) if e.payload.TYPE == "node.beat"]
        return [one.bytes_per_s for node in beats for one in node.links]

    nic = Link(link_id="node-1/nic", bytes_per_s=1e7)
    assert rates(5.1, nic) == [1e7]
    assert rates(5.2, replace(nic, bytes_in_flight=9)) == []
    assert rates(5.3, replace(nic, bytes_per_s=2e7)) == [2e7]


def test_node_tells_engines_cache_and_grows_in_revision() -> None:
    agent = make()
    agent.handle(msg.Surroundings(cached=(CachedWeights(digest="d", num_bytes=1),), host_cache_bytes=9), 1.0)
    rows = [e.value for t in (5.0, 6.0) for e in of(Save, agent.handle(Tick(), t)) if e.table == "nodes"]
    assert rows[0].engines == ("emulated",) and rows[0].cached[0].digest == "d" and rows[0].agent_url == "http://a"
    assert rows[1].revision > rows[0].revision and rows[1].heartbeat_at == 6.0


@pytest.mark.parametrize(
    ("found", "left"),
    [("no_space", 2), ("weights_unavailable", 2), ("weights_corrupt", 2), ("internal_error", 0)],
)
def test_weights_that_cannot_be_had_here_may_be_elsewhere(found: str, left: int) -> None:
    agent = make()
    agent.handle(start(tries_left=2), 10.0)
    effects = agent.handle(msg.WeightsFailed("i-1", found, "it is full"), 11.0)
    assert code(effects) == found and agent.instance().tries_left == left
    assert agent.instance().reason == ("it is full; 2 other nodes may be tried" if left else "it is full")


def test_on_how_many_nodes_a_start_may_be_tried_outlives_a_restart() -> None:
    agent = make()
    agent.handle(start(tries_left=1), 10.0)
    reborn, _ = agent.restarted(["i-1"], 11.0)
    reborn.handle(msg.EngineGone("i-1"), 12.0)
    reborn.handle(msg.WeightsFailed("i-1", "no_space", "it is full"), 13.0)
    assert reborn.instance().tries_left == 1


def test_stopping_node_drains_all_and_starts_none() -> None:
    agent = make().ready()
    agent.handle(start("i-2"), 19.0)
    effects = agent.handle(msg.NodeStopping("bye", 5.0), 20.0)
    assert facts(effects) == ["instance.draining"] * 2 and of(msg.StopEngine, effects) == [msg.StopEngine("i-2", 0.0)]
    assert code(agent.handle(start("i-3"), 20.1)) == "node_stopping"
    assert agent.node(20.2).draining and agent.num_living == 2
    agent.handle(msg.EngineGone("i-2"), 20.3)
    agent.handle(msg.InFlight("i-1", 0), 20.5)
    agent.handle(msg.EngineGone("i-1"), 20.6)
    assert agent.num_living == 0


@pytest.mark.parametrize(("groups_lack", "falls_asleep"), [((), True), (("swap",), False)])
def test_an_instance_over_several_gpus_may_lack_what_others_of_its_engine_have(
    groups_lack: tuple[str, ...], falls_asleep: bool
) -> None:
    agent = make(gpus=2, abilities=("swap",), groups_lack=groups_lack)
    agent.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)
    agent.halves("i-1", 11.0)
    agent.handle(msg.EngineReady("i-1", "http://e"), 12.0)
    effects = agent.drained("swapped_out")
    assert bool(of(msg.SleepEngine, effects)) is falls_asleep and bool(of(msg.StopEngine, effects)) is not falls_asleep


def test_a_replica_over_several_gpus_holds_all_of_its_weights_where_its_engine_cannot_hold_a_part() -> None:
    agent = make(gpus=2, abilities=("prewarm",), groups_lack=("first_layers",))
    agent.handle(start(model=PAIR, workers=workers("i-1", 0, 1, mib=10), replica=True), 10.0)
    assert [agent.used(n) for n in (0, 1)] == [50, 50]


def test_a_tensor_group_takes_its_part_of_each_gpu_in_one_start() -> None:
    agent = make(gpus=4)
    effects = agent.handle(start(model=PAIR, workers=workers("i-1", 1, 3)), 10.0)
    (launch,) = of(msg.LaunchEngine, effects)
    assert launch.devices == Devices(kind="host", ordinals=(1, 3), num_bytes=PAIR.memory_bytes)
    assert [agent.used(n) for n in range(4)] == [0, 100, 0, 100]
    (weights, kv) = (agent.ledger.gpus[3].grants[0], agent.ledger.gpus[3].grants[1])
    assert (weights.num_bytes, kv.num_bytes) == (101 * MIB // 2, 50 * MIB)  # half the weights, half the rest
    assert len(of(msg.AwaitWeights, effects)) == 1


def test_a_group_that_does_not_fit_on_one_gpu_takes_nothing_on_the_others() -> None:
    agent = make(gpus=2)
    agent.handle(start("i-0", mib=250, workers=workers("i-0", 1)), 5.0)
    assert code(agent.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)) == "out_of_memory"
    assert agent.used(0) == 0 and agent.used(1) == 250


def test_a_group_is_one_instance_to_the_end() -> None:
    agent = make(gpus=2)
    agent.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)
    agent.halves("i-1", 11.0)
    agent.handle(msg.EngineReady("i-1", "u", figures=EngineFigures(kv_tokens=4096)), 12.0)
    now = agent.instance()
    assert now.state is InstanceState.READY and now.serves and now.is_whole and now.kv_tokens == 4096
    assert (now.replica, now.part_of, now.num_stages, now.source) == (False, "", 1, "")


def test_a_node_tells_what_its_engines_can_do() -> None:
    node = make(abilities=("prewarm", "swap")).node(1.0)
    assert node.abilities == ("emulated:prewarm", "emulated:swap")
    assert node.can("emulated", "swap") and not node.can("emulated", "stages") and not node.can("vllm", "prewarm")
    assert make().node(1.0).abilities == ()


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"replica": True}, "prewarm"),
        ({"num_stages": 2}, "stages"),
        ({"part_of": "i-0", "num_stages": 2}, "stages"),
        ({"model": a_model(weights_shared=True)}, "share"),
    ],
)
def test_an_engine_without_the_ability_is_never_asked(fields: dict[str, object], missing: str) -> None:
    agent = make()
    effects = agent.handle(start(**fields), 10.0)
    assert code(effects) == "engine_unavailable" and missing in agent.instance().reason
    assert not of(msg.LaunchEngine, effects) and agent.used() == 0


def test_a_group_keeps_its_grants_over_a_restart() -> None:
    before = make(gpus=2)
    before.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)
    agent, _ = before.restarted(set(), gpus=2)
    assert agent.owned(0) == before.owned(0) and agent.owned(1) == before.owned(1)


def test_rows_of_a_memory_without_shares_are_granted_by_their_workers() -> None:
    """An earlier agent wrote them."""
    effects = make().handle(start(), 10.0)
    memory = of(msg.Remember, effects)[0].memory
    old = replace(memory, holdings=tuple(replace(h, shares={}) for h in memory.holdings))
    agent = make(old)
    assert agent.owned() == {("i-1", GrantOwner.WEIGHTS): 100}
    assert facts(agent.handle(msg.Recalled(frozenset()), 20.0)) == ["instance.starting"]


def test_workers_of_other_nodes_are_not_granted_here() -> None:
    elsewhere = Worker(worker_id="w", node_id="node-2", gpu_id="node-2/0", num_bytes=0)
    agent = make()
    agent.handle(start(model=PAIR, workers=(*workers("i-1", 0), elsewhere)), 10.0)
    row: Instance = agent.instance()
    assert agent.used() == 100 and len(row.workers) == 2
