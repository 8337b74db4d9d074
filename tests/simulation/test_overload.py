"""More demand than GPU or host memory."""

from functools import cache
from pathlib import Path

import pytest

from glowplug.domain.decision import DecisionRecord
from glowplug.policies.registry import installed
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.world import World
from tests.simulation import fleets

SLOTS = [
    (4, 4, 4, 4, 8, 4),
    *(pytest.param(slots, marks=pytest.mark.long) for slots in ((4, 4, 4, 4, 4, 4), (2, 4, 8, 4, 16, 4))),
]
FAIR = 6  # requests


def spread_of(seed, slots, fair_requests):
    """The widest difference in dispatched requests between two models after 30 s, and the total."""
    setup, arrivals = fleets.overload(seed, slots=slots, num_each=150, fair_requests=fair_requests)
    world = World(setup, arrivals, label=f"overload seed {seed}")
    queues, worst = world.control.router.queues, [0]

    def look():
        nums = [queue.num_dispatched for queue in queues.values()]
        if all(queue.waiting for queue in queues.values()):
            worst.append(max(nums) - min(nums))
        world.kernel.after(1.0, look)

    world.kernel.at(world.began_s + 30.0, look)
    world.run(150.0, drain_s=0.0)
    return max(worst), sum(queue.num_dispatched for queue in queues.values())


@pytest.mark.parametrize("slots", SLOTS)
def test_quanta_bound_how_far_one_waiting_model_is_ahead_of_another(slots):
    spread, num = spread_of(0, slots, FAIR)
    before, num_before = spread_of(0, slots, 0)
    assert spread <= FAIR + 2 * max(slots), "a quantum, and what runs while one ends"
    assert len(set(slots)) == 1 or before > FAIR + 2 * max(slots), "without it wide batches run away"
    assert num >= 0.9 * num_before


def test_no_start_is_cancelled_while_a_request_is_held_for_it():
    for seed in range(2):
        setup, arrivals = fleets.overload(seed, num_each=30, seconds=60.0, max_wait_s=600.0)
        world = World(setup, arrivals, label=f"overload seed {seed}")
        cancelled = []

        def decided(decision, world=world, cancelled=cancelled):
            if decision.kind == "scale" and decision.chosen == "cancel":
                oldest = world.control.router.queues[decision.model_key].oldest()
                if oldest is not None and world.kernel.now_s - oldest.arrived_at > 0.01:  # the bus has had its time
                    cancelled.append((decision.model_key, world.kernel.now_s - world.began_s))

        world.control.on_decision.append(decided)
        world.run(60.0, drain_s=300.0)
        assert world.traffic.num_open == 0 and cancelled == [], f"seed {seed}"


def test_overload_is_refused_early_and_what_is_kept_is_answered():
    """Half can be answered; refusing the rest early costs hardly any answers."""
    kept = {}
    for late_ratio in (0.0, 1.2):
        setup, arrivals = fleets.overload(0, seconds=60.0, num_each=100, max_wait_s=60.0, late_ratio=late_ratio)
        total = World(setup, arrivals).run(60.0, drain_s=300.0).total()
        assert total.num_finished + sum(total.num_refused.values()) == len(arrivals)
        kept[late_ratio] = total
    refused = kept[1.2].num_refused
    assert kept[0.0].num_refused["wait_timeout"] > 100
    assert refused["wait_too_long"] > 100 and refused.get("wait_timeout", 0) <= 0.05 * len(arrivals)
    assert kept[1.2].num_finished >= 0.8 * kept[0.0].num_finished


SCENARIO = Path(__file__).parents[2] / "scenarios" / "mcache.yaml"
SECONDS = 150.0


def run_with(caching: str) -> tuple[World, list[DecisionRecord]]:
    settings = [f"policies.caching={caching}", f"seconds={SECONDS:.0f}"]
    settings += ["workload.rps=0.8", "workload.shares=power_law"]
    scenario = load(SCENARIO, settings)
    world = World(scenario.setup, scenario.arrivals(3), check=True)
    evictions: list[DecisionRecord] = []
    world.control.on_decision.append(
        lambda record: evictions.append(record) if record.service == "prefetcher" else None
    )
    world.run(SECONDS)
    return world, evictions


once_with = cache(run_with)


@pytest.mark.parametrize("caching", installed("caching"))
def test_host_memory_is_shared_by_any_order(caching: str) -> None:
    world, evictions = once_with(caching)
    assert evictions and {record.policy for record in evictions} == {caching}
    assert all(record.kind == "evict" and record.chosen and record.rivals for record in evictions)
    for name, node in world.nodes.items():
        cache = node.prefetcher.cache
        assert cache.used_bytes <= cache.capacity_bytes, name
    assert world.results.bytes_fetched > world.nodes["v100-1"].prefetcher.cache.capacity_bytes


def test_with_a_disk_for_all_weights_a_node_fetches_each_once() -> None:
    fetched = []
    for disk_bytes in ("0", "400GB"):
        settings = ["seconds=300", "workload.rps=0.8", "workload.shares=power_law"]
        settings += [f"servers.v100.disk_cache_bytes={disk_bytes}", "servers.v100.disk_bytes_per_s=6GB/s"]
        scenario = load(SCENARIO, settings)
        world = World(scenario.setup, scenario.arrivals(3), check=True)
        world.run(300.0)
        fetched.append(world.results.bytes_fetched)
        kinds = {row.start_kind for row in world.control.placer.fleet.instances.by_id.values()}
        assert ("disk" in kinds) is bool(world.results.starts["disk"]) is (disk_bytes != "0")
    least = sum(one.model.weights.num_bytes for one in scenario.setup.models)
    assert fetched[0] > fetched[1] and fetched[1] <= least * len(world.nodes)
    assert any(node.disk.num_bytes_read for node in world.nodes.values())
    for node in world.nodes.values():
        assert node.disk.copies.keys() <= node.prefetcher.disk.copies.keys()


def test_orders_differ_and_a_run_repeats() -> None:
    chosen = {name: [record.chosen for record in once_with(name)[1]] for name in ("lru", "mcache")}
    assert chosen["lru"] != chosen["mcache"]
    assert [record.chosen for record in run_with("mcache")[1]] == chosen["mcache"]
