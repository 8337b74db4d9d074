"""Plan the processes: ports from one base, one environment each, every setting as `GLOWPLUG_*`."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glowplug.domain.address import http_url, is_loopback, reachable
from glowplug.runtime.host_memory import memory_bytes, sleepers_bytes
from glowplug.runtime.supervisor.child import ChildSpec
from glowplug.runtime.supervisor.probe import http_status
from glowplug.runtime.supervisor.settings import FleetSettings
from glowplug.runtime.supervisor.statedir import Secrets
from glowplug.runtime.supervisor.sweep import MARK

DATA, CONSOLE, ROUTER, PREDICTOR, PLACER, AUTOSCALER, FIRST_NODE = 0, 1, 2, 3, 4, 5, 10
# Single ports of a fleet: offset -> address name, and listener.
SINGLE = {
    DATA: ("data", "the router (OpenAI API)"),
    CONSOLE: ("console", "the console"),
    ROUTER: ("router", "the router (admin)"),
    PREDICTOR: ("predictor", "the predictor"),
    PLACER: ("placer", "the placer"),
    AUTOSCALER: ("autoscaler", "the autoscaler"),
}
# Not inherited: a stray one from the shell would be shared by all processes.
_PER_PROCESS = (
    "GLOWPLUG_PORT",
    "GLOWPLUG_DATA_PORT",
    "GLOWPLUG_SERVICE_ID",
    "GLOWPLUG_NODE_ID",
    "GLOWPLUG_ADVERTISE_HOST",
    "GLOWPLUG_ENGINE_PORTS",
    "GLOWPLUG_ENGINE_SECRET",
)
# A laptop's "GPUs": host memory budgets, small enough that samples compete. Emulated ones are free.
GPU_BUDGETS = {"llamacpp": "512MiB", "vllm": "1536MiB", "emulated": "80GB"}

LOOPBACK = "127.0.0.1"
HOST_CACHE_BYTES = 1 << 30  # of weights, per node
DISK_CACHE_BYTES = 4 << 30  # of weights, per node: see docs/howto/weights.md


@dataclass(frozen=True, slots=True)
class Plan:
    """Addresses of a fleet. Ports: data P, console P+1, router admin P+2, predictor P+3, placer P+4, autoscaler P+5,
    node k (from 1): agent P+8+2k, prefetcher P+9+2k."""

    settings: FleetSettings
    port_base: int

    def host(self, offset: int) -> str:
        """Only ports for clients and browsers leave loopback."""
        return self.settings.host if offset in (DATA, CONSOLE, ROUTER) else LOOPBACK

    def url(self, offset: int) -> str:
        return http_url(reachable(self.host(offset)), self.port_base + offset)

    def ports(self) -> Sequence[tuple[int, str]]:
        named = [(offset, owner) for offset, (_, owner) in SINGLE.items()]
        for k in range(self.settings.nodes):
            named += [(agent_port(k), f"agent-{k + 1}"), (agent_port(k) + 1, f"prefetcher-{k + 1}")]
        return [(self.port_base + offset, owner) for offset, owner in named]

    def urls(self) -> dict[str, str]:
        return {name: self.url(offset) for offset, (name, _) in SINGLE.items()}

    def nodes(self) -> list[dict[str, str]]:
        return [
            {
                "node_id": f"node-{k + 1}",
                "agent_url": self.url(agent_port(k)),
                "prefetcher_url": self.url(agent_port(k) + 1),
            }
            for k in range(self.settings.nodes)
        ]


def num_ports(nodes: int) -> int:
    return FIRST_NODE + 2 * nodes


def agent_port(k: int) -> int:
    """Agent offset of node `k` (0-based); its prefetcher is next."""
    return FIRST_NODE + 2 * k


def base_environment(settings: FleetSettings, environ: Mapping[str, str]) -> dict[str, str]:
    env = {key: value for key, value in environ.items() if key not in _PER_PROCESS}
    return env | {
        MARK: str(settings.state_dir),
        "GLOWPLUG_STATE_DIR": str(settings.state_dir),
        "PYTHONUNBUFFERED": "1",
        "MALLOC_ARENA_MAX": "2",
    }


def service_environment(
    plan: Plan, secrets: Secrets, *, models_dir: Path, access_dir: Path, shm_dir: Path
) -> dict[str, str]:
    """Environment of all services; `services` adds their own credentials."""
    settings = plan.settings
    env = base_environment(settings, os.environ)
    env |= {f"GLOWPLUG_{name.upper()}_URL": url for name, url in plan.urls().items()}
    env |= {
        "GLOWPLUG_HOST": settings.host,
        "GLOWPLUG_ADMIN_TOKEN": secrets.admin_token,
        "GLOWPLUG_API_KEY": enforced_api_key(settings, secrets),
        "GLOWPLUG_CONSOLE_KEY": settings.console_key,
        "GLOWPLUG_MODELS_DIR": str(models_dir),
        "GLOWPLUG_ACCESS_DIR": str(access_dir),
        "GLOWPLUG_SHM_DIR": str(shm_dir),
    }
    env.setdefault("GLOWPLUG_FILES_URL", (settings.state_dir.resolve() / "files").as_uri())
    env.setdefault("GLOWPLUG_HOST_CACHE_BYTES", str(HOST_CACHE_BYTES))
    env.setdefault("GLOWPLUG_DISK_CACHE_BYTES", str(DISK_CACHE_BYTES))
    env.setdefault("GLOWPLUG_WARM_ENGINES", settings.engine)
    if settings.engine == "emulated":
        env.setdefault("GLOWPLUG_GPU_KIND", "emulated")
    if env.get("GLOWPLUG_GPU_KIND") != "emulated":
        env.setdefault("GLOWPLUG_SWAP_HOST_BYTES", str(sleepers_bytes(memory_bytes()) // settings.nodes))
    env.setdefault("GLOWPLUG_GPU_BUDGETS", GPU_BUDGETS.get(settings.engine, GPU_BUDGETS["llamacpp"]))
    return env


def enforced_api_key(settings: FleetSettings, secrets: Secrets) -> str:
    """Beyond loopback a key is always required; on loopback only if set."""
    return settings.api_key or ("" if is_loopback(settings.host) else secrets.api_key)


def services(
    plan: Plan, env: Mapping[str, str], servers: Callable[[str], Mapping[str, str]], engine_secret: str = ""
) -> list[ChildSpec]:
    """One spec per process, in start order. `servers(service)`: its `nats_url` and `redis_url`. Only router and agents
    get `engine_secret`."""
    keys = {"GLOWPLUG_ENGINE_SECRET": engine_secret}

    def spec(service: str, name: str, offset: int, **extra: str) -> ChildSpec:
        own = {
            "GLOWPLUG_HOST": plan.host(offset),
            "GLOWPLUG_SERVICE_ID": name,
            "GLOWPLUG_PORT": str(plan.port_base + offset),
            **{f"GLOWPLUG_{name.upper()}": url for name, url in servers(service).items()},
            **extra,
        }
        return spec_of(service, name, plan.url(offset), {**env, **own})

    found = [
        spec("autoscaler", "autoscaler-1", AUTOSCALER),
        spec("placer", "placer-1", PLACER),
        spec("predictor", "predictor-1", PREDICTOR),
        spec("console", "console-1", CONSOLE, GLOWPLUG_DATA_URL=plan.url(DATA)),
    ]
    for k, node in enumerate(plan.nodes(), start=1):
        own = {f"GLOWPLUG_{key.upper()}": value for key, value in node.items()}
        found.append(spec("prefetcher", f"prefetcher-{k}", agent_port(k - 1) + 1, **own))
        found.append(spec("agent", f"agent-{k}", agent_port(k - 1), **own, **keys))
    found.append(spec("router", "router-1", ROUTER, GLOWPLUG_DATA_PORT=str(plan.port_base + DATA), **keys))
    return found


def spec_of(service: str, name: str, url: str, env: Mapping[str, str]) -> ChildSpec:
    async def is_ready(_pid: int) -> bool:
        return await http_status(f"{url}/ready") == 200

    async def is_live() -> bool:
        return await http_status(f"{url}/live") == 200

    argv = (sys.executable, "-m", f"glowplug.services.{service}")
    return ChildSpec(
        name=name, argv=lambda: argv, env=env, is_ready=is_ready, service=service, url=url, is_live=is_live
    )
