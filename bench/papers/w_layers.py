"""W3k: WarmServe's replicas of the first k layers (section 4, erratum E7) against whole ones: does it pay?"""

from dataclasses import replace

from bench.papers import w_warm
from bench.papers.cache import ROOT
from bench.papers.experiment import Experiment, Outcome, Runs, Spread, Verdict, prose
from bench.papers.simulated import figures, policies
from glowplug.domain.instance import Instance, InstanceState
from glowplug.simulator.results import Integral
from glowplug.simulator.scenario.load import load
from glowplug.simulator.world import World

WHERE = {"@25": ["workload.rps=25"], "crowded": ["workload.rps=1", "models.*.copies=3"]}
REPLICAS = {
    "whole": "warmserve",
    "first layers": "warmserve:first_layers=true",
    "first layers, growth counted": "warmserve:first_layers=true:growth_leads=true",
}


class Held:
    """Replicas that lie ready on GPUs, and their bytes, over time."""

    def __init__(self, world: World) -> None:
        self.num, self.num_bytes = Integral(world.began_s), Integral(world.began_s)
        self._held: dict[str, int] = {}
        world.control.on_save.append(self._saved)

    def _saved(self, table: str, row: Instance, now_s: float) -> None:
        if table != "instances":
            return
        is_held = row.replica and row.state is InstanceState.PREWARMED
        before, after = self._held.pop(row.instance_id, 0), sum(w.num_bytes for w in row.workers) * is_held
        if after:
            self._held[row.instance_id] = after
        if before != after:
            self.num.add(bool(after) - bool(before), now_s)
            self.num_bytes.add(after - before, now_s)


def run(case: str, seed: int, quick: bool) -> Outcome:
    replicas, _, where = case.rpartition(" ")
    given = [*w_warm.settings("WarmServe", 25, w_warm.CV, 300 if quick else 900), *WHERE[where]]
    if where == "crowded":
        given += [f"workload.days={[1, 2, 3, 4] * 3}", "servers.server.gpu_bytes=45GB"]
    found = load(ROOT / "scenarios" / "warmserve.yaml", [*given, *policies(prewarming=REPLICAS[replicas])])
    world = World(found.setup, found.arrivals(seed))
    held = Held(world)
    results = world.run(found.seconds, drain_s=found.words.drain_s)
    now_s = world.kernel.now_s
    for integral in (held.num, held.num_bytes):
        integral.add(0, now_s)
    mean = {"held": held.num.total / results.seconds, "held_bytes": held.num_bytes.total / results.seconds}
    return figures(results) | mean | {"unanswered": world.traffic.num_open}


def judge(runs: Runs) -> Verdict:
    """Hits and bytes with and without."""
    shown = {
        "P99 TTFT": ("ttft_p99", ".2f", " s", 1.0),
        "P95": ("ttft_p95", ".2f", " s", 1.0),
        "hits": ("hit_ratio", ".1%", "", 1.0),
        "replicas held": ("held", ".1f", "", 1.0),
        "bytes they hold": ("held_bytes", ".0f", " GB", 1e9),
        "loaded to prewarm": ("prewarmed", ".0f", " GB", 1e9),
        "loaded in all": ("loaded", ".0f", " GB", 1e9),
    }
    lines = [f"| replicas | {' | '.join(shown)} |", "|---" * (1 + len(shown)) + "|"]
    for case in runs.cases:
        cells = [
            Spread(tuple(v / scale for v in runs.of(case, name).values)).show(form, unit)
            for name, form, unit, scale in shown.values()
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    hits = {c: runs.of(c, "hit_ratio").mean for c in runs.cases}
    moved = {c: runs.of(c, "prewarmed").mean for c in runs.cases}
    whole, first, leads = (f"{name} crowded" for name in REPLICAS)
    busy = {name: f"{name} @25" for name in REPLICAS}
    told = {
        "fewer": f"{1 - moved[leads] / moved[whole]:.0%}",
        "strict": f"{1 - moved[first] / moved[whole]:.0%}",
        "crowded": " / ".join(f"{hits[c]:.1%}" for c in (whole, first, leads)),
        "busy": " / ".join(f"{hits[c]:.1%}" for c in busy.values()),
    }
    return Verdict(
        ours=f"hits {hits[whole]:.1%} -> {hits[leads]:.1%}, {told['fewer']} fewer bytes (crowded)",
        passed=hits[leads] >= hits[whole] and moved[leads] < moved[whole],
        deviation=prose(PAYS, **told),
        tables=["\n".join(lines)],
    )


PAYS = """
    Hits with whole replicas, with the first layers, and with those of which a growth's own seconds are taken off:
    {busy} at 25 requests/s, {crowded} where twelve models share GPUs of 45 GB. By the rule alone a replica is hardly
    smaller: a layer of 7B computes in 1.1 ms and loads in 12, so two of its 32 may be missing ({strict} fewer bytes to
    prewarm, crowded). With the 150 to 550 ms that a growth takes anyhow, half may ({fewer} fewer). On the paper's fleet
    one replica of every model fits each GPU, and starts miss for want of GPUs that nobody uses, which smaller replicas
    do not change; P99 there is a matter of chance (row W2). It pays where memory is what replicas lack.
"""
EXPERIMENT: Experiment = replace(
    w_warm.W3,
    id="W3k",
    title="Replicas of the first k layers against whole ones (section 4, erratum E7)",
    paper="not measured",
    band="crowded: no fewer hits, fewer bytes",
    setup=prose(
        """As W1's WarmServe for 15 minutes at 25 requests/s; `crowded`: each model three times, GPUs of 45 GB, one
        request a second of all."""
    ),
    cases=lambda quick: tuple(f"{replicas} {where}" for where in WHERE for replicas in REPLICAS),
    run=run,
    judge=judge,
    reads=(*w_warm.READS, "bench/papers/w_layers.py"),
    kept_with="",
)
