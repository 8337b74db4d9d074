"""PreServe's scaler and router, and their baselines: Llumnix-like, reactive, proactive, hybrid and static. `p_serve`
builds the rows P1 to P3 on them."""

from bench.papers.cache import ROOT
from bench.papers.experiment import Finding, Outcome, Runs, Spread, Verdict
from bench.papers.simulated import Expect, figures, policies
from glowplug_lab.simulator.results import Peak
from glowplug_lab.simulator.scenario.load import Scenario, load
from glowplug_lab.simulator.world import World

LEAD_S, SQUEEZE = 200.0, 24
LEARN_S = 600.0
START = "models.llama-7b.start={launch_s: 15s, warmup_s: 15s}"
SYSTEMS = {  # those of libs/glowplug/policies/systems.py, with each case's changes
    "PreServe": ["policies=preserve"],
    "PreServe, load errors": ["policies=preserve", "workload.length_errors=true"],
    "Llumnix-like": ["policies=llumnix_like"],
    "reactive": ["policies=serverless_vllm"],
    "proactive": ["policies=proactive"],
    "hybrid": ["policies=hybrid"],
    "static 8": ["policies=serverless_vllm", *policies(scaling="static"), "models.llama-7b.min_instances=8"],
    "union": ["policies=union"],
}
OF_P2M = {
    "union": ["policies=union"],
    "oracle": ["policies=union", *policies(scaling="static")],  # p_oracle.py sets how many there are
}
ROUTERS = {
    "PreServe": "preserve",
    "least request": "serverless_vllm",
    "minimum use": "minimum_use",
    "round robin": "round_robin",
    "Llumnix-like": "llumnix_like",
    "union": "union",
}
"""Systems by what a case is called; of each its router alone runs, for instances neither come nor go."""
LENGTHS = "{prompt_mean: 236, prompt_cv: 4.4, response_mean: 180, response_cv: 1.81}"


class Minutes(Peak):
    """The mean of every minute, beside the highest of them."""

    __slots__ = ("means",)

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[int, float] = {}  # minute -> mean seconds a token of requests that ended in it

    def close(self) -> None:
        super().close()
        if self._count:
            self.means[self._bucket] = self._total / self._count


def forget(world: World) -> None:
    """Reset the figures: the time before, with the first instances' start, does not count."""
    world.results.by_model.clear()
    world.results.normalised_peak = Minutes()


def world_of(
    system: str, seed: int, quick: bool, *more: str, lead_s: float = LEAD_S, expect: Expect | None = None
) -> tuple[Scenario, World]:
    """A system on 36 hours from the third day on in 90 minutes, or 8 of them. Requests of the `lead_s` before them do
    not count."""
    seconds = 240 if quick else 5400
    start_s = 48 * 3600 - lead_s * SQUEEZE
    given = [START, "params.exact_lengths=true", f"workload.start_s={start_s}", f"seconds={seconds + lead_s}"]
    given += ["models.llama-7b.preload=true", *(SYSTEMS | OF_P2M)[system], *more]
    found = load(ROOT / "scenarios" / "preserve.yaml", given)
    arrivals = found.arrivals(seed)
    world = World(found.setup, expect(arrivals, seed) if expect else arrivals)
    world.kernel.at(world.began_s + lead_s, forget, world)
    return found, world


def outcome_of(found: Scenario, world: World, from_s: float = 0.0) -> Outcome:
    """Run it to its end. Instances count from `from_s` on."""
    before: list[float] = []
    world.kernel.at(world.began_s + from_s, lambda: before.append(world.accounts.instances.add(0, world.kernel.now_s)))
    outcome = figures(world.run(found.seconds, drain_s=300.0))
    outcome["instances"] = (outcome["instance_s"] - before[0]) / (outcome["seconds"] - from_s)
    assert isinstance(world.results.normalised_peak, Minutes)
    outcome["minutes"] = sorted(world.results.normalised_peak.means.items())
    return outcome


def run_scaling(system: str, seed: int, quick: bool, *more: str, expect: Expect | None = None) -> Outcome:
    """P1 and P2."""
    return outcome_of(*world_of(system, seed, quick, *more, expect=expect))


def run_learned(system: str, seed: int, quick: bool, *more: str) -> Outcome:
    """P2m: the time before is long enough to measure mu, and no instance of that time counts."""
    lead_s = LEAD_S if quick else LEARN_S
    return outcome_of(*world_of(system, seed, quick, *more, lead_s=lead_s), lead_s)


def judge_hours(runs: Runs) -> Verdict:
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
