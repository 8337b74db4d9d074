"""The doctor at a real fleet (emulated engine): silent while all is well, else it names the culprit."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from glowplug.runtime.supervisor.sweep import processes_of
from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(500)]
MODELS = {"one": EMULATED.format(name="one", keep_alive_s=60), "two": EMULATED.format(name="two", keep_alive_s=60)}
PINNED = """
name: pinned
engine: emulated
weights: {{uri: "{uri}", sha256: "{sha256}"}}
kv_bytes: 1MiB
"""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="gp-doctor-", ignore_cleanup_errors=True) as folder,
        Fleet.start(Path(folder), MODELS, GLOWPLUG_HANG_MISSES="0") as started,  # the tests end hung processes
    ):
        yield started


def looked(fleet: Fleet, *argv: str, **env: str) -> dict[str, Any]:
    done = Fleet(fleet.state_dir, fleet.models_dir, fleet.env | env).cli("doctor", "-o", "json", *argv)
    shown: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if shown["healthy"] else 1), done.stderr
    document = fleet.document
    assert not [secret for secret in (*fleet.secrets, document["admin_token"]) if secret in done.stdout + done.stderr]
    return shown


def test_no_process_shows_a_secret_on_its_command_line(fleet: Fleet) -> None:
    shown = {" ".join(process.cmdline()) for process in processes_of(fleet.state_dir)}
    assert len(shown) >= 8, "NATS, Valkey and every kind of service"
    assert not [secret for secret in fleet.secrets if any(secret in line for line in shown)]


def named(shown: dict[str, Any], level: str) -> dict[str, str]:
    return {f["about"]: f["says"] for f in shown["findings"] if f["level"] == level and f["area"] == "fleet"}


@contextmanager
def stopped(fleet: Fleet, name: str) -> Iterator[None]:
    process = psutil.Process(fleet.process(name)["pid"])
    process.suspend()
    try:
        yield
    finally:
        process.resume()
        wait_until("the fleet is whole again", fleet.ready)


def until(fleet: Fleet, level: str, holds: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    """Silence shows only after a lease."""

    def found() -> dict[str, str] | None:
        seen = named(looked(fleet), level)
        return seen if holds(seen) else None

    result: dict[str, str] = wait_until("the doctor sees it", found, every_s=2.0)
    return result


def test_a_fleet_that_is_well(fleet: Fleet) -> None:
    assert fleet.chat("one").status_code == 200
    wait_until("the trace has arrived", lambda: "traces" in named(looked(fleet), "ok"), every_s=0.5)
    shown = looked(fleet)
    assert named(shown, "fail") == named(shown, "warn") == {}
    assert set(named(shown, "skipped")) <= {"weights"}
    assert {"router", "placer", "agent of node-2", "prefetcher of node-1", "store on disk", "bus on disk"} <= set(
        named(shown, "ok")
    )


def test_it_changes_nothing(fleet: Fleet) -> None:
    def rows() -> list[Any]:
        return [
            httpx.get(fleet.url("placer") + "/v1/decisions").json(),
            sorted(row["instance_id"] for row in fleet.instances()),
            sorted(path.name for path in fleet.state_dir.iterdir()),
        ]

    before = rows()
    looked(fleet)
    assert rows() == before


def test_a_fleet_named_by_addresses(fleet: Fleet, tmp_path: Path) -> None:
    urls = [argument for name in ("router", "placer", "autoscaler") for argument in ("--url", fleet.url(name))]
    shown = looked(fleet, *urls, GLOWPLUG_ADMIN_TOKEN=fleet.document["admin_token"])
    assert {"router", "placer", "autoscaler", "agent of node-1", "held requests"} <= set(named(shown, "ok"))
    assert {"store", "bus"} <= set(named(shown, "skipped"))


def test_a_hanging_agent_is_named(fleet: Fleet) -> None:
    with stopped(fleet, "agent-2"):
        found = until(fleet, "fail", lambda seen: "agent of node-2" in seen and "node-2" in seen)
        assert "counts as gone" in found["node-2"]
        assert "agent of node-1" not in found
    until(fleet, "ok", lambda seen: "node-2" in seen)


@pytest.mark.parametrize(("name", "about"), [("valkey", "store"), ("nats", "bus")])
def test_a_stopped_server_is_named(fleet: Fleet, name: str, about: str) -> None:
    with stopped(fleet, name):
        found = named(looked(fleet), "fail")
        assert "does not answer" in found[about]
    until(fleet, "ok", lambda seen: about in seen)


def test_a_killed_agent_that_nothing_starts_again_is_named(fleet: Fleet) -> None:
    """Its supervisor hangs too."""
    killed = fleet.process("agent-1")["pid"]
    supervisor = psutil.Process(fleet.document["pid"])
    supervisor.suspend()
    try:
        os.kill(killed, signal.SIGKILL)
        until(fleet, "fail", lambda seen: "agent of node-1" in seen)
    finally:
        supervisor.resume()
        wait_until("it is started again", lambda: fleet.process("agent-1")["pid"] != killed and fleet.ready())
    until(fleet, "ok", lambda seen: "agent of node-1" in seen and "node-1" in seen)


def test_corrupt_and_missing_weights_are_named(fleet: Fleet, tmp_path: Path) -> None:
    weights, file = tmp_path / "w.gguf", fleet.models_dir / "pinned.yaml"
    weights.write_bytes(b"w" * 4096)
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    file.write_text(PINNED.format(uri=weights, sha256=sha256))
    try:
        until(fleet, "ok", lambda seen: seen.get("weights", "").startswith("1 local"))
        weights.write_bytes(b"v" * 4096)
        assert "does not match its sha256" in named(looked(fleet), "fail")["weights of pinned"]
        weights.unlink()
        assert str(weights) in named(looked(fleet), "fail")["weights of pinned"]
    finally:
        file.unlink()
    until(fleet, "ok", lambda seen: "models" in seen and "weights" not in seen)


def test_a_wrong_model_file_is_named(fleet: Fleet) -> None:
    file = fleet.models_dir / "wrong.yaml"
    file.write_text("name: wrong\nengine: emulated\nkv_bites: 1\n")
    try:
        found = until(fleet, "fail", lambda seen: "model files" in seen)
        assert "wrong.yaml" in found["model files"] and "kv_bites" in found["model files"]
    finally:
        file.unlink()


def machine(tmp_path: Path, **env: str) -> dict[str, dict[str, str]]:
    fleet = Fleet(
        tmp_path / "s", tmp_path, {k: v for k, v in os.environ.items() if not k.startswith("GLOWPLUG_")} | env
    )
    done = fleet.cli("doctor", "-o", "json")
    return {f["about"]: f for f in json.loads(done.stdout)["findings"]}


def test_a_taken_port_and_a_full_disk_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = machine(tmp_path, GLOWPLUG_PORT_BASE=str(port), GLOWPLUG_MIN_FREE_BYTES=str(1 << 60))
    assert f"port {port}" in found["ports"]["says"] and f"pid {os.getpid()}" in found["ports"]["says"]
    assert found["ports"]["level"] == found["disk"]["level"] == "fail"
    assert "--port-base" in found["ports"]["do"] and "--state-dir" in found["disk"]["do"]


def test_few_open_files_are_named(tmp_path: Path) -> None:
    script = f'ulimit -n 200 && exec "{sys.executable}" -m glowplug.cli.main doctor -o json --state-dir "{tmp_path}"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=120, check=False)
    found = {f["about"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert found["open files"]["level"] == "fail" and "200" in found["open files"]["says"]
