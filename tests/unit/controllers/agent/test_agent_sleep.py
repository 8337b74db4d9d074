"""What a drained engine becomes: a replica, or asleep outside its GPU (WarmServe 4.2, SwapServeLLM 3.5)."""

from dataclasses import replace

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Tick
from tests.agent_steps import PARAMS, halves, instance, make, of, owned, resume, stop, told, used
from tests.dormant_steps import (
    ALL,
    again,
    drained,
    on_gpu,
    replica,
    serving,
    start_of,
    state,
)
from tests.fleet_builder import MIB


def test_section_4_1_a_drained_engine_keeps_its_weights_as_a_replica() -> None:
    """WarmServe section 4.2: the GPU holds the prewarm slots of the new models and of the one that ran before."""
    agent = serving(make(abilities=ALL))
    assert of(msg.SleepEngine, drained(agent, "prewarmed")) == [msg.SleepEngine("i-1", "prewarmed")]
    assert used(agent) == 240 and state(agent, "i-1") == "draining"
    effects = agent.handle(msg.EngineAsleep("i-1"), 22.0)
    row = instance(agent)
    assert told(effects) == ["instance.prewarmed"] and owned(agent) == {("i-1", "prewarm"): 60}
    assert row.replica and not row.serves and row.url == "" and row.workers[0].num_bytes == 60 * MIB
    assert of(msg.ActivateEngine, agent.handle(start_of("i-2", source="i-1"), 30.0)) and used(agent) == 240


def test_a_swapped_out_engine_holds_no_gpu_bytes_and_wakes_on_any_gpu() -> None:
    """SwapServeLLM section 3.5: a snapshot holds nothing of the GPU."""
    agent = serving(make(abilities=ALL, gpus=2))
    assert of(msg.SleepEngine, drained(agent, "swapped_out")) == [msg.SleepEngine("i-1", "swapped_out")]
    assert told(agent.handle(msg.EngineAsleep("i-1"), 22.0)) == ["instance.swapped_out"]
    assert used(agent) == 0 and not instance(agent).serves
    effects = agent.handle(start_of("i-2", source="i-1", workers=on_gpu(1)), 30.0)
    assert of(msg.ActivateEngine, effects) and used(agent, 1) == 240 and state(agent, "i-1") == "stopped"
    assert told(agent.handle(msg.EngineReady("i-2", "u"), 31.0)) == ["instance.ready"]


@pytest.mark.parametrize(("becomes", "abilities"), [("prewarmed", ("swap",)), ("swapped_out", ("prewarm",))])
def test_without_the_ability_a_drain_ends_in_a_stop(becomes: str, abilities: tuple[str, ...]) -> None:
    agent = serving(make(abilities=abilities))
    effects = drained(agent, becomes)
    assert of(msg.StopEngine, effects) and not of(msg.SleepEngine, effects)
    assert told(agent.handle(msg.EngineGone("i-1"), 22.0)) == ["instance.stopped"]


def test_over_the_budget_of_host_memory_an_engine_simply_stops() -> None:
    params = replace(PARAMS, swap_host_bytes=100 * MIB)  # one snapshot of 84 MiB
    agent = serving(make(abilities=ALL, gpus=2, params=params))
    agent.handle(start_of("i-2", workers=on_gpu(1)), 12.0)
    halves(agent, "i-2", 12.5)
    agent.handle(msg.EngineReady("i-2", "u"), 13.0)
    agent.handle(stop("i-2", becomes="swapped_out"), 14.0)
    assert of(msg.StopEngine, drained(agent, "swapped_out"))  # promised to i-2, though that still drains
    agent.handle(msg.EngineGone("i-1"), 22.0)
    assert of(msg.SleepEngine, agent.handle(msg.InFlight("i-2", 0), 22.5))
    agent.handle(msg.EngineAsleep("i-2"), 23.0)
    agent.handle(stop("i-2", grace_s=0), 24.0)
    agent.handle(msg.EngineGone("i-2"), 25.0)
    serving(agent, "i-3", 30.0)
    agent.handle(stop("i-3", becomes="swapped_out"), 40.0)
    assert of(msg.SleepEngine, agent.handle(msg.InFlight("i-3", 0), 41.0))


def test_grace_that_is_over_puts_to_sleep_too() -> None:
    agent = serving(make(abilities=ALL))
    agent.handle(stop(grace_s=5, becomes="swapped_out"), 20.0)
    agent.handle(msg.InFlight("i-1", 3), 24.0)
    assert of(msg.SleepEngine, agent.handle(Tick(), 25.0))


def test_a_sleep_that_never_ends_is_a_stop() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "swapped_out")
    assert not of(msg.StopEngine, agent.handle(Tick(), 22.0)) and not of(msg.CountInFlight, agent.handle(Tick(), 23.0))
    assert of(msg.StopEngine, agent.handle(Tick(), 81.0))
    assert not told(agent.handle(msg.EngineAsleep("i-1"), 82.0))
    assert told(agent.handle(msg.EngineGone("i-1"), 83.0)) == ["instance.stopped"] and used(agent) == 0


def test_an_engine_that_could_not_sleep_is_stopped() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    assert told(agent.handle(msg.EngineGone("i-1"), 22.0)) == ["instance.stopped"] and used(agent) == 0


def test_a_stop_is_stronger_than_a_sleep() -> None:
    agent = serving(make(abilities=ALL))
    agent.handle(stop(becomes="prewarmed"), 20.0)
    agent.handle(stop(), 20.1)
    assert of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 21.0))
    other = serving(make(abilities=ALL))
    drained(other, "prewarmed")
    assert of(msg.StopEngine, other.handle(stop(), 21.5)) and not told(other.handle(msg.EngineAsleep("i-1"), 21.6))


def test_commands_that_come_twice_do_not_wake_or_drop_what_sleeps() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    assert not of(msg.StopEngine, agent.handle(stop(grace_s=0, becomes="prewarmed"), 21.5))
    assert not told(agent.handle(resume(), 21.6))
    agent.handle(msg.EngineAsleep("i-1"), 22.0)
    assert not told(agent.handle(stop(grace_s=0, becomes="prewarmed"), 22.1)) and not told(agent.handle(resume(), 22.2))
    assert not told(agent.handle(msg.EngineAsleep("i-1"), 22.3)) and state(agent, "i-1") == "prewarmed"


def test_resume_takes_the_sleep_back() -> None:
    agent = serving(make(abilities=ALL))
    agent.handle(stop(becomes="swapped_out"), 20.0)
    assert told(agent.handle(resume(), 20.5)) == ["instance.ready"]
    agent.handle(stop(), 30.0)
    assert of(msg.StopEngine, agent.handle(msg.InFlight("i-1", 0), 31.0))


def test_a_start_under_way_has_nothing_to_keep() -> None:
    agent = make(abilities=ALL)
    agent.handle(start_of("i-1"), 10.0)
    assert of(msg.StopEngine, agent.handle(stop(becomes="prewarmed"), 11.0)) == [msg.StopEngine("i-1", 0.0)]


def test_what_sleeps_is_not_asked_for_its_health() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    for _ in range(5):
        agent.handle(msg.HealthSeen("i-1", ok=False, reason="frozen"), 21.5)
    agent.handle(msg.EngineAsleep("i-1"), 22.0)
    effects = agent.handle(Tick(), 30.0)
    assert (
        not of(msg.CheckHealth, effects) and not of(msg.CountInFlight, effects) and state(agent, "i-1") == "prewarmed"
    )


def test_a_stopping_node_ends_what_sleeps() -> None:
    agent = replica(serving(make(abilities=ALL)), "r-1", 15.0)
    effects = agent.handle(msg.NodeStopping("bye", 0.0), 20.0)
    assert {e.instance_id for e in of(msg.StopEngine, effects)} == {"i-1", "r-1"}
    agent.handle(msg.EngineGone("i-1"), 21.0)
    agent.handle(msg.EngineGone("r-1"), 21.0)
    assert agent.num_living == 0 and used(agent) == 0


def test_what_sleeps_is_taken_back_after_a_restart() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    serving(agent)
    drained(agent, "swapped_out")
    agent.handle(msg.EngineAsleep("i-1"), 22.0)
    reborn, effects = again(agent, {"r-1", "i-1"})
    assert sorted(told(effects)) == ["instance.prewarmed", "instance.swapped_out"] and not of(msg.StopEngine, effects)
    assert owned(reborn) == {("r-1", "prewarm"): 60}
    assert of(msg.ActivateEngine, reborn.handle(start_of("i-2", source="i-1"), 51.0))


def test_what_slept_and_is_gone_after_a_restart_is_stopped() -> None:
    agent = replica(make(abilities=ALL), "r-1")
    serving(agent)
    drained(agent, "swapped_out")
    agent.handle(msg.EngineAsleep("i-1"), 22.0)
    reborn, effects = again(agent, set())
    assert told(effects) == ["instance.stopped"] * 2 and used(reborn) == 0
    assert {e.instance_id for e in of(msg.StopEngine, effects)} == {"i-1", "r-1"}
    reborn.handle(msg.EngineGone("i-1"), 51.0)
    reborn.handle(msg.EngineGone("r-1"), 51.0)
    assert reborn.num_living == 0


def test_a_sleep_under_way_is_asked_for_again_after_a_restart() -> None:
    agent = serving(make(abilities=ALL))
    drained(agent, "prewarmed")
    reborn, effects = again(agent, {"i-1"})
    assert told(effects) == ["instance.draining"]
    assert of(msg.SleepEngine, reborn.handle(msg.InFlight("i-1", 0), 51.0))
