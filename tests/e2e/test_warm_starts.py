"""Warm starts on a live fleet of the emulated engine: growing again, waking, staying under pressure, and Ollama's
`keep_alive`."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import lives, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(500)]
CHOSEN = {
    "GLOWPLUG_POLICY_PLACEMENT": "union",
    "GLOWPLUG_POLICY_PREWARMING": "keep_last",
    "GLOWPLUG_POLICY_EVICTION": "swapserve",
    "GLOWPLUG_STOP_BECOMES": "prewarmed",
    "GLOWPLUG_EVICT_BECOMES": "swapped_out",
    "GLOWPLUG_GPU_BUDGETS": "3GiB",  # one of these models at a time: 2 GiB each
    "GLOWPLUG_WAKE_DEADLINE_S": "6",
    "GLOWPLUG_CLIENT_KEEP_ALIVE_S": "300",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    kept = {"brief": 1, "lasting": 600, "rival": 600}
    models = {name: EMULATED.format(name=name, keep_alive_s=seconds) for name, seconds in kept.items()}
    with Fleet.start(tmp_path_factory.mktemp("fleet"), models, nodes=1, **CHOSEN) as made:
        yield made


def rows(fleet: Fleet, model: str) -> list[dict[str, Any]]:
    url = fleet.process("agent")["url"] + "/v1/instances"
    found: list[dict[str, Any]] = httpx.get(url, params={"model": model, "gone": True}).json()["data"]
    return found


def in_state(fleet: Fleet, model: str, state: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_until(
        f"{model} {state}", lambda: next((row for row in rows(fleet, model) if row["state"] == state), None)
    )
    return found


def ask(fleet: Fleet, model: str, verb: str, **body: str) -> None:
    url = f"{fleet.url('autoscaler')}/v1/models/{model}/{verb}"
    assert httpx.post(url, headers=fleet.admin, json=body).status_code == 202


def test_what_idled_stays_as_a_replica_and_the_next_request_finds_it(fleet: Fleet) -> None:
    assert fleet.chat("brief").status_code == 200
    replica = in_state(fleet, "brief", "prewarmed")
    assert replica["replica"] and replica["url"] == ""
    assert fleet.chat("brief").status_code == 200
    newest = rows(fleet, "brief")[0]
    assert newest["source"] == replica["instance_id"] and newest["emulated"]
    assert {phase["name"] for phase in newest["phases"]} == {"decide", "load"}, "no process was launched"
    old = next(row for row in rows(fleet, "brief") if row["instance_id"] == replica["instance_id"])
    assert (old["state"], old["reason"]) == ("stopped", f"it continues as {newest['instance_id']}")


def test_what_gave_way_sleeps_outside_its_gpu_and_wakes(fleet: Fleet) -> None:
    assert fleet.chat("lasting").status_code == 200
    assert fleet.chat("rival").status_code == 200
    asleep = in_state(fleet, "lasting", "swapped_out")
    assert fleet.chat("lasting").status_code == 200
    woken = rows(fleet, "lasting")[0]
    assert woken["source"] == asleep["instance_id"]
    assert in_state(fleet, "rival", "swapped_out")


def test_a_sleeper_that_hangs_costs_its_wake_and_no_answer(fleet: Fleet) -> None:
    """After SIGSTOP, a start from host memory serves the request."""
    asleep = in_state(fleet, "rival", "swapped_out")
    (memory,) = fleet.state_dir.rglob("agent.json")
    pid = json.loads(memory.read_bytes())["handles"][asleep["instance_id"]]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert fleet.chat("rival").status_code == 200
    newest, failed = rows(fleet, "rival")[:2]
    assert (newest["state"], newest.get("source", "")) == ("ready", "")
    assert failed["state"] == "failed" and "did not wake within 6 s" in failed["reason"], failed
    assert "did not wake within 6 s" in fleet.cli("ps", "--all", "--model", "rival").stdout
    wait_until("it is gone", lambda: not lives(pid))


SLEEPER = """
name: sleeper
engine: emulated
weights_bytes: 1GiB
kv_bytes: 1GiB
asleep: true
keep_alive_s: 600
engine_args: {profile: "llama-2-7b/h800", time_scale: 8}
"""


def test_a_model_deployed_asleep_wakes_for_its_first_request_and_is_made_again(fleet: Fleet, tmp_path: Path) -> None:
    """SwapServeLLM section 3.2: it takes the GPU only while nothing else needs it."""
    for model in ("lasting", "rival"):
        ask(fleet, model, "sleep")
    file = tmp_path / "sleeper.yaml"
    file.write_text(SLEEPER)
    assert fleet.cli("deploy", str(file)).returncode == 0
    asleep = in_state(fleet, "sleeper", "swapped_out")
    assert fleet.model("sleeper")["pinned_at"] == "asleep"
    assert fleet.chat("sleeper").status_code == 200
    woken = rows(fleet, "sleeper")[0]
    assert (woken["source"], woken["start_kind"]) == (asleep["instance_id"], "wake")
    done = json.loads(fleet.cli("sleep", "sleeper", "--wait", "-o", "json").stdout)
    assert done["cost"]["freed_gpu_bytes"] == 2 << 30 and done["actual_s"] < 30
    again = in_state(fleet, "sleeper", "swapped_out")
    (engine,) = [p for p in psutil.process_iter(["cmdline"]) if _runs(p, woken["instance_id"], asleep["instance_id"])]
    os.kill(engine.pid, signal.SIGKILL)
    wait_until("it is lost", lambda: again["instance_id"] not in {i["instance_id"] for i in fleet.instances("sleeper")})
    assert in_state(fleet, "sleeper", "swapped_out")["instance_id"] != again["instance_id"]


def _runs(process: psutil.Process, *instance_ids: str) -> bool:
    return any(name in part for part in process.info["cmdline"] or () for name in instance_ids)


def test_a_pin_holds_while_others_ask_for_the_memory(fleet: Fleet) -> None:
    done = json.loads(fleet.cli("pin", "sleeper", "--wait", "-o", "json").stdout)
    assert done["cost"]["kind"] == "wake" and done["cost"]["num_measured"] >= 1 and done["actual_s"] is not None
    (pinned,) = [row for row in fleet.instances("sleeper") if row["state"] == "ready"]
    refused = json.loads(fleet.cli("load", "rival", "--dry-run", "-o", "json").stdout)
    assert not refused["is_possible_now"] and "sleeper stays: it is pinned" in refused["reason"]
    ask(fleet, "rival", "load")
    url = fleet.url("placer") + "/v1/placements"
    wait_until("it waits", lambda: any(row["waited_s"] > 1.0 for row in httpx.get(url).json()["data"]))
    assert pinned["instance_id"] in {row["instance_id"] for row in fleet.instances("sleeper")}
    ask(fleet, "sleeper", "pin", at="asleep")
    assert fleet.chat("rival").status_code == 200, "asleep is where it may be sent"
    in_state(fleet, "sleeper", "swapped_out")


def generate(fleet: Fleet, **fields: Any) -> Any:
    body = {"model": "lasting", "stream": False, **fields}
    answer = httpx.post(f"{fleet.url('data')}/api/generate", json=body, timeout=200.0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_client_loads_a_model_and_unloads_it(fleet: Fleet) -> None:
    prompt = {"prompt": "Hi", "options": {"num_predict": 2}}

    def num_ready() -> int:
        return sum(row["state"] == "ready" for row in fleet.instances("lasting"))

    assert generate(fleet)["done_reason"] == "load" and num_ready() == 1
    assert generate(fleet, keep_alive=0)["done_reason"] == "unload"
    wait_until("the model is unloaded", lambda: num_ready() == 0)
    assert generate(fleet, **prompt)["response"] and num_ready() == 1
    assert generate(fleet, **prompt, keep_alive="1s")["response"]
    wait_until("the model has had its keep-alive", lambda: num_ready() == 0)
