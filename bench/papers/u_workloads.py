"""U: the compared systems (the union, every paper alone and the papers' baselines, defined in
`libs/glowplug/policies/systems.py`), and the workloads to put under any of them: every paper's, and a mixed fleet.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from bench.papers import h_load, p_preserve, w_mux, w_warm
from bench.papers.cache import ROOT
from bench.papers.experiment import Outcome
from bench.papers.simulated import curve, figures
from glowplug.events.envelope import Event
from glowplug.events.facts import RequestFinished, RequestRejected
from glowplug_lab.simulator.results import Quantiles
from glowplug_lab.simulator.scenario.load import Scenario, load
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

UNION = "union"
SYSTEMS = {
    UNION: "union",
    "WarmServe": "warmserve",
    "HydraServe": "hydraserve",
    "PreServe": "preserve",
    "SwapServeLLM": "swapserve",
    "mCache": "mcache",
    "SLLM-GPU": "sllm_gpu",
    "ServerlessLLM": "serverlessllm",
    "serverless vLLM": "serverless_vllm",
    "Llumnix-like": "llumnix_like",
    "proactive": "proactive",
    "hybrid": "hybrid",
    "round robin": "round_robin",
    "minimum use": "minimum_use",
    "MuxServe-like": "muxserve_like",
}
"""As a page calls it -> its name, the word of GLOWPLUG_POLICIES."""
PAPERS = ("WarmServe", "HydraServe", "PreServe", "SwapServeLLM", "mCache")
CACHES = ("SLLM-GPU", "ServerlessLLM", "serverless vLLM")
ROUTERS = ("PreServe", "Llumnix-like", "round robin", "minimum use", "serverless vLLM")
"""Where instances neither come nor go a system is its router; least request is that of all others."""

ABLE = "servers.*.abilities=[prewarm, swap, stages]"
ASKED_EVERY_S = 120.0  # in SwapServeLLM's opening: longer than its engines take to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`headline`: the figure its paper is about, and whether more of it is better."""

    scenario: str
    seconds: float
    given: Callable[[float], list[str]]  # settings on top of the scenario, policies aside
    headline: tuple[str, bool]
    systems: tuple[str, ...]
    draw: Callable[[Scenario, int], Iterable[Arrival]] = lambda found, seed: found.arrivals(seed)
    own: Mapping[str, list[str]] = field(default_factory=dict)  # system -> further settings here
    alike: tuple[str, ...] = ()  # systems equal to serverless vLLM here, request by request, so not run
    because: str = ""  # the reason
    opening_s: float = 0.0  # does not count
    starts_each: bool = False  # SwapServeLLM section 4: every engine has been started once before the first request


def _bare(settings: Iterable[str]) -> list[str]:
    """The settings of a paper's own row, without its system."""
    return [setting for setting in settings if not setting.startswith("policies")]


def _warm(rps: float) -> Callable[[float], list[str]]:
    return lambda seconds: _bare(w_warm.settings("SLLM-GPU", rps, w_warm.CV, seconds))


def _hydra(rps: float, cv: float, seconds: float, systems: tuple[str, ...]) -> Workload:
    return Workload(
        scenario="hydraserve",
        seconds=seconds,
        given=lambda seconds: _bare(h_load.end_to_end("HydraServe", rps, cv, seconds, "")),
        headline=("ttft_met", True),
        systems=systems,
        draw=lambda found, seed: h_load.thinned(found, rps, cv, seed),
    )


def _scaling(seconds: float) -> list[str]:
    settings = [p_preserve.START, "params.exact_lengths=true", "models.llama-7b.preload=true"]
    return [*settings, f"seconds={seconds}"]


def _routing(seconds: float) -> list[str]:
    lengths = f"workload.lengths={p_preserve.LENGTHS}"
    return ["workload.rps=18.5", lengths, "params.exact_lengths=true", f"seconds={seconds}"]


def _timed(seconds: float) -> list[str]:
    return [f"seconds={seconds}"]


ALL = (UNION, *PAPERS, *CACHES, "Llumnix-like")
SOME = (UNION, *PAPERS, "SLLM-GPU", "serverless vLLM")  # on a second cell of a paper
FORECAST = ("proactive", "hybrid")
CACHING = ("mCache", "ServerlessLLM")
IN_HOST = "all weights lie in host memory, and what is cached there decides nothing"
MIXED = "mixed fleet"


def _but(systems: tuple[str, ...], alike: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(system for system in systems if system not in alike)


NOT_SWAPPING = _but(ALL, (UNION, "WarmServe", "SwapServeLLM", "serverless vLLM"))
WORKLOADS = {
    "WarmServe's": Workload(
        scenario="warmserve",
        seconds=900,
        given=_warm(20),
        headline=("ttft_p99", False),
        systems=_but((*ALL, "MuxServe-like"), CACHING),
        own={"MuxServe-like": w_mux.settings(w_warm.STEPS_MS)},
        alike=CACHING,
        because=IN_HOST,
    ),
    "WarmServe's at 25/s": Workload(
        scenario="warmserve",
        seconds=900,
        given=_warm(25),
        headline=("ttft_p99", False),
        systems=_but(SOME, CACHING),
        alike=CACHING,
        because=IN_HOST,
    ),
    "HydraServe's": _hydra(0.6, 8, 1200, ALL),
    "HydraServe's, CV 4 at 0.7/s": _hydra(0.7, 4, 900, SOME),
    "mCache's": Workload(scenario="mcache", seconds=1200, given=_timed, headline=("ttft_mean", False), systems=ALL),
    "SwapServeLLM's": Workload(
        scenario="swapserve",
        seconds=1200,
        given=_timed,
        headline=("ttft_mean", False),
        systems=_but(ALL, NOT_SWAPPING),
        starts_each=True,
        alike=NOT_SWAPPING,
        because="eight models take turns on one GPU, and who cannot swap starts an engine anew each time, whatever "
        "else it does; the workload is there for the two that can",
    ),
    "PreServe's": Workload(
        scenario="preserve",
        seconds=1200,
        given=_scaling,
        headline=("norm_p99", False),
        systems=_but((*ALL, *FORECAST), CACHING),
        alike=CACHING,
        because=IN_HOST,
    ),
    "PreServe's routing": Workload(
        scenario="preserve_routing",
        seconds=600,
        given=_routing,
        headline=("norm_p99", False),
        systems=_but((UNION, *ROUTERS), ("minimum use",)),
        alike=("minimum use",),
        because="instances of one size have the least use where they have the fewest requests",
    ),
    MIXED: Workload(
        scenario="mixed_fleet",
        seconds=1200,
        given=_timed,
        headline=("ttft_p99", False),
        systems=(*ALL, *FORECAST, "round robin", "MuxServe-like"),
        opening_s=120,
    ),
}


def laid_over(name: str, system: str, quick: bool = False) -> tuple[Path, list[str]]:
    """The scenario of one system on one workload, and the settings on top of it."""
    workload = WORKLOADS[name]
    given = workload.given(150 if quick else workload.seconds)
    laid = [*given, ABLE, f"policies={SYSTEMS[system]}", *workload.own.get(system, ())]
    return ROOT / "scenarios" / f"{workload.scenario}.yaml", laid


def run(name: str, system: str, seed: int, quick: bool, *more: str) -> Outcome:
    """Run one system on one workload, with `more` settings over both. Raises ScenarioError."""
    path, laid = laid_over(name, system, quick)
    workload, found = WORKLOADS[name], load(path, [*laid, *more])
    arrivals, from_s = workload.draw(found, seed), workload.opening_s
    if not workload.starts_each:
        return settled(found, arrivals, from_s, found.seconds)
    keys = [one.model.key for one in found.setup.models]
    first = [Arrival(ASKED_EVERY_S * number, key, 20, 4) for number, key in enumerate(keys)]
    from_s = ASKED_EVERY_S * len(keys)
    then = (arrival._replace(at_s=arrival.at_s + from_s) for arrival in arrivals)
    return settled(found, chain(first, then), from_s, from_s + found.seconds)


def settled(found: Scenario, arrivals: Iterable[Arrival], from_s: float, seconds: float) -> Outcome:
    """A run whose times and objectives count from `from_s` on. Attainment is nan if no model has an objective."""
    world = World(found.setup, arrivals)
    slo = {one.model.key: one.model.slo for one in found.setup.models}
    ttft, normalised, num = Quantiles(), Quantiles(), dict.fromkeys(("came", "ttft", "tpot", "both"), 0)

    def count(event: Event) -> None:
        data = event.data
        if not isinstance(data, RequestFinished | RequestRejected):
            return
        at = data.arrived_at if isinstance(data, RequestFinished) else event.occurred_at
        if at - world.began_s < from_s:
            return
        num["came"] += 1
        if isinstance(data, RequestFinished) and data.status == 200:
            ttft.add(data.ttft_s)
            normalised.add(data.e2e_s / max(1, data.response_tokens))
            in_time = data.ttft_s <= (slo[data.model_key].ttft_s or math.inf)
            each_s = (data.e2e_s - data.ttft_s) / max(1, data.response_tokens - 1)
            keeps_pace = each_s <= (slo[data.model_key].tpot_s or math.inf)
            num["ttft"] += in_time
            num["tpot"] += keeps_pace
            num["both"] += in_time and keeps_pace

    world.control.on_event.append(count)
    outcome = figures(world.run(seconds, drain_s=found.words.drain_s))
    has_slo = any(one.ttft_s or one.tpot_s for one in slo.values())
    outcome |= {f"{name}_met": num[name] / num["came"] if has_slo else math.nan for name in ("ttft", "tpot", "both")}
    outcome |= {f"ttft_p{share}": ttft.at(share / 100) for share in (50, 95, 99)}
    outcome |= {"norm_mean": normalised.mean, "norm_p99": normalised.at(0.99)}
    starts = {name.removeprefix("starts "): num for name, num in outcome.items() if name.startswith("starts ")}
    outcome["not_fetched"] = 1 - starts.get("remote", 0) / sum(starts.values()) if starts else math.nan
    return outcome | {"ttft_mean": ttft.mean, "ttft_cdf": curve(ttft)}
