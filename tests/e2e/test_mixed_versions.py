"""Two versions on one bus and one store: the code of a version that has landed, and this one, service by service."""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.runtime.supervisor.probe import free_block
from tests.fleet_runner import EMULATED
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LANDED = "d745896"  # used while no version is tagged
NEW, OLD = "new", "old"
NODE, CONTROL = ("prefetcher", "agent"), ("autoscaler", "placer")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


def git(*words: str) -> bytes | None:
    """What git prints, None where it fails: no git, no history, no such commit."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def landed() -> str:
    """The newest tag of a version that is not this very commit, else LANDED."""
    tags = git("tag", "--list", "v*", "--sort=-version:refname", "--no-contains", "HEAD") or b""
    return tags.decode().split("\n")[0] or LANDED


@pytest.fixture(scope="module")
def trees() -> Iterator[dict[str, Path]]:
    """The checkout and, unpacked, the version before."""
    archive = git("archive", landed(), "libs", "services", "pyproject.toml")
    if archive is None:
        pytest.skip(f"the history does not reach back to {landed()}")
    with tempfile.TemporaryDirectory(prefix="gp-old-", ignore_cleanup_errors=True) as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield {NEW: ROOT, OLD: Path(folder)}


@dataclass
class Mixed:
    """A fleet of one node whose services are started one by one from either tree."""

    trees: dict[str, Path]
    env: dict[str, str]
    folder: Path
    base: int
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.base + ('data', *NODE, *CONTROL, 'router').index(service)}"

    def start(self, version: str, *services: str) -> None:
        """End what runs of these services and start them from that tree, one after the other."""
        for service in services:
            self.stop(service)
            tree = self.trees[version]
            env = self.env | {
                "PYTHONPATH": f"{tree / 'libs'}{os.pathsep}{tree}",
                "GLOWPLUG_SERVICE_ID": f"{service}-1",
                "GLOWPLUG_PORT": self.url(service).rpartition(":")[2],
            }
            log = (self.folder / f"{service}-{version}.log").open("ab")
            argv = [sys.executable, "-m", f"services.{service}"]
            self.running[service] = subprocess.Popen(argv, cwd=self.folder, env=env, stdout=log, stderr=log)
            wait_until(f"{version} {service} is ready", lambda s=service: self.ready(s), 90)
            assert Path(f"/proc/{self.running[service].pid}").exists(), (
                self.folder / f"{service}-{version}.log"
            ).read_text()

    def ready(self, service: str) -> bool:
        return httpx.get(self.url(service) + "/ready").status_code == 200

    def stop(self, service: str) -> None:
        process = self.running.pop(service, None)
        if process is not None:
            process.terminate()
            process.wait(30)

    def instances(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = httpx.get(self.url("placer") + "/v1/instances").json()["data"]
        return data

    def model(self) -> dict[str, Any]:
        data: dict[str, Any] = httpx.get(self.url("autoscaler") + "/v1/models/one").json()
        return data

    def demand(self) -> int:
        model = self.model()
        return int(model["num_waiting"]) + int(model["num_in_flight"])

    def cold_request(self) -> None:
        """Put the model to sleep and ask for it. A router that was replaced leaves its last report behind until the
        next one speaks: whoever waited then would wake the model again."""
        wait_until("nobody waits or is served", lambda: not self.demand(), 45)
        httpx.post(self.url("autoscaler") + "/v1/models/one/unload").raise_for_status()
        wait_until("nothing runs", lambda: not self.instances(), 90)
        body = {"model": "one", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(self.url("data") + "/v1/chat/completions", json=body, timeout=90)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        assert [row["model_key"] for row in self.instances()] == ["one"]

    def complaints(self) -> list[str]:
        """What services said of rows and commands of the other version. An agent may refuse the other's memory: the
        two have other schemas, it says so, and ends the engines that it finds (docs/howto/upgrade.md)."""
        return [
            f"{path.name}: {row}"
            for path in sorted(self.folder.glob("*.log"))
            for row in path.read_text(errors="replace").splitlines()
            if "refused: " in row or ("is not readable" in row and "the agent's memory" not in row)
        ]


@pytest.fixture
def mixed(trees: dict[str, Path], own_nats: NatsProcess, own_valkey: ValkeyProcess) -> Iterator[Mixed]:
    with tempfile.TemporaryDirectory(prefix="gp-mixed-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "models").mkdir()
        (folder / "models" / "one.yaml").write_text(EMULATED.format(name="one", keep_alive_s=120))
        base = free_block("127.0.0.1", 8, os.getpid() * 53)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GLOWPLUG_", "OTEL_", "PYTHON"))} | {
            "GLOWPLUG_NATS_URL": own_nats.url,
            "GLOWPLUG_REDIS_URL": own_valkey.url,
            "GLOWPLUG_STATE_DIR": str(folder / "state"),
            "GLOWPLUG_MODELS_DIR": str(folder / "models"),
            "GLOWPLUG_SHM_DIR": str(folder / "shm"),
            "GLOWPLUG_GPU_BUDGETS": "80GB",
            "GLOWPLUG_ENGINES": "emulated",
            "GLOWPLUG_NODE_ID": "node-1",
            "GLOWPLUG_DATA_PORT": str(base),
        }
        fleet = Mixed(trees, env, folder, base)
        fleet.env["GLOWPLUG_PREFETCHER_URL"] = fleet.url("prefetcher")
        try:
            yield fleet
        finally:
            for service in tuple(fleet.running):
                fleet.stop(service)


def test_the_other_tree_is_really_the_other_code(mixed: Mixed) -> None:
    code = "import glowplug, services; print(glowplug.__file__, services.__path__)"
    env = mixed.env | {"PYTHONPATH": f"{mixed.trees[OLD] / 'libs'}{os.pathsep}{mixed.trees[OLD]}"}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=mixed.folder, env=env, capture_output=True, text=True
    ).stdout
    assert said.count(str(mixed.trees[OLD])) == 2 and str(ROOT) not in said


def test_a_fleet_is_upgraded_service_by_service_and_taken_back(mixed: Mixed) -> None:
    mixed.start(OLD, *NODE, *CONTROL, "router")
    mixed.cold_request()
    mixed.start(NEW, *NODE)  # new agents under the old control plane
    mixed.cold_request()
    mixed.start(NEW, *CONTROL)  # the old router, everything else new
    mixed.cold_request()
    mixed.start(NEW, "router")
    mixed.cold_request()
    mixed.start(OLD, *NODE)  # the way back, and: old agents under the new control plane
    mixed.cold_request()
    mixed.start(OLD, *CONTROL, "router")
    mixed.cold_request()
    assert mixed.complaints() == []
