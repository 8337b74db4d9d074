"""P1-P3: PreServe's scaler and router against Llumnix-like, reactive, proactive, hybrid and static ones."""

from bench.papers.cache import ROOT
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Spread, Verdict, prose
from bench.papers.plots import Bars, Lines
from bench.papers.simulated import SIMULATOR, figures, points, policies, simulate
from glowplug.simulator.results import Peak
from glowplug.simulator.scenario import load
from glowplug.simulator.world import World

LEAD_S, SQUEEZE = 200.0, 24
RATE = 5.0
START = "models.llama-7b.start={launch_s: 15s, warmup_s: 15s}"
TAKES = {"prompt_per_s": 1400, "response_per_s": 240, "total_per_s": 1640}
"""mu: tokens a second one instance takes with 95 % of its requests below 0.2 s a token (`profile` below)."""
KNOWN = [f"params.predictor.capacity.{name}={value}" for name, value in TAKES.items()]
SYSTEMS = {
    "PreServe": policies(scaling="preserve", routing="preserve_load_aware"),
    "PreServe, load errors": [
        *policies(scaling="preserve", routing="preserve_load_aware"),
        "workload.length_errors=true",
    ],
    "Llumnix-like": policies(scaling="llumnix_like", routing="llumnix_like"),
    "reactive": policies(scaling="reactive", routing="least_loaded"),
    "proactive": policies(scaling="proactive", routing="least_loaded"),
    "hybrid": policies(scaling="hybrid", routing="least_loaded"),
    "static 8": [*policies(scaling="static", routing="least_loaded"), "models.llama-7b.min_instances=8"],
    "union": policies(scaling="union", routing="union"),
}
ROUTERS = {
    "PreServe": "preserve_load_aware",
    "least request": "least_loaded",
    "minimum use": "minimum_use",
    "round robin": "round_robin",
    "Llumnix-like": "llumnix_like",
    "union": "union",
}
LENGTHS = "{prompt_mean: 236, prompt_cv: 4.4, response_mean: 180, response_cv: 1.81}"


def forget(world: World) -> None:
    """What came before counts no more: the first instances needed their start, and nobody measures that."""
    world.results.by_model.clear()
    world.results.normalised_peak = Peak()


def run_scaling(case: str, seed: int, quick: bool, *more: str) -> Outcome:
    """P1 and P2: the third and fourth day in an hour each, or a quarter of that."""
    seconds = 1200 if quick else 5400
    start_s = 48 * 3600 - LEAD_S * SQUEEZE
    given = [START, *KNOWN, "params.exact_lengths=true", f"workload.rps={RATE}", f"workload.start_s={start_s}"]
    given += [f"seconds={seconds + LEAD_S}", "models.llama-7b.preload=true", *SYSTEMS[case], *more]
    found = load(ROOT / "scenarios" / "preserve.yaml", given)
    world = World(found.setup, found.arrivals(seed))
    world.kernel.at(world.began_s + LEAD_S, forget, world)
    outcome = figures(world.run(found.seconds, drain_s=300.0))
    outcome["instances"] = outcome["instance_s"] / outcome["seconds"]
    return outcome


def scaling_cases(quick: bool) -> tuple[str, ...]:
    return ("PreServe", "Llumnix-like", "static 8") if quick else tuple(SYSTEMS)


def judge_peak(runs: Runs) -> Verdict:
    """P1."""
    peak = {case: runs.of(case, "norm_peak") for case in runs.cases}
    ratio = peak["Llumnix-like"].mean / peak["PreServe"].mean
    printed = {"PreServe": "0.197 s", "PreServe, load errors": "0.250 s", "Llumnix-like": "0.455 s"}
    findings = [
        Finding(
            case,
            f"peak {peak[case].show('.3f', ' s')}, P99 {runs.of(case, 'norm_p99').mean:.3f} s a token, mean TTFT "
            f"{runs.of(case, 'ttft_mean').mean:.2f} s, {runs.of(case, 'instances').mean:.2f} instances",
            printed.get(case, ""),
        )
        for case in runs.cases
    ]
    bars = Bars(
        title="Highest normalised latency of any minute",
        x_label="system",
        y_label="seconds a token",
        groups=list(runs.cases),
        series={"peak": [peak[case].mean for case in runs.cases]},
    )
    passed = ratio > 1.4
    told = {
        "ratio": f"{ratio:.2f}",
        "peaks": ", ".join(f"{case} {spread.mean:.3f} s" for case, spread in peak.items()),
        "starts": ", ".join(f"{case} {runs.of(case, 'starts').mean:.0f}" for case in runs.cases),
    }
    deviation = "" if passed else prose(PEAK, **told)
    return Verdict(ours=f"{ratio:.2f}x", passed=passed, findings=findings, deviation=deviation, plots={"peak": bars})


PEAK = """
    Llumnix-like / PreServe is {ratio}x. Highest minutes: {peaks}. The plan from forecasts is not the cause:
    `proactive` and `hybrid` follow the same forecasts and hardly have a peak. What they lack is the scaler's
    way down within a window (section 4.3.2: instances go once all will stay below 30 % of their KV cache for
    100 steps). A hundred steps are 4 to 5 s here and a start takes 30 s, so after a lull of seconds the
    instances are missing when the load returns; starts in all: {starts}. The union, which keeps spare instances
    for a while, has the lower peak.
"""


def judge_hours(runs: Runs) -> Verdict:
    """P2."""
    saved = {case: Spread(tuple(v / 8 - 1 for v in runs.of(case, "instances").values)) for case in runs.cases}
    ours = saved["PreServe"].mean
    printed = {"PreServe": "-49.38 %", "Llumnix-like": "-48.26 %"}
    findings = [
        Finding(
            case,
            f"{saved[case].mean:+.1%} ({runs.of(case, 'instances').show('.2f')} instances), peak "
            f"{runs.of(case, 'norm_peak').mean:.3f} s a token",
            printed.get(case, ""),
        )
        for case in runs.cases
    ]
    passed = -0.55 <= ours <= -0.40
    return Verdict(ours=f"{ours:+.1%}", passed=passed, findings=findings)


def run_routing(case: str, seed: int, quick: bool) -> Outcome:
    """P3."""
    router, _, rate = case.partition(" @")
    given = [f"workload.rps={rate}", f"workload.lengths={LENGTHS}", "params.exact_lengths=true", "seconds=600"]
    return simulate("preserve_routing", [*given, *policies(routing=ROUTERS[router])], seed)


def routing_cases(quick: bool) -> tuple[str, ...]:
    rates = ("18.5",) if quick else ("16", "17", "18", "18.5")
    return tuple(f"{router} @{rate}" for rate in rates for router in ROUTERS)


def judge_routing(runs: Runs) -> Verdict:
    """P3: at the highest rate, the overload edge."""
    rates = list(dict.fromkeys(case.partition(" @")[2] for case in runs.cases))
    edge = rates[-1]
    p99 = {router: runs.of(f"{router} @{edge}", "norm_p99") for router in ROUTERS}
    others = {router: p99[router].mean for router in ROUTERS if router not in ("PreServe", "union")}
    best = min(others, key=lambda router: others[router])
    counted = min(others[router] for router in others if router != "Llumnix-like")
    ratio, plain = others[best] / p99["PreServe"].mean, counted / p99["PreServe"].mean
    passed = ratio > 1.3
    findings = [
        Finding(f"best baseline ({best}) / PreServe at {edge}", f"{ratio:.2f}x", "1.70x"),
        Finding("best of those that count requests / PreServe", f"{plain:.2f}x"),
    ]
    for case in runs.cases:
        tokens = runs.of(case, "norm_p99").show(".3f", " s")
        ours = f"P99 {tokens} a token, mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s"
        printed = {"PreServe": "0.45 s, 2.24 s", "Llumnix-like": "0.767 s, 4.26 s"}.get(case.partition(" @")[0], "")
        findings.append(Finding(case, ours, printed if case.endswith(f"@{edge}") else ""))
    curves = Lines(
        title="P99 normalised latency by load",
        x_label="requests/s on four instances",
        y_label="seconds a token",
        series={r: points([(float(q), runs.of(f"{r} @{q}", "norm_p99").mean) for q in rates]) for r in ROUTERS},
        log_y=True,
    )
    told = {"ratio": f"{ratio:.2f}", "plain": f"{plain:.2f}", "best": best}
    deviation = "" if passed else prose(NEAR, **told)
    return Verdict(
        ours=f"{ratio:.2f}x ({best})", passed=passed, findings=findings, deviation=deviation, plots={"p99": curves}
    )


NEAR = """
    Against the policies that only count requests PreServe gains {plain}x. The best baseline is {best}
    ({ratio}x): it is given the same true lengths and the same look-ahead, and pays nothing for what Llumnix
    pays in the paper (its mean TTFT of 4.26 s is attributed to moving KV caches), since it dispatches and never
    migrates.
"""
READS = (*SIMULATOR, "scenarios/preserve.yaml", "bench/papers/p_preserve.py")
SETUP = prose(
    """PreServe section 5.3: up to eight Llama-2-7B on A40s (the A10's profile by memory bandwidth), Azure
    conversations of 2024, thinned to 5 requests/s; the workload predictor knows the two days before, the next
    36 hours run 24 times as fast, 90 minutes. An instance takes 30 s to start. The router is told true response
    lengths; `load errors` gives it ones that are off as the paper's Table 2 says. mu is given as a profile."""
)
P1 = Experiment(
    id="P1",
    title="Peak normalised latency, Llumnix-like / PreServe",
    paper="0.455 / 0.250 s (1.8x)",
    band="> 1.4x",
    setup=SETUP,
    cases=scaling_cases,
    run=run_scaling,
    judge=judge_peak,
    reads=READS,
    max_seeds=3,
)
P2 = Experiment(
    id="P2",
    title="Instance-hours against static 8",
    paper="-49.4 %",
    band="-40 % to -55 %",
    setup="As P1.",
    cases=scaling_cases,
    run=run_scaling,
    judge=judge_hours,
    reads=READS,
    max_seeds=3,
    kept_with="P1",
)
P3 = Experiment(
    id="P3",
    title="P99 normalised latency at the overload edge, best baseline / PreServe",
    paper="0.767 / 0.45 s (1.7x)",
    band="> 1.3x",
    setup=prose(
        """PreServe section 5.4: four instances that stay, Poisson arrivals for ten minutes, lengths lognormal
        through ShareGPT's median and 95th percentile as the paper prints them (52 and 911 prompt, 87 and 632
        response tokens). The edge lies at 18 requests/s here, at 9.3 to 10.5 in the paper: its engine is slower
        than the profile."""
    ),
    cases=routing_cases,
    run=run_routing,
    judge=judge_routing,
    reads=(*READS, "scenarios/preserve_routing.yaml"),
    max_seeds=5,
)
