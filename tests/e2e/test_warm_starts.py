"""Warm starts on a live fleet of the emulated engine: what drained grows again, and what gave way wakes."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
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
    "GLOWPLUG_WAKE_DEADLINE_S": "1.5",
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


def test_a_sleeper_that_hangs_costs_its_wake_and_no_answer(fleet: Fleet) -> None:
    """SIGSTOP: it lives and says nothing. The request that waits is answered by a start from host memory."""
    asleep = in_state(fleet, "rival", "swapped_out")
    (memory,) = fleet.state_dir.rglob("agent.json")
    pid = json.loads(memory.read_bytes())["handles"][asleep["instance_id"]]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert fleet.chat("rival").status_code == 200
    newest, failed = rows(fleet, "rival")[:2]
    assert (newest["state"], newest.get("source", "")) == ("ready", "")
    assert failed["state"] == "failed" and "did not wake within 1.5 s" in failed["reason"], failed
    assert "did not wake within 1.5 s" in fleet.cli("ps", "--all", "--model", "rival").stdout
    wait_until("it is gone", lambda: not psutil.pid_exists(pid))
