"""Warm starts on a live fleet of the emulated engine: what drained grows again, and what gave way wakes."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]
CHOSEN = {
    "GLOWPLUG_POLICY_PLACEMENT": "union",
    "GLOWPLUG_POLICY_PREWARMING": "keep_last",
    "GLOWPLUG_POLICY_EVICTION": "swapserve",
    "GLOWPLUG_STOP_BECOMES": "prewarmed",
    "GLOWPLUG_EVICT_BECOMES": "swapped_out",
    "GLOWPLUG_GPU_BUDGETS": "3GiB",  # one of these models at a time: 2 GiB each
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    kept = {"brief": 1, "lasting": 600, "rival": 600}
    models = {name: EMULATED.format(name=name, keep_alive_s=seconds) for name, seconds in kept.items()}
    with Fleet.start(tmp_path_factory.mktemp("fleet"), models, nodes=1, **CHOSEN) as made:
        yield made


def rows(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    """What its agent knows of one model, newest first."""
    url = fleet.process("agent")["url"] + "/v1/instances"
    found: list[dict[str, Any]] = httpx.get(url, params={"model": model, "gone": True}).json()["data"]
    return found


def in_state(fleet: Fleet, model: str, state: str) -> dict[str, Any]:
    """The instance of that model in that state, once there is one."""
    found: dict[str, Any] = wait_until(
        f"{model} {state}", lambda: next((row for row in rows(fleet, model) if row["state"] == state), None)
    )
    return found


def test_what_idled_stays_as_a_replica_and_the_next_request_finds_it(fleet: Fleet) -> None:
    assert fleet.chat("brief").status_code == 200
    replica = in_state(fleet, "brief", "prewarmed")
    assert replica["replica"] and replica["url"] == ""
    assert fleet.chat("brief").status_code == 200
    newest = rows(fleet, "brief")[0]
    assert newest["source"] == replica["instance_id"] and newest["emulated"]
    assert {phase["name"] for phase in newest["phases"]} == {"decide", "load"}, "no process was launched"
    old = next(row for row in rows(fleet, "brief") if row["instance_id"] == replica["instance_id"])
    assert (old["state"], old["reason"]) == ("stopped", f"it goes on as {newest['instance_id']}")


def test_what_gave_way_sleeps_outside_its_gpu_and_wakes(fleet: Fleet) -> None:
    assert fleet.chat("lasting").status_code == 200
    assert fleet.chat("rival").status_code == 200
    asleep = in_state(fleet, "lasting", "swapped_out")
    assert fleet.chat("lasting").status_code == 200
    woken = rows(fleet, "lasting")[0]
    assert woken["source"] == asleep["instance_id"]
    assert in_state(fleet, "rival", "swapped_out")
