"""Drain outcomes, and KV caches that give way (WarmServe section 4.1, SwapServeLLM section 3.5)."""

from dataclasses import replace

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Tick
from glowplug.domain.hardware import GpuRole
from glowplug.domain.reading import Misread, laid_over
from tests.agent_steps import (
    ALL,
    EQ1,
    PARAMS,
    WIDE,
    code,
    facts,
    make,
    of,
    resume,
    start,
    start_of,
    stop,
    workers,
)
from tests.fleet_builder import MIB, a_model


def test_section_4_1_a_drained_engine_keeps_its_weights_as_a_replica() -> None:
    """WarmServe section 4.2."""
    agent = make(abilities=ALL).serving()
    assert of(msg.SleepEngine, agent.drained("prewarmed")) == [msg.SleepEngine("i-1", "prewarmed")]
    assert agent.used() == 240 and agent.state("i-1") == "draining"
    effects = agent.handle(msg.EngineAsleep("i-1"), 22.0)
    row = agent.instance()
    assert facts(effects) == ["instance.prewarmed"] and agent.owned() == {("i-1", "prewarm"): 60}
    assert row.replica and not row.serves and row.url == "" and row.workers[0].num_bytes == 60 * MIB
    assert of(msg.ActivateEngine, agent.handle(start_of("i-2", source="i-1"), 30.0)) and agent.used() == 240


def test_a_swapped_out_engine_holds_no_gpu_bytes_and_wakes_on_any_gpu() -> None:
    """SwapServeLLM section 3.5."""
    agent = make(abilities=ALL, gpus=2).serving()
    assert of(msg.SleepEngine, agent.drained("swapped_out")) == [msg.SleepEngine("i-1", "swapped_out")]
    assert facts(agent.handle(msg.EngineAsleep("i-1"), 22.0)) == ["instance.swapped_out"]
    assert agent.used() == 0 and not agent.instance().serves
    effects = agent.handle(start_of("i-2", source="i-1", workers=workers("i-1", 1)), 30.0)
    assert of(msg.ActivateEngine, effects) and agent.used(1) == 240 and agent.state("i-1") == "stopped"
    assert facts(agent.handle(msg.EngineReady("i-2", "u"), 31.0)) == ["instance.ready"]


def test_an_engine_that_refuses_is_asked_to_sleep_at_once() -> None:
    agent = make(abilities=ALL, refuses=True).serving()
    effects = agent.handle(stop(becomes="swapped_out"), 20.0)
    assert of(msg.SleepEngine, effects) == [msg.SleepEngine("i-1", "swapped_out", if_idle=True)]
    assert facts(effects) == ["instance.draining"] and agent.used() == 240
    (report,) = of(msg.ReportDrain, agent.handle(msg.EngineAsleep("i-1"), 20.02))
    assert agent.used() == 0 and [(s.started_at, s.ended_at) for s in report.spells] == [(20.0, 20.0), (20.0, 20.02)]


def test_the_report_of_a_sleep_carries_what_its_command_expected() -> None:
    agent = make(abilities=ALL, refuses=True).serving()
    agent.handle(stop(becomes="swapped_out", predicted_s=0.03), 20.0)
    (report,) = of(msg.ReportDrain, agent.handle(msg.EngineAsleep("i-1"), 20.02))
    assert [spell.predicted_s for spell in report.spells] == [0.0, 0.03]


def test_an_engine_that_refuses_and_is_busy_drains_for_its_grace() -> None:
    agent = make(abilities=ALL, refuses=True).serving()
    agent.handle(stop(becomes="swapped_out", grace_s=8.0), 20.0)
    agent.handle(msg.EngineBusy("i-1", 2), 20.02)
    assert of(msg.CountInFlight, agent.handle(Tick(), 20.05)), "it drains"
    assert not agent.handle(msg.InFlight("i-1", 2), 20.06)
    asked = of(msg.SleepEngine, agent.handle(msg.InFlight("i-1", 0), 21.0))
    assert asked == [msg.SleepEngine("i-1", "swapped_out", if_idle=True)]
    agent.handle(msg.EngineBusy("i-1", 1), 21.02)
    asked = of(msg.SleepEngine, agent.handle(Tick(), 28.0))
    assert asked == [msg.SleepEngine("i-1", "swapped_out")], "its grace is over: what still runs ends"
    assert not agent.handle(msg.EngineBusy("i-1", 1), 28.02), "it was not asked whether it is busy"


def test_an_engine_that_refuses_drains_as_any_other_where_it_is_to_stop() -> None:
    agent = make(abilities=ALL, refuses=True).serving()
    assert not of(msg.StopEngine, agent.handle(stop(), 20.0))
    assert of(msg.CountInFlight, agent.handle(Tick(), 20.31))


def test_what_a_sleeper_keeps_is_granted_and_gives_way_to_whatever_starts() -> None:
    agent = make(abilities=ALL, gpu_kind="cuda").serving().asleep("swapped_out", keeps=20 * MIB)
    all_of_it = a_model("wider", weights_bytes=70 * MIB, kv_bytes=220 * MIB)
    assert agent.owned() == {("i-1", "sleeper"): 20} and agent.ledger.gpus[0].free_bytes == 300 * MIB
    agent.serving("i-2", 30.0, model=a_model("wide", weights_bytes=70 * MIB, kv_bytes=200 * MIB))
    assert agent.state("i-1") == "swapped_out" and agent.used() == 270, "there is enough for both"
    effects = agent.stopped("i-2", 40.0) and agent.handle(start_of("i-3", model=all_of_it), 50.0)
    assert agent.state("i-1") == "stopped" and "memory it keeps" in agent.instance().reason
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-1", 0.0)] and agent.used() == 290


def test_on_host_memory_what_a_process_keeps_is_beside_its_grant() -> None:
    agent = make(abilities=ALL).serving().asleep("swapped_out", keeps=20 * MIB)
    assert agent.owned() == {} and agent.state("i-1") == "swapped_out"


def test_a_sleeping_process_keeps_its_device() -> None:
    agent = make(abilities=ALL, gpus=2, gpu_kind="cuda").serving().asleep("swapped_out")
    effects = agent.handle(start_of("i-2", source="i-1", workers=workers("i-1", 1)), 30.0)
    assert of(msg.LaunchEngine, effects) and not of(msg.ActivateEngine, effects)


def test_a_sleeper_that_wakes_takes_its_rest_along() -> None:
    agent = make(abilities=ALL, gpu_kind="cuda").serving().asleep("swapped_out", keeps=20 * MIB)
    agent.handle(start_of("i-2", source="i-1"), 30.0)
    assert agent.owned() == {("i-2", "weights"): 60, ("i-2", "kv"): 180}


@pytest.mark.parametrize(
    ("becomes", "kept", "state"),
    [
        ("swapped_out", 30, "swapped_out"),
        ("swapped_out", 31, "draining"),
        ("prewarmed", 90, "prewarmed"),
        ("prewarmed", 91, "draining"),
    ],
)
def test_an_engine_that_keeps_more_than_it_may_is_stopped_with_the_reason(becomes: str, kept: int, state: str) -> None:
    """Limit: 30 MiB, plus 60 MiB of weights where they stay."""
    agent = make(abilities=ALL, asleep_mib=30).serving()
    agent.drained(becomes)
    effects = agent.handle(msg.EngineAsleep("i-1", kept * MIB), 22.0)
    assert agent.state("i-1") == state and bool(of(msg.StopEngine, effects)) == (state == "draining")
    if state == "draining":
        assert f"keeps {kept} MiB" in agent.instance().reason and agent.used() == 240, "its bytes are not free yet"
        agent.handle(msg.EngineGone("i-1"), 23.0)
        assert agent.used() == 0


def test_a_rest_is_known_after_a_restart() -> None:
    agent = make(abilities=ALL, gpu_kind="cuda").serving().asleep("swapped_out", keeps=20 * MIB)
    reborn, _ = agent.restarted(["i-1"], abilities=ALL, gpu_kind="cuda")
    assert reborn.owned() == {("i-1", "sleeper"): 20} and reborn.state("i-1") == "swapped_out"


@pytest.mark.parametrize(("becomes", "abilities"), [("prewarmed", ("swap",)), ("swapped_out", ("prewarm",))])
def test_without_the_ability_a_drain_ends_in_a_stop(becomes: str, abilities: tuple[str, ...]) -> None:
    agent = make(abilities=abilities).serving()
    effects = agent.drained(becomes)
    assert of(msg.StopEngine, effects) and not of(msg.SleepEngine, effects)
    assert facts(agent.handle(msg.EngineGone("i-1"), 22.0)) == ["instance.stopped"]


def test_over_the_budget_of_host_memory_an_engine_simply_stops() -> None:
    params = replace(PARAMS, swap_host_bytes=100 * MIB)  # room for one snapshot of 84 MiB
    agent = make(abilities=ALL, gpus=2, params=params).serving()
    agent.serving("i-2", 12.0, workers=workers("i-2", 1))
    agent.handle(stop("i-2", becomes="swapped_out"), 14.0)
    assert of(msg.StopEngine, agent.drained("swapped_out"))  # promised to i-2, which still drains
    why = "84 MiB beside 84 MiB is more than the 100 MiB that engines asleep may take"
    assert agent.instance().reason.startswith("idle; it stops instead of sleeping") and why in agent.instance().reason
    agent.handle(msg.EngineGone("i-1"), 22.0)
    assert of(msg.SleepEngine, agent.handle(msg.InFlight("i-2", 0), 22.5))
    agent.handle(msg.EngineAsleep("i-2"), 23.0)
    agent.stopped("i-2", 24.0)
    agent.serving("i-3", 30.0)
    agent.handle(stop("i-3", becomes="swapped_out"), 40.0)
    assert of(msg.SleepEngine, agent.handle(msg.InFlight("i-3", 0), 41.0))


def test_grace_that_is_over_puts_to_sleep_too() -> None:
    agent = make(abilities=ALL).serving()
    agent.handle(stop(grace_s=5, becomes="swapped_out"), 20.0)
    agent.handle(msg.InFlight("i-1", 3), 24.0)
    assert of(msg.SleepEngine, agent.handle(Tick(), 25.0))


def test_a_sleep_that_never_ends_is_a_stop() -> None:
    agent = make(abilities=ALL).serving()
    agent.drained("swapped_out")
    assert not of(msg.StopEngine, agent.handle(Tick(), 22.0)) and not of(msg.CountInFlight, agent.handle(Tick(), 23.0))
    assert of(msg.StopEngine, agent.handle(Tick(), 51.0)) == [msg.StopEngine("i-1", 0.0)], "whoever waits needs it now"
    assert not facts(agent.handle(msg.EngineAsleep("i-1"), 52.0)) and agent.used() == 240
    assert facts(agent.handle(msg.EngineGone("i-1"), 53.0)) == ["instance.stopped"] and agent.used() == 0
    assert "not asleep after 30 s" in agent.instance().reason


@pytest.mark.parametrize("becomes", ["prewarmed", "swapped_out"])
def test_an_engine_that_cannot_sleep_is_stopped_with_the_reason(becomes: str) -> None:
    agent = make(abilities=ALL).serving()
    agent.drained(becomes)
    effects = agent.handle(msg.SleepFailed("i-1", "its KV cache was not found"), 22.0)
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-1", 0.0)] and agent.used() == 240
    assert not of(msg.StopEngine, agent.handle(msg.SleepFailed("i-1", "again"), 22.1)), "it ends already"
    assert facts(agent.handle(msg.EngineGone("i-1"), 23.0)) == ["instance.stopped"] and agent.used() == 0
    assert agent.instance().reason.endswith("is stopped: its KV cache was not found")


def test_an_engine_that_dies_while_it_falls_asleep_has_failed() -> None:
    agent = make(abilities=ALL).serving()
    agent.drained("swapped_out")
    assert code(agent.handle(msg.EngineExited("i-1", "killed"), 22.0)) == "engine_failed"
    agent.handle(msg.EngineGone("i-1"), 23.0)
    assert agent.used() == 0 and agent.holdings["i-1"].snapshot_bytes == 0 and agent.instance().reason == "killed"


@pytest.mark.parametrize("lies", ["prewarmed", "swapped_out"])
@pytest.mark.parametrize("how", ["it fails", "it dies", "it hangs"])
def test_a_wake_that_fails_returns_the_bytes_and_the_next_start_is_from_scratch(lies: str, how: str) -> None:
    agent = make(abilities=ALL).serving().asleep(lies)
    agent.handle(start_of("i-2", source="i-1"), 30.0)
    assert not of(msg.StopEngine, agent.handle(Tick(), 59.0)) and agent.state("i-2") == "loading"
    end, why = {
        "it fails": (msg.EngineStartFailed("i-2", "engine_failed", "it answers otherwise"), "it answers otherwise"),
        "it dies": (msg.EngineExited("i-2", "killed"), "killed"),
        "it hangs": (Tick(), "the engine of i-1 did not wake within 30 s"),
    }[how]
    effects = agent.handle(end, 60.0)
    assert facts(effects) == ["instance.failed"] and agent.instance("i-2").reason == why
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-2", 0.0)] and agent.used() == 240, "not before it is gone"
    agent.handle(msg.EngineGone("i-2"), 61.0)
    assert agent.used() == 0
    effects = agent.handle(start_of("i-3", source="i-1"), 62.0)
    assert of(msg.LaunchEngine, effects) and agent.used() == 240


def test_without_memory_for_a_wake_the_sleeper_sleeps_on() -> None:
    agent = make(abilities=ALL, gpu_kind="cuda").serving().asleep("swapped_out", keeps=20 * MIB)
    agent.serving("i-2", 30.0, model=a_model("other", weights_bytes=60 * MIB, kv_bytes=100 * MIB))
    before = agent.ledger.gpus
    effects = agent.handle(start_of("i-3", source="i-1"), 40.0)
    assert code(effects) == "out_of_memory" and "has 140 MiB of 300 MiB free" in agent.instance("i-3").reason
    assert agent.ledger.gpus == before and agent.state("i-1") == "swapped_out" and not of(msg.StopEngine, effects)
    agent.stopped("i-2", 50.0)
    assert of(msg.ActivateEngine, agent.handle(start_of("i-4", source="i-1"), 60.0))


def test_a_stop_is_stronger_than_a_sleep() -> None:
    agent = make(abilities=ALL).serving()
    agent.handle(stop(becomes="prewarmed"), 20.0)
    agent.handle(stop(), 20.1)
    assert of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 21.0))
    other = make(abilities=ALL).serving()
    other.drained("prewarmed")
    assert of(msg.StopEngine, other.handle(stop(), 21.5)) and not facts(other.handle(msg.EngineAsleep("i-1"), 21.6))


def test_commands_that_come_twice_do_not_wake_or_drop_what_sleeps() -> None:
    agent = make(abilities=ALL).serving()
    agent.drained("prewarmed")
    assert not of(msg.StopEngine, agent.handle(stop(grace_s=0, becomes="prewarmed"), 21.5))
    assert not facts(agent.handle(resume(), 21.6))
    agent.handle(msg.EngineAsleep("i-1"), 22.0)
    assert not facts(agent.handle(stop(grace_s=0, becomes="prewarmed"), 22.1)) and not facts(
        agent.handle(resume(), 22.2)
    )
    assert not facts(agent.handle(msg.EngineAsleep("i-1"), 22.3)) and agent.state("i-1") == "prewarmed"


def test_resume_takes_the_sleep_back() -> None:
    agent = make(abilities=ALL).serving()
    agent.handle(stop(becomes="swapped_out"), 20.0)
    assert facts(agent.handle(resume(), 20.5)) == ["instance.ready"]
    agent.handle(stop(), 30.0)
    assert of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 31.0))


def test_a_start_under_way_has_nothing_to_keep() -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("i-1"), 10.0)
    assert of(msg.StopEngine, agent.handle(stop(becomes="prewarmed"), 11.0)) == [msg.StopEngine("i-1", 0.0)]


def test_what_sleeps_is_not_asked_for_its_health() -> None:
    agent = make(abilities=ALL).serving()
    agent.drained("prewarmed")
    for _ in range(5):
        agent.handle(msg.HealthSeen("i-1", ok=False, reason="frozen"), 21.5)
    agent.handle(msg.EngineAsleep("i-1"), 22.0)
    effects = agent.handle(Tick(), 30.0)
    assert not of(msg.CheckHealth, effects) and not of(msg.CountInFlight, effects)
    assert agent.state("i-1") == "prewarmed"


def test_a_stopping_node_ends_what_sleeps() -> None:
    agent = make(abilities=ALL).serving().replica("r-1", 15.0)
    effects = agent.handle(msg.NodeStopping("bye", 0.0), 20.0)
    assert {e.instance_id for e in of(msg.StopEngine, effects)} == {"i-1", "r-1"}
    agent.handle(msg.EngineGone("i-1"), 21.0)
    agent.handle(msg.EngineGone("r-1"), 21.0)
    assert agent.num_living == 0 and agent.used() == 0


def test_what_sleeps_is_taken_back_after_a_restart_and_ends_where_it_is_gone() -> None:
    agent = make(abilities=ALL).replica().serving().asleep("swapped_out")
    reborn, effects = agent.restarted({"r-1", "i-1"}, abilities=ALL)
    assert sorted(facts(effects)) == ["instance.prewarmed", "instance.swapped_out"] and not of(msg.StopEngine, effects)
    assert reborn.owned() == {("r-1", "prewarm"): 60}
    assert of(msg.ActivateEngine, reborn.handle(start_of("i-2", source="i-1"), 51.0))
    reborn, effects = agent.restarted(set(), abilities=ALL)
    assert facts(effects) == ["instance.stopped"] * 2 and reborn.used() == 0
    assert {e.instance_id for e in of(msg.StopEngine, effects)} == {"i-1", "r-1"}
    for instance_id in ("i-1", "r-1"):
        reborn.handle(msg.EngineGone(instance_id), 51.0)
    assert reborn.num_living == 0


def test_a_sleep_under_way_is_asked_for_again_after_a_restart() -> None:
    agent = make(abilities=ALL).serving()
    agent.drained("prewarmed")
    reborn, effects = agent.restarted({"i-1"}, abilities=ALL)
    assert facts(effects) == ["instance.draining"] and of(msg.SleepEngine, effects)
    assert not of(msg.StopEngine, reborn.handle(Tick(), 79.0)), "its time begins anew"
    assert facts(reborn.handle(resume("i-1"), 51.0)) == [], "it may sleep already"
    assert facts(reborn.handle(msg.EngineAsleep("i-1"), 52.0)) == ["instance.prewarmed"]


def test_a_sleeper_that_fails_keeps_nothing_of_its_gpu() -> None:
    agent = make(abilities=ALL, gpu_kind="cuda").serving().asleep("swapped_out", keeps=20 * MIB)
    assert of(msg.StopEngine, agent.handle(msg.EngineExited("i-1", "killed"), 30.0)) and agent.owned() == {}


# WarmServe section 4.1, Eq. 1


@pytest.mark.parametrize(
    ("reservation", "kept_mib"),
    [("paper", 69), ("literal_code", 104)],  # at R/C = 8/32 and K = 40 %: 57 % and 35 % are freed (erratum E3)
)
def test_eq_1_frees_what_running_requests_cannot_need(reservation: str, kept_mib: int) -> None:
    agent = make(abilities=ALL, params=replace(EQ1, reservation=reservation)).draining()
    effects = agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", kept_mib * MIB)]
    assert agent.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): kept_mib}
    assert any(e.payload.TYPE == "node.beat" for e in effects if hasattr(e, "payload"))
    assert not of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.1))


def test_eq_1_keeps_a_buffer_above_what_is_used() -> None:
    agent = make(abilities=ALL, params=EQ1).draining()
    agent.handle(msg.InFlight("i-1", 2, 10 * MIB), 21.0)
    assert agent.owned()[("i-1", "kv")] == 15  # max(160 x 2/32, 10 + 160/32)
    assert not of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 2, 13 * MIB), 21.1))  # covered by the buffer


def test_section_4_1_a_cache_that_became_too_small_evicts_the_recently_loaded_weights() -> None:
    agent = make(abilities=ALL, params=EQ1, mib=220).draining()
    agent.handle(msg.InFlight("i-1", 2, 10 * MIB), 21.0)
    for n in range(2):
        agent.replica(f"r-{n}", 22.0 + n, model=a_model(f"m{n}", weights_bytes=70 * MIB))
    assert agent.used() == 215
    effects = agent.handle(msg.InFlight("i-1", 2, 14 * MIB), 25.0)  # 5 MiB free, 19 wanted
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 19 * MIB)] and not facts(effects)
    effects = agent.handle(msg.InFlight("i-1", 2, 18 * MIB), 26.0)
    assert facts(effects) == ["instance.stopped"]
    assert agent.state("r-1") == "stopped" and agent.state("r-0") != "stopped"
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 23 * MIB)] and agent.owned()[("i-1", "kv")] == 23


def test_a_cache_takes_what_there_is_when_nobody_can_give_way() -> None:
    agent = make(abilities=ALL, params=EQ1, mib=220).draining()
    agent.handle(msg.InFlight("i-1", 2, 10 * MIB), 21.0)
    agent.handle(start("i-2", mib=142), 22.0)
    effects = agent.handle(msg.InFlight("i-1", 2, 15 * MIB), 23.0)
    assert of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 18 * MIB)] and agent.used() == 220
    assert not of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 2, 18 * MIB), 24.0))


@pytest.mark.parametrize("case", ["off", "no ability", "unknown use", "before routers know", "not draining"])
def test_eq_1_is_left_alone(case: str) -> None:
    agent = make(abilities=() if case == "no ability" else ALL, params=PARAMS if case == "off" else EQ1)
    agent.serving(model=WIDE)
    if case != "not draining":
        agent.handle(stop(becomes="prewarmed"), 20.0)
    seen = msg.InFlight("i-1", 1, -1 if case == "unknown use" else 0)
    effects = agent.handle(seen, 20.1 if case == "before routers know" else 21.0)
    assert not of(msg.LimitKv, effects) and agent.used() == 220


def test_eq_1_shrinks_each_gpu_of_a_group_evenly() -> None:
    agent = make(abilities=ALL, params=EQ1, gpus=2)
    agent.serving(model=replace(WIDE, num_gpus=2), workers=workers("i-1", 0, 1))
    agent.handle(stop(), 20.0)
    assert of(msg.LimitKv, agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0))[0].num_bytes == 69 * MIB
    assert [agent.owned(n)[("i-1", "kv")] for n in (0, 1)] == [34, 34]  # 34.5


def test_a_replica_is_prewarmed_beside_a_draining_engine_and_outlives_it() -> None:
    """WarmServe Fig. 5(b): dedicated in its grace -> universal."""
    agent = make(abilities=ALL, params=EQ1, mib=220).draining()
    other = a_model("other", weights_bytes=90 * MIB, kv_bytes=100 * MIB)
    assert code(agent.handle(start_of("r-0", replica=True, model=other), 20.9)) == "out_of_memory"
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    agent.replica("r-1", 21.1, model=other)
    assert agent.ledger.gpus[0].role is GpuRole.DEDICATED
    agent.handle(msg.InFlight("i-1", 0, 0), 23.0)
    agent.handle(msg.EngineAsleep("i-1"), 23.1)
    assert agent.owned() == {("i-1", "prewarm"): 60, ("r-1", "prewarm"): 90}
    assert agent.ledger.gpus[0].role is GpuRole.UNIVERSAL


def test_resume_takes_the_kv_cache_back_or_the_drain_goes_on() -> None:
    agent = make(abilities=ALL, params=EQ1, mib=220).draining()
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    effects = agent.handle(resume(), 21.5)
    assert facts(effects) == ["instance.ready"] and of(msg.LimitKv, effects) == [msg.LimitKv("i-1", 160 * MIB)]
    assert agent.used() == 220
    agent.handle(stop(), 22.0)
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 23.0)
    agent.replica("r-1", 24.0, model=a_model("other", weights_bytes=90 * MIB))
    assert facts(agent.handle(resume(), 25.5)) == ["instance.draining"] and "given away" in agent.instance().reason
    assert not facts(agent.handle(resume(), 25.6))


def test_an_unknown_way_to_reserve_is_refused() -> None:
    with pytest.raises(Misread, match="reservation: 'guess' is not one of '', paper, literal_code"):
        laid_over(PARAMS, {"reservation": "guess"})


def test_a_cut_kv_cache_is_still_cut_after_a_restart() -> None:
    agent = make(abilities=ALL, params=EQ1, mib=220).draining()
    agent.handle(msg.InFlight("i-1", 8, 64 * MIB), 21.0)
    agent.replica("r-1", 22.0, model=a_model("other", weights_bytes=90 * MIB))
    reborn, _ = agent.restarted({"i-1", "r-1"}, abilities=ALL, mib=220, params=EQ1)
    assert reborn.owned() == {("i-1", "weights"): 60, ("i-1", "kv"): 69, ("r-1", "prewarm"): 90}
