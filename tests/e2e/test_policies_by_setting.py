"""One setting selects another policy: a fleet runs by the papers."""

from collections.abc import Iterator

import httpx
import pytest

from glowplug_lab.systems import SYSTEMS
from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(500)]
CHOSEN = {
    "GLOWPLUG_POLICIES": "union",  # with these policies replaced:
    "GLOWPLUG_POLICY_SCALING": "preserve",
    "GLOWPLUG_POLICY_PREDICTION": "last_window",
    "GLOWPLUG_WINDOW_S": "3",
    "GLOWPLUG_POLICY_ROUTING": "preserve_load_aware",
    "GLOWPLUG_POLICY_PREWARMING": "warmserve",
    "GLOWPLUG_POLICY_CACHING": "mcache:spread=1:half_life_s=60",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    models = {name: EMULATED.format(name=name, keep_alive_s=60) for name in ("one", "two")}
    with Fleet.start(tmp_path_factory.mktemp("fleet"), models, nodes=1, **CHOSEN) as made:
        yield made


def test_every_service_says_which_policy_is_in_force(fleet: Fleet) -> None:
    said = fleet.policies()
    for kind in ("scaling", "prediction", "placement", "routing", "fairness", "prewarming", "eviction", "caching"):
        of_the_union = SYSTEMS["union"].policies[kind]
        assert said[kind] == CHOSEN.get(f"GLOWPLUG_POLICY_{kind.upper()}", of_the_union), kind
    assert (said["placement"], said["eviction"]) == ("union", "union")


def test_a_cold_and_a_warm_request_are_answered_and_the_decision_names_the_policy(fleet: Fleet) -> None:
    cold = fleet.chat("one")
    assert cold.status_code == 200, cold.text
    warm = fleet.chat("one")
    assert warm.status_code == 200
    assert len(fleet.instances("one")) == 1, "the second found what the first had started"
    decisions = httpx.get(fleet.url("placer") + "/v1/decisions", params={"model": "one"}).json()["data"]
    made = {(row["kind"], row["policy"]) for row in decisions}
    assert {("scale", "preserve"), ("place", "union")} <= made
    (start,) = [row for row in decisions if row["chosen"] == "start"]
    assert "1 request waits" in start["reason"], "with cold data the default rule decides, and says so"


def test_forecasts_reach_rest_and_console(fleet: Fleet) -> None:
    fleet.chat("one")
    url = fleet.url("console") + "/api/v1/forecasts"
    page = wait_until(
        "a forecast on the console",
        lambda: (found := httpx.get(url, params={"model": "one"}, headers=fleet.admin).json())["forecasts"] and found,
    )
    assert (page["policy"], page["why_empty"], page["problem"]) == ("last_window", "", "")
    assert {point["source"] for point in page["forecasts"]} == {"last_window"}
    assert any(point["metric"] == "requests" and point["window_s"] == 3.0 for point in page["forecasts"])
