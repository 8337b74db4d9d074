"""Row U, scenario and fleet of one name are one system, field by field."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from bench.papers import h_load, h_pipeline, p_preserve, s_swap, w_warm
from bench.papers.u_workloads import SYSTEMS as ROWS
from bench.papers.u_workloads import WORKLOADS, laid_over
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.prefetcher.params import IMPORTANCE
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.autoscaler.settings import AutoscalerSettings
from glowplug.services.placer.settings import PlacerSettings
from glowplug.services.predictor.settings import PredictorSettings
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.services.router.settings import RouterSettings
from glowplug_lab.simulator.hardware.node import prefetcher_params
from glowplug_lab.simulator.scenario.tree import override, read_tree
from glowplug_lab.simulator.setup import Params, PolicyNames
from glowplug_lab.systems import SYSTEMS
from tests.simulation import fleets

SCENARIOS = Path(__file__).parents[3] / "scenarios"
SERVICES = (RouterSettings, PredictorSettings, PlacerSettings, AutoscalerSettings, PrefetcherSettings, AgentSettings)


def fleet(name: str) -> dict[str, Any]:
    """A named fleet's policies and controller params."""
    kinds = {
        field.removeprefix("policy_"): getattr(made, field)
        for made in (settings.of({"policies": name}) for settings in SERVICES)
        for field in vars(made)
        if field.startswith("policy_")
    }
    deciding = {"agent": AgentSettings, "autoscaler": AutoscalerSettings, "placer": PlacerSettings}
    controllers = {part: settings.of({"policies": name}).params for part, settings in deciding.items()}
    given = {
        f"{part}.{field}": getattr(controllers[part], field)
        for part, params in SYSTEMS[name].params.items()
        for field in params
    }
    return kinds | given


def simulated(tree: Mapping[str, Any]) -> dict[str, Any]:
    params = tree.get("params", {})
    given = {
        f"{part}.{field.name}": params[part][field.name]
        for part in ("agent", "autoscaler", "placer")
        for field in fields(getattr(Params(), part))
        if field.name in params.get(part, {})
    }
    return dict(tree["policies"]) | given


def cells() -> Iterator[tuple[str, str]]:
    for workload, found in WORKLOADS.items():
        for label in (*found.systems, *found.alike):
            yield workload, label


@pytest.mark.parametrize(("workload", "label"), list(cells()))
def test_a_system_of_row_u_is_the_fleet_of_its_name(workload: str, label: str) -> None:
    path, laid = laid_over(workload, label)
    tree = override(read_tree(path), laid)
    in_row = simulated(tree)
    known = fleet(ROWS[label])
    assert {name: in_row.get(name) for name in known} == known
    # no scenario's own settings are left over; costs and profiles are the workload's
    left = {name for name in in_row.keys() - known.keys() if not name.startswith("placer.start_stages")}
    assert not left


def test_every_system_is_in_row_u_under_a_name_of_its_own() -> None:
    assert sorted(ROWS.values()) == sorted(SYSTEMS)
    assert {label for found in WORKLOADS.values() for label in (*found.systems, *found.alike)} == set(ROWS)


@pytest.mark.parametrize("name", ["warmserve", "hydraserve", "preserve", "swapserve", "mcache"])
def test_the_scenario_of_a_paper_runs_that_paper(name: str) -> None:
    assert simulated(read_tree(SCENARIOS / f"{name}.yaml")) == fleet(name)


def test_a_plain_fleet_and_a_plain_scenario_are_the_same_baseline() -> None:
    """Omitted policies and params are those of `serverless_vllm`."""
    given = {name: value for name, value in fleet("serverless_vllm").items() if "." in name}
    assert {name: attrgetter(name)(Params()) for name in given} == given


SIMULATED_OTHERWISE = {
    "placer.node_lease_s": "nodes of a run do not fall silent unless a fault says so",
    "placer.sleeper_patience": "published results of scenarios stand without it; a replay has the live 1.0",
    "placer.hole_grace_s": "no message of a run is lost, so a stage that is gone is gone",
    "placer.settle_s": "a run begins with everybody there",
    "placer.follows_parts": "bytes of a stage that a run brings are seen when its instance loads",
    "agent.beat_s": "bytes are reported with every change anyway",
    "agent.drain_quiet_s": "published results of scenarios stand with 0.3 s; a replay takes the live 0.05 s",
    "agent.health_every_s": "engines of a run do not hang unless a fault says so",
    "agent.stop_grace_s": "a simulated process ends when it is asked to",
    "router.move_within_s": "streams of a run go on to the end of a drain: published results stand with that",
    "router.fairness": "a run has no tenants unless its workload names them, and then says which policy it compares",
    "autoscaler.rest_s": "no message is lost, so no model needs to be looked at again",
}


def test_a_simulated_fleet_has_the_bounds_of_a_live_one_but_for_those_named_here() -> None:
    live = {"agent": AgentSettings, "predictor": PredictorSettings}
    pairs: dict[str, Any] = {part: settings.of({"policies": "mcache"}).params for part, settings in live.items()}
    pairs["placer"] = PlacerSettings.of({"policies": "mcache"}).controller_params()
    pairs["router"] = RouterSettings.of({"policies": "mcache"}).controller_params()
    pairs["autoscaler"] = AutoscalerParams()
    apart = {
        f"{part}.{field.name}"
        for part, live in pairs.items()
        for field in fields(live)
        if getattr(live, field.name) != getattr(getattr(Params(), part), field.name)
    }
    assert apart == SIMULATED_OTHERWISE.keys()
    setup, _ = fleets.swapserve()
    made = prefetcher_params(replace(setup, policies=PolicyNames(caching="mcache")), setup.servers[0])
    assert made.importance == IMPORTANCE, "a live prefetcher has no setting of them"


def test_the_other_rows_run_whole_systems_and_say_what_they_do_otherwise() -> None:
    def of(scenario: str, settings: list[str]) -> dict[str, Any]:
        return simulated(override(read_tree(SCENARIOS / f"{scenario}.yaml"), settings))

    def apart(found: Mapping[str, Any], name: str) -> dict[str, Any]:
        known = fleet(name)
        return {field: found.get(field) for field in known if found.get(field) != known[field]}

    for label, name in (("WarmServe", "warmserve"), ("SLLM-GPU", "sllm_gpu"), (w_warm.UNPOOLED, "sllm_gpu")):
        assert not apart(of("warmserve", w_warm.settings(label, 20, w_warm.CV, 60)), name)
    ablated = of("warmserve", w_warm.settings("no proactive", 20, w_warm.CV, 60))
    assert apart(ablated, "warmserve") == {"prewarming": "warmserve_unproactive"}
    assert not apart(of("hydraserve", h_load.end_to_end("HydraServe", 0.6, 8, 60, "")), "hydraserve")
    for label in ("serverless vLLM", "ServerlessLLM"):
        found = of("hydraserve", h_load.end_to_end(label, 0.6, 8, 60, ""))
        assert apart(found, h_load.SYSTEMS[label]) == {"scaling": "hydraserve"}
    for label in ("PreServe", "Llumnix-like", "proactive", "hybrid", "union"):
        assert not apart(of("preserve", p_preserve.SYSTEMS[label]), ROWS[label])
    assert not apart(simulated(s_swap.tree("vLLM", "LLaMA-3.2 1B")), "swapserve")
    model: dict[str, object] = {"name": "model"}
    kinds = SYSTEMS["hydraserve"].policies
    assert h_pipeline.fleet("HydraServe", "a10", 1, 1, model)["policies"] == kinds
