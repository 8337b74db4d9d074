"""Tensor groups, abilities, and what an instance's row says of them."""

from dataclasses import replace

import pytest

from glowplug.controllers.agent.messages import AwaitWeights, EngineReady, LaunchEngine, Recalled, Remember
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import Instance, InstanceState, Worker
from tests.agent_steps import NODE, code, halves, instance, make, of, owned, start, told, used, workers
from tests.fleet_builder import MIB, a_model

PAIR = a_model(weights_bytes=101 * MIB, kv_bytes=100 * MIB, num_gpus=2)


def test_a_tensor_group_takes_its_part_of_each_gpu_in_one_start() -> None:
    agent = make(gpus=4)
    effects = agent.handle(start(model=PAIR, workers=workers("i-1", 1, 3)), 10.0)
    (launch,) = of(LaunchEngine, effects)
    assert [w.gpu_id for w in launch.workers] == [f"{NODE}/1", f"{NODE}/3"] and launch.gpu_index == 1
    assert (launch.replica, launch.stage, launch.num_stages) == (False, 0, 1)
    assert [used(agent, n) for n in range(4)] == [0, 100, 0, 100]
    (weights, kv) = (agent.ledger.gpus[3].grants[0], agent.ledger.gpus[3].grants[1])
    assert (weights.num_bytes, kv.num_bytes) == (101 * MIB // 2, 50 * MIB)  # half the weights, half the rest
    assert len(of(AwaitWeights, effects)) == 1


def test_a_group_that_does_not_fit_on_one_gpu_takes_nothing_on_the_others() -> None:
    agent = make(gpus=2)
    agent.handle(start("i-0", mib=250, workers=workers("i-0", 1)), 5.0)
    assert code(agent.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)) == "out_of_memory"
    assert used(agent, 0) == 0 and used(agent, 1) == 250


def test_a_group_is_one_instance_to_the_end() -> None:
    agent = make(gpus=2)
    agent.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)
    halves(agent, "i-1", 11.0)
    agent.handle(EngineReady("i-1", "u", (), 4096), 12.0)
    now = instance(agent)
    assert now.state is InstanceState.READY and now.serves and now.is_whole and now.kv_tokens == 4096
    assert (now.replica, now.part_of, now.num_stages, now.source) == (False, "", 1, "")


def test_a_node_tells_what_its_engines_can_do() -> None:
    node = make(abilities=("prewarm", "swap")).node(1.0)
    assert node.abilities == ("emulated:prewarm", "emulated:swap")
    assert node.can("emulated", "swap") and not node.can("emulated", "stages") and not node.can("vllm", "prewarm")
    assert make().node(1.0).abilities == ()


@pytest.mark.parametrize(
    ("fields", "missing"),
    [({"replica": True}, "prewarm"), ({"num_stages": 2}, "stages"), ({"part_of": "i-0", "num_stages": 2}, "stages")],
)
def test_an_engine_without_the_ability_is_never_asked(fields: dict[str, object], missing: str) -> None:
    agent = make()
    effects = agent.handle(start(**fields), 10.0)
    assert code(effects) == "engine_unavailable" and missing in instance(agent).reason
    assert not of(LaunchEngine, effects) and used(agent) == 0


def test_a_group_keeps_its_grants_over_a_restart() -> None:
    before = make(gpus=2)
    effects = before.handle(start(model=PAIR, workers=workers("i-1", 0, 1)), 10.0)
    agent = make(of(Remember, effects)[0].memory, gpus=2)
    agent.handle(Recalled(frozenset()), 20.0)
    assert owned(agent, 0) == owned(before, 0) and owned(agent, 1) == owned(before, 1)


def test_rows_of_a_memory_without_shares_are_granted_by_their_workers() -> None:
    """What an agent of an earlier version wrote down knows no shares."""
    effects = make().handle(start(), 10.0)
    memory = of(Remember, effects)[0].memory
    old = replace(memory, holdings=tuple(replace(h, shares={}) for h in memory.holdings))
    agent = make(old)
    assert owned(agent) == {("i-1", GrantOwner.WEIGHTS): 100}
    assert told(agent.handle(Recalled(frozenset()), 20.0)) == ["instance.starting"]


def test_workers_of_other_nodes_are_not_granted_here() -> None:
    elsewhere = Worker(worker_id="w", node_id="node-2", gpu_id="node-2/0", num_bytes=0)
    agent = make()
    agent.handle(start(model=PAIR, workers=(*workers("i-1", 0), elsewhere)), 10.0)
    row: Instance = instance(agent)
    assert used(agent) == 100 and len(row.workers) == 2
