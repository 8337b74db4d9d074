"""U: the union of the five papers beside each paper alone and the baselines, on every paper's workload."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.measured.data import markdown
from bench.papers.experiment import Experiment, Finding, Outcome, Runs, Spread, Verdict, prose, ttft_cdf
from bench.papers.plots import Bars, Lines
from bench.papers.simulated import SIMULATOR
from bench.papers.u_workloads import MIXED, UNION, WORKLOADS
from bench.papers.u_workloads import run as simulate

WORDS = {
    "ttft_p99": "P99 TTFT",
    "ttft_met": "TTFT attainment",
    "both_met": "TTFT and TPOT attainment",
    "norm_p99": "P99 normalised latency",
    "ttft_mean": "mean TTFT",
}
NUM_LINES = 8  # systems in a plot


def run(case: str, seed: int, quick: bool) -> Outcome:
    workload, _, system = case.partition(": ")
    return simulate(workload, system, seed, quick)


def cases(quick: bool) -> tuple[str, ...]:
    if quick:
        return tuple(f"{MIXED}: {system}" for system in (UNION, "WarmServe", "HydraServe", "SwapServeLLM", "proactive"))
    return tuple(f"{workload}: {system}" for workload in WORKLOADS for system in WORKLOADS[workload].systems)


def systems(runs: Runs, workload: str) -> list[str]:
    """The systems that were run."""
    return [system for system in WORKLOADS[workload].systems if runs.has(f"{workload}: {system}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The union beside the best other system, one figure on one workload."""

    workload: str
    name: str
    more: bool  # is better
    ours: Spread
    best: str
    theirs: Spread
    gpu_s: tuple[float, float]  # held, means: the union's, the other system's
    serving_s: tuple[float, float]  # those of instances among them

    @property
    def wins(self) -> bool:
        """Whether the union is at least as good in the mean over seeds; on the mixed fleet, better."""
        gain = (self.ours.mean - self.theirs.mean) * (1 if self.more else -1)
        return gain > 0 if self.workload == MIXED else gain >= 0

    @property
    def num_seeds_won(self) -> int:
        """Seeds in which the union was at least as good as that other system."""
        pairs = zip(self.ours.values, self.theirs.values, strict=True)
        return sum(ours >= theirs if self.more else ours <= theirs for ours, theirs in pairs)

    @property
    def said(self) -> str:
        form = ".2%" if self.name.endswith("_met") else ".3f"
        figures = f"{WORDS[self.name]} {self.ours.show(form)} against {self.theirs.show(form)} ({self.best})"
        held, serving = (
            f"{ours:,.0f} against {theirs:,.0f} ({ours / theirs - 1:+.0%})"
            for ours, theirs in (self.gpu_s, self.serving_s)
        )
        return f"{figures}, GPU-seconds held {held}, of instances {serving}"

    @property
    def short(self) -> str:
        """Format gain and price: "P99 TTFT -43 % for +19 % GPU-seconds"."""
        if self.name.endswith("_met"):
            gained = f"{(self.ours.mean - self.theirs.mean) * 100:+.2f} points"
        else:
            gained = f"{self.ours.mean / self.theirs.mean - 1:+.0%}"
        return f"{WORDS[self.name]} {gained} for {self.gpu_s[0] / self.gpu_s[1] - 1:+.0%} GPU-seconds"

    @property
    def shown(self) -> str:
        """Likewise, with the number of seeds for which it holds."""
        return f"{self.said}; at least as good in {self.num_seeds_won} of {len(self.ours.values)} seeds"


def compared(runs: Runs, workload: str, name: str, more: bool) -> Comparison:
    """Compare with the system that is best in the mean over all seeds of `runs`."""
    by_system = {s: runs.of(f"{workload}: {s}", name) for s in systems(runs, workload)}
    others = {s: spread.mean for s, spread in by_system.items() if s != UNION and spread.mean == spread.mean}
    best = max(others, key=others.__getitem__) if more else min(others, key=others.__getitem__)
    return Comparison(
        workload=workload,
        name=name,
        more=more,
        ours=by_system[UNION],
        best=best,
        theirs=by_system[best],
        gpu_s=_both(runs, workload, best, "gpu_s"),
        serving_s=_both(runs, workload, best, "gpu_serving_s"),
    )


def _both(runs: Runs, workload: str, best: str, name: str) -> tuple[float, float]:
    return runs.of(f"{workload}: {UNION}", name).mean, runs.of(f"{workload}: {best}", name).mean


def comparisons(runs: Runs) -> list[Comparison]:
    """Compare every headline figure on every workload."""
    workloads = list(dict.fromkeys(case.partition(": ")[0] for case in runs.cases))
    found = [compared(runs, workload, *WORKLOADS[workload].headline) for workload in workloads]
    return [*found, compared(runs, MIXED, "both_met", True)] if MIXED in workloads else found


def judge(whole: Runs) -> Verdict:
    """Judge by the seeds on which the rules were found; the held-out seeds are shown beside it."""
    runs, held_out = whole.among(range(1, HELD_OUT[0])), whole.among(HELD_OUT)
    workloads = list(dict.fromkeys(case.partition(": ")[0] for case in runs.cases))
    found = comparisons(runs)
    lost = [one for one in found if not one.wins]
    findings = [Finding(f"{one.workload}: union against the best single one", one.shown) for one in found]
    if held_out.seeds:
        findings += [
            Finding(f"{one.workload}: the same, seeds held out ({_numbers(held_out.seeds)})", one.shown)
            for one in comparisons(held_out)
        ]
    short = "; ".join(f"{one.workload}: {one.said}" for one in lost)
    deviation = prose("Where the union is not the best: {short}.", short=short) if lost else ""
    if len(runs.seeds) < 3:
        deviation = f"{deviation} {prose(DRAWS)}".strip()
    return Verdict(
        ours="; ".join(f"{one.workload} {'yes' if one.wins else 'no'}: {one.short}" for one in found),
        passed=not lost,
        findings=findings,
        deviation=deviation,
        plots=plots(runs, MIXED) if MIXED in workloads else {},
        tables=[table(runs, workload) for workload in workloads],
    )


def _numbers(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"


HELD_OUT = (11, 12, 13, 14, 15)
"""No rule of the union was made or changed by what they show."""
DRAWS = "So few seeds decide little where P99 waits for GPUs."


def plots(runs: Runs, workload: str) -> dict[str, Lines | Bars]:
    there = systems(runs, workload)
    cdf = ttft_cdf(f"TTFT, {workload}", runs, {s: f"{workload}: {s}" for s in there[:NUM_LINES]})
    ratios = (("TTFT attainment", "ttft_met"), ("GPU-seconds", "gpu_s"), ("GPU-seconds of instances", "gpu_serving_s"))
    bars = Bars(
        title=f"Attainment and GPU-seconds of the {workload}, against the union",
        x_label="system",
        y_label="ratio",
        groups=there,
        series={
            words: [runs.of(f"{workload}: {s}", n).mean / runs.of(f"{workload}: {UNION}", n).mean for s in there]
            for words, n in ratios
        },
    )
    return {"mixed ttft": cdf, "mixed": bars}


HEADS = (
    "system",
    "TTFT mean",
    "TTFT p50 / p95 / p99 s",
    "TTFT met",
    "TPOT met",
    "both met",
    "norm. p99 s",
    "GPU-s held / of instances",
    "starts from a replica / not fetched",
    "fetched / loaded / swapped GB",
    "refused",
)


def table(runs: Runs, workload: str) -> str:
    """Every system on one workload."""
    title = (
        f"**{workload} workload** (simulated, mean over seeds; mean and P99 of TTFT and attainment with their range)"
    )
    if workload == MIXED:
        title = title.replace(" workload**", "**")
    rows = []
    for system in systems(runs, workload):
        case = f"{workload}: {system}"
        names = ("ttft_p50", "ttft_p95", "tpot_met", "both_met", "norm_p99", "gpu_s", "gpu_serving_s", "refused")
        mean = {n: runs.of(case, n).mean for n in names}
        hits, near = (_share(runs.of(case, n), ".0%") for n in ("hit_ratio", "not_fetched"))
        cells = [
            system,
            runs.of(case, "ttft_mean").show(".2f"),
            f"{mean['ttft_p50']:.2f} / {mean['ttft_p95']:.2f} / {runs.of(case, 'ttft_p99').show('.2f')}",
            _share(runs.of(case, "ttft_met")),
            _share(runs.of(case, "tpot_met")),
            _share(runs.of(case, "both_met")),
            f"{mean['norm_p99']:.3f}",
            f"{mean['gpu_s']:.0f} / {mean['gpu_serving_s']:.0f}",
            f"{hits} / {near}",
            " / ".join(f"{runs.of(case, n).mean / 1e9:.0f}" for n in ("fetched", "loaded", "swapped")),
            f"{mean['refused']:.0f}",
        ]
        rows.append(cells)
    lines = [title, "", markdown(HEADS, rows)]
    if WORKLOADS[workload].alike:
        alike, because = ", ".join(WORKLOADS[workload].alike), WORKLOADS[workload].because
        lines += ["", f"Not run, because they do what serverless vLLM does: {alike} ({because})."]
    return "\n".join(lines)


def _share(spread: Spread, form: str = ".1%") -> str:
    """Format a share; "-" without objectives, or without starts."""
    return spread.show(form) if spread.mean == spread.mean else "-"


SCENARIOS = tuple(f"scenarios/{name}.yaml" for name in sorted({w.scenario for w in WORKLOADS.values()}))
MODULES = ("u_union", "u_workloads", "w_warm", "w_mux", "h_load", "h_starts", "p_preserve")
UNION_CODE = (
    *(
        f"libs/glowplug/policies/{kind}/union.py"
        for kind in ("caching", "eviction", "placement", "prewarming", "scaling")
    ),
    "libs/glowplug/policies/scaling/union.py",
)

EXPERIMENT = Experiment(
    id="U",
    title="The union against each paper alone and every baseline",
    paper="",
    band="at least the best single one on every workload, better on the mixed fleet",
    setup=prose(
        """Every paper alone and the baselines on the workload of every paper, a quarter to a third of an hour each,
        on a second cell of WarmServe's and HydraServe's, and on a mixed fleet (ServeGen's clients as models: four
        popular, eight bursty, twenty of the long tail, on large and small servers). Engines and start-up stages are
        the same for all on one workload, those of the workload's own paper; policies alone differ, so `serverless
        vLLM` here is first fit, reactive scaling, least request and LRU with those engines. Systems that differ in
        nothing but what a workload never asks for are run once, which stands below their table: where instances
        neither come nor go a system is its router. A gain has its price beside it, in GPU-seconds held.
        Headline figures: WarmServe's P99 TTFT, HydraServe's TTFT attainment (arrivals sampled down as in row H2),
        mCache's mean TTFT (8 cards' host memory for four models in ten), SwapServeLLM's mean TTFT, PreServe's P99
        normalised latency (scaling as in P1, routing as in P3), the mixed fleet's P99 TTFT and its share of requests
        that meet both objectives, from the third minute on: in the first two every system fills an empty fleet over
        the same network cards. On SwapServeLLM's workload each model is asked once before anything counts, two
        minutes apart, for its section 4 starts every engine before the first request; who can leaves it asleep.
        GPU-seconds held count whatever lies on a GPU, replicas too, which give way at once; those of instances are
        the rest. Best is the best mean over seeds. The rules of the union were found on the seeds 1 to 10; 11 to 15
        are held out: nothing was made or changed by them, and they are shown by themselves. What each system is stands
        in `libs/glowplug/policies/systems.py`, and a fleet of that name runs the same. Engines that are swapped out
        hold no GPU bytes here; real ones keep 0.4 to 1.1 GB each."""
    ),
    cases=cases,
    run=run,
    judge=judge,
    reads=(*SIMULATOR, *UNION_CODE, *SCENARIOS, *(f"bench/papers/{name}.py" for name in MODULES)),
    max_seeds=10,
    held_out=HELD_OUT,
)
