"""H2: HydraServe's TTFT attainment under load, beside serverless vLLM and ServerlessLLM (HydraServe section 8.3).

The artifact (github.com/gjghfd/hydraserve-artifact) adds these facts to the paper's text:

- Figure 9's points (ae_scripts/figure9.py). The paper's 1.43x to 1.74x is HydraServe over *serverless vLLM* at these
  nine points; over the better baseline they give 1.32x to 1.63x.
- The workload (trace/generate_trace.py, result_analyzer.py): Gamma arrivals are drawn at the rate of two weeks of
  Azure's 2021 trace squeezed into an hour, and *then* sampled down to the requests a second of the figure, about one in
  a thousand. A Gamma process sampled like that is close to Poisson at any CV: the index of dispersion of its counts is
  1 + keep (CV^2 - 1), 1.07 at CV 8. `unthinned` draws the Gamma arrivals at the rate that is served.
- Cold starts (ae_scripts/figure7.py): `bench.papers.h_starts`. A ServerlessLLM engine with its weights in host memory
  takes 15.1 s for a 13B on a V100 and 8.1 s for a 7B on an A10, with objectives of 12 and 7.5 s.
- ServerlessLLM's cache (init_servers.py): 0.9 of a server's memory less 4 GB more than each GPU has and 5 GB.

The trace is not available. Its volume is taken as two million, and popularity is that published of the 2019 trace.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from random import Random

from bench.measured.data import markdown
from bench.papers.cache import ROOT
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Spread, Verdict, prose, span, ttft_cdf
from bench.papers.h_starts import SIZES_GB, stages
from bench.papers.plots import Bars
from bench.papers.simulated import SIMULATOR, figures, policies
from glowplug_lab.simulator.scenario.load import Scenario, load
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

SYSTEMS = {"HydraServe": "hydraserve", "serverless vLLM": "serverless_vllm", "ServerlessLLM": "serverlessllm"}
"""libs/glowplug/policies/systems.py. All scale as HydraServe does: the three run on one platform, its own."""
CHAT = "{prompt_mean: 236, prompt_cv: 4.4, response_mean: 180, response_cv: 1.81}"  # ShareGPT's quantiles
CODE = "{prompt_mean: 160, prompt_cv: 0.45, response_mean: 70, response_cv: 0.6}"  # HumanEval: short both ways
KNOWN = "params.placer.start_stages={container_s: 1.0, library_s: 3.0, prefill_s: 2.0, decode_s: 0.05, hop_s: 0.001}"
QUICK_START = "{launch_s: 1.0, library_s: 3.0, warmup_s: 3.2, overlap: false}"
CACHE = {"a10": "559GB", "v100": "182GB"}  # host memory for weights
HOST = {"ServerlessLLM": CACHE, "HydraServe, cached": CACHE}
END_TO_END = ("serverless vLLM", "ServerlessLLM", "HydraServe", "HydraServe, cached")
GRID = ("2/0.6", "4/0.7", "8/0.6", "8/0.8")  # CV / requests a second
UNTHINNED, QUICK = "unthinned", "quick starts"
FULL_RPS = 2_000_000 / 3600
PRINTED = {  # Figure 9, % of objectives met, in the order of END_TO_END
    "2/0.6": (46.7, 57.5, 81.1, 83.7),
    "2/0.7": (45.7, 49.8, 77.2, 79.1),
    "2/0.8": (43.9, 45.3, 73.8, 78.3),
    "4/0.6": (49.9, 61.5, 84.2, 88.2),
    "4/0.7": (48.6, 57.7, 78.2, 83.8),
    "4/0.8": (44.7, 47.7, 71.8, 79.3),
    "8/0.6": (53.5, 60.3, 82.5, 88.2),
    "8/0.7": (53.3, 57.7, 76.3, 85.0),
    "8/0.8": (48.5, 54.0, 75.2, 78.5),
}


def end_to_end(system: str, rps: float, cv: float, seconds: float, variant: str) -> list[str]:
    """Settings on top of scenarios/hydraserve.yaml. `HydraServe, cached`: host memory caches."""
    base = system.partition(", ")[0]
    out = [f"workload.rps={rps}", f"workload.cv={cv}", f"seconds={seconds}", KNOWN]
    for size, kind, model in (("7b", "a10", "Llama2-7B"), ("13b", "v100", "Llama2-13B")):
        out += [f"models.chat-{size}.lengths={CHAT}", f"models.code-{size}.lengths={CODE}"]
        start = stages(system, kind, SIZES_GB[model])
        shown = ", ".join(f"{name}: {str(value).lower()}" for name, value in start.items())
        for application in ("chat", "code", "summary"):
            out.append(f"models.{application}-{size}.start={{{shown}}}")
            if variant == QUICK and base != "HydraServe":
                out[-1] = f"models.{application}-{size}.start={QUICK_START}"
    out += [f"policies={SYSTEMS[base]}", *policies(scaling="hydraserve")]
    if base != "HydraServe":
        out.append("servers.*.abilities=[]")
    if system in HOST:
        out += [f"servers.{kind}.host_cache_bytes={size}" for kind, size in HOST[system].items()]
    return out


def thinned(found: Scenario, rps: float, cv: float, seed: int) -> Iterator[Arrival]:
    """Gamma arrivals of each model at its share of the whole trace, each kept with the same probability, in order of
    time.

    The sampling is exact, without drawing the dropped arrivals: the sum of n gaps of one Gamma is a Gamma of n times
    the shape.
    """
    traffic, keep, shape = found.traffic, rps / FULL_RPS, 1 / (cv * cv)

    def one(key: str, share: float) -> Iterator[Arrival]:
        chance, lengths, rate = Random(f"{seed}/{key}"), traffic.lengths_of(key), FULL_RPS * share
        at_s = -20 / (rate * keep) * (1 + chance.random())  # in the steady state
        while True:
            num_gaps = 1 + int(math.log(1.0 - chance.random()) / math.log1p(-keep))
            at_s += chance.gammavariate(num_gaps * shape, 1 / (rate * shape))
            if at_s >= found.seconds:
                return
            if at_s >= 0:
                yield Arrival(at_s, key, *lengths.draw(chance))

    streams = [one(key, share) for key, share in zip(traffic.keys, traffic.shares, strict=True)]
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)


def cases(quick: bool) -> tuple[str, ...]:
    if quick:
        return tuple(f"{system} @{GRID[2]}" for system in END_TO_END)
    main = [f"{system} @{at}" for at in GRID for system in END_TO_END]
    others = [f"{system} @{GRID[2]} {UNTHINNED}" for system in END_TO_END[:3]]
    return (*main, *others, *(f"{system} @{GRID[2]} {QUICK}" for system in END_TO_END[:2]))


def run(case: str, seed: int, quick: bool) -> Outcome:
    system, _, rest = case.partition(" @")
    at, _, variant = rest.partition(" ")
    cv, rps = (float(part) for part in at.split("/"))
    settings = end_to_end(system, rps, cv, 240 if quick else 900, variant)
    found = load(ROOT / "scenarios" / "hydraserve.yaml", settings)
    arrivals = found.arrivals(seed) if variant == UNTHINNED else thinned(found, rps, cv, seed)
    outcome = figures(World(found.setup, arrivals).run(found.seconds, drain_s=found.words.drain_s))
    return {"starts host": 0} | outcome


def _best(runs: Runs, at: str) -> Spread:
    """The baseline that meets more of its objectives over all seeds."""
    return max((runs.of(f"{system} @{at}", "ttft_met") for system in END_TO_END[:2]), key=lambda met: met.mean)


def _hydra(runs: Runs, at: str) -> Spread:
    """HydraServe's own attainment; for variants of the baselines, that under the same traffic."""
    case = f"HydraServe @{at}"
    return runs.of(case if case in runs.cases else f"HydraServe @{at.partition(' ')[0]}", "ttft_met")


def _attainment(runs: Runs, grid: Iterable[str]) -> str:
    """Attainment in %, ours with its range over seeds, beside Figure 9's."""
    rows = []
    for at in grid:
        printed = PRINTED[at.partition(" ")[0]] if QUICK not in at and UNTHINNED not in at else ()
        cells = []
        for n, system in enumerate(END_TO_END):
            case = f"{system} @{at}"
            shown = runs.of(case, "ttft_met").show(".1%") if case in runs.cases else ""
            cells.append(f"{shown}{f'; paper {printed[n]} %' if printed else ''}")
        met = _hydra(runs, at)
        for n, other in enumerate((_best(runs, at), runs.of(f"serverless vLLM @{at}", "ttft_met"))):
            theirs = f"; paper {printed[2] / (max(printed[:2]), printed[0])[n]:.2f}x" if printed else ""
            cells.append((met / other).show(".2f", "x") + theirs)
        rows.append((at, *cells))
    return markdown(("CV / requests a second", *END_TO_END, "HydraServe / best baseline", "/ serverless vLLM"), rows)


def _besides(runs: Runs) -> str:
    """Further figures of each case, means over seeds."""
    heads = ("mean TTFT, s", "requests", "starts", "of which from host memory", "TPOT met", "GPU-seconds")
    shown = {
        "ttft_mean": ".1f",
        "arrived": ".0f",
        "starts": ".0f",
        "starts host": ".0f",
        "tpot_met": ".1%",
        "gpu_s": ".0f",
    }
    rows = ((case, *(f"{runs.of(case, name).mean:{form}}" for name, form in shown.items())) for case in runs.cases)
    return markdown(("case (CV / requests a second)", *heads), rows)


def judge(runs: Runs) -> Verdict:
    everywhere = list(dict.fromkeys(case.partition(" @")[2] for case in runs.cases))
    grid = [at for at in everywhere if " " not in at]
    met = {case: runs.of(case, "ttft_met").mean for case in runs.cases}
    best = {at: met[f"HydraServe @{at}"] / _best(runs, at).mean for at in grid}
    plain = {at: met[f"HydraServe @{at}"] / met[f"serverless vLLM @{at}"] for at in grid}
    cached = {at: met[f"HydraServe, cached @{at}"] / met[f"HydraServe @{at}"] for at in grid}
    printed = PRINTED.values()
    passed = all(1.3 <= ratio <= 1.9 for ratio in best.values())
    findings = [
        Finding("HydraServe / best baseline", span(best.values()), span(p[2] / max(p[:2]) for p in printed)),
        Finding("HydraServe / serverless vLLM", span(plain.values()), span(p[2] / p[0] for p in printed)),
        Finding("HydraServe with cache / without", span(cached.values()), span(p[3] / p[2] for p in printed)),
    ]
    bars = Bars(
        title="TTFT SLO attainment",
        x_label="CV / requests per second",
        y_label="share of requests",
        groups=grid,
        series={system: [met[f"{system} @{at}"] for at in grid] for system in END_TO_END},
    )
    cdf = ttft_cdf(f"TTFT at CV/RPS {grid[-1]}", runs, {s: f"{s} @{grid[-1]}" for s in END_TO_END})
    others = {
        name: f"{_hydra(runs, at).mean / _best(runs, at).mean:.2f}x"
        for name, at in (("unthinned", f"{GRID[2]} {UNTHINNED}"), ("quick", f"{GRID[2]} {QUICK}"))
        if at in everywhere
    }
    if len(others) == 2:
        others["met"] = f"{_best(runs, f'{GRID[2]} {UNTHINNED}').mean:.0%} for {_best(runs, GRID[2]).mean:.0%}"
    return Verdict(
        ours=span(best.values()),
        passed=passed,
        findings=findings,
        deviation=prose(READ, **others) if others else "",
        plots={"attainment": bars, "ttft": cdf},
        tables=(_attainment(runs, everywhere), _besides(runs)),
    )


READ = """
    Two readings decide, and the artifact has both. (1) Gamma arrivals are drawn before the trace is sampled down,
    which leaves little of the CV. Drawn at the served rate (`unthinned`) the ratio is {unthinned} at 8/0.6, which
    meets {met}. (2) Starts take what the authors measured; with starts as quick as section 8.2 suggests (`quick
    starts`) it is {quick} at 8/0.6. The popularity of the functions of 2021 cannot be had.
"""
H2 = Experiment(
    id="H2",
    title="TTFT SLO attainment, HydraServe / best baseline, CV 2 to 8, RPS 0.6 to 0.8",
    paper="1.43x to 1.74x over serverless vLLM; its points give 1.32x to 1.63x over the best baseline",
    band="1.3x to 1.9x",
    setup=prose(
        """HydraServe section 8.3, testbed (ii), 24 GPUs and 384 models, a quarter of an hour that begins with nothing
        started or cached. Starts: fetch and load are simulated, the rest of a start is fitted to the cold starts the
        authors measured (`bench/papers/h_starts.py`: 7B as on A10, 13B as on V100), so that the *seconds of a start*
        are theirs by construction; which requests meet a start, where it is placed, what it waits for and what it
        shares the network with is the simulator's. HydraServe's own estimate starts at 3 s beside the fetch and 2 s
        after it, and follows what it sees. Arrivals are Gamma at the rate of the whole trace, then sampled down to the
        requests a second, as in the authors' generator; popularity: 46,413 functions as published of Azure's 2019
        trace, dealt round robin onto the models (the 2021 trace cannot be had). Lengths of ShareGPT's quantiles
        (chat), of HumanEval (code) and of arXiv summaries cut to 4096 tokens. Objectives as in Table 3 (the
        artifact's code gives summaries five times as long, not twice). ServerlessLLM and HydraServe with cache
        have 559 GB (A10) and 182 GB (V100) a server for weights, the others 120 GB for those on their way to four
        GPUs, and what stays there is a cache too."""
    ),
    cases=cases,
    run=run,
    judge=judge,
    reads=(*SIMULATOR, "scenarios/hydraserve.yaml", "bench/papers/h_load.py", "bench/papers/h_starts.py"),
)
