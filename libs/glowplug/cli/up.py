"""`glowplug up`, `down` and `status`: the local fleet as a whole."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import Annotated, Any

import httpx
import psutil
import typer

from glowplug.cli import contexts
from glowplug.cli.client import bearer, connect
from glowplug.cli.options import (
    EngineOption,
    JsonOption,
    NodesOption,
    PortOption,
    StateDirOption,
)
from glowplug.cli.terminal import CliError, age, emit, say
from glowplug.domain.address import is_loopback
from glowplug.domain.units import show_bytes
from glowplug.runtime.errors import AlreadyRunning
from glowplug.runtime.supervisor.fleet import LocalFleet, default_shm_dir, run_fleet
from glowplug.runtime.supervisor.output import Output
from glowplug.runtime.supervisor.probe import http_status
from glowplug.runtime.supervisor.settings import LOG_MAX_BYTES, FleetSettings
from glowplug.runtime.supervisor.statedir import StateDir, read_fleet
from glowplug.runtime.supervisor.sweep import engines_of, of_processes, sweep

MODELS_WAIT_S = 30.0
DOWN_WAIT_S = 60.0
POLL_S = 0.1
BANNER_HAS = "glowplug run"
ELSEWHERE = "`glowplug down` and `glowplug status` are for fleets that `glowplug up` started on this machine"


def settings_of(state_dir: Path | None, **given: Any) -> FleetSettings:
    """Command line over environment over defaults. Raises WrongSetting."""
    stated = {key: value for key, value in {"state_dir": state_dir, **given}.items() if value is not None}
    return FleetSettings.read(**stated)


def up(
    engine: EngineOption = None,
    nodes: NodesOption = None,
    port_base: PortOption = None,
    state_dir: StateDirOption = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background, and return when the fleet is ready.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not print the logs of services; they are in files.")
    ] = False,
) -> None:
    """Start the local fleet: NATS, Valkey, router, predictor, placer, autoscaler, console and the nodes. Its state is
    in .glowplug of this folder; without --state-dir it becomes the current context (see `glowplug context`)."""
    settings = settings_of(state_dir, engine=engine, nodes=nodes, port_base=port_base)
    if detach:
        _up_detached(settings, state_dir)
        return
    state = StateDir(settings.state_dir)
    state.lock(settings.min_free_bytes)
    output = Output(state.directory("logs"), max_bytes=LOG_MAX_BYTES, show_logs=False)

    async def on_ready(fleet: LocalFleet) -> None:
        output.say(await banner(fleet, is_given=state_dir is not None))
        output.show_logs = not quiet

    try:
        code = asyncio.run(run_fleet(settings, output, state, on_ready))
    finally:
        output.close()
        state.unlock()
    raise typer.Exit(code)


async def banner(fleet: LocalFleet, *, is_given: bool) -> str:
    took_s = time.time() - fleet.started_at
    urls, document = fleet.plan.urls(), fleet.document()
    models = await wait_for_models(urls, document["api_key"])
    key = document["api_key"]
    authorization = f" -H 'Authorization: Bearer {key}'" if key else ""
    first = models[0] if models else "MODEL"
    lines = [
        "",
        f"Glowplug is ready after {took_s:.1f} s ({fleet.settings.engine} engine"
        + (", EMULATED: its answers and timings are modelled" if fleet.settings.engine == "emulated" else "")
        + ")",
        f"  console     {urls['console']}",
        f"  OpenAI API  {urls['data']}/v1",
        "  web pages   of other sites: GLOWPLUG_ALLOWED_ORIGINS=https://app.example (or *) glowplug up",
        f"  models      {', '.join(models) or 'none yet: glowplug deploy FILE'}",
        f"  model files {fleet.models_dir} (edit them; they are reread)",
        f"  logs        {fleet.state.path / 'logs'}",
    ]
    if not is_loopback(fleet.settings.host):
        lines += [f"  API key     {key}", f"  admin token {document['admin_token']}"]
    body = (
        f'{{"model": "{first}", "stream": true, "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'
    )
    lines += [
        "",
        f"  curl -N {urls['data']}/v1/chat/completions{authorization} -H 'Content-Type: application/json' \\",
        f"    -d '{body}'",
        f"  glowplug run {first} 'Why is the sky blue?'   |   glowplug status, models, ps, top, tap, why, down",
        *on_path(Path(sys.executable).parent),
        *(_where(fleet.state.path) if is_given else _recorded(fleet.state.path)),
        "",
    ]
    return "\n".join(lines)


def _recorded(state_dir: Path) -> list[str]:
    try:
        return [f"  other folders find this fleet as context {contexts.record(state_dir)}: glowplug context"]
    except CliError as error:
        return [f"  other folders do not find this fleet: {error}"]


def folder_of(state_dir: Path | None) -> Path:
    """Raises CliError for a fleet started elsewhere."""
    where = contexts.chosen(state_dir)
    if where.urls:
        raise CliError(f"context {where.name} is a fleet that runs elsewhere, and {ELSEWHERE}")
    return Path(where.state_dir)


def _where(state_dir: Path) -> list[str]:
    is_found = Path(contexts.chosen(None, by_context=False).state_dir) == state_dir.absolute()
    return [] if is_found else [f"  first: export GLOWPLUG_STATE_DIR={state_dir}"]


def on_path(bin_dir: Path) -> list[str]:
    if which("glowplug") is not None or not (bin_dir / "activate").is_file():
        return []
    return [f"  `glowplug` is not on the path here: source {bin_dir / 'activate'}, or type {bin_dir / 'glowplug'}"]


async def wait_for_models(urls: Mapping[str, str], api_key: str = "") -> list[str]:
    """Return names at the data port, once it lists all models of the files, or after MODELS_WAIT_S."""
    deadline = time.monotonic() + MODELS_WAIT_S
    names: list[str] = []
    async with httpx.AsyncClient(trust_env=False, headers=bearer(api_key), timeout=2) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                deployed = (await client.get(f"{urls['autoscaler']}/v1/models")).json()
                listed = (await client.get(f"{urls['data']}/v1/models")).json()
                names = [row["id"] for row in listed["data"]]
                if deployed["files_read"] and {row["name"] for row in deployed["data"]} <= {*names}:
                    break
            await asyncio.sleep(POLL_S)
    return names


def _up_detached(settings: FleetSettings, state_dir: Path | None) -> None:
    running = read_fleet(settings.state_dir)
    if running is not None:
        raise AlreadyRunning(f"a fleet already runs in {settings.state_dir} (pid {running['pid']}): `glowplug down`")
    state = StateDir(settings.state_dir)
    state.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    log_path = state.directory("logs") / "up.log"
    argv = [sys.executable, "-m", "glowplug.cli.main", "up", "--quiet"]
    argv += ["--state-dir", str(settings.state_dir)] if state_dir else []
    argv += ["--engine", settings.engine, "--nodes", str(settings.nodes), "--port-base", str(settings.port_base)]
    with log_path.open("w") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    with log_path.open(encoding="utf-8", errors="replace") as shown:
        while process.poll() is None:
            say(shown.read(), nl=False)
            fleet = read_fleet(settings.state_dir) or {}
            is_ready = fleet.get("pid") == process.pid and fleet.get("phase") == "ready"
            if is_ready and BANNER_HAS in log_path.read_text(errors="replace"):
                say(shown.read(), nl=False)
                return
            time.sleep(POLL_S)
        say(shown.read(), nl=False)
    raise typer.Exit(process.returncode or 1)


def down(state_dir: StateDirOption = None) -> None:
    """Stop the local fleet and wait until all of it has ended."""
    settings = settings_of(folder_of(state_dir))
    fleet = read_fleet(settings.state_dir)
    if fleet is None:
        _sweep_left_over(settings)
        return
    supervisor = psutil.Process(fleet["pid"])
    os.kill(supervisor.pid, signal.SIGTERM)
    say(f"stopping the fleet in {settings.state_dir} (pid {supervisor.pid}) ...")
    try:
        supervisor.wait(timeout=DOWN_WAIT_S)
    except psutil.TimeoutExpired as error:
        raise CliError(
            f"the fleet did not stop within {DOWN_WAIT_S:g} s; its log is {fleet['log_dir']}/up.log"
        ) from error
    say("stopped")


def _sweep_left_over(settings: FleetSettings) -> None:
    """End the remains of a killed supervisor: engines outlive everything else."""
    if not settings.state_dir.is_dir():
        say(f"no fleet runs in {settings.state_dir}")
        return
    state = StateDir(settings.state_dir)
    state.lock()
    try:
        left = sweep(settings.state_dir)
        shutil.rmtree(settings.shm_dir or default_shm_dir(settings.state_dir), ignore_errors=True)
        state.remove_fleet()
    finally:
        state.unlock()
    say(f"stopped {left} process(es) left by an earlier run" if left else f"no fleet runs in {state.path}")


def status(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Show the processes of the local fleet with their restarts and memory. Exits with 1 if one is not ready."""
    fleet = connect(state_dir).document
    if not fleet:
        raise CliError(f"this fleet runs elsewhere, and {ELSEWHERE}; `glowplug nodes` shows its nodes")
    processes = asyncio.run(_with_readiness(fleet["processes"]))
    memory = of_processes({p["name"]: p["pid"] for p in processes} | {"supervisor": fleet["pid"]})
    for process in processes:
        process["memory_bytes"] = memory.get(process["name"], 0)
    engines = engines_of(Path(fleet["state_dir"]), {fleet["pid"], *(p["pid"] for p in processes)})
    total = sum(memory.values())
    value = {
        "phase": fleet["phase"],
        "engine": fleet["engine"],
        "urls": fleet["urls"],
        "uptime_s": time.time() - fleet["started_at"],
        "memory_bytes": total,
        "engine_memory_bytes": sum(engines.values()),
        "num_engine_processes": len(engines),
        "processes": processes,
    }
    rows = [
        (p["name"], p["state"], p["pid"] or "-", p["restarts"], show_bytes(p["memory_bytes"]), p["url"] or "-")
        for p in processes
    ]
    emit(as_json, value, ("process", "state", "pid", "restarts", "memory", "url"), rows)
    if not as_json:
        say(
            f"\n{fleet['phase']}, up {age(value['uptime_s'])}, {show_bytes(total)} without engines, "
            f"{len(engines)} engine process(es) with {show_bytes(value['engine_memory_bytes'])}\n"
            f"console {fleet['urls']['console']}   API {fleet['urls']['data']}/v1   logs {fleet['log_dir']}"
        )
    raise typer.Exit(0 if all(p["state"] == "ready" for p in processes) else 1)


async def _with_readiness(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask each service now: fleet.json may be older than a hang."""

    async def asked(process: dict[str, Any]) -> dict[str, Any]:
        if process["url"] and process["state"] == "ready" and await http_status(f"{process['url']}/ready") != 200:
            return {**process, "state": "not ready"}
        return dict(process)

    return list(await asyncio.gather(*(asked(process) for process in processes)))
