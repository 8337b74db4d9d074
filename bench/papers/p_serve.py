"""P1 to P3: PreServe with mu from a profile taken beforehand, and requests that wait while all are overloaded. The
judged runs expect lengths with the errors of the shipped length model; rows P1e and P3e give their cost."""

import statistics
from collections.abc import Mapping
from dataclasses import replace

from bench.papers import data, p_preserve
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Spread, Verdict, prose
from bench.papers.length_errors import expect_as_shipped
from bench.papers.plots import Bars, Lines
from bench.papers.simulated import SIMULATOR, Expect, points, policies, simulate

NEVER_HOLDS = "policies.routing=preserve_load_aware"
PROFILE = {"prompt_per_s": 1560, "response_per_s": 285, "total_per_s": 1845}
"""mu: what one instance takes at 1.35 requests a second, the most with a mean below 0.2 s a token (`PROFILED`)."""
FROZEN = "params.predictor.capacity.busy_ratio=1000"  # mu is not learned
PARTS = {"PreServe, never holds": [FROZEN, NEVER_HOLDS]}
CODE = "code: "
REAL, QUICK_STARTS = ", real errors", ", starts of 5 s"
TRUE, PRINTED, SHIPPED = "PreServe", "PreServe, load errors", f"PreServe{REAL}"
LLUMNIX = "Llumnix-like"
QUICKER = (f"{SHIPPED}{QUICK_STARTS}", f"{LLUMNIX}{QUICK_STARTS}")
ON_CODE = tuple(CODE + case for case in (TRUE, PRINTED, SHIPPED, LLUMNIX, *QUICKER, "proactive", "static 8"))
CODE_MU = {"prompt_per_s": 3876, "response_per_s": 52, "total_per_s": 3928}
"""mu of the coding service: what one instance takes at 1.9 requests a second, with a mean of thrice an idle one's."""
PROFILED = tuple(f"one instance @{rps}" for rps in (1.2, 1.3, 1.4, 1.5))
CODE_PROFILED = tuple(f"{CODE}one instance @{rps}" for rps in (0.05, 1.8, 1.9, 2.0))
RATE, CODE_RATE = 5.0, 7.5
SOON = "models.llama-7b.start={launch_s: 2s, warmup_s: 3s}"
CODE_WORKLOAD = ("workload.source=azure_2024_code_10s", "workload.lengths=azure_2023_code")


def run_scaling(case: str, seed: int, quick: bool) -> Outcome:
    """P1 and P2: a system on one of the two services, or one instance at a rate."""
    named, on_code = case.removeprefix(CODE), case.startswith(CODE)
    service = CODE_WORKLOAD if on_code else ()
    if named.startswith("one instance"):
        return profile(named.partition("@")[2], seed, quick, *service)
    system = named.removesuffix(QUICK_STARTS)
    mu = CODE_MU if on_code else PROFILE
    given = [*service, f"workload.rps={CODE_RATE if on_code else RATE}"]
    given += [f"params.predictor.capacity.{name}={value}" for name, value in mu.items()]
    given += PARTS.get(system, [FROZEN])
    given += [SOON] if named.endswith(QUICK_STARTS) else []
    expect = _shipped(on_code) if system.endswith(REAL) else None
    system = "PreServe" if system in PARTS else system.removesuffix(REAL)
    return p_preserve.run_scaling(system, seed, quick, *given, expect=expect)


def _shipped(on_code: bool) -> Expect:
    trace = "azure_2023_code" if on_code else "azure_2023_conv"
    return expect_as_shipped(statistics.median(response for _, response in data.lengths(trace)))


def profile(rps: str, seed: int, quick: bool, *service: str) -> Outcome:
    """One instance that stays, and Poisson arrivals with the service's lengths."""
    workload = [*service, "workload.source=gamma", f"workload.rps={rps}", "workload.squeeze=1", "workload.start_s=0"]
    given = [*workload, "history.seconds=0", "models.llama-7b.max_instances=1", "models.llama-7b.preload=true"]
    given += policies(scaling="static", routing="least_loaded", prediction="none")
    return simulate("preserve", [*given, f"seconds={600 if quick else 1800}"], seed)


def scaling_cases(quick: bool) -> tuple[str, ...]:
    if quick:
        return tuple(service + case for service in ("", CODE) for case in (TRUE, SHIPPED, LLUMNIX))
    return (*p_preserve.SYSTEMS, SHIPPED, *PARTS, *QUICKER, *ON_CODE)


def peak_cases(quick: bool) -> tuple[str, ...]:
    """P1's cases, with the profile of one instance."""
    return scaling_cases(quick) if quick else (*scaling_cases(quick), *PROFILED, *CODE_PROFILED)


PRINTED_PEAKS = {TRUE: "0.197 s", PRINTED: "0.250 s", SHIPPED: "0.250 s (its errors)", LLUMNIX: "0.455 s"}


def judge_peak(runs: Runs) -> Verdict:
    profiled = [case for case in runs.cases if "one instance" in case]
    systems = [case for case in runs.cases if case not in profiled]
    peak = {case: runs.of(case, "norm_peak") for case in systems}
    ratio = {f"{s}{e}": peak[f"{s}{LLUMNIX}"] / peak[f"{s}{e}"] for s in ("", CODE) for e in (TRUE, SHIPPED)}
    findings = [
        Finding(f"{case.partition(TRUE)[0]}{LLUMNIX} / {case.removeprefix(CODE)}", ratio[case].show(".2f", "x"), paper)
        for case, paper in zip(ratio, ("2.3x with true lengths", "1.8x with the paper's errors") * 2, strict=True)
    ]
    findings += [_scaled(case, runs) for case in systems] + [_profiled(case, runs) for case in profiled]
    bars = Bars(
        title="Highest normalised latency of any minute",
        x_label="system",
        y_label="seconds a token",
        groups=systems,
        series={"peak": [peak[case].mean for case in systems]},
        log_y=True,
    )
    judged = {"chat": "", "code": CODE}
    over = {name: peak[f"{s}{LLUMNIX}"].mean / peak[f"{s}{SHIPPED}"].mean for name, s in judged.items()}
    passed = all(LEAST <= one <= MOST for one in over.values())
    ours = "; ".join(
        f"{name} {peak[f'{s}{LLUMNIX}'].mean:.3f} / {peak[f'{s}{SHIPPED}'].mean:.3f} s ({over[name]:.1f}x)"
        for name, s in judged.items()
    )
    deviation = "" if passed or QUICKER[0] not in peak else prose(HIGH, **_told(peak, over))
    return Verdict(ours=ours, passed=passed, findings=findings, deviation=deviation, plots={"peak": bars})


LEAST, MOST = 1.4, 2.4
"""Of P1's ratio, on both services: the paper's 1.82x, a third more and a quarter less."""


def _scaled(case: str, runs: Runs) -> Finding:
    ours = f"peak {runs.of(case, 'norm_peak').show('.3f', ' s')}, P99 {runs.of(case, 'norm_p99').mean:.3f} s a token, "
    ours += f"mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s, {runs.of(case, 'instances').mean:.2f} instances, "
    return Finding(case, f"{ours}{runs.of(case, 'starts').mean:.0f} starts", PRINTED_PEAKS.get(case, ""))


def _profiled(case: str, runs: Runs) -> Finding:
    mean, last = runs.of(case, "norm_mean"), runs.of(case, "norm_p95")
    ours = f"mean {mean.show('.3f', ' s')} a token, P95 {last.show('.3f', ' s')}"
    return Finding(f"{case} requests/s", ours, "" if case.startswith(CODE) else "0.2 s is the objective")


def _told(peak: Mapping[str, Spread], over: Mapping[str, float]) -> dict[str, str]:
    """The figures of the deviation."""
    quick = {s: peak[f"{s}{QUICKER[1]}"].mean / peak[f"{s}{QUICKER[0]}"].mean for s in ("", CODE)}
    means = {case: f"{spread.mean:.3f} s" for case, spread in peak.items()}
    return {
        "chat": f"{over['chat']:.1f}x",
        "code": f"{over['code']:.1f}x",
        "own": means[SHIPPED],
        "on_code": means[CODE + SHIPPED],
        "llumnix": means[LLUMNIX],
        "llumnix_code": means[CODE + LLUMNIX],
        "quick": f"{quick['']:.1f}x ({means[QUICKER[1]]} and {means[QUICKER[0]]})",
        "quick_code": f"{quick[CODE]:.1f}x ({means[CODE + QUICKER[1]]} and {means[CODE + QUICKER[0]]})",
        "proactive": means["proactive"],
        "proactive_code": means[CODE + "proactive"],
    }


HIGH = """
    PreServe's peak is {own} on the conversations (paper 0.250 s), Llumnix-like's {llumnix} (paper 0.455 s): {chat}
    in place of 1.8x. On the coding service it is {llumnix_code} to {on_code}, {code}: prompts of 2,040 tokens stand
    before answers of 28. Llumnix-like's peak has two causes. (1) Both days run 24 times as fast, so a window lasts
    25 s, and a start takes 30 s, our figure; with 5 s the ratios are {quick} and {quick_code}. (2) Llumnix moves
    running requests to a new instance; nothing is moved here. `proactive`, the forecast alone, peaks at {proactive}
    and {proactive_code}. The scaler's departures: `scaling/preserve.py`.
"""


ROUTING_MEDIAN = 87.0  # tokens of an answer, in the lengths of row P3
EDGE = "18.5"
AT_EDGE = tuple(f"{router} @{EDGE}" for router in (SHIPPED, f"union{REAL}", "PreServe, never holds"))


def run_routing(case: str, seed: int, quick: bool) -> Outcome:
    named, _, rate = case.partition(" @")
    router = named.removesuffix(REAL).removesuffix(", never holds")
    given = [
        f"policies={p_preserve.ROUTERS[router]}",
        *policies(scaling="static", prediction="none"),
        f"workload.rps={rate}",
        f"workload.lengths={p_preserve.LENGTHS}",
        "params.exact_lengths=true",
    ]
    given += [f"seconds={60 if quick else 600}", *([NEVER_HOLDS] if named.endswith("never holds") else [])]
    expect = expect_as_shipped(ROUTING_MEDIAN) if named.endswith(REAL) else None
    return simulate("preserve_routing", given, seed, expect=expect)


def routing_cases(quick: bool) -> tuple[str, ...]:
    rates = (EDGE,) if quick else ("16", "18", EDGE)
    return (*(f"{router} @{rate}" for rate in rates for router in p_preserve.ROUTERS), *AT_EDGE)


def judge_routing(runs: Runs) -> Verdict:
    """Judge P3 at the highest rate, the edge of overload, with the lengths of a real router."""
    rates = list(dict.fromkeys(case.partition(" @")[2] for case in runs.cases))
    p99 = {case.removesuffix(f" @{EDGE}"): runs.of(case, "norm_p99") for case in runs.cases if case.endswith(EDGE)}
    others = {router: p99[router].mean for router in p_preserve.ROUTERS if router not in ("PreServe", "union")}
    best = min(others, key=lambda router: others[router])
    counted = min(others[router] for router in others if router != LLUMNIX)
    ratio, exact = others[best] / p99[SHIPPED].mean, others[best] / p99[TRUE].mean
    findings = [
        Finding(f"best baseline ({best}) / {SHIPPED}, at {EDGE}", f"{ratio:.2f}x", "1.70x"),
        Finding("the same, seed by seed", (p99[best] / p99[SHIPPED]).show(".2f", "x")),
        Finding(f"best baseline ({best}) / PreServe with true lengths", f"{exact:.2f}x", "1.70x"),
        Finding("the same, seed by seed", (p99[best] / p99[TRUE]).show(".2f", "x")),
        Finding(f"best of those that count requests / {SHIPPED}", f"{counted / p99[SHIPPED].mean:.2f}x"),
    ]
    printed = {SHIPPED: "0.45 s, 2.24 s", LLUMNIX: "0.767 s, 4.26 s"}
    for case in runs.cases:
        tokens, (router, _, rate) = runs.of(case, "norm_p99").show(".3f", " s"), case.partition(" @")
        ours = f"P99 {tokens} a token, mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s"
        findings.append(Finding(case, ours, printed.get(router, "") if rate == EDGE else ""))
    curves = Lines(
        title="P99 normalised latency by load",
        x_label="requests/s on four instances",
        y_label="seconds a token",
        series={
            r: points([(float(q), runs.of(f"{r} @{q}", "norm_p99").mean) for q in rates]) for r in p_preserve.ROUTERS
        },
        log_y=True,
    )
    passed = 1.3 <= ratio <= 2.2
    told = {"ratio": f"{ratio:.2f}", "exact": f"{exact:.2f}", "best": best}
    told |= {"own": f"{p99[SHIPPED].mean:.2f}", "theirs": f"{others[best]:.2f}"}
    return Verdict(
        ours=f"{others[best]:.2f} / {p99[SHIPPED].mean:.2f} s ({ratio:.2f}x, {best}); with true lengths {exact:.2f}x",
        passed=passed,
        findings=findings,
        deviation="" if passed else prose(NEAR, **told),
        plots={"p99": curves},
    )


NEAR = """
    {best} comes to {theirs} s and PreServe with the lengths that a router has to {own} s: {ratio}x. With true
    lengths it is {exact}x; row P3e says what the errors do. The paper does not say how far off its lengths are
    here. Llumnix-like dispatches and never migrates, so it pays nothing for moving KV caches, to which the paper
    attributes its mean TTFT of 4.26 s.
"""


SETUP = prose(
    """PreServe section 5.3: up to eight Llama-2-7B on A40s (the A10's profile by memory bandwidth), Azure
    conversations of 2024, thinned to 5 requests/s; the workload predictor knows the two days before, the next
    36 hours run 24 times as fast, 90 minutes. An instance takes 30 s to start, which the paper does not print
    (`starts of 5 s`: 5). What is judged expects response lengths that are as far off as those of the length model
    that is shipped (`real errors`; by `bench/papers/length_errors.toml`, see P1e); `load errors` are as far off as
    the paper's Table 2 says, and where a case says nothing they are the true ones, which no router could have.
    mu is a profile taken beforehand,
    as in the paper's offline phase: what one instance takes with a mean below 0.2 s a token (`one instance` below).
    As in section 4.3.3 a request waits while all instances are overloaded (`never holds`: without that). `code`:
    the coding service at 7.5 requests/s, which takes as many instances, from its third day (a Sunday) on; its answers
    have 28 tokens after prompts of 2,040, so the time of a prefill alone is most of a token's, and the objective of its
    profile is thrice what an idle instance does, as the paper's 0.2 s is. The paper's figures are means of both."""
)
MODULES = ("p_preserve.py", "p_serve.py", "length_errors.py", "length_errors.toml")
P1 = Experiment(
    id="P1",
    title="Peak normalised latency, Llumnix-like / PreServe",
    paper="0.455 / 0.250 s (1.8x)",
    band="1.4x to 2.4x on both services",
    setup=SETUP,
    cases=peak_cases,
    run=run_scaling,
    judge=judge_peak,
    reads=(*SIMULATOR, "scenarios/preserve.yaml", *(f"bench/papers/{name}" for name in MODULES)),
)
P2 = replace(
    P1,
    id="P2",
    title="Instance-hours against static 8",
    paper="-49.4 %",
    band="-40 % to -55 %",
    setup="As P1. How many instances are needed depends on the rates of P1, which are ours.",
    cases=scaling_cases,
    judge=p_preserve.judge_hours,
    kept_with="P1",
)
P3 = replace(
    P1,
    id="P3",
    title="P99 normalised latency at the overload edge, best baseline / PreServe",
    paper="0.767 / 0.45 s (1.7x)",
    band="1.3x to 2.2x",
    setup=prose(
        """PreServe section 5.4: four instances that stay, Poisson arrivals for ten minutes, lengths lognormal
        through ShareGPT's median and 95th percentile as the paper prints them (52 and 911 prompt, 87 and 632
        response tokens). The edge lies at 18 requests/s here, at 9.3 to 10.5 in the paper: its engine is slower
        than the profile. PreServe's requests wait while all instances are overloaded (section 4.3.3). It is judged
        with `real errors`, as P1 is; no baseline looks at expected lengths."""
    ),
    cases=routing_cases,
    run=run_routing,
    judge=judge_routing,
    reads=(*P1.reads, "scenarios/preserve_routing.yaml"),
)
