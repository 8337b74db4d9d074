"""A landed version and this one on one bus and store, service by service."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.ha_fleet import ADMIN, START_S, HaFleet, emulated
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
LANDED = "d745896"  # while no version is tagged
NEW, OLD = "new", "old"
COMPLAINTS = (
    "cannot be read and is left out",  # a row (runtime/unreadable.py)
    "cannot be read and are left out",
    "a command of a replaced process is refused: ",  # runtime/shell.py
    " is not readable: ",  # a row, in LANDED's words
)
NODE, CONTROL = ("prefetcher", "agent"), ("autoscaler", "placer")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


def git(*words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def landed() -> str:
    """The newest version tag without this commit, else LANDED."""
    tags = git("tag", "--list", "v*", "--sort=-version:refname", "--no-contains", "HEAD") or b""
    return tags.decode().split("\n")[0] or LANDED


@pytest.fixture(scope="module")
def trees() -> Iterator[dict[str, Path]]:
    archive = git("archive", landed(), "libs", "services", "pyproject.toml")
    if archive is None:
        pytest.skip(f"the history does not reach back to {landed()}")
    with tempfile.TemporaryDirectory(prefix="gp-old-", ignore_cleanup_errors=True) as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield {NEW: ROOT, OLD: Path(folder)}


@dataclass
class Mixed(HaFleet):
    trees: dict[str, Path] = field(default_factory=dict)

    def begin(self, version: str, *services: str) -> None:
        tree = self.trees[version]
        for service in services:
            if before := self.processes.pop(f"{service}-1", None):
                before.signal(signal.SIGTERM)
                assert before.process is not None
                before.process.wait(30)
            path = f"{tree / 'libs'}{os.pathsep}{tree}"
            node = {"GLOWPLUG_NODE_ID": "node-1"} if service in NODE else {}
            process = self.add(f"{service}-1", PYTHONPATH=path, **node)
            if not (tree / "libs/glowplug/services").exists():  # before version 0.2
                process.module = f"services.{service}"
            process.start()
            if service == "prefetcher":
                self.env["GLOWPLUG_PREFETCHER_URL"] = process.url
            wait_until(f"{version} {service} is ready", process.ready, START_S)

    def demand(self) -> int:
        model = self.processes["autoscaler-1"].get("/v1/models/one")
        return int(model["num_waiting"]) + int(model["num_in_flight"])

    def cold_request(self) -> None:
        """Wake the model. A replaced router's last report stays until the next one reports: a request that waited in it
        would wake the model again."""
        wait_until("no request waits or is served", lambda: not self.demand())
        unload = self.processes["autoscaler-1"].url + "/v1/models/one/unload"
        httpx.post(unload, headers=ADMIN).raise_for_status()
        wait_until("nothing runs", lambda: not self.instances())
        answer = self.chat("one")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        assert [row["model_key"] for row in self.instances()] == ["one"]

    def complaints(self) -> list[str]:
        return [
            f"{path.name}: {row}"
            for path in sorted(self.folder.glob("*.log"))
            for row in path.read_text(errors="replace").splitlines()
            if any(text in row for text in COMPLAINTS)
        ]


@pytest.fixture
def mixed(trees: dict[str, Path], own_nats: NatsProcess, own_valkey: ValkeyProcess) -> Iterator[Mixed]:
    with tempfile.TemporaryDirectory(prefix="gp-mixed-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "models").mkdir()
        (folder / "models" / "one.yaml").write_text(emulated("one", keep_alive_s=120))
        env = {"GLOWPLUG_EMULATED_TIME_SCALE": "1"}
        fleet = Mixed(folder, Infra(own_nats, own_valkey), lease_s=0, env=env, trees=trees)
        try:
            yield fleet
        finally:
            fleet.stop()


def test_the_other_tree_is_really_the_other_code(mixed: Mixed) -> None:
    code = "import glowplug, services; print(glowplug.__file__, services.__path__)"
    env = {**os.environ, "PYTHONPATH": f"{mixed.trees[OLD] / 'libs'}{os.pathsep}{mixed.trees[OLD]}"}
    argv = [sys.executable, "-c", code]
    said = subprocess.run(argv, cwd=mixed.folder, env=env, capture_output=True, text=True).stdout
    assert said.count(str(mixed.trees[OLD])) == 2 and str(ROOT) not in said


def test_a_fleet_is_upgraded_service_by_service_and_taken_back(mixed: Mixed) -> None:
    for version, services in (
        (OLD, (*NODE, *CONTROL, "router")),
        (NEW, NODE),  # new agents under the old control plane
        (NEW, CONTROL),  # the old router, everything else new
        (NEW, ("router",)),
        (OLD, NODE),  # the way back: old agents under the new control plane
        (OLD, (*CONTROL, "router")),
    ):
        mixed.begin(version, *services)
        mixed.cold_request()
    assert mixed.complaints() == []
