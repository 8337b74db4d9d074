"""Agents' abilities besides starts and stops."""

from dataclasses import replace

import pytest

from glowplug.controllers.agent.messages import AgentParams
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.instance import InstanceState, Worker
from glowplug.events.commands import ConsolidateInstance, FetchWeights, JoinStages, StartInstance, StopInstance
from glowplug_lab.simulator.costs import FITTED
from glowplug_lab.simulator.setup import GB, QUIET_AGENT, Fault, Params, ServerSetup, Setup, StartSeconds
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World
from tests.simulation import fleets

COSTS = FITTED["llama-2-7b", "h800"]
START = StartSeconds(launch_s=2.0, warmup_s=0.5, activate_s=0.01, swap_base_s=1.0, swap_bytes_per_s=10e9)
ABLE = frozenset({"prewarm", "swap", "stages"})


def a_setup(num_gpus=1, num_servers=1, start=START, agent=QUIET_AGENT, kv_bytes=32 * GB, **fields):
    own = {"keep_alive_s": -1, "max_instances": 4, "num_gpus": num_gpus} | fields
    one = fleets.a_model("m", 16, kv_bytes / GB, {"h800": COSTS}, start, **own)
    server = ServerSetup(
        num_servers=num_servers, num_gpus=4, pcie_bytes_per_s=16e9, weights_in_host=num_servers == 1, abilities=ABLE
    )
    return Setup(servers=(server,), models=(one,), params=Params(agent=agent))


def workers_of(setup, node="server-1", num_bytes=0, first=0):
    model = setup.models[0].model
    share = (num_bytes or model.memory_bytes) // model.num_gpus
    gpus = range(first, first + model.num_gpus)
    return tuple(
        Worker(worker_id=f"w{n}", node_id=node, gpu_id=f"{node}/{n}", num_bytes=share, rank=n - first) for n in gpus
    )


def ask(world, payload, at_s=0.0):
    world.kernel.at(world.began_s + at_s, world.control.publish, "placer", payload, None)


def start(world, instance_id, at_s=0.0, **fields):
    fields = {"model": world.setup.models[0].model, "decision_id": ""} | fields
    ask(world, StartInstance(target=fields["workers"][0].node_id, instance_id=instance_id, **fields), at_s)


def state_of(world, instance_id):
    return world.control.tables["instances"][instance_id].state


def ready_s(world, instance_id):
    return world.control.tables["instances"][instance_id].ready_at - world.began_s


def held(world, node="server-1"):
    return [gpu.used_bytes for gpu in world.nodes[node].agent.ledger.gpus]


def look_at(world, instance_id, at_s):
    """Filled during the run: state, bytes on the first GPU."""
    seen = []
    world.kernel.at(world.began_s + at_s, lambda: seen.append((state_of(world, instance_id), held(world)[0])))
    return seen


def test_a_replica_loads_without_a_process_and_serves_at_once():
    """WarmServe section 5: 16 GB at 16 GB/s; an engine grows from it in 10 ms."""
    world = World(a_setup(), [Arrival(5.0, "m", 100, 5)], check=True)
    start(world, "r1", replica=True, workers=workers_of(world.setup, num_bytes=16 * GB))
    seen = look_at(world, "r1", 2.0)
    start(world, "i1", at_s=3.0, source="r1", workers=workers_of(world.setup))
    results = world.run(10.0)
    assert seen == [(InstanceState.PREWARMED, 16 * GB)]
    assert ready_s(world, "i1") == pytest.approx(3.01, abs=0.01)
    assert state_of(world, "r1") is InstanceState.STOPPED and held(world)[0] == 48 * GB
    assert results.starts == {"prewarmed": 1} and results.hit_ratio == 1.0
    assert results.total().num_finished == 1 and results.bytes_loaded == results.bytes_prewarmed == 16 * GB


EARLY_S = 31 / 32 * COSTS.prefill_s(1, 1)  # the last layers may come during the shortest first prefill


@pytest.mark.parametrize(
    ("num_gb", "asked_s", "page_map_s", "serves_s", "found"),
    [
        # WarmServe section 4.2: 32 GB are 15,259 pages of 2 MiB, at 193 us each where they are created first
        pytest.param(16, 3.0, 193e-6, 3.01 + 15_259 * 193e-6, "prewarmed", id="maps the pages of its KV cache"),
        # (L-1)/L x shortest prefill x bandwidth may be missing
        pytest.param(16, 0.4, 0.0, 1.0 - EARLY_S, "prewarming", id="is still loading and is streamed to its end"),
        pytest.param(8, 0.2, 0.0, 1.0 - EARLY_S, "prewarming", id="of the first layers goes on to the last"),
    ],
)
def test_an_engine_that_grows_from_a_replica(num_gb, asked_s, page_map_s, serves_s, found):
    world = World(a_setup(start=replace(START, page_map_s=page_map_s)), [], check=True)
    start(world, "r1", replica=True, workers=workers_of(world.setup, num_bytes=num_gb * GB))
    start(world, "i1", at_s=asked_s, source="r1", workers=workers_of(world.setup))
    results = world.run(10.0)
    assert ready_s(world, "i1") == pytest.approx(serves_s, abs=0.004)
    assert results.starts == {found: 1} and results.bytes_loaded == 16 * GB


def test_a_replica_of_the_first_layers_takes_their_bytes_and_streams_the_rest_at_its_start() -> None:
    """WarmServe section 4 and erratum E7: 12 of 16 GB are held; at 16 GB/s the rest takes 250 ms, less the part the
    shortest prefill hides. The start is a hit and holds all its bytes from its grant on."""
    world = World(a_setup(), [Arrival(5.0, "m", 100, 5)], check=True)
    start(world, "r1", replica=True, workers=workers_of(world.setup, num_bytes=12 * GB))
    start(world, "i1", at_s=3.0, source="r1", workers=workers_of(world.setup))
    before, after = look_at(world, "r1", 2.0), look_at(world, "i1", 3.05)
    results = world.run(10.0)
    assert before + after == [(InstanceState.PREWARMED, 12 * GB), (InstanceState.LOADING, 48 * GB)]
    assert ready_s(world, "i1") == pytest.approx(3.0 + 0.25 - EARLY_S, abs=0.004)
    assert results.starts == {"prewarmed": 1} and results.total().num_finished == 1
    assert results.bytes_prewarmed == 12 * GB and results.bytes_loaded == 16 * GB
    engine = world.nodes["server-1"].find("i1")
    assert engine is not None and engine.loaded_at - world.began_s == pytest.approx(3.25, abs=0.01)


def test_a_replica_of_the_first_layers_that_is_dropped_leaves_nothing_behind() -> None:
    world = World(a_setup(), [], check=True)
    start(world, "r1", replica=True, workers=workers_of(world.setup, num_bytes=12 * GB))
    ask(world, StopInstance(target="server-1", instance_id="r1", reason=""), 2.0)
    world.run(5.0)
    assert state_of(world, "r1") is InstanceState.STOPPED and held(world)[0] == 0
    assert world.results.bytes_loaded == 12 * GB


def test_a_load_in_the_foreground_goes_before_one_in_the_background():
    """One lane: the start's 16 GB go first."""
    setup = a_setup(start=replace(START, launch_s=0.0, warmup_s=0.0), kv_bytes=1)
    world = World(setup, [], check=True)
    start(world, "r1", replica=True, workers=workers_of(setup, num_bytes=16 * GB))
    start(world, "i1", at_s=0.5, workers=workers_of(setup))
    world.run(5.0)
    assert ready_s(world, "i1") == pytest.approx(1.5, abs=0.01)
    prewarmed = world.control.tables["instances"]["r1"]
    assert prewarmed.ready_at - world.began_s == pytest.approx(2.0, abs=0.01)


def test_the_last_chunk_is_loaded_once_it_has_been_fetched():
    """HydraServe Eq. 5 with erratum E15: 16 GB at 2 GB/s hide loading, except 4 GB at 16 GB/s, and the warm-up."""
    world = World(a_setup(num_servers=2, start=replace(START, chunk_bytes=4 * GB)), [], check=True)
    model = world.setup.models[0].model
    ask(world, FetchWeights(target="server-1", model_key="m", weights=model.weights, instance_id="i1"))
    start(world, "i1", workers=workers_of(world.setup))
    world.run(15.0)
    assert ready_s(world, "i1") == pytest.approx(16 / 2 + 4 / 16 + 0.5, abs=0.02)


def test_a_tensor_group_loads_over_all_its_lanes():
    world = World(a_setup(num_gpus=4), [Arrival(4.0, "m", 100, 5)], check=True)
    start(world, "i1", workers=workers_of(world.setup))
    results = world.run(5.0)
    assert ready_s(world, "i1") == pytest.approx(2.0 + 16 / 4 / 16 + 0.5, abs=0.01)
    assert held(world) == [12 * GB] * 4 and results.total().num_finished == 1


def test_an_engine_asleep_gives_its_gpu_back_and_wakes():
    """SwapServeLLM section 4, as calibrated: a second, and 16 GB at 10 GB/s."""
    world = World(a_setup(), [Arrival(15.0, "m", 100, 5)], check=True)
    start(world, "i1", workers=workers_of(world.setup))
    ask(world, StopInstance(target="server-1", instance_id="i1", reason="", becomes="swapped_out"), 5.0)
    seen = look_at(world, "i1", 9.0)
    start(world, "i2", at_s=10.0, source="i1", workers=workers_of(world.setup, first=1))
    results = world.run(20.0)
    assert seen == [(InstanceState.SWAPPED_OUT, 0)]
    assert ready_s(world, "i2") == pytest.approx(10.0 + 1.0 + 1.6, abs=0.01)
    assert results.starts == {"host": 1, "swapped": 1} and results.bytes_swapped == 32 * GB
    assert results.total().num_finished == 1


def test_a_drained_engine_keeps_its_weights_as_a_replica():
    world = World(a_setup(), [], check=True)
    start(world, "i1", workers=workers_of(world.setup))
    ask(world, StopInstance(target="server-1", instance_id="i1", reason="", becomes="prewarmed"), 5.0)
    start(world, "i2", at_s=8.0, source="i1", workers=workers_of(world.setup))
    world.run(10.0)
    assert ready_s(world, "i2") == pytest.approx(8.01, abs=0.01) and held(world)[0] == 48 * GB


def test_a_draining_engine_gives_its_cache_up_request_by_request():
    """WarmServe section 4.1, Eq. 1: the grant falls, and no running request suffers."""
    agent = AgentParams(beat_s=4.0, reservation="paper")
    arrivals = [Arrival(5.0 + n / 100, "m", 200, 100 * (n + 1)) for n in range(8)]
    world = World(a_setup(agent=agent), arrivals, check=True)
    start(world, "i1", workers=workers_of(world.setup))
    ask(world, StopInstance(target="server-1", instance_id="i1", reason="", grace_s=60.0), 5.5)
    seen = []
    world.control.on_save.append(
        lambda table, row, now_s: seen.append(row.gpus[0].used_bytes) if table == "nodes" else None
    )
    results = world.run(30.0)
    falling = [b for b in seen if 16 * GB < b < 48 * GB]
    assert len(set(falling)) >= 5 and falling == sorted(falling, reverse=True)
    assert results.total().num_finished == 8 and results.total().num_preempted == 0


def pipeline(setup, arrivals, num_stages=4, **kwargs):
    """Each node has its range of the weights and an equal part of the memory."""
    world = World(setup, arrivals, check=True, **kwargs)
    model = setup.models[0].model
    nodes = [f"server-{n + 1}" for n in range(num_stages)]
    share = model.memory_bytes // num_stages
    workers = tuple(Worker(worker_id=f"w{n}", node_id=n, gpu_id=f"{n}/0", num_bytes=share) for n in nodes)
    part = model.weights_bytes // num_stages
    for r, node in enumerate(nodes):
        name, mine = ("x", workers) if r == 0 else (f"x.{r}", (workers[r],))
        span = {"first_byte": r * part, "last_byte": (r + 1) * part}
        ask(world, FetchWeights(target=node, model_key="m", weights=model.weights, instance_id=name, **span))
        start(world, name, workers=mine, part_of="x" if r else "", num_stages=num_stages, stage=r)
    ask(world, JoinStages(target=nodes[0], instance_id="x"), 5.0)
    return world


@pytest.mark.parametrize(("reserve_compute", "slow"), [(True, 4), (False, 1)])
def test_a_pipelined_cold_start_fetches_in_parts_and_serves(reserve_compute, slow):
    """HydraServe sections 4 and 5: 4 GB per server at 2 GB/s beside 2 s of launch, then over PCIe. A token hops, and
    computes s - w + w/s times as long with w = 0 full-memory stages (Eq. 2), where each has 1/s of its GPU."""
    setup = a_setup(num_servers=4)
    setup = replace(setup, params=replace(setup.params, reserve_compute=reserve_compute))
    world = pipeline(setup, [Arrival(6.0, "m", 100, 31)])
    seen = []
    world.kernel.at(world.began_s + 2.4, lambda: seen.append((world.results.bytes_fetched, world.results.bytes_loaded)))
    results = world.run(8.0)
    row = world.control.tables["instances"]["x"]
    assert {phase.name.value for phase in row.phases} >= {"fetch", "launch", "load", "warmup"}
    loaded = max(p.ended_at for p in row.phases if p.name == "load") - world.began_s
    assert loaded == pytest.approx(max(2.0 + 4 / 16, 4 / 2 + 0.016 / 16), abs=0.02)
    assert seen == [(16 * GB, 16 * GB)]
    assert row.max_concurrency == 32 and row.kv_tokens == 32 * GB // 500_000
    assert world.nodes["server-1"].find("x").serving.limits.max_sequences == 32, "a batch for each stage"
    assert row.slots_per_stage == 8
    total = results.total()
    hops_s = 4 * START.hop_s
    step_s = COSTS.decode_base_s + COSTS.decode_s_per_sequence / 4
    assert total.tpot.mean == pytest.approx(slow * step_s + hops_s, rel=0.01)


@pytest.mark.parametrize("scale_up", [False, True])
def test_consolidation_loses_no_token_and_moves_the_cache_once(scale_up):
    """HydraServe section 6: 12 GB in the background, then the KV of the other stages."""
    arrivals = [Arrival(6.0, "m", 500, 1500), Arrival(6.1, "m", 100, 400)]
    world = pipeline(a_setup(num_servers=4), arrivals)
    ids = ["x", "x.1", "x.2", "x.3"] if scale_up else ["x"]
    for r, instance_id in enumerate(ids):
        ask(world, ConsolidateInstance(target=f"server-{r + 1}", instance_id=instance_id, reason="test"), 6.5)
    results = world.run(40.0)
    rows = world.control.tables["instances"]
    assert all(rows[i].is_whole and rows[i].serves and rows[i].max_concurrency == 8 for i in ids)
    assert all(rows[i].kv_tokens == 64_000 for i in ids)
    total = results.total()
    assert total.num_finished == 2 and total.response_tokens == 1900 and total.num_preempted == 0
    assert results.num_consolidated == len(ids)
    assert results.bytes_fetched == (16 + 12 * len(ids)) * GB
    assert 0 < results.bytes_migrated < 2000 * 500_000
    assert total.tpot.lowest < 2 * COSTS.decode_base_s


def test_a_pipeline_whose_consolidation_fails_serves_on_and_is_whole_when_asked_again():
    arrivals = [Arrival(6.0, "m", 500, 1500), Arrival(22.0, "m", 100, 400)]
    faults = (Fault(at_s=1.0, node_id="server-1", model="m", kind="consolidation"),)
    world = pipeline(replace(a_setup(num_servers=4), faults=faults), arrivals)
    said = []  # the autoscaler asks by itself, again and again
    for at_s in (10.0, 17.0):
        world.kernel.at(world.began_s + at_s, lambda: said.append(world.control.tables["instances"]["x"]))
    results = world.run(60.0)
    assert said[0] == said[1] and not said[0].is_whole and not said[0].consolidating
    assert said[0].state is InstanceState.READY and "broken by a fault" in said[0].reason
    assert world.control.tables["instances"]["x"].is_whole and results.num_consolidated == 1
    assert results.bytes_fetched == (16 + 2 * 12) * GB, "the rest comes twice"
    total = results.total()
    assert total.num_finished == 2 and total.response_tokens == 1900 and not total.num_refused


@pytest.mark.parametrize("scale_up", [False, True])
def test_a_consolidation_that_hangs_is_given_up_in_its_time_and_the_pipeline_serves_on(scale_up):
    """After 15 s its engine is told to drop it. The next attempt works: 12 GB more, 6 s over the network."""
    hung = "server-2" if scale_up else "server-1"
    setup = a_setup(num_servers=4, agent=replace(QUIET_AGENT, consolidate_deadline_s=15.0))
    params = replace(setup.params, idle_tick_s=1.0, autoscaler=AutoscalerParams(consolidate=not scale_up))
    faults = (Fault(at_s=1.0, node_id=hung, model="m", kind="hang"),)
    arrivals = [Arrival(6.0, "m", 500, 1500), Arrival(45.0, "m", 100, 400)]
    world = pipeline(replace(setup, params=params, faults=faults), arrivals)
    for at_s in (6.5, 40.0) if scale_up else ():
        ask(world, ConsolidateInstance(target=hung, instance_id="x.1", reason="test"), at_s)
    name, decided, said = "x.1" if scale_up else "x", [], []
    world.control.on_decision.append(lambda d: decided.append(d) if d.chosen == "unconsolidated" else None)
    for at_s in (15.0, 24.0):
        world.kernel.at(
            world.began_s + at_s, lambda: said.append((world.control.tables["instances"][name], held(world, hung)[0]))
        )
    results = world.run(60.0)
    (hangs, held_hanging), (failed, held_failed) = said
    assert hangs.consolidating and not hangs.is_whole and held_hanging == 48 * GB
    assert not failed.consolidating and failed.state is InstanceState.READY and held_failed == 12 * GB
    assert "not whole after 15 s" in failed.reason
    row, total = world.control.tables["instances"][name], results.total()
    assert row.is_whole and results.num_consolidated == 1 and held(world, hung)[0] == 48 * GB
    assert total.num_finished == 2 and total.response_tokens == 1900 and not total.num_refused
    assert results.bytes_fetched == (16 + 2 * 12) * GB, "the rest comes twice"
    if not scale_up:
        (decision,) = decided
        assert "a pipeline of m serves on as it is" in decision.reason and failed.reason in decision.reason


def test_a_stage_that_goes_takes_its_pipeline_along():
    world = pipeline(a_setup(num_servers=4), [Arrival(6.0, "m", 100, 101)])
    ask(world, StopInstance(target="server-2", instance_id="x.1", reason="test", grace_s=0.0), 6.5)
    total = world.run(20.0).total()
    assert total.num_refused == {"engine_failed": 1} and world.traffic.num_open == 0
    assert world.control.tables["instances"]["x"].state.is_gone


def test_engines_busy_on_one_gpu_share_its_time():
    """Static sharing, as MuxServe's: two alike take twice as long each."""
    setup = a_setup(kv_bytes=8 * GB)
    other = replace(setup.models[0], model=replace(setup.models[0].model, name="n", key="n"))
    arrivals = [Arrival(10.0, "m", 100, 101), Arrival(10.0, "n", 100, 101)]
    world = World(replace(setup, models=(*setup.models, other)), arrivals, check=True)
    for one in (setup.models[0], other):
        start(world, f"i-{one.model.key}", model=one.model, workers=workers_of(setup))
    total = world.run(30.0).total()
    alone_s = COSTS.decode_base_s + COSTS.decode_s_per_sequence
    assert total.num_finished == 2 and total.tpot.mean == pytest.approx(2 * alone_s, rel=0.03)


def test_an_engine_that_dies_fails_its_requests_and_starts_anew():
    setup = replace(a_setup(), faults=(Fault(at_s=8.0, node_id="server-1", model="m"),))
    arrivals = [Arrival(1.0, "m", 100, 1000), Arrival(20.0, "m", 100, 10)]
    world = World(setup, arrivals, check=True)
    total = world.run(40.0).total()
    assert total.num_refused == {"engine_failed": 1} and total.num_finished == 1
    assert world.results.num_starts == 2


def test_a_node_that_falls_silent_is_done_without():
    """Its instances are given up when its lease ends."""
    params = Params(
        agent=AgentParams(beat_s=1.0, health_every_s=1e9), placer=PlacerParams(settle_s=0.0), idle_tick_s=1.0
    )
    setup = replace(a_setup(num_servers=2), params=params, faults=(Fault(at_s=20.0, node_id="server-1"),))
    arrivals = [Arrival(1.0, "m", 100, 10), Arrival(19.9, "m", 100, 1000), Arrival(40.0, "m", 100, 10)]
    world = World(setup, arrivals, check=True)
    total = world.run(70.0).total()
    assert total.num_refused == {"engine_failed": 1} and total.num_finished == 2
    rows = world.control.tables["instances"].values()
    assert {row.node_id for row in rows if row.state is InstanceState.READY} == {"server-2"}


def sharing(shares, num_gpus=1):
    """16 GB of weights and 20 GB of KV cache each, on GPUs of 80 GB."""
    setup = a_setup(kv_bytes=20 * GB, min_instances=3, max_instances=3)
    server = replace(setup.servers[0], num_gpus=num_gpus, abilities=ABLE | ({"share"} if shares else set()))
    return replace(setup, servers=(server,))


@pytest.mark.parametrize(("shares", "num", "used_gb"), [(False, 2, 72), (True, 3, 76)])
def test_a_gpu_holds_three_instances_where_two_copies_of_their_weights_would_not_fit(shares, num, used_gb):
    world = World(sharing(shares), [Arrival(60.0, "m", 100, 5)], check=True)
    world.run(90.0)
    ready = [row for row in world.control.tables["instances"].values() if row.state is InstanceState.READY]
    assert (len(ready), held(world)) == (num, [used_gb * GB])
    (gpu,) = world.nodes["server-1"].agent.ledger.gpus
    assert [(one.num_bytes, len(one.holders)) for one in gpu.shared] == ([(16 * GB, 3)] if shares else [])


def test_models_with_the_same_weights_share_them_whatever_comes_and_goes():
    """Two engines of 16 + 25 GB fit on 80 GB only if they share weights."""
    setup, arrivals = fleets.swapserve(seed=3, seconds=100.0, rate=0.3)
    weights = setup.models[0].model.weights
    alike = {"weights": weights, "keep_alive_s": 8.0, "kv_bytes": 25 * GB}
    models = tuple(replace(one, model=replace(one.model, **alike)) for one in setup.models)
    for abilities, most in ((frozenset({"swap", "share"}), 2), (frozenset({"swap"}), 0)):
        server = replace(setup.servers[0], abilities=abilities)
        world = World(replace(setup, models=models, servers=(server,)), arrivals, check=True)
        seen = [look_at_sharers(world, at_s) for at_s in range(10, 100, 2)]
        world.run(200.0)
        assert max(num for (num,) in seen) == most
        assert not world.traffic.num_open


def look_at_sharers(world, at_s):
    seen = []

    def look():
        (gpu,) = world.nodes["server-1"].agent.ledger.gpus
        seen.append(max((len(weights.holders) for weights in gpu.shared), default=0))

    world.kernel.at(world.began_s + at_s, look)
    return seen
