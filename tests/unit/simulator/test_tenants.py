"""Tenants of a scenario."""

from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.access import Priority
from glowplug_lab.simulator.results import summary
from glowplug_lab.simulator.scenario.load import ScenarioError, load, load_tree
from glowplug_lab.simulator.world import World

SCENARIO = Path(__file__).parents[3] / "scenarios" / "tenants.yaml"
LENGTHS = {"prompt_mean": 100, "prompt_cv": 0.5, "response_mean": 20, "response_cv": 0.5}


def tree(*tenants: dict[str, Any], **workload: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "seconds": 60,
        "servers": [{"name": "n", "num_servers": 1, "num_gpus": 1, "gpu_bytes": "24GB", "gpu_kind": "a10"}],
        "models": [{"name": "m", "weights_bytes": "12.5GB", "costs": "llama-2-7b"}],
        "workload": {"source": "gamma", "lengths": LENGTHS, "tenants": list(tenants), **workload},
    }


def test_requests_are_dealt_by_shares_and_the_sum_stays() -> None:
    made = load_tree(tree({"name": "a", "share": 3}, {"name": "b"}, rps=20), Path())
    found = list(made.arrivals(1))
    plain = list(load_tree(tree(rps=20), Path()).arrivals(1))
    assert [one._replace(tenant="") for one in found] == plain
    share = sum(one.tenant == "a" for one in found) / len(found)
    assert 0.7 < share < 0.8


def test_a_tenant_with_its_own_workload_comes_beside_the_others() -> None:
    own = {"name": "b", "workload": {"source": "gamma", "rps": 2, "lengths": LENGTHS}}
    found = list(load_tree(tree({"name": "a"}, own, rps=5), Path()).arrivals(1))
    num = {name: sum(one.tenant == name for one in found) for name in ("a", "b")}
    assert 200 < num["a"] < 400 and 60 < num["b"] < 180
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)


def test_the_results_of_tenants_add_up_to_the_total() -> None:
    made = load(SCENARIO, ["seconds=60", "policies.fairness=vtc"])
    assert [tenant.priority for tenant in made.setup.tenants] == [Priority.STANDARD] * 2 + [Priority.BATCH]
    world = World(made.setup, made.arrivals(), check=True)
    numbers = summary(world.run(made.seconds))
    assert [row["tenant"] for row in numbers["tenants"]] == ["flood", "light", "nightly"]
    for name in ("num_arrived", "num_finished", "response_tokens"):
        assert sum(row[name] for row in numbers["tenants"]) == numbers["total"][name]


def test_the_light_tenant_waits_less_under_vtc() -> None:
    def light(policy: str) -> float:
        made = load(SCENARIO, ["seconds=60", f"policies.fairness={policy}"])
        return World(made.setup, made.arrivals()).run(made.seconds).by_tenant["light"].ttft.at(0.5)

    assert light("vtc") < 0.5 < light("fifo")


@pytest.mark.parametrize(
    "tenants", [({"name": "a"}, {"name": "a"}), ({"name": "a", "workload": {"rps": 1, "tenants": [{"name": "b"}]}},)]
)
def test_a_name_twice_and_tenants_of_tenants_are_errors(tenants: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(ScenarioError, match="tenants"):
        load_tree(tree(*tenants, rps=1), Path())
