"""The control plane against a hostile world, over many seeds. The failing seed is the bug report."""

from collections import Counter

import pytest

from glowplug.controllers import operator
from glowplug.domain.model import WeightsRef
from glowplug.weights.region import region_digest
from tests.fleet_builder import a_model
from tests.simulation.seeds import seeds
from tests.simulation.world import Chances, World

SEEDS = seeds()
KEEP_ALIVE_S = 3.0


def models(num: int, mib: int = 120, **fields):
    return [
        a_model(
            f"m{i}",
            mib=mib,
            keep_alive_s=KEEP_ALIVE_S,
            weights=WeightsRef(uri=f"file:/w{i}", num_bytes=10),
            max_wait_s=60.0,
            **fields,
        )
        for i in range(num)
    ]


def load(world: World, seconds: float, per_second: float, names: list[str]) -> None:
    at = 0.0
    while (at := at + world.random.expovariate(per_second)) < seconds:
        name = world.random.choice(names)
        patience = world.random.expovariate(1 / 30)

        def come(name: str = name, patience: float = patience) -> None:
            ticket = world.arrive(name)
            world.at(patience, lambda: world.leave(ticket))

        world.at(at, come)


def settle(world: World) -> None:
    world.run(90.0 + KEEP_ALIVE_S)
    world.settled()


@pytest.mark.parametrize("seed", SEEDS)
def test_more_models_than_memory_over_a_bad_bus(seed):
    world = World(seed, models(6), num_nodes=2, gpus=("300MiB",))
    load(world, 60.0, 4.0, [m.name for m in world.models])
    world.run(60.0)
    settle(world)
    ends = Counter(world.outcome.values())
    assert ends["200"] > 0.5 * sum(ends.values()), f"seed {seed}: {ends}"


@pytest.mark.parametrize("seed", SEEDS)
def test_services_killed_in_turn(seed):
    world = World(seed, models(4), num_nodes=2, gpus=("300MiB",))
    load(world, 60.0, 3.0, [m.name for m in world.models])
    for second in range(5, 60, 5):
        victim = world.random.choice(sorted(world.services))
        world.at(second, lambda victim=victim: world.start(victim))
    world.run(60.0)
    settle(world)
    ends = Counter(world.outcome.values())
    assert ends["200"] > 0.4 * sum(ends.values()), f"seed {seed}: {ends}"


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_killed_at_random(seed):
    world = World(seed, models(3), num_nodes=2, gpus=("300MiB",))
    load(world, 40.0, 4.0, [m.name for m in world.models])

    def kill_one() -> None:
        engines = [(n, i) for n in world.nodes.values() for i in n.engines]
        if engines:
            node, instance_id = world.random.choice(engines)
            node.kill(instance_id)

    for second in range(3, 40, 4):
        world.at(second, kill_one)
    world.run(40.0)
    settle(world)


@pytest.mark.parametrize("seed", SEEDS)
def test_corrupt_weights_are_never_served_and_everybody_is_answered(seed):
    world = World(seed, models(2), num_nodes=1)
    bad = region_digest(world.models[0].weights)
    world.nodes["node-1"].bad_digests.add(bad)
    world.run(3.0)
    tickets = [world.arrive("m0") for _ in range(20)]
    good = [world.arrive("m1") for _ in range(5)]
    world.run(70.0)
    assert {world.outcome[t] for t in tickets} <= {"503 weights_corrupt"}, f"seed {seed}"
    assert {world.outcome[t] for t in good} == {"200"}, f"seed {seed}"
    settle(world)


def test_a_thousand_at_once_for_one_cold_model_cause_one_start():
    world = World(7, models(1, max_queue=2000), chances=Chances(lose=0.0, double=0.0))
    world.run(3.0)
    tickets = [world.arrive("m0") for _ in range(1000)]
    world.run(59.0)
    assert {world.outcome[t] for t in tickets} == {"200"}
    assert len([d for d in world.decisions if d.kind == "place"]) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_two_models_that_exclude_each_other_both_get_their_turn(seed):
    """peers.md T17: A/B/A/B on one GPU, both always wanted: no starvation."""
    world = World(seed, models(2, mib=250), num_nodes=1, chances=Chances(lose=0.0))
    load(world, 100.0, 6.0, ["m0", "m1"])
    world.run(100.0)
    by_model = Counter()
    for decision in world.decisions:
        if decision.kind == "place":
            by_model[decision.model_key] += 1
    ends = Counter(world.outcome.values())
    assert min(by_model["m0"], by_model["m1"]) >= 2, f"seed {seed}: {by_model}"
    assert ends["503 wait_timeout"] == 0, f"seed {seed}: {ends}"
    settle(world)


def test_a_model_no_gpu_can_hold_is_refused_at_once_with_the_reason():
    world = World(1, models(1, mib=500), chances=Chances(lose=0.0))
    world.run(5.0)
    tickets = [world.arrive("m0") for _ in range(3)]
    world.run(5.0)
    assert {world.outcome[t] for t in tickets} == {"503 no_capacity"}
    late = world.arrive("m0")
    assert world.outcome[late] == "503 no_capacity"


def test_a_drained_model_answers_what_waits_and_what_comes_until_it_is_loaded():
    world = World(2, models(1), chances=Chances(lose=0.0))
    world.run(3.0)
    held = world.arrive("m0")
    world.give("autoscaler", operator.Suspend("m0"))
    world.run(2.0)
    assert world.outcome[held] == "503 model_suspended"
    assert world.outcome[world.arrive("m0")] == "503 model_suspended"
    world.give("autoscaler", operator.Load("m0"))
    world.run(5.0)
    again = world.arrive("m0")
    world.run(10.0)
    assert world.outcome[again] == "200"
