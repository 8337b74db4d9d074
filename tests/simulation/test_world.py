"""The services' own controllers in virtual time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from glowplug.controllers.reads import MissingExecutor
from glowplug.domain.model import Slo
from glowplug_lab.simulator.costs import FITTED
from glowplug_lab.simulator.setup import GB, ServerSetup, Setup, StartSeconds
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.workload.sampling import power_law_shares
from glowplug_lab.simulator.world import World
from tests.simulation import fleets
from tests.simulation.seeds import seeds

SEEDS = seeds(2)
COSTS = {"h800": FITTED["llama-2-7b", "h800"]}


def a_model(key, kv_gb=20.0):
    fields = {"max_concurrency": 16, "max_instances": 4, "keep_alive_s": 10.0, "max_queue": 256, "max_wait_s": 120.0}
    start = StartSeconds(launch_s=0.5, warmup_s=0.2)
    return fleets.a_model(key, 12.5, kv_gb, COSTS, start, slo=Slo(ttft_s=5.0), **fields)


def traffic(seed, num_models, rate, seconds):
    shares = {f"m{n}": share for n, share in enumerate(power_law_shares(num_models, 1.0))}
    return fleets.requests(seed, shares, rate, seconds)


def a_setup(num_models, **server):
    return Setup(
        servers=(ServerSetup(**{"num_servers": 2, "num_gpus": 2, "gpu_bytes": 40 * GB} | server),),
        models=tuple(a_model(f"m{n}") for n in range(num_models)),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_more_models_than_memory_and_everybody_is_answered(seed):
    arrivals = traffic(seed, 8, rate=3.0, seconds=120.0)
    world = World(a_setup(8), arrivals, check=True)
    total = world.run(120.0).total()
    assert world.traffic.num_open == 0, f"seed {seed}"
    assert total.num_arrived == len(arrivals) == total.num_finished + sum(total.num_refused.values())
    assert total.num_finished > 0.8 * len(arrivals), f"seed {seed}: {total.num_refused}"
    assert world.results.num_starts >= 8


def test_after_the_traffic_every_gpu_is_free():
    world = World(a_setup(4), traffic(1, 4, 2.0, 30.0), check=True)
    world.run(30.0)
    world.kernel.run(world.kernel.now_s + 60.0)
    assert [n for node in world.nodes.values() for n in node.engines] == []
    assert all(not gpu.grants for node in world.nodes.values() for gpu in node.agent.ledger.gpus)


@pytest.mark.parametrize(
    ("overlap", "stages_s"),
    [
        (True, 12.5 / 2 + 0.016 / 25 + 0.2),  # loaded while arriving: only the last chunk is left
        (False, 0.5 + 12.5 / 2 + 12.5 / 25 + 0.2),
    ],
)
def test_a_cold_start_takes_what_its_stages_take(overlap, stages_s):
    """HydraServe section 5.2, Eq. 5: 12.5 GB at 2 GB/s over the network and 25 GB/s over PCIe, 0.5 s of launch, 0.2 s
    of warm-up; the control plane takes 20 ms."""
    setup = a_setup(1, num_servers=1, num_gpus=1, pcie_bytes_per_s=25e9)
    one = replace(setup.models[0], start=replace(setup.models[0].start, overlap=overlap))
    world = World(replace(setup, models=(one,)), [Arrival(0.0, "m0", 1000, 2)], check=True)
    total = world.run(10.0).total()
    expected = stages_s + COSTS["h800"].prefill_s(1000, 1000**2)
    assert total.num_cold == 1
    assert expected < total.ttft.highest < expected + 0.02
    assert world.results.bytes_fetched == world.results.bytes_loaded == 12.5 * GB
    assert world.results.starts == {"remote": 1}


def test_a_prompt_that_never_fits_is_refused_and_the_rest_goes_on():
    tiny = a_model("m0", kv_gb=0.1)  # 200 tokens
    setup = Setup(servers=(ServerSetup(num_gpus=1),), models=(tiny,))
    world = World(setup, [Arrival(0.0, "m0", 500, 10), Arrival(1.0, "m0", 50, 10)], check=True)
    total = world.run(30.0).total()
    assert total.num_refused == {"context_length_exceeded": 1} and total.num_finished == 1


def test_a_model_nobody_deployed_is_refused():
    world = World(a_setup(1), [Arrival(0.0, "nobody", 5, 5)])
    assert world.run(5.0).total().num_refused == {"model_not_found": 1}


def test_effects_that_nothing_carries_out_are_refused_before_anything_runs():
    control = World(a_setup(1), []).control
    with pytest.raises(MissingExecutor, match="router: nothing carries out Dispatch, Hold, MoveStream, Recall, Reject"):
        control.add_router(SimpleNamespace(executes=()))


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (lambda: Setup(servers=(), models=(a_model("a"),)), "servers"),
        (lambda: Setup(servers=(ServerSetup(),), models=()), "models"),
        (lambda: Setup(servers=(ServerSetup(),), models=(a_model("a"), a_model("a"))), "2 of them with 1 keys"),
        (lambda: ServerSetup(num_gpus=-1), "num_gpus: -1"),
    ],
)
def test_an_impossible_setup_names_the_field(broken, named):
    with pytest.raises(ValueError, match=named):
        broken()


def test_skipping_ahead_is_visiting_every_step():
    """The engine's closed form over equal steps."""
    setup, arrivals = replace(a_setup(4), began_at=1000.0), traffic(7, 4, 3.0, 60.0)  # epochs round to 0.2 us
    results = [
        World(replace(setup, params=replace(setup.params, stepping=stepping)), arrivals).run(60.0)
        for stepping in (False, True)
    ]
    skipped, stepped = (one.total() for one in results)
    assert skipped.num_finished == stepped.num_finished == len(arrivals)
    assert results[0].starts == results[1].starts
    for name in ("ttft", "tpot", "e2e"):
        assert getattr(skipped, name).total == pytest.approx(getattr(stepped, name).total, rel=1e-6), name


def test_memory_does_not_grow_with_the_trace():
    def kept(seconds):
        world = World(a_setup(2), traffic(9, 2, 2.0, seconds))
        world.run(seconds)
        world.kernel.run(world.kernel.now_s + 300.0)
        agents = sum(len(node.agent.holdings) for node in world.nodes.values())
        return len(world.kernel._heap), agents, len(world.control.tables["instances"]), world.traffic.num_open

    short, long = kept(600.0), kept(3600.0)
    assert all(b <= a + 4 for a, b in zip(short, long, strict=True)), (short, long)
