"""A draining engine's KV cache gives way to replicas: WarmServe section 4.1, Eq. 1."""

from dataclasses import replace

import msgspec
import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.domain.hardware import GpuRole
from tests.agent_steps import PARAMS, code, halves, instance, make, of, owned, resume, start, stop, told, used
from tests.dormant_steps import (
    ALL,
    EQ1,
    WIDE,
    again,
    draining,
    on_gpu,
    replica,
    serving,
    start_of,
    state,
)
from tests.fleet_builder import MIB, a_model


@pytest.mark.parametrize(
    ("reservation", "kept_mib"),
    [("paper", 69), ("literal_code", 104)],  # at R/C = 8/32 and K = 40 %: 57 % and 35 % are freed (erratum E3)
)
def test_eq_1_frees_what_running_requests_cannot_need(reservation: str, kept_mib: int) -> None:
    agent = draining(make(abilities=ALL, params=replace(EQ1, reservation=reservation)))
    effects = agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", kept_mib * MIB)]
    assert owned(agent) == {("i-1", "weights"): 60, ("i-1", "kv"): kept_mib}
    assert any(e.payload.TYPE == "node.beat" for e in effects if hasattr(e, "payload"))
    assert not of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.1))


def test_eq_1_keeps_a_buffer_above_what_is_used() -> None:
    agent = draining(make(abilities=ALL, params=EQ1))
    agent.handle(msg.InFlight("i-1", 2, 10 * MIB), 21.0)
    assert owned(agent)[("i-1", "kv")] == 15  # max(160 x 2/32, 10 + 160/32)
    assert not of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 2, 13 * MIB), 21.1))  # the buffer is for that


def test_section_4_1_a_cache_that_became_too_small_evicts_the_recently_loaded_weights() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(msg.InFlight("i-1", 2, 10 * MIB), 21.0)
    for n in range(2):
        replica(agent, f"r-{n}", 22.0 + n, model=a_model(f"m{n}", weights_bytes=70 * MIB))
    assert used(agent) == 215
    effects = agent.handle(msg.InFlight("i-1", 2, 14 * MIB), 25.0)  # 5 MiB are free, and 19 wanted
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 19 * MIB)] and not told(effects)
    effects = agent.handle(msg.InFlight("i-1", 2, 18 * MIB), 26.0)
    assert (
        told(effects) == ["instance.stopped"] and state(agent, "r-1") == "stopped" and state(agent, "r-0") != "stopped"
    )
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 23 * MIB)] and owned(agent)[("i-1", "kv")] == 23


def test_a_cache_takes_what_there_is_when_nobody_can_give_way() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(msg.InFlight("i-1", 2, 10 * MIB), 21.0)
    agent.handle(start("i-2", mib=142), 22.0)
    effects = agent.handle(msg.InFlight("i-1", 2, 15 * MIB), 23.0)
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 18 * MIB)] and used(agent) == 220
    assert not of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 2, 18 * MIB), 24.0))


@pytest.mark.parametrize("case", ["off", "no ability", "unknown use", "before routers have heard", "not draining"])
def test_eq_1_is_left_alone(case: str) -> None:
    agent = make(abilities=() if case == "no ability" else ALL, params=PARAMS if case == "off" else EQ1)
    serving(agent, model=WIDE)
    if case != "not draining":
        agent.handle(stop(becomes="prewarmed"), 20.0)
    seen = msg.InFlight("i-1", 1, -1 if case == "unknown use" else 0)
    effects = agent.handle(seen, 20.1 if case == "before routers have heard" else 21.0)
    assert not of(msg.LimitKv, effects) and used(agent) == 220


def test_eq_1_shrinks_each_gpu_of_a_group_evenly() -> None:
    agent = make(abilities=ALL, params=EQ1, gpus=2)
    pair = replace(WIDE, num_gpus=2)
    agent.handle(start_of("i-1", model=pair, workers=(*on_gpu(0), *on_gpu(1))), 10.0)
    halves(agent, "i-1", 10.0)
    agent.handle(msg.EngineReady("i-1", "u"), 11.0)
    agent.handle(stop(), 20.0)
    assert of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0))[0].num_bytes == 69 * MIB
    assert [owned(agent, n)[("i-1", "kv")] for n in (0, 1)] == [34, 34]  # 34.5


def test_a_replica_is_prewarmed_beside_a_draining_engine_and_outlives_it() -> None:
    """WarmServe Fig. 5(b): dedicated in its grace -> universal, without another load."""
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    other = a_model("other", weights_bytes=90 * MIB, kv_bytes=100 * MIB)
    assert code(agent.handle(start_of("r-0", replica=True, model=other), 20.9)) == "out_of_memory"
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    replica(agent, "r-1", 21.1, model=other)
    assert agent.ledger.gpus[0].role is GpuRole.DEDICATED
    agent.handle(msg.InFlight("i-1", 0, 0), 23.0)
    agent.handle(msg.EngineAsleep("i-1"), 23.1)
    assert owned(agent) == {("i-1", "prewarm"): 60, ("r-1", "prewarm"): 90}
    assert agent.ledger.gpus[0].role is GpuRole.UNIVERSAL


def test_resume_takes_the_kv_cache_back_or_the_drain_goes_on() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    effects = agent.handle(resume(), 21.5)
    assert told(effects) == ["instance.ready"] and of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 160 * MIB)]
    assert used(agent) == 220
    agent.handle(stop(), 22.0)
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 23.0)
    replica(agent, "r-1", 24.0, model=a_model("other", weights_bytes=90 * MIB))
    assert told(agent.handle(resume(), 25.5)) == ["instance.draining"] and "given away" in instance(agent).reason
    assert not told(agent.handle(resume(), 25.6))


def test_an_unknown_way_to_reserve_is_refused() -> None:
    with pytest.raises(ValueError, match="reservation is one of"):
        make(params=replace(PARAMS, reservation="guess"))


def test_a_cut_kv_cache_is_still_cut_after_a_restart() -> None:
    agent = draining(make(abilities=ALL, params=EQ1, mib=220))
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    replica(agent, "r-1", 22.0, model=a_model("other", weights_bytes=90 * MIB))
    reborn, _ = again(agent, {"i-1", "r-1"}, mib=220, params=EQ1)
    assert owned(reborn) == {("i-1", "weights"): 60, ("i-1", "kv"): 69, ("r-1", "prewarm"): 90}


def test_all_of_it_survives_being_written_down() -> None:
    agent = draining(make(abilities=ALL, params=EQ1))
    (written,) = of(msg.Remember, agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0))
    assert msgspec.json.decode(msgspec.json.encode(written.memory), type=msg.AgentMemory) == written.memory
