"""Adapters on the engine of their base: no process or bytes of their own, and no longer life."""

from typing import Any

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Tick
from tests.agent_steps import MODEL, CheckedAgent, code, facts, make, of, resume, start_of, stop, workers
from tests.fleet_builder import a_model

ABLE = ("adapters", "prewarm", "swap")
ADAPTER = a_model("poet", base=MODEL.key, adapter_rank=8, weights_bytes=10 << 20, kv_bytes=0)
LAUNCHES = (msg.LaunchEngine, msg.LoadEngine, msg.StopEngine)


def with_host(**fields: Any) -> CheckedAgent:
    return make(abilities=ABLE, **fields).serving(adapter_slots=2, adapter_rank=16)


def begin(agent: CheckedAgent, instance_id: str = "a-1", now_s: float = 12.0, **fields: Any) -> list[Any]:
    given = {"model": ADAPTER, "workers": workers(instance_id, 0), "host_id": "i-1"}
    return agent.handle(start_of(instance_id, **given | fields), now_s)


def serve(agent: CheckedAgent, instance_id: str = "a-1") -> CheckedAgent:
    begin(agent, instance_id)
    agent.handle(msg.WeightsComplete(instance_id, "/a"), 12.1)
    agent.handle(msg.EngineReady(instance_id, "http://e", key_id="k"), 12.2)
    return agent


def test_an_adapter_loads_into_its_host_and_takes_no_bytes_and_no_process() -> None:
    agent = with_host()
    assert (agent.used(), agent.instance().adapter_slots) == (240, 2)
    effects = begin(agent)
    assert [e.instance_id for e in of(msg.AwaitWeights, effects)] == ["a-1"] and not of(msg.LaunchEngine, effects)
    (load,) = of(msg.LoadAdapter, agent.handle(msg.WeightsComplete("a-1", "/a"), 12.1))
    assert (load.command.host_id, load.command.model, load.path) == ("i-1", ADAPTER, "/a")
    assert agent.state("a-1") == "loading"
    effects = agent.handle(msg.EngineReady("a-1", "http://e", key_id="k"), 12.2)
    row = agent.instance("a-1")
    assert facts(effects) == ["instance.ready"] and (row.host_id, row.url, row.key_id) == ("i-1", "http://e", "k")
    assert row.max_concurrency == agent.instance().max_concurrency and agent.used() == 240
    assert [e.instance_id for e in of(msg.CheckHealth, agent.handle(Tick(), 20.0))] == ["i-1"]


def test_the_launch_of_a_base_says_how_many_adapters_it_is_to_hold() -> None:
    agent = make(abilities=ABLE)
    (launch,) = of(msg.LaunchEngine, agent.handle(start_of(adapter_slots=4, adapter_rank=32), 10.0))
    assert (launch.command.adapter_slots, launch.command.adapter_rank) == (4, 32)


def test_a_stop_drains_the_adapter_and_leaves_its_host_ready() -> None:
    agent = serve(with_host())
    agent.handle(stop("a-1"), 20.0)
    assert agent.state("a-1") == "draining" and agent.state("i-1") == "ready"
    (count,) = of(msg.CountInFlight, agent.handle(Tick(), 20.4))
    assert count.adapter is not None
    assert (count.instance_id, count.adapter.host_id, count.adapter.model) == ("a-1", "i-1", ADAPTER)
    effects = agent.handle(msg.InFlight("a-1", 0), 20.5)
    assert [e.command.host_id for e in of(msg.UnloadAdapter, effects)] == ["i-1"] and not of(msg.StopEngine, effects)
    assert facts(agent.handle(msg.EngineGone("a-1"), 20.6)) == ["instance.stopped"] and agent.state("i-1") == "ready"


def test_an_adapter_that_does_not_fit_fails_with_the_reason_of_the_engine_and_its_base_serves_on() -> None:
    agent = with_host()
    begin(agent)
    agent.handle(msg.WeightsComplete("a-1", "/a"), 12.1)
    effects = agent.handle(msg.EngineStartFailed("a-1", "engine_failed", "rank 64 is greater than 16"), 12.2)
    assert code(effects) == "engine_failed" and "rank 64" in agent.instance("a-1").reason
    assert not of(msg.StopEngine, effects) and agent.state("i-1") == "ready" and agent.used() == 240


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"host_id": "i-9"}, "not there"),
        ({"model": a_model("poet", base="other", kv_bytes=0)}, "base is other"),
        ({"model": a_model("poet", base=MODEL.key, adapter_rank=64, kv_bytes=0)}, "up to rank 16"),
    ],
)
def test_what_a_host_cannot_take_is_refused(fields: dict[str, Any], why: str) -> None:
    agent = with_host()
    assert code(begin(agent, **fields)) in ("engine_unavailable", "bad_request")
    assert why in agent.instance("a-1").reason and agent.state("i-1") == "ready"


def test_a_host_takes_no_more_adapters_than_it_was_started_for() -> None:
    agent = serve(serve(with_host()), "a-2")
    assert code(begin(agent, "a-3")) == "engine_unavailable" and "all 2 places" in agent.instance("a-3").reason
    agent.stopped("a-1")
    assert facts(begin(agent, "a-4", 22.0)) == ["instance.starting"]


@pytest.mark.parametrize("refuses", [False, True])
def test_adapters_drain_with_their_host_and_are_gone_before_it_sleeps(refuses: bool) -> None:
    agent = serve(with_host(refuses=refuses))
    begin(agent, "a-2")
    effects = agent.handle(stop(becomes="swapped_out", grace_s=8.0), 20.0)
    assert agent.state("a-1") == "draining" and agent.state("a-2") == "draining"
    assert [e.instance_id for e in of(msg.UnloadAdapter, effects)] == ["a-2"], "a start is given up"
    if not refuses:
        agent.handle(msg.InFlight("i-1", 0), 21.0)
    agent.handle(msg.EngineAsleep("i-1"), 21.1)
    assert agent.state("i-1") == "swapped_out" and agent.used() == 0
    assert agent.holdings["a-1"].stop is not None, "it ends at once"
    for name in ("a-1", "a-2"):
        agent.handle(msg.EngineGone(name), 21.2)
        assert agent.state(name) == "stopped"


def test_an_adapter_is_not_taken_back_while_its_host_drains() -> None:
    agent = serve(with_host())
    agent.handle(stop("i-1"), 20.0)
    assert facts(agent.handle(resume("a-1"), 20.1)) == [], "not READY even for a moment"
    agent.handle(resume("i-1"), 20.2)
    agent.handle(resume("a-1"), 20.3)
    assert (agent.state("i-1"), agent.state("a-1")) == ("ready", "ready")


def test_adapters_fail_with_their_host() -> None:
    agent = serve(with_host())
    agent.handle(msg.EngineExited("i-1", "killed"), 20.0)
    assert agent.state("a-1") == "failed" and "killed" in agent.instance("a-1").reason
    agent.handle(msg.EngineGone("i-1"), 20.1)
    agent.handle(msg.EngineGone("a-1"), 20.1)
    assert agent.used() == 0


def test_after_a_kill_of_the_agent_its_adapters_are_what_their_host_is() -> None:
    agent = serve(with_host())
    begin(agent, "a-2")
    found, effects = agent.restarted(["i-1"], abilities=ABLE)
    assert found.state("a-1") == "ready" and found.state("a-2") == "starting", "it begins again"
    assert [e.instance_id for e in of(msg.UnloadAdapter, effects)] == ["a-2"]
    effects = found.handle(msg.EngineGone("a-2"), 50.1)
    assert [e.instance_id for e in of(msg.AwaitWeights, effects)] == ["a-2"] and not of(msg.LaunchEngine, effects)
    lost, _ = agent.restarted([], abilities=ABLE)
    assert {lost.state("a-1"), lost.state("i-1")} == {"failed"}
