"""H1-H4: HydraServe's cold starts, attainment, consolidation and bursts against serverless engines."""

from collections.abc import Iterable, Sequence

import yaml

from bench.papers.cache import ROOT
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Verdict, prose
from bench.papers.plots import Bars, Lines
from bench.papers.simulated import SIMULATOR, figures, points, policies, simulate
from glowplug.simulator.scenario import load_tree
from glowplug.simulator.workload.arrival import Arrival
from glowplug.simulator.world import World

START_S = {
    "HydraServe": "{launch_s: 1.0, library_s: 2.0, warmup_s: 1.0, overlap: true}",
    "serverless vLLM": "{launch_s: 2.0, library_s: 3.0, warmup_s: 3.2, overlap: false}",
    "ServerlessLLM": "{launch_s: 1.0, library_s: 3.0, warmup_s: 3.2, overlap: false}",
}
KNOWN = "params.placer.start_stages={container_s: 1.0, library_s: 2.0, prefill_s: 0.3, decode_s: 0.05, hop_s: 0.001}"
LOADED = KNOWN.replace("prefill_s: 0.3", "prefill_s: 1.0")  # the first prefill of a worker warms it up
PLACED = {"HydraServe": "hydraserve", "serverless vLLM": "first_fit", "ServerlessLLM": "serverlessllm"}
CHAT = "{prompt_mean: 236, prompt_cv: 4.4, response_mean: 180, response_cv: 1.81}"  # ShareGPT's quantiles
CODE = "{prompt_mean: 160, prompt_cv: 0.45, response_mean: 70, response_cv: 0.6}"  # HumanEval: short both ways
GRID = ((2, 0.6), (4, 0.7), (8, 0.6), (8, 0.8))  # CV and requests a second

SEVEN = {
    "OPT-2.7B": (5.3, "a10"),
    "OPT-6.7B": (13.3, "a10"),
    "OPT-13B": (25.7, "v100"),
    "Llama2-7B": (12.5, "a10"),
    "Llama2-13B": (24.2, "v100"),
    "Llama3-8B": (16.1, "a10"),
    "Falcon-7B": (14.4, "a10"),
}
"""GB, and the GPU it is served on."""


def fleet(system: str, kind: str, num_servers: int, num_gpus: int, model: dict[str, object]) -> dict[str, object]:
    """Testbed (i), the part of one kind of GPU, with one model on it."""
    gpu_bytes = "24GB" if kind == "a10" else "32GB"
    server = {
        "name": kind,
        "num_servers": num_servers,
        "num_gpus": num_gpus,
        "gpu_bytes": gpu_bytes,
        "gpu_kind": kind,
        "network_bytes_per_s": "16Gbps",
        "host_cache_bytes": "188GB",
        "abilities": ["stages"] if system.startswith("HydraServe") else [],
    }
    base = system.partition(",")[0]
    return {
        "title": "testbed (i)",
        "seconds": 300,
        "servers": [server],
        "models": [{"max_concurrency": 8, "keep_alive_s": 30, "max_queue": 1000, "max_wait_s": 600} | model],
        "policies": {"scaling": "hydraserve", "placement": PLACED[base]},
        "workload": {"source": "gamma", "rps": 0.1, "lengths": {"prompt_mean": 512}},
    }


def alone(tree: dict[str, object], arrivals: Iterable[Arrival], settings: Sequence[str], system: str) -> Outcome:
    """A run of given requests on a small fleet."""
    for setting in (KNOWN, *settings):
        path, _, text = setting.partition("=")
        node: dict[str, object] = tree
        *heads, last = path.split(".")
        for head in heads:
            node = node.setdefault(head, {})  # type: ignore[assignment]
        node[last] = yaml.safe_load(text)
    start = yaml.safe_load(START_S[system.partition(",")[0]])
    tree["models"][0]["start"] = start  # type: ignore[index]
    scenario = load_tree(tree, ROOT / "scenarios")
    return figures(World(scenario.setup, iter(list(arrivals))).run(400.0))


COSTS = {
    "a10": {"profile": "llama-2-7b/a10"},
    "v100": {"profile": "llama-2-13b/a100", "scale": 2.4},
}


def ready_s(gigabytes: float, num_stages: int) -> float:
    """When Eq. 5 says that s stages are there, on 16 Gbit/s (stages are skewed by 0.9)."""
    part = gigabytes * 1e9 / num_stages / (0.9 if num_stages > 1 else 1.0)
    return max(1.0 + max(part / 32e9, 2.0), part / 2e9 + 16e6 / 32e9)


def forced(gigabytes: float, num_stages: int) -> float:
    """A TTFT objective that Algorithm 1 meets with four stages, one of them full, hardly with three; or with one."""
    return 100.0 if num_stages == 1 else ready_s(gigabytes, 4) + 0.3 * 3.25 + 0.003 + 0.05


def run_cold(case: str, seed: int, quick: bool) -> Outcome:
    """H1: one request to a model nobody has."""
    name, _, system = case.partition(" by ")
    gigabytes, kind = SEVEN[name]
    model = {
        "name": "model",
        "weights_bytes": f"{gigabytes}GB",
        "kv_bytes": "2GB",
        "costs": COSTS[kind] | ({"scale": gigabytes / 12.5} if kind == "a10" else {}),
        "slo": {"ttft_s": forced(gigabytes, 1 if system.endswith("one worker") else 4), "tpot_s": 10},
    }
    tree = fleet(system, kind, 4, 1 if kind == "a10" else 4, model)
    return alone(tree, [Arrival(1.0, "model", 128, 16)], (), system)


SYSTEMS = ("HydraServe", "HydraServe, one worker", "serverless vLLM", "ServerlessLLM")


def cold_cases(quick: bool) -> tuple[str, ...]:
    return tuple(f"{name} by {system}" for name in SEVEN for system in SYSTEMS)


def judge_cold(runs: Runs) -> Verdict:
    """H1."""
    ttft = {case: runs.of(case, "ttft_mean").mean for case in runs.cases}
    ratios = {name: ttft[f"{name} by serverless vLLM"] / ttft[f"{name} by HydraServe"] for name in SEVEN}
    other = {name: ttft[f"{name} by ServerlessLLM"] / ttft[f"{name} by HydraServe"] for name in SEVEN}
    findings = [
        Finding("serverless vLLM / HydraServe", _range(ratios.values()), "2.1x to 4.7x"),
        Finding("ServerlessLLM (nothing cached) / HydraServe", _range(other.values()), "1.7x to 3.1x"),
    ]
    for name in SEVEN:
        times = ", ".join(f"{system} {ttft[f'{name} by {system}']:.2f} s" for system in SYSTEMS)
        findings.append(Finding(f"{name}: TTFT of a cold start", times))
    bars = Bars(
        title="TTFT of a cold start",
        x_label="model",
        y_label="seconds",
        groups=list(SEVEN),
        series={system: [ttft[f"{name} by {system}"] for name in SEVEN] for system in SYSTEMS},
    )
    passed = min(ratios.values()) >= 1.9 and max(ratios.values()) <= 5
    return Verdict(ours=_range(ratios.values()), passed=passed, findings=findings, plots={"cold starts": bars})


def _range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{found[0]:.2f}x to {found[-1]:.2f}x"


def end_to_end(system: str, rps: float, cv: float, seconds: float) -> list[str]:
    """What is laid over scenarios/hydraserve.yaml. `SYSTEM, cached`: all of host memory caches."""
    base, _, cached = system.partition(", ")
    out = [f"workload.rps={rps}", f"workload.cv={cv}", f"seconds={seconds}", LOADED]
    for size in ("7b", "13b"):
        out += [f"models.chat-{size}.lengths={CHAT}", f"models.code-{size}.lengths={CODE}"]
    out += [f"model_defaults.start={START_S[base]}", *policies(scaling="hydraserve", placement=PLACED[base])]
    if base != "HydraServe":
        out.append("servers.*.abilities=[]")
    if base == "ServerlessLLM" or cached:
        out += ["servers.a10.host_cache_bytes=700GB", "servers.v100.host_cache_bytes=340GB"]
    return out


END_TO_END = ("HydraServe", "HydraServe, cached", "serverless vLLM", "ServerlessLLM")


def load_cases(quick: bool) -> tuple[str, ...]:
    grid = GRID[2:3] if quick else GRID
    return tuple(f"{system} @{cv}/{rps}" for cv, rps in grid for system in END_TO_END)


def run_load(case: str, seed: int, quick: bool) -> Outcome:
    """H2."""
    system, _, at = case.partition(" @")
    cv, rps = at.split("/")
    return simulate("hydraserve", end_to_end(system, float(rps), float(cv), 600 if quick else 900), seed)


def judge_load(runs: Runs) -> Verdict:
    """H2."""
    grid = list(dict.fromkeys(case.partition(" @")[2] for case in runs.cases))
    met = {case: runs.of(case, "ttft_met") for case in runs.cases}
    best = {at: max(met[f"serverless vLLM @{at}"].mean, met[f"ServerlessLLM @{at}"].mean) for at in grid}
    ratios = {at: met[f"HydraServe @{at}"].mean / best[at] for at in grid}
    cached = {at: met[f"HydraServe, cached @{at}"].mean / best[at] for at in grid}
    plain = {at: met[f"HydraServe @{at}"].mean / met[f"serverless vLLM @{at}"].mean for at in grid}
    passed = all(1.3 <= ratio <= 1.9 for ratio in ratios.values())
    findings = [
        Finding("HydraServe / best baseline", _range(ratios.values()), "1.43x to 1.74x"),
        Finding("HydraServe with cache / best baseline", _range(cached.values()), "up to 1.11x more"),
        Finding("HydraServe / serverless vLLM", _range(plain.values())),
    ]
    for case in runs.cases:
        tpot = f"TPOT attainment {runs.of(case, 'tpot_met').mean:.1%}, GPU-seconds {runs.of(case, 'gpu_s').mean:.0f}"
        cold = f"mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s, {runs.of(case, 'starts').mean:.0f} starts"
        findings.append(Finding(f"{case} (CV/RPS): TTFT attainment", f"{met[case].show('.1%')}; {cold}; {tpot}"))
    share = [runs.of(case, "starts").mean / runs.of(case, "arrived").mean for case in runs.cases]
    hs = [met[f"HydraServe @{at}"].mean for at in grid]
    base = sorted(best.values())
    told = {
        "hs": f"{min(hs):.0%} to {max(hs):.0%}",
        "best": f"{base[0]:.0%} to {base[-1]:.0%}",
        "plain": _range(plain.values()),
        "starts": f"{min(share):.0%} to {max(share):.0%}",
    }
    bars = Bars(
        title="TTFT SLO attainment",
        x_label="CV / requests per second",
        y_label="share of requests",
        groups=grid,
        series={system: [met[f"{system} @{at}"].mean for at in grid] for system in END_TO_END},
    )
    cdf = Lines(
        title=f"TTFT at CV/RPS {grid[-1]}",
        x_label="TTFT, seconds",
        y_label="share of requests",
        series={s: points(runs.first(f"{s} @{grid[-1]}")["ttft_cdf"]) for s in END_TO_END},
        log_x=True,
    )
    deviation = "" if passed else prose(ATTAINED, **told)
    plots = {"attainment": bars, "ttft": cdf}
    return Verdict(ours=_range(ratios.values()), passed=passed, findings=findings, deviation=deviation, plots=plots)


ATTAINED = """
    HydraServe meets {hs} of its objectives, so what the ratio can be is set by what the best baseline meets:
    {best} here (ServerlessLLM with the host memory of all servers as a cache); the paper's ratios leave at most
    70 % to it. Against serverless vLLM the ratio is {plain}. What the baselines miss is chat and code requests that
    meet a start or a queue behind one, and starts are {starts} of the requests. How requests fall onto the 384
    models decides it, and the Functions trace that says so cannot be had.
"""


def burst(
    system: str, num: int, slo_s: float, *, grows: bool = True, apart: bool = False, gather_s: float = 0.0
) -> Outcome:
    """`num` requests of 512 + 512 tokens at once to a 13B model on four V100 servers, or on sixteen of one GPU and a
    quarter of the network each (`apart`): there no two workers share what was fetched."""
    stages = 1 if system.endswith("one worker") else 4
    model = {
        "name": "model",
        "weights_bytes": "24.2GB",
        "kv_bytes": "5GB",
        "costs": COSTS["v100"],
        "slo": {"ttft_s": slo_s, "tpot_s": 10},
    }
    tree = fleet(system, "v100", *((16, 1) if apart else (4, 4)), model)
    if apart:
        tree["servers"][0]["network_bytes_per_s"] = "4Gbps"  # type: ignore[index]
    tree["models"][0]["max_instances"] = 16  # type: ignore[index]
    if stages == 1:
        tree["servers"][0]["abilities"] = []  # type: ignore[index]
    arrivals = [Arrival(60.0 + n * 1e-6, "model", 512, 512) for n in range(num)]
    settings = (f"params.autoscaler.consolidate={str(grows).lower()}", f"params.autoscaler.gather_s={gather_s}")
    return alone(tree, arrivals, settings, system)


def run_down(case: str, seed: int, quick: bool) -> Outcome:
    """H3: generation with and without growing whole."""
    batch = int(case.split()[0])
    return burst("HydraServe", batch, forced(24.2, 4), grows="consolidated" in case)


def down_cases(quick: bool) -> tuple[str, ...]:
    return tuple(f"{batch} {how}" for batch in (1, 2, 4, 8) for how in ("consolidated", "pipeline"))


def judge_down(runs: Runs) -> Verdict:
    """H3."""
    batches = list(dict.fromkeys(case.split()[0] for case in runs.cases))
    seconds = {case: runs.of(case, "e2e_mean").mean - runs.of(case, "ttft_mean").mean for case in runs.cases}
    ratios = [seconds[f"{b} pipeline"] / seconds[f"{b} consolidated"] for b in batches]
    findings = [Finding("pipeline / consolidated, generation time", _range(ratios), "1.90x to 2.67x")]
    for case in runs.cases:
        ours = f"{seconds[case]:.1f} s to generate 512 tokens, TTFT {runs.of(case, 'ttft_mean').mean:.2f} s, "
        findings.append(Finding(f"batch of {case}", ours + f"{runs.of(case, 'consolidated').mean:.0f} grown whole"))
    bars = Bars(
        title="Seconds to generate 512 tokens",
        x_label="batch",
        y_label="seconds",
        groups=batches,
        series={how: [seconds[f"{b} {how}"] for b in batches] for how in ("pipeline", "consolidated")},
    )
    passed = all(1.7 <= ratio <= 2.9 for ratio in ratios)
    return Verdict(ours=_range(ratios), passed=passed, findings=findings, plots={"generation": bars})


def run_burst(case: str, seed: int, quick: bool) -> Outcome:
    """H4."""
    num, _, stages = case.partition(" with ")
    system = "HydraServe" if stages == "s=4" else "HydraServe, one worker"
    return burst(system, int(num.split()[0]), 100.0, apart="apart" in num, gather_s=1.0)


def judge_burst(runs: Runs) -> Verdict:
    """H4."""
    sizes = list(dict.fromkeys(case.partition(" with ")[0] for case in runs.cases))
    ratio = {
        name: [runs.of(f"{n} with s=1", name).mean / runs.of(f"{n} with s=4", name).mean for n in sizes]
        for name in ("ttft_mean", "tpot_mean")
    }
    at = sizes.index("128")
    ttft, tpot = ratio["ttft_mean"][at], 1 / ratio["tpot_mean"][at]
    findings = [
        Finding(
            f"{case}",
            f"TTFT {runs.of(case, 'ttft_mean').mean:.2f} s, TPOT {runs.of(case, 'tpot_mean').mean:.3f} s, "
            f"{runs.of(case, 'starts').mean:.0f} starts, {runs.of(case, 'consolidated').mean:.0f} grown whole",
        )
        for case in runs.cases
    ]
    bars = Bars(
        title="Mean TTFT of a burst",
        x_label="requests at once",
        y_label="seconds",
        groups=sizes,
        series={s: [runs.of(f"{n} with {s}", "ttft_mean").mean for n in sizes] for s in ("s=1", "s=4")},
    )
    passed = 1.6 <= ttft <= 2.2 and tpot < 1.25
    ours = f"TTFT {ttft:.2f}x, TPOT {tpot:.2f}x"
    by_size = ", ".join(f"{r:.2f}x at {n}" for n, r in zip(sizes, ratio["ttft_mean"], strict=True))
    deviation = (
        "" if passed else prose(SHARED, ratios=by_size, one=runs.of("128 with s=1", "ttft_mean").show(".1f", " s"))
    )
    return Verdict(ours=ours, passed=passed, findings=findings, deviation=deviation, plots={"burst": bars})


SHARED = """
    TTFT by size of the burst: {ratios}. One worker per model is fast here ({one}, where four fetches of 24.2 GB
    over 16 Gbit/s would take 48 s): the four GPUs of a server take the weights from one copy in its host memory,
    fetched once. Where each GPU has a server and a quarter of the network of its own (`apart`) nothing is shared.
"""


READS = (*SIMULATOR, "scenarios/hydraserve.yaml", "bench/papers/h_pipeline.py")
STAGES = """Start-up stages: HydraServe 1 s for container and context, 2 s of imports beside the load, 1 s of warm-up;
    serverless vLLM one after the other, 2 s, 3 s and 3.2 s of warm-up; ServerlessLLM the same engine with containers
    ready, 1 s, 3 s and 3.2 s: section 8.2 has one worker of HydraServe start OPT-6.7B (7.7 s here) sooner than
    ServerlessLLM does from its cache, which makes the latter's cold starts of large models slower than the 3.1x of
    the same section. 32 GB/s of PCIe."""
H1 = Experiment(
    id="H1",
    title="Cold start, seven models, serverless vLLM / HydraServe with four stages",
    paper="2.1x to 4.7x",
    band="1.9x to 5x",
    setup=prose(f"HydraServe section 8.2, testbed (i), 16 Gbit/s: one request to a model that is nowhere. {STAGES}"),
    cases=cold_cases,
    run=run_cold,
    judge=judge_cold,
    reads=READS,
    max_seeds=1,
)
H2 = Experiment(
    id="H2",
    title="TTFT SLO attainment, HydraServe / best baseline, CV 2 to 8, RPS 0.6 to 0.8",
    paper="1.43x to 1.74x",
    band="1.3x to 1.9x",
    setup=prose(
        f"""HydraServe section 8.3, testbed (ii), 24 GPUs and 384 models, a quarter of an hour. {STAGES} 46,413
        functions as popular as published of Azure's 2019 trace (which the paper cites), dealt round robin onto the
        models; Gamma arrivals of each model at its long-run rate. HydraServe takes a first prefill for 1 s, warm-up
        with it. Lengths of ShareGPT's quantiles (chat), of
        HumanEval (code) and of arXiv summaries cut to 4096 tokens. ServerlessLLM caches in all host memory, the
        others have 120 GB a server for weights on their way to four GPUs, and what stays there is a cache too."""
    ),
    cases=load_cases,
    run=run_load,
    judge=judge_load,
    reads=READS,
    max_seeds=3,
)
H3 = Experiment(
    id="H3",
    title="Generation time, pipeline of four / consolidated, 512 + 512 tokens",
    paper="1.90x to 2.67x",
    band="1.7x to 2.9x",
    setup="HydraServe section 8.4: 13B on V100s, four stages. `pipeline` keeps its stages for good.",
    cases=down_cases,
    run=run_down,
    judge=judge_down,
    reads=READS,
    max_seeds=1,
)
H4 = Experiment(
    id="H4",
    title="Burst of 128 on 16 V100s, four stages against one",
    paper="TTFT 1.87x, TPOT 1.08x to 1.19x",
    band="TTFT 1.6x to 2.2x, TPOT < 1.25x",
    setup=prose(
        """HydraServe section 8.4, scaling up: 13B, 8 requests a worker, all at once to a model that is nowhere, on four
        servers of four V100s and 16 Gbit/s whose GPUs share what was fetched. The first start waits for HydraServe's
        window of 1 s, with four stages and with one, so that the queue is seen whole."""
    ),
    cases=lambda quick: tuple(f"{n} with {s}" for n in ("32", "64", "128", "128 apart") for s in ("s=1", "s=4")),
    run=run_burst,
    judge=judge_burst,
    reads=READS,
    max_seeds=1,
)
