"""Run a scenario once; the outcome has the figures for every row."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.papers.cache import ROOT
from bench.papers.experiment import Outcome
from glowplug_lab.simulator.results import Quantiles, Results
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

Expect = Callable[[Iterator[Arrival], int], Iterator[Arrival]]
"""Arrivals and seed -> the same arrivals, each with the length that is expected of its answer."""
SIMULATOR = (
    "libs/glowplug/domain",
    "libs/glowplug/events",
    "libs/glowplug/policies",
    "libs/glowplug/controllers",
    "libs/glowplug/memory",
    "libs/glowplug_lab/simulator",
    "bench/papers/simulated.py",
)
"""What decides a simulated outcome, for `Experiment.reads`."""
SHARES = (*(n / 50 for n in range(50)), 0.985, 0.99, 0.995, 0.999)


def simulate(scenario: str, settings: Iterable[str], seed: int, *, expect: Expect | None = None) -> Outcome:
    """Run scenarios/NAME.yaml with 'key=value' settings over it. Raises ScenarioError."""
    found = load(ROOT / "scenarios" / f"{scenario}.yaml", settings)
    arrivals = found.arrivals(seed)
    world = World(found.setup, expect(arrivals, seed) if expect else arrivals)
    return figures(world.run(found.seconds, drain_s=found.words.drain_s))


def figures(results: Results) -> Outcome:
    """The figures of a run. Seconds, bytes, shares of 1."""
    whole = results.total()
    out: Outcome = {
        "arrived": whole.num_arrived,
        "refused": sum(whole.num_refused.values()),
        "cold": whole.num_cold,
        "preempted": whole.num_preempted,
        "ttft_met": whole.ttft_attainment,
        "tpot_met": whole.tpot_attainment,
        "under_100ms": whole.ttft.share_upto(0.1) if whole.ttft.count else 0.0,
        "hit_ratio": results.hit_ratio,
        "starts": results.num_starts,
        "consolidated": results.num_consolidated,
        "gpu_s": results.gpu_seconds,
        "gpu_serving_s": results.gpu_serving_seconds,
        "instance_s": results.instance_seconds,
        "norm_peak": results.normalised_peak.highest,
        "fetched": results.bytes_fetched,
        "loaded": results.bytes_loaded,
        "prewarmed": results.bytes_prewarmed,
        "migrated": results.bytes_migrated,
        "swapped": results.bytes_swapped,
        "seconds": results.seconds,
        "ttft_cdf": curve(whole.ttft),
    }
    for name, of in (("ttft", whole.ttft), ("tpot", whole.tpot), ("norm", whole.normalised), ("e2e", whole.e2e)):
        out |= {
            f"{name}_mean": of.mean,
            f"{name}_p50": of.at(0.5),
            f"{name}_p95": of.at(0.95),
            f"{name}_p99": of.at(0.99),
        }
    for origin, num in results.starts.items():
        out[f"starts {origin}"] = num
    for key, one in results.by_model.items():
        out[f"ttft_p99 {key}"] = one.ttft.at(0.99)
    return out


def curve(of: Quantiles) -> list[list[float]]:
    """A distribution as (value, share at or below it), for a plot."""
    return [[of.at(share), share] for share in SHARES] if of.count else []


def policies(**names: str) -> list[str]:
    """Settings that choose policies by kind."""
    return [f"policies.{kind}={name}" for kind, name in names.items()]


def points(pairs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """A kept curve as points of a plot."""
    return [(float(x), float(y)) for x, y in pairs]
