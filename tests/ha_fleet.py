"""A fleet with two processes of each elected service. Emulated engine."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fleet_runner import EMULATED
from tests.ports import free_port
from tests.server_clusters import Clusters
from tests.servers import Infra
from tests.waiting import wait_until

START_S = 240.0
ADMIN = {"Authorization": "Bearer secret"}


@dataclass
class Process:
    """Its log survives restarts."""

    name: str
    module: str
    env: dict[str, str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.env['GLOWPLUG_PORT']}"

    @property
    def data_url(self) -> str:
        return f"http://127.0.0.1:{self.env['GLOWPLUG_DATA_PORT']}"

    def start(self) -> "Process":
        argv, folder = [sys.executable, "-m", self.module], self.log_path.parent  # PYTHONPATH selects the tree
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(argv, cwd=folder, env=self.env, stdout=log, stderr=log)
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).json()

    def health(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.get("/health")
        except httpx.HTTPError:
            return {}
        return found

    def leads(self) -> bool:
        return self.health().get("role") == "leader"

    def ready(self) -> bool:
        """Raises AssertionError with the end of its log if it has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log()[-2000:]}")
        try:
            return httpx.get(self.url + "/ready", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


@dataclass
class HaFleet:
    folder: Path
    infra: Infra | Clusters
    lease_s: float = 2.0
    nodes: int = 1
    models: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)

    def add(self, name: str, **env: str) -> Process:
        service = name.rpartition("-")[0]
        own = {
            "GLOWPLUG_SERVICE_ID": name,
            "GLOWPLUG_PORT": str(free_port()),
            "GLOWPLUG_DATA_PORT": str(free_port()) if service == "router" else "0",
            "GLOWPLUG_STATE_DIR": str(self.folder / "state"),
            "GLOWPLUG_SHM_DIR": str(self.folder / "shm"),
            "GLOWPLUG_MODELS_DIR": str(self.folder / "models"),
            "GLOWPLUG_ENGINES": "emulated",
            "GLOWPLUG_WARM_ENGINES": "emulated",
            "GLOWPLUG_GPU_BUDGETS": "80GB",
            "GLOWPLUG_ADMIN_TOKEN": "secret",
            "GLOWPLUG_LEADER_LEASE_S": str(self.lease_s),
            "GLOWPLUG_EMULATED_TIME_SCALE": "10",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GLOWPLUG_", "OTEL_"))}
        everything = inherited | self.infra.env | own | self.env | env
        made = Process(name, f"glowplug.services.{service}", everything, self.folder / f"{name}.log")
        self.processes[name] = made
        return made

    def start(self) -> "HaFleet":
        (self.folder / "models").mkdir(parents=True)
        (self.folder / "state").mkdir()
        for name, text in self.models.items():
            (self.folder / "models" / f"{name}.yaml").write_text(text)
        names = [f"{service}-{k}" for service in ("autoscaler", "placer", "predictor") for k in (1, 2)]
        for name in names:
            self.add(name)
        for k in range(1, self.nodes + 1):
            self.add(f"agent-{k}", GLOWPLUG_NODE_ID=f"node-{k}")
            self.add(f"prefetcher-{k}", GLOWPLUG_NODE_ID=f"node-{k}")
        self.add("router-1")
        for process in self.processes.values():
            process.start()
        wait_until("everything is ready", self.ready, START_S)
        for service in ("autoscaler", "placer", "predictor"):
            wait_until(f"a {service} leads", lambda service=service: self.leader(service), START_S)
        wait_until("models registered", lambda: len(self.router_models()) == len(self.models), START_S)
        return self

    def ready(self) -> bool:
        return all(process.ready() for process in self.processes.values())

    def router_models(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = httpx.get(self.processes["router-1"].data_url + "/v1/models").json()["data"]
        return data

    def pair(self, service: str) -> list[Process]:
        return [p for name, p in self.processes.items() if name.startswith(f"{service}-")]

    def leader(self, service: str) -> Process | None:
        """Returns None without one; fails if two report to lead."""
        leaders = [p for p in self.pair(service) if p.leads()]
        assert len(leaders) <= 1, [p.name for p in leaders]
        return leaders[0] if leaders else None

    def roles(self, service: str) -> tuple[Process, Process]:
        def both() -> tuple[Process, Process] | None:
            leader = self.leader(service)
            standby = [p for p in self.pair(service) if p.health().get("role") == "standby"]
            return (leader, standby[0]) if leader and standby else None

        found: tuple[Process, Process] = wait_until(f"one {service} leading and one standby", both, START_S, 0.05)
        return found

    def chat(self, model: str, timeout_s: float = 200.0, **fields: Any) -> httpx.Response:
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]} | fields
        url = self.processes["router-1"].data_url + "/v1/chat/completions"
        return httpx.post(url, json=body, timeout=timeout_s)

    def instances(self, model: str = "", gone: bool = False) -> list[dict[str, Any]]:
        placer = self.leader("placer") or self.pair("placer")[0]
        rows = httpx.get(placer.url + "/v1/instances", params={"model": model, "gone": gone}, timeout=30).json()
        found: list[dict[str, Any]] = rows["data"]
        return found

    def failover_s(self, service: str, harm: Any, within_s: float) -> float:
        leader, standby = self.roles(service)
        began = time.monotonic()
        harm(leader)
        wait_until(f"{standby.name} leads", standby.leads, within_s, 0.02)
        return time.monotonic() - began

    def stop(self) -> None:
        for process in self.processes.values():
            if process.process is not None:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for process in self.processes.values():
            while process.process is not None and process.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.kill()


def emulated(name: str, keep_alive_s: float = -1, **more: str) -> str:
    extra = "".join(f"{key}: {value}\n" for key, value in more.items())
    return EMULATED.format(name=name, keep_alive_s=keep_alive_s) + extra
