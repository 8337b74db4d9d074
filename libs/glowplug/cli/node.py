"""`glowplug node`: run a node's agent and prefetcher in the foreground, for systemd, Slurm or a terminal; SIGTERM
drains the engines first."""

import asyncio
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from glowplug.cli import contexts
from glowplug.cli.client import connect
from glowplug.cli.operate import exports
from glowplug.cli.options import StateDirOption
from glowplug.cli.terminal import WRONG_USAGE, CliError
from glowplug.runtime.supervisor.child import Child
from glowplug.runtime.supervisor.fleet import default_shm_dir
from glowplug.runtime.supervisor.output import Output
from glowplug.runtime.supervisor.plan import spec_of
from glowplug.runtime.supervisor.settings import LOG_MAX_BYTES, RESTART_MAX_S
from glowplug.runtime.supervisor.statedir import StateDir
from glowplug.runtime.supervisor.sweep import MARK, sweep
from glowplug.state.address import Sentinels

CONNECT_S: Final = 3.0
AGENT_PORT: Final = 8050
DRAIN_S: Final = 5.0
GRACE_S: Final = 15.0
_NODE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def node(
    node_id: Annotated[str, typer.Argument(metavar="NODE", help="Its name in the fleet: a-z, 0-9 and dashes.")],
    env_file: Annotated[
        Path | None, typer.Option(help="Output of `glowplug env node` where the fleet runs; mode 0600.")
    ] = None,
    advertise: Annotated[str, typer.Option(help="Name or address by which the fleet's other machines reach it.")] = "",
    port: Annotated[
        int, typer.Option(envvar="GLOWPLUG_PORT", help="Port of the agent; the prefetcher uses the next one.")
    ] = AGENT_PORT,
    folder: Annotated[Path | None, typer.Option(help="For its logs and weights [.glowplug/nodes/NODE].")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Run one node of a fleet here: its agent and prefetcher, started again when they die. Settings of both come from
    the environment (GLOWPLUG_GPU_KIND, GLOWPLUG_GPU_BUDGETS ...). Ctrl-C or SIGTERM drains it."""
    if not _NODE_ID.fullmatch(node_id):
        raise CliError(f"{node_id!r} is not a node name: a-z, 0-9 and dashes, at most 64 characters", WRONG_USAGE)
    told = contexts.read_env(env_file, str(env_file)) if env_file else exports(connect(state_dir), "node")
    missing = [name for name in ("GLOWPLUG_NATS_URL", "GLOWPLUG_REDIS_URL") if not told.get(name)]
    if missing:
        raise CliError(f"{' and '.join(missing)} are not known: give --env-file, made by `glowplug env node`")
    try:
        unreachable = list(_unreachable(told))
    except ValueError as error:
        raise CliError(f"the address of the bus or the store is not valid: {error}", WRONG_USAGE) from error
    if unreachable:
        raise CliError("\n".join(unreachable))
    state = StateDir((folder or contexts.DEFAULT_STATE_DIR / "nodes" / node_id).absolute())
    state.lock()
    output = Output(state.directory("logs"), max_bytes=LOG_MAX_BYTES)
    try:
        sweep(state.path)
        environment = os.environ | told | _own(node_id, state.path, advertise)
        code = asyncio.run(_run(environment, port, output))
        if "GLOWPLUG_SHM_DIR" not in os.environ:
            shutil.rmtree(environment["GLOWPLUG_SHM_DIR"], ignore_errors=True)
    finally:
        output.close()
        state.unlock()
    raise typer.Exit(code)


def _own(node_id: str, folder: Path, advertise: str) -> dict[str, str]:
    own = {MARK: str(folder), "GLOWPLUG_NODE_ID": node_id, "GLOWPLUG_STATE_DIR": str(folder)}
    if "GLOWPLUG_SHM_DIR" not in os.environ:
        own["GLOWPLUG_SHM_DIR"] = str(default_shm_dir(folder))
    if advertise:
        own |= {"GLOWPLUG_HOST": "0.0.0.0", "GLOWPLUG_ADVERTISE_HOST": advertise}
    return own


def _unreachable(told: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for the bus and for the store, if no server of theirs accepts a connection."""
    for server, name in (("the bus", "GLOWPLUG_NATS_URL"), ("the store", "GLOWPLUG_REDIS_URL")):
        tried = dict(_tried(told[name]))
        if tried and all(tried.values()):
            said = "; ".join(f"{where}: {error}" for where, error in tried.items())
            yield f"{server} cannot be reached from here ({said}): is it up, and does a firewall let its port through?"


def _tried(url: str) -> Iterator[tuple[str, str]]:
    under = Sentinels.of(url)
    for host, port in under.hosts if under else ((one.hostname, one.port) for one in map(urlsplit, url.split(","))):
        if host and port:
            try:
                socket.create_connection((host, port), CONNECT_S).close()
                yield f"{host}:{port}", ""
            except OSError as error:
                yield f"{host}:{port}", error.strerror or str(error) or "no answer"


async def _run(environment: Mapping[str, str], port: int, output: Output) -> int:
    """Keep both alive until a signal; then end the agent, with its engines, before the prefetcher."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    url = f"http://127.0.0.1:{port + 1}"
    prefetcher = {"GLOWPLUG_NATS_URL", "GLOWPLUG_REDIS_URL"}
    own = {name: environment[f"PREFETCHER_{name}"] for name in prefetcher if f"PREFETCHER_{name}" in environment}
    children = [
        _child("prefetcher", port + 1, {**environment, **own}, output),
        _child("agent", port, {**environment, "GLOWPLUG_PREFETCHER_URL": url}, output),
    ]
    for child in children:
        child.start()
    await stopping.wait()
    output.say("stopping: running requests end first ...")
    grace_s = float(environment.get("GLOWPLUG_DRAIN_S", DRAIN_S)) + GRACE_S
    for child in reversed(children):
        await child.stop(grace_s)
    output.say("stopped")
    return 0


def _child(service: str, port: int, environment: Mapping[str, Any], output: Output) -> Child:
    name = f"{service}-{environment['GLOWPLUG_NODE_ID']}"
    own = {"GLOWPLUG_SERVICE_ID": name, "GLOWPLUG_PORT": str(port)}
    spec = spec_of(service, name, f"http://127.0.0.1:{port}", {**environment, **own})
    return Child(spec, output, lambda _: None, longest_wait_s=RESTART_MAX_S)
