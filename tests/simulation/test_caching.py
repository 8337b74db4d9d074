"""Every order of room `caching` in a fleet whose host memory is short: nothing breaks, and it decides who leaves."""

from pathlib import Path

import pytest

from glowplug.domain.decision import DecisionRecord
from glowplug.policies.registry import KINDS
from glowplug.simulator.scenario.load import load
from glowplug.simulator.world import World

SCENARIO = Path(__file__).parents[2] / "scenarios" / "mcache.yaml"


def run(caching: str, seconds: float = 600.0) -> tuple[World, list[DecisionRecord]]:
    settings = [f"policies.caching={caching}", f"seconds={seconds:.0f}"]
    settings += ["workload.rps=0.8", "workload.shares=power_law"]
    scenario = load(SCENARIO, settings)
    world = World(scenario.setup, scenario.arrivals(3), check=True)
    evictions: list[DecisionRecord] = []
    world.control.on_decision.append(
        lambda record: evictions.append(record) if record.service == "prefetcher" else None
    )
    world.run(seconds)
    return world, evictions


@pytest.mark.parametrize("caching", sorted(KINDS["caching"]))
def test_host_memory_is_shared_by_any_order(caching: str) -> None:
    world, evictions = run(caching)
    assert evictions and {record.policy for record in evictions} == {caching}
    assert all(record.kind == "evict" and record.chosen and record.rivals for record in evictions)
    for name, node in world.nodes.items():
        cache = node.prefetcher.cache
        assert cache.used_bytes <= cache.capacity_bytes, name
    assert world.results.bytes_fetched > world.nodes["v100-1"].prefetcher.cache.capacity_bytes


def test_orders_differ_and_a_run_repeats() -> None:
    chosen = {name: [record.chosen for record in run(name)[1]] for name in ("lru", "mcache")}
    assert chosen["lru"] != chosen["mcache"]
    assert [record.chosen for record in run("mcache")[1]] == chosen["mcache"]
