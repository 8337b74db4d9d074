"""A real local fleet of processes, and the `glowplug` command."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from glowplug.policies.registry import KINDS
from glowplug.runtime.supervisor.plan import num_ports
from glowplug.runtime.supervisor.samples import sample_files
from glowplug.runtime.supervisor.sweep import processes_of
from tests.ports import free_ports
from tests.waiting import wait_until

EMULATED = """
name: {name}
engine: emulated
weights_bytes: 1GiB
kv_bytes: 1GiB
max_concurrency: 64
max_queue: 1000
keep_alive_s: {keep_alive_s}
max_wait_s: 180
engine_args: {{profile: "llama-2-7b/h800"}}
"""
GLOWPLUG = (sys.executable, "-m", "glowplug.cli.main")
READY_S = "240"


@dataclass
class Fleet:
    state_dir: Path
    models_dir: Path
    env: dict[str, str]

    @classmethod
    def start(
        cls, root: Path, models: dict[str, str], *, engine: str = "emulated", nodes: int = 2, **env: str
    ) -> "Fleet":
        models_dir = root / "models"
        models_dir.mkdir(parents=True)
        for name, text in models.items():
            (models_dir / f"{name}.yaml").write_text(text)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GLOWPLUG_", "OTEL_"))}
        fleet = cls(
            root / "state",
            models_dir,
            inherited | {"GLOWPLUG_MODELS_DIR": str(models_dir), "GLOWPLUG_READY_TIMEOUT_S": READY_S} | env,
        )
        base = free_ports(num_ports(nodes))
        done = fleet.cli("up", "-d", "-q", "--engine", engine, "--nodes", str(nodes), "--port-base", str(base))
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until("models registered", lambda: len(fleet.models()) == len(models))
        return fleet

    def cli(self, *args: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "glowplug.cli.main", *args]
        env = self.env | {"GLOWPLUG_STATE_DIR": str(self.state_dir)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)

    @property
    def secrets(self) -> set[str]:
        kept = json.loads((self.state_dir / "secrets.json").read_text())
        return {*kept.pop("passwords").values(), *kept.values()}

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state_dir / "fleet.json").read_text())
        return found

    def url(self, name: str) -> str:
        return str(self.document["urls"][name])

    @property
    def admin(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.document['admin_token']}"}

    def process(self, name: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self.document["processes"]
        return next(p for p in rows if name in (p["name"], p["service"]))

    def models(self) -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = httpx.get(self.url("data") + "/v1/models").json()["data"]
        return data

    def model(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url('autoscaler')}/v1/models/{name}").json()
        return found

    def instances(self, model: str = "") -> list[dict[str, Any]]:
        data: list[dict[str, Any]] = httpx.get(self.url("placer") + "/v1/instances", params={"model": model}).json()[
            "data"
        ]
        return data

    def policies(self) -> dict[str, str]:
        services = ("router", "predictor", "placer", "autoscaler", "prefetcher")
        answers = [httpx.get(self.process(name)["url"] + "/policies").json() for name in services]
        return {kind: policy for answer in answers for kind, policy in answer.items() if kind in KINDS}

    def chat(self, model: str, *, max_tokens: int = 8, timeout_s: float = 200.0, **fields: Any) -> httpx.Response:
        body = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": "hello"}]} | fields
        return httpx.post(self.url("data") + "/v1/chat/completions", json=body, timeout=timeout_s)

    def ready(self) -> bool:
        rows = self.document["processes"]
        return all(p["state"] == "ready" for p in rows) and all(
            httpx.get(p["url"] + "/ready", timeout=2).status_code == 200 for p in rows if p["url"]
        )

    def logs(self, name: str, lines: int = 60) -> str:
        path = self.state_dir / "logs" / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"

    def stop(self) -> None:
        self.cli("down")

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def glowplug(state: Path, *argv: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    full = {k: v for k, v in os.environ.items() if not k.startswith("GLOWPLUG_")} | env
    ended = subprocess.run(
        [*GLOWPLUG, argv[0], "--state-dir", str(state), *argv[1:]],
        capture_output=True,
        text=True,
        env=full,
        timeout=300,
    )
    assert not check or ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def as_json(state: Path, *argv: str) -> Any:
    return json.loads(glowplug(state, *argv, "--output", "json").stdout)


@contextmanager
def running() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gp-e2e-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "s"
        try:
            said = glowplug(path, "up", "--detach", "--port-base", "0", GLOWPLUG_READY_TIMEOUT_S=READY_S).stdout
            assert "curl -N http://127.0.0.1:" in said
            assert all(file.stem[3:] in said for file in sample_files("llamacpp")), said
            yield path
        finally:
            glowplug(path, "down", check=False)
            assert not processes_of(path)


def document(state: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((state / "fleet.json").read_text())
    return found
