"""Weight pages shared on one GPU: granted once, after sharing was seen."""

from dataclasses import replace

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.effects import Publish
from glowplug.domain.instance import InstanceState
from tests.agent_steps import ALL, MODEL, PARAMS, CheckedAgent, facts, make, of, shares, start_of, workers
from tests.fleet_builder import MIB, a_model

SMALL = replace(MODEL, kv_bytes=70 * MIB)  # 60 MiB of weights: 300 MiB hold two unshared, three shared
ABLE = (*ALL, "share")


def sharing(num: int, *, shared: int = 60, mib: int = 300) -> CheckedAgent:
    """`num` instances of one model that share `shared` MiB of weights."""
    agent = make(abilities=ABLE, mib=mib)
    for n in range(1, num + 1):
        agent.serving(f"i-{n}", model=SMALL, shared=shared)
    return agent


def test_a_gpu_that_holds_two_instances_holds_three_where_their_weights_are_shared() -> None:
    agent = sharing(3)
    assert agent.used() == 60 + 3 * 70 and agent.shared() == {60: ("i-1", "i-2", "i-3")}
    assert agent.owned() == {(f"i-{n}", owner): mib for n in (1, 2, 3) for owner, mib in (("weights", 0), ("kv", 70))}
    assert "60 MiB of its weights count once with 2 other instances there" in agent.instance("i-3").reason
    assert agent.instance("i-3").shared_bytes == 60 * MIB
    private = make(abilities=ALL)
    private.serving("i-1", model=SMALL, shared=60).serving("i-2", model=SMALL, shared=60)
    private.handle(start_of("i-3", model=SMALL), 30.0)
    assert private.state("i-3") == "failed" and private.used() == 260, "an engine that cannot share is granted all"


def test_the_first_start_is_granted_all_and_what_is_shared_counts_once_it_was_seen() -> None:
    agent = make(abilities=ABLE)
    agent.loading("i-1", model=SMALL).loading("i-2", model=SMALL)
    assert agent.used() == 260 and not agent.shared()
    agent.handle(msg.EngineReady("i-1", "http://e", figures=shares(60)), 20.0)
    assert agent.used() == 260 and agent.shared() == {60: ("i-1",)}
    effects = agent.handle(msg.EngineReady("i-2", "http://e", figures=shares(60)), 20.0)
    assert agent.used() == 200 and agent.shared() == {60: ("i-1", "i-2")}
    assert "node.beat" in [e.payload.TYPE for e in of(Publish, effects)], "60 MiB have come free"


def test_two_starts_at_once_take_one_copy_where_earlier_engines_were_seen_to_share() -> None:
    agent = sharing(1, shared=40)
    agent.stopped("i-1")
    agent.loading("i-2", model=SMALL).loading("i-3", model=SMALL)
    assert agent.used() == 40 + 2 * (20 + 70) and agent.shared() == {40: ("i-2", "i-3")}
    agent.handle(msg.EngineReady("i-2", "http://e", figures=shares(40)), 20.0)
    agent.handle(msg.EngineReady("i-3", "http://e", figures=shares(40)), 20.0)
    assert agent.used() == 220 and agent.state("i-2") == agent.state("i-3") == "ready"


def test_one_of_two_that_land_and_shares_nothing_takes_all_of_its_weights_or_fails() -> None:
    large, full = sharing(1, mib=400), sharing(1)
    for agent, state in ((large, "ready"), (full, "failed")):
        agent.stopped("i-1")
        for name in ("i-2", "i-3", *(("i-4",) if agent is full else ())):
            agent.loading(name, model=SMALL)
        agent.handle(msg.EngineReady("i-2", "http://e"), 20.0)
        assert agent.state("i-2") == state
    assert large.used() == 2 * 130, "the other one has the bytes for itself"
    full.handle(msg.EngineGone("i-2"), 21.0)
    assert full.used() == 60 + 2 * 70
    full.stopped("i-3")
    full.stopped("i-4")
    full.loading("i-5", model=SMALL).loading("i-6", model=SMALL)
    assert full.used() == 260 and not full.shared(), "what was counted on did not hold: it is seen first again"


def test_what_an_engine_has_for_itself_is_granted_to_it_alone() -> None:
    """llama.cpp repacks some weights: 20 of 60 MiB here."""
    agent = sharing(3, shared=40, mib=400)
    assert agent.used() == 40 + 3 * (20 + 70) and agent.shared() == {40: ("i-1", "i-2", "i-3")}


def test_the_last_one_holds_the_weights_and_frees_them() -> None:
    agent = sharing(3)
    for going, mib in (("i-1", 200), ("i-3", 130), ("i-2", 0)):
        agent.stopped(going)
        assert agent.used() == mib, going
    assert not agent.shared()


def test_a_start_that_reads_less_in_place_than_the_others_takes_bytes_of_its_own_or_fails() -> None:
    agent = sharing(1, mib=400)
    agent.loading("i-2", model=SMALL)
    assert agent.used() == 60 + 2 * 70
    agent.handle(msg.EngineReady("i-2", "http://e", figures=shares(30)), 20.0)
    assert agent.used() == 2 * 130 and agent.shared() == {60: ("i-1",)} and agent.state("i-2") == "ready"
    full = sharing(2)
    full.loading("i-3", model=SMALL)
    effects = full.handle(msg.EngineReady("i-3", "http://e"), 20.0)
    assert full.state("i-3") == "failed" and facts(effects) == ["instance.failed"]
    assert "it reads 0 B of its weights in host memory, and not 60 MiB" in full.instance("i-3").reason
    full.handle(msg.EngineGone("i-3"), 21.0)
    assert full.used() == 200


@pytest.mark.parametrize(("becomes", "mib"), [("prewarmed", 60), ("swapped_out", 0)])
def test_one_that_shares_sleeps_beside_the_others_and_wakes(becomes: str, mib: int) -> None:
    """A replica still reads the shared pages; a sleeper gives them back."""
    agent = make(abilities=ABLE, params=replace(PARAMS, swap_host_bytes=1)).serving(model=SMALL, shared=60)
    agent.asleep(becomes)
    assert agent.state("i-1") == becomes and agent.used() == mib
    assert agent.instance().shared_bytes == mib * MIB
    agent.serving("i-2", 25.0, model=SMALL, shared=60)
    assert agent.used() == 130, "its weights are there already, or they come alone"
    agent.handle(start_of("i-3", model=SMALL, source="i-1"), 30.0)
    assert agent.used() == 200, "it wakes with what i-2 holds"
    agent.handle(msg.EngineReady("i-3", "http://e", figures=shares(60)), 31.0)
    assert agent.used() == 200 and agent.shared() == {60: ("i-2", "i-3")}


def test_replicas_of_models_with_the_same_weights_share_them() -> None:
    agent = make(abilities=ABLE, mib=100)
    weights = a_model("one").weights
    for name in ("one", "two"):
        model = a_model(name, weights=replace(weights, uri="file:/w"), weights_bytes=60 * MIB, kv_bytes=20 * MIB)
        agent.replica(f"r-{name}", model=model, shared=60)
    assert agent.used() == 60 and agent.shared() == {60: ("r-one", "r-two")}
    agent.handle(start_of("i-1", model=replace(model, name="one", key="one"), source="r-one"), 30.0)
    agent.handle(msg.EngineReady("i-1", "http://e", figures=shares(60)), 31.0)
    assert agent.used() == 80


def test_a_restarted_agent_grants_what_its_predecessor_did() -> None:
    agent, _ = sharing(3).restarted(["i-1", "i-2", "i-3"], abilities=ABLE)
    assert agent.used() == 270 and agent.shared() == {60: ("i-1", "i-2", "i-3")}
    assert {row.state for row in agent.instances} == {InstanceState.READY}


def test_an_instance_on_several_gpus_shares_nothing() -> None:
    agent = make(abilities=ABLE, gpus=2)
    wide = replace(SMALL, num_gpus=2)
    agent.serving(model=wide, workers=workers("i-1", 0, 1), shared=60)
    assert agent.used() == agent.used(1) == 65 and not agent.shared()
