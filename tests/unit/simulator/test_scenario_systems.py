"""Whole systems by name: each can be built and takes the place of a scenario's own choice; a wrong name is told."""

from pathlib import Path

import pytest

from glowplug.policies.registry import KINDS, choose
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.systems import DEFAULT, SYSTEMS
from glowplug.simulator.scenario.load import ScenarioError, load
from glowplug.simulator.world import World

SCENARIOS = Path(__file__).parents[3] / "scenarios"


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_names_a_policy_of_every_kind(name: str) -> None:
    system = SYSTEMS[name]

    assert system.policies.keys() == KINDS.keys()
    assert all(choose(kind, policy) for kind, policy in system.policies.items())


def test_preserve_alone_lets_requests_wait_while_all_are_overloaded() -> None:
    """PreServe section 4.3.3."""
    setup = load(SCENARIOS / "small.yaml", ["policies=preserve"]).setup
    router = World(setup, []).control.router
    assert router.balances._factory(BalancerParams()).params.hold_overloaded  # type: ignore[attr-defined]


def test_a_system_over_a_scenario_takes_the_place_of_its_policies_and_their_settings() -> None:
    own = load(SCENARIOS / "swapserve.yaml").setup
    found = load(SCENARIOS / "swapserve.yaml", ["policies=warmserve"]).setup

    assert own.params.placer.evict_becomes == "swapped_out"
    assert found.params.placer.evict_becomes == "stopped"
    assert found.policies.scaling == "warmserve_one_way" and found.policies.eviction == "lru"


def test_one_kind_of_a_system_can_be_set_after_it() -> None:
    found = load(SCENARIOS / "small.yaml", ["policies=union", "policies.scaling=reactive"]).setup.policies

    assert found.scaling == "reactive" and found.placement == "union"


def test_a_file_that_names_a_system_keeps_its_own_settings(tmp_path: Path) -> None:
    base = SCENARIOS / "small.yaml"
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {base}\npolicies: union\nparams: {{autoscaler: {{stop_becomes: stopped, rest_s: 7}}}}\n")

    params = load(path).setup.params

    assert (params.autoscaler.stop_becomes, params.autoscaler.rest_s) == ("stopped", 7.0)
    assert params.placer.evict_becomes == "swapped_out"


def test_a_scenario_that_names_no_policies_runs_the_default_system_and_of_some_the_rest_are_baselines() -> None:
    told_nothing, of_some = load(SCENARIOS / "small.yaml").setup, load(SCENARIOS / "mcache.yaml").setup

    assert told_nothing == load(SCENARIOS / "small.yaml", [f"policies={DEFAULT}"]).setup
    assert told_nothing.policies.scaling == SYSTEMS[DEFAULT].policies["scaling"]
    assert (of_some.policies.caching, of_some.policies.scaling) == ("mcache", "reactive")


def test_a_system_that_does_not_exist_is_named() -> None:
    with pytest.raises(ScenarioError, match=r"policies: there is no system 'unoin' \(did you mean union"):
        load(SCENARIOS / "small.yaml", ["policies=unoin"])
