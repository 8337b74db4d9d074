"""Restarted agents: wrong stores."""

from dataclasses import replace

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Remove, Save, Tick
from glowplug.domain.instance import InstanceState
from tests.agent_steps import NODE, code, facts, make, of, start, stop
from tests.fleet_builder import an_instance


def test_living_engine_is_taken_back_as_it_was() -> None:
    before = make().ready()
    agent, effects = before.restarted({"i-1"})
    now = agent.instance()
    assert facts(effects) == ["instance.ready"] and now.url == "http://e:1" and agent.used() == 100
    assert now.revision == before.instance().revision + 1 and not of(msg.StopEngine, effects)
    assert now.start_kind == "cold"


def test_engine_that_died_meanwhile_is_failed() -> None:
    agent, effects = make().ready().restarted(set())
    assert code(effects) == "engine_failed" and of(msg.StopEngine, effects)
    agent.handle(msg.EngineGone("i-1"), 51.0)
    assert agent.used() == 0


def test_start_under_way_begins_again() -> None:
    before = make()
    before.handle(start(), 10.0)
    before.handle(msg.EngineLaunched("i-1"), 11.0)
    agent, effects = before.restarted({"i-1"})
    assert of(msg.StopEngine, effects) == [msg.StopEngine("i-1", 0.0)] and facts(effects) == ["instance.starting"]
    effects = agent.handle(msg.EngineGone("i-1"), 51.0)
    assert of(msg.LaunchEngine, effects) and of(msg.AwaitWeights, effects)[0].deadline_at == 110.0
    assert agent.used() == 100
    agent.halves("i-1", 53.0)
    agent.handle(msg.EngineReady("i-1", "u"), 54.0)
    assert agent.instance().state is InstanceState.READY


def test_drain_goes_on_over_a_restart() -> None:
    before = make().ready()
    before.handle(stop(), 20.0)
    agent, effects = before.restarted({"i-1"}, 21.0)
    assert facts(effects) == ["instance.draining"]
    agent.handle(msg.InFlight("i-1", 0), 22.0)
    assert facts(agent.handle(msg.EngineGone("i-1"), 23.0)) == ["instance.stopped"]


def test_stop_under_way_is_asked_again_after_a_restart() -> None:
    before = make().ready()
    before.handle(stop(grace_s=0), 20.0)
    agent, effects = before.restarted({"i-1"})
    assert of(msg.StopEngine, effects) and agent.used() == 100
    assert facts(agent.handle(msg.EngineGone("i-1"), 51.0)) == ["instance.stopped"] and agent.used() == 0


def test_gpu_that_became_too_small_fails_what_does_not_fit() -> None:
    agent, effects = make().ready().restarted({"i-1"}, mib=50)
    assert code(effects) == "out_of_memory" and of(msg.StopEngine, effects) and agent.used() == 0
    agent.handle(msg.EngineGone("i-1"), 51.0)
    assert agent.num_living == 0


def test_store_is_healed_where_it_is_behind() -> None:
    agent = make().ready()
    current = agent.instance()
    assert of(Save, agent.restore("instances", {}, 20.0)) == [Save("instances", "i-1", current)]
    behind = {"i-1": replace(current, revision=1)}
    assert of(Save, agent.restore("instances", behind, 21.0)) == [Save("instances", "i-1", current)]
    assert not agent.restore("instances", {"i-1": current}, 22.0)


def test_store_that_is_ahead_is_overtaken() -> None:
    agent = make().ready()
    effects = agent.restore("instances", {"i-1": replace(agent.instance(), revision=40)}, 20.0)
    assert agent.instance().revision == 41 and facts(effects) == ["instance.ready"] and of(msg.Remember, effects)


def test_node_given_up_too_early_is_taken_back() -> None:
    """The placer missed beats and failed its instances, at the revision just published."""
    agent, _ = make().ready().restarted({"i-1"})
    failed = replace(agent.instance(), state=InstanceState.FAILED, reason="its node has left")
    effects = agent.restore("instances", {"i-1": failed}, 51.0)
    (saved,) = of(Save, effects)
    assert facts(effects) == ["instance.ready"] and saved.value.revision == failed.revision + 1


def test_rows_of_this_node_that_nobody_knows_are_ended_then_removed() -> None:
    agent = make()
    row = an_instance("i-7", gpu_id=f"{NODE}/0", revision=3)
    other = an_instance("i-8", gpu_id="node-2/0")
    effects = agent.restore("instances", {"i-7": row, "i-8": other}, 20.0)
    (saved,) = of(Save, effects)
    assert (saved.value.state, saved.value.revision) == (InstanceState.FAILED, 4)
    assert facts(effects) == ["instance.failed"]
    assert not agent.restore("instances", {"i-7": saved.value}, 30.0)
    assert agent.restore("instances", {"i-7": saved.value}, 200.0) == [Remove("instances", "i-7")]


def test_outcomes_of_unknown_instances_are_ignored() -> None:
    agent = make()
    agent.handle(Tick(), 1.0)
    assert agent.handle(msg.EngineGone("i-404"), 1.1) == [] and agent.handle(msg.InFlight("i-404", 0), 1.2) == []


def test_instance_given_to_another_node_later_is_theirs() -> None:
    agent = make().ready()
    theirs = an_instance("i-1", gpu_id="node-2/0", created_at=15.0, revision=1)
    effects = agent.restore("instances", {"i-1": theirs}, 20.0)
    assert of(msg.StopEngine, effects) and not facts(effects) and not of(Save, effects)
    assert not facts(agent.handle(msg.EngineGone("i-1"), 21.0)) and agent.used() == 0
    assert not agent.restore("instances", {"i-1": theirs}, 22.0)
    effects = agent.handle(Tick(), 500.0)
    assert of(msg.ForgetEngine, effects) and not of(Remove, effects)


def test_instance_given_to_this_node_later_is_ours() -> None:
    agent = make().ready()
    theirs = an_instance("i-1", gpu_id="node-2/0", created_at=5.0, revision=9)
    effects = agent.restore("instances", {"i-1": theirs}, 20.0)
    (saved,) = of(Save, effects)
    assert saved.value.node_id == NODE and saved.value.revision == 10 and facts(effects) == ["instance.ready"]


@pytest.mark.parametrize(("created_at", "node_id"), [(5.0, "node-0"), (10.0, "node-0"), (15.0, "node-2")])
def test_what_has_ended_here_yields_to_what_lives_on_another_node(created_at: float, node_id: str) -> None:
    """Otherwise both nodes would rewrite the row in turn."""
    agent = make().ready()
    agent.stopped()
    theirs = an_instance("i-1", gpu_id=f"{node_id}/0", created_at=created_at, revision=1)
    for now_s in (23.0, 25.0):
        effects = agent.restore("instances", {"i-1": theirs}, now_s)
        assert not facts(effects) and not of(Save, effects)


def test_of_two_nodes_given_one_instance_at_one_moment_one_has_it() -> None:
    mine = make().ready()
    theirs = replace(mine.instance(), workers=an_instance(gpu_id="node-2/0").workers)
    assert of(msg.StopEngine, mine.restore("instances", {"i-1": theirs}, 20.0)), "that of the higher name"
    over = replace(theirs, state=InstanceState.STOPPED)
    assert facts(make().ready().restore("instances", {"i-1": over}, 20.0)) == ["instance.ready"], "or that which lives"
