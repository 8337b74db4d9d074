"""P1 to P3: PreServe with mu from a profile taken beforehand, and requests that wait while all are overloaded."""

from dataclasses import replace

from bench.papers import p_preserve
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Verdict, prose
from bench.papers.plots import Bars
from bench.papers.simulated import SIMULATOR, Expect, policies, simulate

NEVER_HOLDS = "policies.routing=preserve_load_aware"
PROFILE = {"prompt_per_s": 1560, "response_per_s": 285, "total_per_s": 1845}
"""mu: what one instance takes at 1.35 requests a second, the most with a mean below 0.2 s a token (`PROFILED`)."""
FROZEN = "params.predictor.capacity.busy_ratio=1000"  # nothing is learned of mu
PARTS = {"PreServe, never holds": [FROZEN, NEVER_HOLDS]}
CODE = "code: "
ON_CODE = tuple(CODE + case for case in ("PreServe", "PreServe, load errors", "Llumnix-like", "proactive", "static 8"))
CODE_MU = {"prompt_per_s": 3876, "response_per_s": 52, "total_per_s": 3928}
"""mu of the coding service: what one instance takes at 1.9 requests a second, with a mean of thrice an idle one's."""
PROFILED = tuple(f"one instance @{rps}" for rps in (1.2, 1.3, 1.4, 1.5))
CODE_PROFILED = tuple(f"{CODE}one instance @{rps}" for rps in (0.05, 1.8, 1.9, 2.0))
RATE, CODE_RATE = 5.0, 7.5
CODE_WORKLOAD = ("workload.source=azure_2024_code_10s", "workload.lengths=azure_2023_code")


def run_scaling(case: str, seed: int, quick: bool, expect: Expect | None = None) -> Outcome:
    """P1 and P2: a system on one of the two services; or one instance at a rate."""
    system, on_code = case.removeprefix(CODE), case.startswith(CODE)
    service = CODE_WORKLOAD if on_code else ()
    if system.startswith("one instance"):
        return profile(system.partition("@")[2], seed, quick, *service)
    mu = CODE_MU if on_code else PROFILE
    given = [*service, f"workload.rps={CODE_RATE if on_code else RATE}"]
    given += [f"params.predictor.capacity.{name}={value}" for name, value in mu.items()]
    given += PARTS.get(system, [FROZEN])
    return p_preserve.run_scaling("PreServe" if system in PARTS else system, seed, quick, *given, expect=expect)


def profile(rps: str, seed: int, quick: bool, *service: str) -> Outcome:
    """One instance that stays, Poisson arrivals with the service's lengths."""
    workload = [*service, "workload.source=gamma", f"workload.rps={rps}", "workload.squeeze=1", "workload.start_s=0"]
    given = [*workload, "history.seconds=0", "models.llama-7b.max_instances=1", "models.llama-7b.preload=true"]
    given += policies(scaling="static", routing="least_loaded", prediction="none")
    return simulate("preserve", [*given, f"seconds={600 if quick else 1800}"], seed)


def scaling_cases(quick: bool) -> tuple[str, ...]:
    if quick:
        return ("PreServe", "PreServe, load errors", "Llumnix-like", "static 8", *ON_CODE)
    return (*p_preserve.SYSTEMS, *PARTS, *ON_CODE)


def judge_peak(runs: Runs) -> Verdict:
    """P1."""
    profiled = [case for case in runs.cases if "one instance" in case]
    systems = [case for case in runs.cases if case not in profiled]
    peak = {case: runs.of(case, "norm_peak") for case in systems}
    exact, off, code, code_off = (
        peak[f"{service}Llumnix-like"] / peak[f"{service}PreServe{errors}"]
        for service in ("", CODE)
        for errors in ("", ", load errors")
    )
    printed = {"PreServe": "0.197 s", "PreServe, load errors": "0.250 s", "Llumnix-like": "0.455 s"}
    findings = [
        Finding("Llumnix-like / PreServe with true lengths", exact.show(".2f", "x"), "2.3x"),
        Finding("Llumnix-like / PreServe with load errors", off.show(".2f", "x"), "1.8x"),
        Finding("code: Llumnix-like / PreServe with true lengths", code.show(".2f", "x"), "2.3x"),
        Finding("code: Llumnix-like / PreServe with load errors", code_off.show(".2f", "x"), "1.8x"),
    ]
    for case in systems:
        ours = f"peak {peak[case].show('.3f', ' s')}, P99 {runs.of(case, 'norm_p99').mean:.3f} s a token, "
        ours += f"mean TTFT {runs.of(case, 'ttft_mean').mean:.2f} s, {runs.of(case, 'instances').mean:.2f} instances, "
        findings.append(Finding(case, f"{ours}{runs.of(case, 'starts').mean:.0f} starts", printed.get(case, "")))
    for case in profiled:
        mean, last = runs.of(case, "norm_mean"), runs.of(case, "norm_p95")
        ours = f"mean {mean.show('.3f', ' s')} a token, P95 {last.show('.3f', ' s')}"
        objective = "" if case.startswith(CODE) else "0.2 s is the objective"
        findings.append(Finding(f"{case} requests/s", ours, objective))
    bars = Bars(
        title="Highest normalised latency of any minute",
        x_label="system",
        y_label="seconds a token",
        groups=systems,
        series={"peak": [peak[case].mean for case in systems]},
        log_y=True,
    )
    passed = min(exact.mean, off.mean, code.mean, code_off.mean) > 1.4
    ours = f"chat {off.mean:.2f}x with load errors, {exact.mean:.2f}x without"
    ours += f"; code {code_off.mean:.2f}x and {code.mean:.2f}x"
    means = {case: f"{spread.mean:.3f} s" for case, spread in peak.items()}
    told = {"on_code": means[f"{CODE}proactive"], "code": means[f"{CODE}PreServe"]}
    told |= {"proactive": means.get("proactive", "not run")}
    note = prose(HIGH, ours=ours, **told) if passed else ""
    return Verdict(ours=ours, passed=passed, findings=findings, deviation=note, plots={"peak": bars})


HIGH = """
    {ours}. Both days run 24 times as fast, so a window lasts 25 s and a start 30 s: who starts only when there is
    too little room is late by more than a window. On the conversations nearly all of that gain is the forecast:
    `proactive` has the same mu and forecasts alone, and does as well (peak {proactive}); on the coding service its
    peak is {on_code} against PreServe's {code}, which sees within the window what the forecast missed. `reactive`
    counts free slots, not KV cache, and with 256 slots an instance it starts too late. Two departures of the scaler
    matter (`scaling/preserve.py`): no window takes instances away while one is too full, and calm takes away none
    that the forecast asks for. Row P2m measures mu on the way.
"""


def run_routing(case: str, seed: int, quick: bool, expect: Expect | None = None) -> Outcome:
    """P3."""
    router, _, rate = case.partition(" @")
    name = p_preserve.ROUTERS[router.removesuffix(", never holds")]
    given = [
        f"policies={name}",
        *policies(scaling="static", prediction="none"),
        f"workload.rps={rate}",
        f"workload.lengths={p_preserve.LENGTHS}",
        "params.exact_lengths=true",
    ]
    given += ["seconds=600", *([NEVER_HOLDS] if router != router.removesuffix(", never holds") else [])]
    return simulate("preserve_routing", given, seed, expect=expect)


def routing_cases(quick: bool) -> tuple[str, ...]:
    cases = p_preserve.routing_cases(quick)
    return (*cases, f"PreServe, never holds @{cases[-1].partition(' @')[2]}")


SETUP = prose(
    """PreServe section 5.3: up to eight Llama-2-7B on A40s (the A10's profile by memory bandwidth), Azure
    conversations of 2024, thinned to 5 requests/s; the workload predictor knows the two days before, the next
    36 hours run 24 times as fast, 90 minutes. An instance takes 30 s to start. The router is told true response
    lengths; `load errors` gives it ones that are off as the paper's Table 2 says. mu is a profile taken beforehand,
    as in the paper's offline phase: what one instance takes with a mean below 0.2 s a token (`one instance` below).
    As in section 4.3.3 a request waits while all instances are overloaded (`never holds`: without that). `code`:
    the coding service at 7.5 requests/s, which takes as many instances, from its third day (a Sunday) on; its answers
    have 28 tokens after prompts of 2,040, so the time of a prefill alone is most of a token's, and the objective of its
    profile is thrice what an idle instance does, as the paper's 0.2 s is. The paper's figures are means of both."""
)
P1 = Experiment(
    id="P1",
    title="Peak normalised latency, Llumnix-like / PreServe",
    paper="0.455 / 0.250 s (1.8x)",
    band="> 1.4x on both services",
    setup=SETUP,
    cases=lambda quick: (*scaling_cases(quick), *PROFILED, *CODE_PROFILED),
    run=run_scaling,
    judge=judge_peak,
    reads=(*SIMULATOR, "scenarios/preserve.yaml", "bench/papers/p_preserve.py", "bench/papers/p_serve.py"),
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
    band="> 1.3x",
    setup=prose(
        """PreServe section 5.4: four instances that stay, Poisson arrivals for ten minutes, lengths lognormal
        through ShareGPT's median and 95th percentile as the paper prints them (52 and 911 prompt, 87 and 632
        response tokens). The edge lies at 18 requests/s here, at 9.3 to 10.5 in the paper: its engine is slower
        than the profile. PreServe's requests wait while all instances are overloaded (section 4.3.3)."""
    ),
    cases=routing_cases,
    run=run_routing,
    judge=p_preserve.judge_routing,
    reads=(*P1.reads, "scenarios/preserve_routing.yaml"),
)
