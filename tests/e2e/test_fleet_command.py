"""Every verb of the command line on a running fleet, and kills of its processes.

Lane: system; long (kills of further services, which tests/chaos/test_kill_services.py has under load).
"""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glowplug.runtime.supervisor.sweep import processes_of
from tests.fleet_runner import as_json, document, glowplug, running
from tests.waiting import lives, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.llamacpp, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    with running() as path:
        yield path


@pytest.fixture(scope="module")
def fleet(state: Path) -> dict[str, Any]:
    return document(state)


def test_a_request_is_explained_and_traced(state: Path, fleet: dict[str, Any]) -> None:
    answer = as_json(state, "run", "smol-brief", "Say yes.", "--max-tokens", "4")
    assert answer["text"]
    assert set(answer["timings_s"]) >= {"queue", "router"}
    why = as_json(state, "why", answer["request_id"])
    assert why["request"]["status"] == 200
    kinds = {decision["kind"] for decision in why["decisions"]}
    assert {"scale", "place"} <= kinds
    placed = next(d for d in why["decisions"] if d["kind"] == "place")
    assert placed["inputs"] and placed["rivals"] and placed["reason"]
    assert "decided to place by" in glowplug(state, "why", "smol-brief").stdout
    services = {"glowplug-router", "glowplug-autoscaler", "glowplug-placer", "glowplug-agent"}

    def joined() -> bool:
        traces = httpx.get(f"{fleet['urls']['console']}/api/v1/traces", params={"limit": 50}, trust_env=False).json()
        return any(services <= set(trace["services"]) for trace in traces["traces"])

    wait_until("a trace joins router, autoscaler, placer and agent", joined)


def test_models_nodes_logs_tap_and_top_show_the_fleet(state: Path) -> None:
    assert {row["name"] for row in as_json(state, "models")["data"]} >= {"smol-chat", "smol-pirate"}
    assert len(as_json(state, "nodes")) == 3
    assert "node-1/0" in glowplug(state, "top", "--once").stdout
    assert glowplug(state, "logs", "placer-1").stdout
    assert glowplug(state, "logs", "smol-brief").stdout
    events = glowplug(state, "tap", "--plane", "tel", "--type", "node.beat", "-n", "2", "--output", "json").stdout
    assert [json.loads(line)["type"] for line in events.splitlines()] == ["node.beat"] * 2


def test_load_pin_unload_and_drain(state: Path) -> None:
    def state_of(name: str) -> str:
        return next(str(row["state"]) for row in as_json(state, "models")["data"] if row["name"] == name)

    glowplug(state, "load", "smol-brief")
    wait_until("it is loaded", lambda: state_of("smol-brief") == "hot")
    glowplug(state, "sleep", "smol-brief")
    wait_until("it sleeps", lambda: state_of("smol-brief") == "warm")
    glowplug(state, "wake", "smol-brief")
    wait_until("it is woken", lambda: state_of("smol-brief") == "hot")
    glowplug(state, "unload", "smol-brief")
    wait_until("it is unloaded", lambda: state_of("smol-brief") in ("cold", "warm"))  # perhaps prewarmed again
    glowplug(state, "drain", "smol-brief")
    refused = glowplug(state, "run", "smol-brief", "hello", check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("glowplug: ")
    glowplug(state, "load", "smol-brief")
    wait_until("the drain is lifted", lambda: state_of("smol-brief") == "hot")


def test_weights_are_pulled_onto_a_node(state: Path) -> None:
    (row,) = as_json(state, "pull", "smol-brief", "--node", "node-2")
    assert row["where"] == "node-2" and row["num_bytes"] > 90_000_000

    def is_there() -> bool:
        node = next(node for node in as_json(state, "nodes") if node["node_id"] == "node-2")
        return row["digest"] in {weights["digest"] for weights in node["cached"]}

    wait_until("the node's row names them", is_there)


def test_deploy_undeploy_and_a_bad_file(state: Path, tmp_path: Path) -> None:
    good = tmp_path / "mine.yaml"
    good.write_text("name: mine\nengine: llamacpp\nweights: sample:smollm2\nkv_bytes: 64MiB\n")
    glowplug(state, "deploy", str(good))
    assert as_json(state, "run", "mine", "Say yes.", "--max-tokens", "4")["text"]
    bad = tmp_path / "bad.yaml"
    bad.write_text(good.read_text() + "kv_bites: 3\n")
    refused = glowplug(state, "deploy", str(bad), check=False)
    assert refused.returncode == 1
    assert "kv_bites" in refused.stderr and len(refused.stderr.splitlines()) == 1
    glowplug(state, "undeploy", "mine")
    gone = glowplug(state, "run", "mine", "hello", check=False)
    assert gone.returncode == 1 and "model_not_found" in gone.stderr


def test_a_second_up_says_who_has_the_directory(state: Path, fleet: dict[str, Any]) -> None:
    for extra in ((), ("--detach",)):
        refused = glowplug(state, "up", "--port-base", "0", *extra, check=False)
        assert refused.returncode == 4
        assert f"pid {fleet['pid']}" in refused.stderr


def test_writing_needs_the_admin_token(fleet: dict[str, Any]) -> None:
    url = f"{fleet['urls']['autoscaler']}/v1/models/smol-chat/unload"
    refused = httpx.post(url, trust_env=False)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"


OTHERS = ("autoscaler", "predictor", "console", "prefetcher", "agent")


@pytest.mark.parametrize(
    "service", ["placer", "router", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_a_killed_service_comes_back(state: Path, service: str) -> None:
    before = next(p for p in as_json(state, "status")["processes"] if p["service"] == service)
    os.kill(before["pid"], signal.SIGKILL)

    def whole() -> bool:
        ended = glowplug(state, "status", "--output", "json", check=False)
        processes = json.loads(ended.stdout)["processes"]
        now = next(p for p in processes if p["name"] == before["name"])
        return now["restarts"] == before["restarts"] + 1 and all(p["state"] == "ready" for p in processes)

    wait_until(f"{service} comes back", whole, every_s=1.0)
    assert as_json(state, "run", "smol-chat", "Say yes.", "--max-tokens", "4")["text"]


def test_a_taken_port_is_one_line_and_nothing_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = glowplug(tmp_path / "s", "up", "--port-base", str(port), check=False)
    assert refused.returncode == 4
    assert str(port) in refused.stderr and "--port-base" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    assert not processes_of(tmp_path / "s")


def test_no_room_on_the_disk_is_one_line(tmp_path: Path) -> None:
    refused = glowplug(tmp_path / "s", "up", check=False, GLOWPLUG_MIN_FREE_BYTES=str(1 << 60))
    assert refused.returncode == 1
    assert "MiB free" in refused.stderr and len(refused.stderr.strip().splitlines()) == 1


def test_without_a_fleet_every_command_says_so(tmp_path: Path) -> None:
    for argv in (("status",), ("models",), ("ps",), ("why", "x"), ("run", "x", "y"), ("tap",), ("logs", "x")):
        refused = glowplug(tmp_path, *argv, check=False)
        assert refused.returncode == 3, argv
        assert "glowplug up" in refused.stderr


def test_a_killed_supervisor_leaves_engines_that_down_ends(state: Path) -> None:
    """Last in this file: it ends the fleet."""
    assert as_json(state, "run", "smol-chat", "Say yes.", "--max-tokens", "4")["text"]
    fleet = document(state)
    psutil.Process(fleet["pid"]).kill()
    services = {p["pid"] for p in fleet["processes"]}
    wait_until("services end with their supervisor", lambda: not any(lives(pid) for pid in services))
    glowplug(state, "down")
    assert not processes_of(state)
