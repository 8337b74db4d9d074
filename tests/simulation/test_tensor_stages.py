"""Cold starts of multi-GPU models as pipelines of tensor groups."""

import math
from dataclasses import replace

import pytest

from glowplug.controllers.agent.messages import AgentParams
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug_lab.simulator.costs import FITTED
from glowplug_lab.simulator.setup import GB, Fault, Params, PolicyNames, ServerSetup, Setup, StartSeconds
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World
from tests.simulation import fleets
from tests.simulation.seeds import seeds

SEEDS, FIXED = seeds(1), range(1)
OVER_TENSOR = "hydraserve:allocation.pipeline_over_tensor=true"
COSTS = FITTED["llama-2-7b", "h800"]
START = StartSeconds(launch_s=1.0, warmup_s=0.5)
WHOLE = 16 * GB + 8 * GB
STAGES = StageSeconds(container_s=1.0, prefill_s=0.02, decode_s=0.01, hop_s=0.001)


def a_setup(placement=OVER_TENSOR, scaling="hydraserve", num_servers=2, node_lease_s=math.inf, **fields):
    """16 GB on two GPUs: 8 s of fetching breaks an objective of 6 s; two halves take 4 s."""
    slo = Slo(ttft_s=6.0, tpot_s=1.0)
    own = {"num_gpus": 2, "max_instances": 4, "keep_alive_s": -1, "slo": slo}
    one = fleets.a_model("m", 16, 8, {"h800": COSTS}, START, **own)
    server = ServerSetup(num_servers=num_servers, num_gpus=3, gpu_bytes=20 * GB, abilities=frozenset({"stages"}))
    return Setup(
        servers=(server,),
        models=(one,),
        policies=PolicyNames(placement=placement, scaling=scaling),
        params=Params(placer=PlacerParams(settle_s=0.0, node_lease_s=node_lease_s, start_stages=STAGES), **fields),
    )


def held(world):
    return {name: [gpu.used_bytes for gpu in node.agent.ledger.gpus] for name, node in world.nodes.items()}


def rows(world):
    return world.control.tables["instances"]


def living(world):
    return {name: row for name, row in rows(world).items() if not row.state.is_gone}


def test_section_7_two_groups_fetch_side_by_side_serve_together_and_become_one():
    """HydraServe sections 4, 6 and 7: halves of 8 GB over two cards at 2 GB/s; no token is lost."""
    world = World(a_setup(), [Arrival(1.0, "m", 100, 1200), Arrival(5.6, "m", 50, 400)], check=True)
    seen = []
    for at_s in (3.0, 7.0):
        world.kernel.at(world.began_s + at_s, lambda: seen.append((held(world), dict(rows(world)))))
    results = world.run(60.0)
    (starting, _), (serving, table) = seen
    first, second = sorted(table)
    assert second == f"{first}.1" and {row.state for row in table.values()} == {InstanceState.READY}
    assert (table[first].num_stages, len(table[first].workers), len(table[second].workers)) == (2, 4, 2)
    assert len({w.gpu_id for w in table[first].workers}) == 4
    assert [{w.node_id for w in table[name].workers[-2:]} for name in (first, second)] == [{"server-2"}] * 2
    assert starting == {"server-1": [WHOLE // 2] * 2 + [0], "server-2": [WHOLE // 4] * 2 + [0]}
    assert serving == starting, "the first could hold the whole from its start (Algorithm 1, w = 1)"
    total = results.total()
    prefill_s = 1.5 * COSTS.prefill_s(100, 10_000)  # Eq. 2, s = 2 and w = 1
    assert total.ttft.highest == pytest.approx(16 / 2 / 2 + START.warmup_s + START.hop_s + prefill_s, abs=0.02)
    assert total.num_finished == 2 and total.response_tokens == 1600 and total.num_preempted == 0
    assert results.num_consolidated == 1 and results.bytes_fetched == (16 + 8) * GB
    assert 0 < results.bytes_migrated < 1700 * 500_000
    ((name, row),) = living(world).items()
    assert name == first and row.is_whole and row.kv_tokens == 16_000
    assert {w.node_id for w in row.workers} == {"server-1"} and [w.num_bytes for w in row.workers] == [WHOLE // 2] * 2
    assert held(world) == {"server-1": [WHOLE // 2] * 2 + [0], "server-2": [0] * 3}, "the second group is free again"


def test_section_6_1_each_group_becomes_an_instance_when_both_are_needed():
    """Twelve at once where one instance takes eight."""
    arrivals = [Arrival(1.0 + n * 1e-3, "m", 100, 1200) for n in range(12)]
    setup = a_setup(scaling="hydraserve:literal_code=true", autoscaler=AutoscalerParams(gather_s=1.0))
    world = World(setup, arrivals, check=True)
    seen = []
    for at_s in (7.0, 17.0):
        world.kernel.at(world.began_s + at_s, lambda: seen.append((living(world), held(world))))
    total = world.run(60.0).total()
    (before, held_before), (after, held_after) = seen
    assert sorted(row.num_stages for row in before.values()) == [2, 2]
    assert len(after) == 2 and all(row.is_whole and row.serves and len(row.workers) == 2 for row in after.values())
    assert {row.node_id for row in after.values()} == {"server-1", "server-2"}
    assert held_before == held_after == {name: [WHOLE // 2] * 2 + [0] for name in ("server-1", "server-2")}
    assert total.num_finished == 12 and total.response_tokens == 12 * 1200 and total.num_preempted == 0
    assert world.results.num_consolidated == 2 and world.results.bytes_fetched == (16 + 2 * 8) * GB


def test_a_group_starts_whole_unless_the_option_is_given():
    world = World(a_setup("hydraserve"), [Arrival(1.0, "m", 100, 10)], check=True)
    stages = set()
    world.control.on_save.append(lambda table, row, now_s: stages.add(row.num_stages) if table == "instances" else None)
    results = world.run(20.0)
    assert stages == {1} and results.num_consolidated == 0
    assert results.total().ttft.highest == pytest.approx(16 / 2 + 0.5, abs=0.1)


def test_a_group_whose_server_goes_takes_its_pipeline_along_and_the_model_starts_anew():
    watchful = AgentParams(beat_s=1.0, health_every_s=1e9)
    setup = a_setup(num_servers=3, node_lease_s=PlacerParams().node_lease_s, agent=watchful, idle_tick_s=1.0)
    setup = replace(setup, faults=(Fault(at_s=3.0, node_id="server-2"),))
    world = World(setup, [Arrival(1.0, "m", 100, 100)], check=True)
    results = world.run(90.0)
    total = results.total()
    assert total.num_finished == 1 and total.response_tokens == 100 and not total.num_refused
    there = [row for row in living(world).values() if row.node_id != "server-2"]
    assert len(there) == 1 and there[0].is_whole and there[0].state is InstanceState.READY
    kept = held(world)
    assert sum(sum(kept[name]) for name in ("server-1", "server-3")) == WHOLE


def mixed(seed, placement):
    """Four servers of four 24 GB GPUs with thin network cards."""
    start = StartSeconds(launch_s=1.5, library_s=1.0, warmup_s=0.1)
    sizes = {"m1": (12.5, 4, 1, 6.0), "m2": (24.0, 10, 2, 10.0), "m4": (48.0, 20, 4, 16.0), "n1": (12.5, 4, 1, 6.0)}
    models = tuple(
        fleets.a_model(key, gb, kv, {"a10": fleets.A10}, start, num_gpus=num, slo=Slo(ttft_s=slo_s, tpot_s=0.2))
        for key, (gb, kv, num, slo_s) in sizes.items()
    )
    a10 = {"gpu_bytes": 24 * GB, "gpu_kind": "a10", "host_cache_bytes": 100 * GB}
    server = ServerSetup(num_servers=4, num_gpus=4, abilities=frozenset({"stages", "swap", "prewarm"}), **a10)
    policies = PolicyNames(placement=placement, scaling="hydraserve", eviction="lru")
    setup = Setup(servers=(server,), models=models, policies=policies)
    shares = {"m1": 0.4, "m2": 0.3, "m4": 0.2, "n1": 0.1}
    return setup, fleets.requests(seed, shares, 0.5, 120.0, cv=4.0)


@pytest.mark.parametrize("placement", [OVER_TENSOR, OVER_TENSOR.replace("hydraserve", "union")])
@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_all_sizes_live_together(seed, placement):
    label, staged = f"{placement} seed {seed}", set()
    setup, arrivals = mixed(seed, placement)
    world = World(setup, arrivals, check=True, label=label)

    def look(table, row, now_s):
        if table != "instances":
            return
        gpu_ids = [w.gpu_id for w in row.workers]
        assert len(set(gpu_ids)) == len(gpu_ids), f"{label}: {row}"
        num_gpus = {one.model.key: one.model.num_gpus for one in setup.models}[row.model_key]
        num_groups = row.num_stages if not (row.is_whole or row.part_of) else 1
        assert len(gpu_ids) == num_gpus * num_groups, f"{label}: {row}"
        groups = [row.workers[n * num_gpus : (n + 1) * num_gpus] for n in range(num_groups)]
        nodes = [{w.node_id for w in group} for group in groups]
        assert all(len(of_group) == 1 for of_group in nodes) and len(set.union(*nodes)) == num_groups, f"{label}: {row}"
        if num_groups > 1:
            staged.add(num_gpus)

    world.control.on_save.append(look)
    results = world.run(120.0)
    total = results.total()
    assert world.traffic.num_open == 0 and total.num_finished == len(arrivals), f"{label}: {total.num_refused}"
    if seed in FIXED:  # other arrivals may need no group of several GPUs
        assert staged & {2, 4} and results.num_consolidated > 0, f"{label}: {staged}"
    ended = [row for row in rows(world).values() if row.state.is_gone]
    holders = set().union(*(node.agent.ledger.holders for node in world.nodes.values()))
    assert not holders & {row.instance_id for row in ended}, label
