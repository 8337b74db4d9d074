"""Fleets of each paper, small enough for a test."""

import math
from dataclasses import replace
from random import Random

from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.policies.prediction.port import WindowTotals
from glowplug_lab.simulator.costs import FITTED
from glowplug_lab.simulator.setup import (
    GB,
    QUIET_AGENT,
    ModelSetup,
    Params,
    PolicyNames,
    ServerSetup,
    Setup,
    StartSeconds,
)
from glowplug_lab.simulator.workload.arrival import Arrival, merge
from glowplug_lab.simulator.workload.sampling import gamma_times, power_law_shares
from glowplug_lab.systems import SYSTEMS

H800, A10 = FITTED["llama-2-7b", "h800"], FITTED["llama-2-7b", "a10"]
BEGAN_S = 1_700_006_400.0


def a_model(key, weights_gb, kv_gb, costs, start=StartSeconds(), kv_bytes_per_token=500_000, **fields):
    model = Model(
        name=key,
        key=key,
        engine="emulated",
        weights=WeightsRef(uri=f"s3://{key}", num_bytes=int(weights_gb * GB)),
        weights_bytes=int(weights_gb * GB),
        kv_bytes=int(kv_gb * GB),
        **{"max_concurrency": 8, "max_instances": 8, "keep_alive_s": 30.0, "max_queue": 10_000, "max_wait_s": 300.0}
        | fields,
    )
    return ModelSetup(model=model, costs=costs, kv_bytes_per_token=kv_bytes_per_token, start=start)


def requests(seed, shares, rate, seconds, cv=2.0, longest=300):
    chance = Random(seed)
    streams = []
    for key, share in shares.items():
        times = gamma_times(rate * share, cv, seconds, chance)
        streams.append([Arrival(t, key, chance.randint(10, 1024), chance.randint(3, longest)) for t in times])
    return list(merge(*streams))


def past(keys, rate_of, num_windows=30, window_s=60.0):
    """Each window is as busy as `rate_of(key)` requests in flight."""

    def window(number, rate):
        return WindowTotals(
            started_at=BEGAN_S - window_s * (num_windows - number), window_s=window_s, num_requests=10.0 * rate,
            prompt_tokens=5_000.0 * rate, response_tokens=1_500.0 * rate, concurrency_mean=rate,
            concurrency_peak=2.0 * rate,
        )  # fmt: skip

    return {key: tuple(window(number, rate_of(key)) for number in range(num_windows)) for key in keys}


def warmserve(seed=0, seconds=120.0, rate=8.0, prewarming="warmserve"):
    """WarmServe section 7.1: two servers of eight 80 GB GPUs, tp 1, 2 and 4, weights in host memory."""
    start = StartSeconds(launch_s=0.0, warmup_s=0.0)
    mid = {"h800": FITTED["llama-2-13b", "h100"]}
    big = {"h800": FITTED["llama-2-13b", "h100"].scaled(1.5)}
    models = (
        a_model("7b-0", 12.55, 67, {"h800": H800}, start, max_concurrency=32),
        a_model("7b-1", 12.55, 67, {"h800": H800}, start, max_concurrency=32),
        a_model("13b", 24.24, 135, mid, start, 800_000, max_concurrency=32, num_gpus=2),
        a_model("70b", 128.49, 191, big, start, 312_500, max_concurrency=32, num_gpus=4),
    )
    keys = [one.model.key for one in models]
    shares = dict(zip(keys, power_law_shares(4, 0.5), strict=True))
    setup = Setup(
        servers=(ServerSetup(num_servers=2, weights_in_host=True, abilities=frozenset({"prewarm"})),),
        models=tuple(replace(one, model=replace(one.model, keep_alive_s=5.0)) for one in models),
        policies=PolicyNames(
            prediction="warmserve_csp", placement="warmserve", scaling="warmserve", prewarming=prewarming
        ),
        params=Params(agent=replace(QUIET_AGENT, reservation="paper")),
        history=past(keys, lambda key: 20.0 * shares[key], window_s=300.0),
        began_at=BEGAN_S,
    )
    return setup, requests(seed, shares, rate, seconds)


def hydraserve(seed=0, seconds=120.0, rate=0.2, placement="hydraserve", overlap=True):
    """HydraServe section 8.1: servers of few GPUs and thin network cards, many models, remote weights."""
    start = StartSeconds(launch_s=1.5, library_s=1.0, warmup_s=0.1, overlap=overlap)
    models = tuple(a_model(f"m{n}", 12.5, 5, {"a10": A10}, start, slo=Slo(ttft_s=6.0, tpot_s=0.2)) for n in range(12))
    shares = dict(zip((one.model.key for one in models), power_law_shares(12, 0.3), strict=True))
    a10 = {"gpu_bytes": 24 * GB, "gpu_kind": "a10", "host_cache_bytes": 100 * GB}
    server = ServerSetup(num_servers=4, num_gpus=2, abilities=frozenset({"stages"}), **a10)
    policies = PolicyNames(placement=placement, scaling="hydraserve" if placement == "hydraserve" else "reactive")
    setup = Setup(servers=(server,), models=models, policies=policies)
    return setup, requests(seed, shares, rate, seconds, cv=4.0)


def swapserve(seed=0, seconds=300.0, rate=0.15):
    """SwapServeLLM section 5: more engines than fit on one GPU; preempted ones sleep in host memory."""
    start = StartSeconds(launch_s=5.0, warmup_s=20.0, swap_base_s=2.3, swap_bytes_per_s=13.5e9)
    models = tuple(a_model(f"m{n}", 16, 50, {"h800": H800}, start, keep_alive_s=-1) for n in range(3))
    shares = {one.model.key: 1 / 3 for one in models}
    setup = Setup(
        servers=(ServerSetup(num_gpus=1, weights_in_host=True, abilities=frozenset({"swap"})),),
        models=models,
        policies=PolicyNames(eviction="swapserve"),
        params=Params(placer=PlacerParams(settle_s=0.0, node_lease_s=math.inf, evict_becomes="swapped_out")),
    )
    return setup, requests(seed, shares, rate, seconds)


def preserve(seed=0, seconds=300.0, rate=12.0, routing="preserve_load_aware"):
    """PreServe section 5.3: eight GPUs, one service, response lengths known; instances follow the forecast."""
    start = StartSeconds(launch_s=3.0, warmup_s=1.0)
    model = a_model("chat", 13.5, 22, {"h800": A10}, start, max_concurrency=64, keep_alive_s=-1, min_instances=1)
    setup = Setup(
        servers=(ServerSetup(num_gpus=8, gpu_bytes=40 * GB, weights_in_host=True),),
        models=(model,),
        policies=PolicyNames(routing=routing, prediction="moving_average", scaling="preserve"),
        params=Params(exact_lengths=True),
        history=past(["chat"], lambda key: 4.0 * rate, window_s=600.0),
        began_at=BEGAN_S,
    )
    return setup, requests(seed, {"chat": 1.0}, rate, seconds, cv=1.0)


def muxserve_like(seed=0, seconds=60.0, rate=3.0, share_compute=True):
    """MuxServe's static sharing: a GPU's KV cache and compute are divided."""
    models = tuple(a_model(f"m{n}", 12.55, 12, {"h800": A10}, max_concurrency=32) for n in range(3))
    shares = {one.model.key: 1 / 3 for one in models}
    setup = Setup(
        servers=(ServerSetup(num_gpus=1, weights_in_host=True),),
        models=models,
        policies=PolicyNames(scaling="muxserve_like", placement="muxserve_like"),
        params=Params(share_compute=share_compute),
    )
    return setup, requests(seed, shares, rate, seconds)


def overload(seed=0, *, slots=(4, 4, 4, 4, 8, 4), num_each=50, seconds=0.5, fair_requests=6, late_ratio=0.0, **fields):
    """Six models under the union, memory for three, as many requests for each."""
    start = StartSeconds(launch_s=1.0, warmup_s=0.2)
    models = tuple(
        a_model(f"m{n}", 12.5, 5, {"a10": A10}, start, **{"max_concurrency": num, "max_instances": 1} | fields)
        for n, num in enumerate(slots)
    )
    union = SYSTEMS["union"]
    placer = PlacerParams(settle_s=0.0, node_lease_s=math.inf, fair_requests=fair_requests, **union.params["placer"])
    setup = Setup(
        servers=(ServerSetup(num_gpus=3, gpu_bytes=24 * GB, gpu_kind="a10", weights_in_host=True),),
        models=models,
        policies=PolicyNames(**union.policies),
        params=Params(placer=placer, router=RouterParams(late_ratio=late_ratio)),
    )
    chance = Random(seed)
    arrivals = [
        Arrival(chance.random() * seconds, one.model.key, chance.randint(10, 100), chance.randint(60, 180))
        for one in models
        for _ in range(num_each)
    ]
    return setup, sorted(arrivals)


def turning(seed=0, seconds=900.0, swap_host_bytes=None):
    """Eight models under the union on three GPUs that hold an instance and a replica each; a favourite changes."""
    start = StartSeconds(launch_s=3.0, warmup_s=1.0, swap_base_s=0.5)
    models = tuple(
        a_model(f"m{n}", 12.5, 5, {"a10": A10}, start, max_concurrency=4, keep_alive_s=10.0) for n in range(8)
    )
    union = SYSTEMS["union"]
    setup = Setup(
        servers=(
            ServerSetup(
                num_servers=3,
                num_gpus=1,
                gpu_bytes=32 * GB,
                gpu_kind="a10",
                weights_in_host=True,
                abilities=frozenset({"swap", "prewarm"}),
            ),
        ),
        models=models,
        policies=PolicyNames(**union.policies),
        params=Params(
            agent=replace(QUIET_AGENT, swap_host_bytes=swap_host_bytes),
            autoscaler=AutoscalerParams(**union.params["autoscaler"]),
            placer=PlacerParams(settle_s=0.0, node_lease_s=math.inf, **union.params["placer"]),
        ),
    )
    chance, arrivals, now_s = Random(seed), [], 0.0
    while (now_s := now_s + chance.expovariate(1.0)) < seconds:
        number = int(now_s / 40.0 + chance.paretovariate(1.5) - 1) % len(models)
        arrivals.append(Arrival(now_s, f"m{number}", chance.randint(10, 200), chance.randint(8, 32)))
    return setup, arrivals
