"""The compose fleet: its commands, two ports, containers and file."""

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import yaml

from glowplug.runtime.privileges import USERS, variable
from tests.compose.engine import ROOT, TAG, run
from tests.waiting import wait_until

PROJECT = "glowplug-test"
FILES = ("deploy/docker-compose.yml", "tests/compose/override.yml")
UP_S = 900.0
WAIT_S = 180.0
SERVICES = ("router", "predictor", "placer", "autoscaler", "console")
NODES = ("node-1", "node-2", "node-3")
ADMIN, KEY, CONSOLE_KEY = "the-admin-token", "the-api-key", "the-console-key"
SETTINGS = {
    "COMPOSE_PROJECT_NAME": PROJECT,
    "GLOWPLUG_ADMIN_TOKEN": ADMIN,
    "GLOWPLUG_API_KEY": KEY,
    "GLOWPLUG_CONSOLE_KEY": CONSOLE_KEY,
    "GLOWPLUG_ENGINE_SECRET": "the-engine-secret",
    **{variable(user): f"the-password-of-{user}" for user in USERS},
    "S3_ACCESS_KEY": "the-access-key",
    "S3_SECRET_KEY": "the-secret-key",
    "GRAFANA_PASSWORD": "the-grafana-password",
    "ROUTER_PORT": "0",
    "CONSOLE_PORT": "0",
    "IMAGE_TAG": TAG,
    "BUILD_NETWORK": "host",
    "OTLP_ENDPOINT": "",
}
COMPOSE = FILES[0]
VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)(:?[-?][^}]*)?\}")


@dataclass
class ComposeFleet:
    parts: tuple[str, ...]
    env_file: Path
    router: str = ""
    console: str = ""
    client: httpx.Client = field(
        default_factory=lambda: httpx.Client(
            timeout=300.0, trust_env=False, headers={"X-Glowplug-Console-Key": CONSOLE_KEY}
        )
    )

    def __post_init__(self) -> None:
        self.env_file.write_text("".join(f"{name}={value}\n" for name, value in SETTINGS.items()))

    def compose(self, *parts: str, timeout_s: float = 180.0, check: bool = True) -> str:
        files = [word for name in FILES for word in ("-f", name)]
        argv = (*self.parts, "--env-file", str(self.env_file), *files, *parts)
        return run(*argv, timeout_s=timeout_s, check=check, COMPOSE_HTTP_TIMEOUT="600")

    def up(self) -> "ComposeFleet":
        """Wait until each container is healthy or, if one-shot, has succeeded."""
        self.down()
        try:
            self.compose("up", "-d", timeout_s=UP_S)
        except RuntimeError as error:
            states = {s: stated["State"] for s, stated in self.containers().items()}
            bad = [s for s, state in states.items() if state["ExitCode"] or "unhealthy" in str(state.get("Health"))]
            stated = [f"{s}: {str(states[s].get('Health'))[-600:]}\n{self.logs(s)}" for s in bad]
            raise RuntimeError("\n".join([str(error)[-1000:], *stated])) from error
        wait_until("every container is healthy", lambda: not self.unhealthy(), UP_S, 2.0)
        self.router, self.console = self.door("router", 8000), self.door("console", 8080)
        wait_until("every node is on the console", lambda: set(self.nodes_up()) == set(NODES), WAIT_S, 1.0)
        return self

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "-t", "1", timeout_s=300.0)

    def door(self, service: str, port: int) -> str:
        return f"http://{self.compose('port', service, str(port)).strip()}"

    def container(self, service: str) -> str:
        label = f"label=com.docker.compose.service={service}"
        found = run("docker", "ps", "-aq", "-f", f"label=com.docker.compose.project={PROJECT}", "-f", label).split()
        assert len(found) == 1, f"{service} has containers {found}"
        return found[0]

    def containers(self) -> dict[str, dict[str, Any]]:
        ids = run("docker", "ps", "-aq", "-f", f"label=com.docker.compose.project={PROJECT}").split()
        stated: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids)) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in stated}

    def unhealthy(self) -> list[str]:
        """Raises AssertionError if a service can no longer reach its expected state."""
        found = []
        for service, stated in self.containers().items():
            state = stated["State"]
            if "Health" in state and state["Status"] == "running":
                found += [service] if state["Health"]["Status"] != "healthy" else []
            elif state["Status"] != "exited" or state["ExitCode"]:
                assert state["Status"] != "exited", f"{service} ended with {state['ExitCode']}: {self.logs(service)}"
                found.append(service)
        return found

    def logs(self, service: str) -> str:
        return self.compose("logs", "--tail=30", service, check=False)[-3000:]

    def exec(self, service: str, *parts: str) -> str:
        return run("docker", "exec", self.container(service), *parts)

    def chat(
        self, model: str, text: str = "Say hello.", base_url: str = "", tokens: int = 12, timeout_s: float = 300.0
    ) -> httpx.Response:
        body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}
        url = f"{base_url or self.router}/v1/chat/completions"
        return self.client.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=timeout_s)

    def see(self, path: str) -> Any:
        answer = self.client.get(f"{self.console}{path}")
        answer.raise_for_status()
        return answer.json()

    def nodes_up(self) -> list[str]:
        rows = self.see("/api/v1/fleet")["nodes"]
        return [row["value"]["node_id"] for row in rows if not row["joined"]["lost_since"]]

    def model(self, name: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = self.see("/api/v1/fleet")["models"]
        return next(row["value"] | row["joined"] for row in rows if row["value"]["name"] == name)

    def node_of(self, answer: httpx.Response) -> str:
        instance = answer.headers["x-glowplug-instance"]
        rows = [row["value"] for row in self.see("/api/v1/fleet")["instances"]]
        return next((row["workers"][0]["node_id"] for row in rows if row["instance_id"] == instance), "")


def root_file(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def compose(path: str = COMPOSE) -> dict[str, Any]:
    stated: dict[str, Any] = yaml.safe_load(root_file(path))
    return stated


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def example() -> dict[str, str]:
    lines = [line for line in root_file(".env.example").splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def filled(text: str) -> str:
    return VARIABLE.sub(lambda match: example().get(match[1]) or "given", text)
