"""Run a fleet over several machines, which are network namespaces of this one: a registry of weights, the control
plane, and nodes of one "GPU" each, whose network cards have a limited rate.

The kernel limits all traffic into a node (tc's token bucket on the switch's port), from the registry, another node's
prefetcher or a stage of a pipeline. Needs root, iproute2 and nftables.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from tests.hub_server import HubServer
from tests.k8s.namespaces import Network, why_not
from tests.servers import nats_binary, valkey_binary

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
CONTROL, REGISTRY = "control", "registry"
PORTS = {"data": 8000, "router": 8002, "predictor": 8003, "placer": 8004, "autoscaler": 8005}
AGENT, PREFETCHER, NATS, VALKEY = 8010, 8011, 4222, 6379
TOKENS = {
    "GLOWPLUG_ADMIN_TOKEN": "admin-of-the-bench",
    "GLOWPLUG_API_KEY": "key-of-the-bench",
    "GLOWPLUG_ENGINE_SECRET": "engines-of-the-bench",
}
READY_S, STOP_S = 120.0, 20.0
TBF_QUEUE_S = 0.2  # bytes that may wait at the switch's port


class NoNetwork(RuntimeError):
    """This machine cannot make namespaces."""


class Registry(HubServer):
    """The hub of the tests, at an address that other namespaces reach."""

    host = "0.0.0.0"
    name = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self._server.server_address[1]}"


class Machines:
    """`num_nodes` nodes with `bytes_per_s` each. `env` goes to every service, `node_env` to agents and prefetchers. The
    engines of the last `num_plain` nodes load after the fetch, the others during it. A context: namespaces and
    processes end with it."""

    def __init__(
        self,
        num_nodes: int,
        bytes_per_s: float,
        repos: Mapping[str, Mapping[str, bytes]],
        env: Mapping[str, str],
        node_env: Mapping[str, str],
        num_plain: int = 0,
    ) -> None:
        if reason := why_not():
            raise NoNetwork(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="glowplug-bench-coldstart-"))
        self.nodes = [f"node-{number}" for number in range(1, num_nodes + 1)]
        self.plain = self.nodes[num_nodes - num_plain :]
        self._rate, self._env, self._node_env = bytes_per_s, env, node_env
        self.registry = Registry({name: dict(files) for name, files in repos.items()})
        self.network = Network()
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for _name, process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for _name, process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        if self.registry._server is not None:
            self.registry.__exit__()
        self.network.close()
        for folder in (self.folder, SHM / self.folder.name):
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self) -> None:
        for pod in (CONTROL, REGISTRY, *self.nodes):
            self.network.add(pod)
        for number, pod in enumerate(self.network.addresses):
            if pod in self.nodes and self._rate:
                self._limit(f"p{number}")
        self.registry.name = self.network.addresses[REGISTRY]
        self.network.inside(REGISTRY, self.registry.__enter__)
        # There is no name server.
        names = "".join(f"{address} {pod}\n" for pod, address in self.network.addresses.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{names}")
        self._servers()
        self._services()

    def _limit(self, port: str) -> None:
        switch = self.network.namespace("switch")
        rate = ["rate", f"{int(self._rate * 8)}bit", "burst", "256kb", "latency", f"{int(TBF_QUEUE_S * 1000)}ms"]
        subprocess.run(["tc", "-n", switch, "qdisc", "add", "dev", port, "root", "tbf", *rate], check=True)

    def _servers(self) -> None:
        address, folder = self.network.addresses[CONTROL], self.folder
        (folder / "nats.conf").write_text(f'jetstream {{ store_dir: "{folder / "jetstream"}" }}\n')
        self._spawn(CONTROL, "nats", [nats_binary(), "-c", str(folder / "nats.conf"), "-a", address, "-p", str(NATS)])
        bind = ["--bind", address, "--port", str(VALKEY), "--protected-mode", "no", "--save", "", "--dir", str(folder)]
        self._spawn(CONTROL, "valkey", [str(valkey_binary()), *bind])

    def _services(self) -> None:
        address = self.network.addresses[CONTROL]
        common = {key: value for key, value in os.environ.items() if not key.startswith(("GLOWPLUG_", "OTEL_"))} | {
            "GLOWPLUG_NATS_URL": f"nats://{address}:{NATS}",
            "GLOWPLUG_REDIS_URL": f"redis://{address}:{VALKEY}/0",
            "MALLOC_ARENA_MAX": "2",
            "HF_ENDPOINT": self.registry.url,
            **TOKENS,
            **{f"GLOWPLUG_{name.upper()}_URL": f"http://{address}:{port}" for name, port in PORTS.items()},
            **self._env,
        }
        common["GLOWPLUG_MODELS_DIR"] = str(self.folder / "models")
        (self.folder / "models").mkdir()
        for service in ("autoscaler", "placer", "predictor", "router"):
            own = {"GLOWPLUG_PORT": str(PORTS[service]), "GLOWPLUG_DATA_PORT": str(PORTS["data"])}
            self._service(CONTROL, service, common | own)
        for node in self.nodes:
            here = self.network.addresses[node]
            own = {
                "GLOWPLUG_NODE_ID": node,
                "GLOWPLUG_SHM_DIR": str(SHM / self.folder.name / node),
                "GLOWPLUG_PREFETCHER_URL": f"http://{here}:{PREFETCHER}",
                "HF_HOME": str(self.folder / node / "hf"),
                "_GLOWPLUG_FLEET": f"{self.folder.name}-{node}",  # a parked process of its own, in its namespace
                "GLOWPLUG_STREAM_WEIGHTS": "0" if node in self.plain else "1",
                **self._node_env,
            }
            self._service(node, "prefetcher", common | own | {"GLOWPLUG_PORT": str(PREFETCHER)})
            self._service(node, "agent", common | own | {"GLOWPLUG_PORT": str(AGENT)})
        for url in (*(f"http://{address}:{port}/ready" for name, port in PORTS.items() if name != "data"),):
            self._until(partial(self._is_ready, url), url)
        self._until(lambda: len(self.rows("placer", "/v1/nodes")) == len(self.nodes), "every node")

    def _service(self, pod: str, service: str, env: Mapping[str, str]) -> None:
        own = {"GLOWPLUG_HOST": self.network.addresses[pod], "GLOWPLUG_SERVICE_ID": f"{service}-{pod}"}
        own["GLOWPLUG_STATE_DIR"] = str(self.folder / f"{service}-{pod}")
        self._spawn(pod, f"{service}-{pod}", [sys.executable, "-m", f"glowplug.services.{service}"], {**env, **own})

    def _spawn(self, pod: str, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = self.network.command(pod, self.folder / "hosts", argv)
            process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        self._processes.append((name, process))

    def _is_ready(self, url: str) -> bool:
        return self.ask("GET", url).status_code == 200

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            for name, process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended:\n{self.log(name)[-3000:]}")
            with contextlib.suppress(httpx.HTTPError):  # it does not answer yet
                if is_so():
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} is not ready after {READY_S:g} s")
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def url(self, service: str) -> str:
        return f"http://{self.network.addresses[CONTROL]}:{PORTS[service]}"

    def inside(self, call: Callable[[], T]) -> T:
        """Run `call` in the clients' namespace, beside the control plane."""
        return self.network.inside(CONTROL, call)

    def ask(self, method: str, url: str, **kwargs: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKENS['GLOWPLUG_ADMIN_TOKEN']}"}
        return self.inside(lambda: httpx.request(method, url, headers=headers, timeout=10.0, trust_env=False, **kwargs))

    def rows(self, service: str, path: str, **params: Any) -> list[dict[str, Any]]:
        answer = self.ask("GET", self.url(service) + path, params=params)
        answer.raise_for_status()
        data: list[dict[str, Any]] = answer.json()["data"]
        return data

    def open(self, nodes: Collection[str]) -> None:
        """Restrict new starts to these nodes."""
        for node in self.nodes:
            verb = "undrain" if node in nodes else "drain"
            self.ask("POST", f"{self.url('placer')}/v1/nodes/{node}/{verb}").raise_for_status()

    def deploy(self, model: Mapping[str, Any]) -> None:
        """Deploy a model, or change a deployed one."""
        answer = self.ask("PUT", f"{self.url('autoscaler')}/v1/models/{model['name']}", json=dict(model))
        if answer.is_error:
            raise RuntimeError(answer.text)

    def cost(self, name: str, verb: str) -> dict[str, Any]:
        """The placer's estimate of a verb's cost."""
        answer = self.ask("GET", f"{self.url('placer')}/v1/models/{name}/cost", params={"verb": verb})
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def remove(self, name: str) -> None:
        """Remove the model and all of its instances."""
        self.ask("DELETE", f"{self.url('autoscaler')}/v1/models/{name}")
        self._until(lambda: not self.rows("placer", "/v1/instances", model=name), f"the end of {name}")
