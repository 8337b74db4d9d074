"""P1e and P3e: rows P1 and P3 where the router expects lengths as far off as those of the length model that is shipped,
beside the true ones."""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from bench.papers import data, p_serve
from bench.papers.experiment import Finding, Outcome, Runs, Verdict, prose
from bench.papers.length_errors import LengthErrors
from bench.papers.simulated import Expect
from glowplug.simulator.workload.arrival import Arrival

REAL = ", real errors"
TRUE, PRINTED, SHIPPED = "PreServe", "PreServe, load errors", f"PreServe{REAL}"
EDGE = " @18.5"
ROUTERS = tuple(router + EDGE for router in (TRUE, SHIPPED, "union", f"union{REAL}", "Llumnix-like", "least request"))
ROUTING_MEDIAN = 87.0  # tokens of an answer, in the lengths of row P3
AT_MOST = 0.250 / 0.197  # the paper's peak with load errors over the one with true lengths


def expect_as_shipped(median_tokens: float) -> Expect:
    """For a service whose median answer has so many tokens."""
    errors = LengthErrors.read()

    def expect(arrivals: Iterator[Arrival], seed: int) -> Iterator[Arrival]:
        return errors.given(arrivals, median_tokens, seed)

    return expect


def run_scaling(case: str, seed: int, quick: bool) -> Outcome:
    """P1e: as P1."""
    if not case.endswith(REAL):
        return p_serve.run_scaling(case, seed, quick)
    trace = "azure_2023_code" if case.startswith(p_serve.CODE) else "azure_2023_conv"
    median = statistics.median(response for _, response in data.lengths(trace))
    return p_serve.run_scaling(case.removesuffix(REAL), seed, quick, expect_as_shipped(median))


def run_routing(case: str, seed: int, quick: bool) -> Outcome:
    """P3e: as P3."""
    router = case.removesuffix(EDGE)
    expect = expect_as_shipped(ROUTING_MEDIAN) if router.endswith(REAL) else None
    return p_serve.run_routing(router.removesuffix(REAL) + EDGE, seed, quick, expect)


def judge_peak(runs: Runs) -> Verdict:
    """P1e: peaks with errors over those with true lengths, seed by seed."""
    findings, worst = [], 0.0
    said = []
    for service, name in (("", "chat"), (p_serve.CODE, "code")):
        peak = {case: runs.of(service + case, "norm_peak") for case in (TRUE, PRINTED, SHIPPED)}
        real, printed = peak[SHIPPED] / peak[TRUE], peak[PRINTED] / peak[TRUE]
        findings += [
            Finding(f"{name}: peak with the shipped model's errors / with true lengths", real.show(".2f", "x")),
            Finding(f"{name}: peak with the paper's errors / with true lengths", printed.show(".2f", "x"), "1.27x"),
        ]
        worst = max(worst, peak[SHIPPED].mean / peak[TRUE].mean)
        said.append(f"{name} {peak[TRUE].mean:.3f} s exact, {peak[SHIPPED].mean:.3f} s with real errors")
    for case in runs.cases:
        ours = f"peak {runs.of(case, 'norm_peak').show('.3f', ' s')}, P99 {runs.of(case, 'norm_p99').mean:.3f} s a "
        ours += f"token, mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s, {runs.of(case, 'instances').mean:.2f} "
        ours += "instances"
        findings.append(Finding(case, ours, {TRUE: "0.197 s", PRINTED: "0.250 s"}.get(case, "")))
    return Verdict(ours="; ".join(said), passed=worst <= AT_MOST, findings=findings)


def judge_routing(runs: Runs) -> Verdict:
    """P3e: what true lengths gain over the best baseline, and what is left of it."""
    p99 = {case.removesuffix(EDGE): runs.of(case, "norm_p99") for case in runs.cases}
    best = min(("Llumnix-like", "least request"), key=lambda router: p99[router].mean)
    exact, real = (p99[best].mean / p99[router].mean for router in (TRUE, SHIPPED))
    worse = {router: p99[f"{router}{REAL}"] / p99[router] for router in (TRUE, "union")}
    findings = [
        Finding(f"{best} / PreServe with true lengths", f"{exact:.2f}x", "1.70x"),
        Finding(f"{best} / PreServe with the shipped model's errors", f"{real:.2f}x"),
    ]
    findings += [
        Finding(f"{router}, the shipped model's errors / true lengths", ratio.show(".2f", "x"))
        for router, ratio in worse.items()
    ]
    for case in runs.cases:
        tokens = runs.of(case, "norm_p99").show(".3f", " s")
        findings.append(Finding(case, f"P99 {tokens} a token, mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s"))
    ours = f"{exact:.2f}x exact, {real:.2f}x with real errors ({best})"
    return Verdict(ours=ours, passed=real > 1.3, findings=findings)


ERRORS = prose(
    """`real errors`: the router expects lengths that are as far off as those of the length model that is shipped, by
    the quantiles of `bench/papers/length_errors.toml` (expected over actual on held-out answers of ShareGPT, by how
    long the answer is beside the median one, scaled to the median of the service)."""
)
READS = ("p_lengths.py", "length_errors.py", "length_errors.toml")
P1E = replace(
    p_serve.P1,
    id="P1e",
    title="Peak normalised latency of PreServe, true lengths and those of the shipped length model",
    paper="0.197 s exact, 0.250 s with errors (1.27x)",
    band="at most 1.27x of that with true lengths, on both services",
    setup=f"As P1. {ERRORS} The texts of the coding service are not ShareGPT's, so there this is a guess.",
    cases=lambda quick: tuple(s + case for s in ("", p_serve.CODE) for case in (TRUE, PRINTED, SHIPPED)),
    run=run_scaling,
    judge=judge_peak,
    reads=(*p_serve.P1.reads, *(f"bench/papers/{name}" for name in READS)),
)
P3E = replace(
    P1E,
    id="P3e",
    title="P99 normalised latency at the overload edge, best baseline / PreServe with those lengths",
    paper="0.767 / 0.45 s (1.7x) with true lengths",
    band="> 1.3x",
    setup=f"As P3 at 18.5 requests/s, where it is judged. {ERRORS}",
    cases=lambda quick: ROUTERS,
    run=run_routing,
    judge=judge_routing,
    reads=(*P1E.reads, "scenarios/preserve_routing.yaml"),
)
