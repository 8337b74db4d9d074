"""Whole fleets under each paper's policies."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.domain.instance import InstanceState
from glowplug_lab.simulator.world import World
from tests.simulation import fleets

ROOT = Path(__file__).parents[2]
SEEDS = range(1)  # a paper's claims hold on the mean


def run(setup, arrivals, seconds, label, **fields):
    """With checkers; everybody must be answered."""
    world = World(setup, arrivals, check=True, label=label)
    for name, value in fields.items():
        getattr(world.control, name).append(value)
    results = world.run(seconds)
    total = results.total()
    assert world.traffic.num_open == 0, label
    assert total.num_arrived == len(arrivals) == total.num_finished + sum(total.num_refused.values()), label
    return world, results, total


def nested_or_disjoint(label):
    """WarmServe section 5.2: GPU sets on one node are disjoint or nested."""
    rows = {}

    def look(table, row, now_s):
        if table != "instances":
            return
        rows[row.instance_id] = row
        if row.state.is_gone:
            return
        mine = {w.gpu_id for w in row.workers}
        for other in rows.values():
            if other.state.is_gone or not (other.replica or row.replica) or other.node_id != row.node_id:
                continue
            theirs = {w.gpu_id for w in other.workers}
            common = mine & theirs
            assert not common or common in (mine, theirs), f"{label}: {row} and {other}"
            twice = common and other.model_key == row.model_key and other.instance_id != row.instance_id
            coming = InstanceState.DRAINING in (row.state, other.state)
            assert not (twice and row.replica and other.replica and not coming), f"{label}: two copies on {common}"

    return look


@pytest.mark.parametrize("seed", SEEDS)
def test_warmserve_starts_from_what_was_prewarmed(seed):
    label = f"warmserve seed {seed}"
    _, results, total = run(*fleets.warmserve(seed), 120.0, label, on_save=nested_or_disjoint(label))
    assert total.num_finished == total.num_arrived, label
    assert results.hit_ratio > 0.5 and results.num_prewarms >= 4, f"{label}: {results.starts}"
    assert results.bytes_fetched == 0 < results.bytes_prewarmed


@pytest.mark.parametrize("seed", SEEDS)
def test_warmserve_starts_from_the_first_layers_and_streams_the_rest(seed):
    """Section 4, erratum E7: replicas hold less than their weights, and a start whose layers are present takes only its
    activation."""
    label, part, growths = f"warmserve first layers seed {seed}", {}, []
    setup, arrivals = fleets.warmserve(
        seed, seconds=300.0, rate=2.0, prewarming="warmserve:first_layers=true:growth_leads=true"
    )
    models = tuple(replace(one, start=replace(one.start, activate_s=0.2)) for one in setup.models)
    setup = replace(setup, models=models)
    weights = {one.model.key: one.model.weights_bytes for one in setup.models}

    def look(table, row, now_s):
        if table != "instances" or row.state.is_gone:
            return
        held = sum(w.num_bytes for w in row.workers)
        if row.replica and held < weights[row.model_key]:
            part[row.instance_id] = row.state
        elif row.source in part:
            assert held > weights[row.model_key], f"{label}: {row}"
            if row.state is InstanceState.READY and part[row.source] is InstanceState.PREWARMED:
                growths.append(row.phases[-1].actual_s)

    _, results, total = run(setup, arrivals, 300.0, label, on_save=look)
    assert len(growths) > 10 and total.num_finished == len(arrivals), label
    assert results.bytes_prewarmed < results.bytes_loaded, label
    assert max(growths) < 0.21, f"{label}: {max(growths)}"
    assert results.hit_ratio > 0.5, f"{label}: {results.starts}"


def test_prewarming_is_what_makes_starts_warm():
    with_it, without = (run(*fleets.warmserve(3, prewarming=p, seconds=60.0), 60.0, p) for p in ("warmserve", "none"))
    assert with_it[1].hit_ratio > 0.5 and without[1].hit_ratio == 0
    assert with_it[2].ttft.at(0.99) < without[2].ttft.at(0.99)


@pytest.mark.parametrize("seed", SEEDS)
def test_hydraserve_starts_in_pipelines_and_consolidates(seed):
    stages = set()

    def look(table, row, now_s):
        if table == "instances":
            stages.add(row.num_stages)

    _, results, total = run(*fleets.hydraserve(seed), 120.0, f"hydraserve seed {seed}", on_save=look)
    assert max(stages) > 1 and results.num_consolidated > 0, f"seed {seed}: {stages}"
    assert total.num_preempted <= total.num_finished


def test_a_pipelined_cold_start_is_faster_than_one_of_a_single_worker():
    """HydraServe section 8.2: one request for a remote model, 6.25 s of fetching for a single worker."""
    ttft_s = {}
    for placement, overlap in (("hydraserve", True), ("first_fit", True), ("first_fit", False)):
        setup, _ = fleets.hydraserve(placement=placement, overlap=overlap)
        one = setup.models[0]
        sooner = replace(one.model, slo=replace(one.model.slo, ttft_s=5.0))
        setup = replace(setup, models=(replace(one, model=sooner),))
        world = World(setup, [fleets.Arrival(0.0, "m0", 512, 100)], check=True)
        ttft_s[placement, overlap] = world.run(60.0).total().ttft.highest
    assert ttft_s["hydraserve", True] < 0.7 * ttft_s["first_fit", True] < 0.7 * ttft_s["first_fit", False]


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_that_do_not_fit_together_take_turns_asleep(seed):
    """SwapServeLLM section 4."""
    _, results, total = run(*fleets.swapserve(seed), 300.0, f"swapserve seed {seed}")
    assert total.num_finished == total.num_arrived
    assert results.starts["swapped"] > 0 and results.starts["host"] <= 4, f"seed {seed}: {results.starts}"


def test_models_deployed_asleep_start_once_before_anybody_asks():
    """SwapServeLLM section 3.2: the first request of each is a swap-in too."""
    setup, _ = fleets.swapserve()
    asleep = tuple(replace(one, model=replace(one.model, asleep=True)) for one in setup.models)
    arrivals = [fleets.Arrival(150.0 + 20 * n, f"m{n % 3}", 200, 20) for n in range(6)]
    starts, highest_s = {}, {}
    for name, models in (("cold", setup.models), ("asleep", asleep)):
        _, results, total = run(replace(setup, models=models), arrivals, 400.0, name)
        starts[name], highest_s[name] = results.starts, total.ttft.highest
    assert starts == {"cold": {"host": 3, "swapped": 3}, "asleep": {"host": 3, "swapped": 6}}
    assert highest_s["asleep"] < 0.2 * highest_s["cold"]


@pytest.mark.parametrize("seed", SEEDS)
def test_preserve_scales_with_the_forecast_and_looks_ahead(seed):
    _, results, total = run(*fleets.preserve(seed, seconds=150.0), 150.0, f"preserve seed {seed}")
    assert results.instances_peak > 1 and total.num_finished == total.num_arrived
    assert results.instance_seconds < 8 * results.seconds


def test_models_that_share_a_gpu_wait_for_each_other_not_for_a_start():
    """WarmServe section 7: MuxServe starts nothing, and pays with slower tokens."""
    (world, _, shared), (_, _, alone) = (
        run(*fleets.muxserve_like(share_compute=shares), 60.0, f"shared: {shares}") for shares in (True, False)
    )
    assert shared.num_cold == alone.num_cold == 0 and shared.num_finished == alone.num_finished
    assert shared.tpot.mean > 1.3 * alone.tpot.mean
    kv_tokens = [engine.kv_tokens for node in world.nodes.values() for engine in node.engines.values()]
    assert len(kv_tokens) == 3, "one of each, and it is still there"
    assert min(kv_tokens) < max(kv_tokens), "who came last has what was left of the KV space"


DIGESTS = """
import hashlib
from glowplug.events.envelope import encode
from glowplug_lab.simulator.world import World
from tests.simulation import fleets
seen = hashlib.sha256()
for fleet in (fleets.warmserve, fleets.hydraserve, fleets.swapserve, fleets.preserve):
    world = World(*fleet(2))
    world.control.on_event.append(lambda event: seen.update(encode(event)))
    world.run(30.0)
print(seen.hexdigest())
"""


def test_a_run_that_is_listened_to_goes_as_one_that_is_not():
    found = []
    for listeners in ([], [lambda event: None]):
        world = World(*fleets.hydraserve(1))
        world.control.on_event += listeners
        total = world.run(40.0).total()
        learned = {
            key: (one.prefill_s, one.decode_s) for key, one in world.control.placer.fleet.network.seconds.items()
        }
        found.append((learned, total.ttft.total, total.e2e.total))
    assert found[0] == found[1]
    assert any(decode_s for _, decode_s in found[0][0].values()), "what warm requests take is learned"


@pytest.mark.long  # the fast lane has the union's in e2e/test_simulate_command.py
def test_two_processes_write_the_same_bytes():
    """Whatever the order of a process's sets."""

    def digest(hash_seed):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.check_output([sys.executable, "-c", DIGESTS], env=env, cwd=ROOT)

    assert digest("1") == digest("2")
