"""Run the whole local fleet: check, start by tiers, keep alive, describe in fleet.json, stop."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from glowplug import __version__
from glowplug.runtime.errors import CannotStart
from glowplug.runtime.privileges import READER, USERS
from glowplug.runtime.supervisor import embedded, plan, probe
from glowplug.runtime.supervisor.child import Child, ChildSpec, ChildState
from glowplug.runtime.supervisor.output import Output
from glowplug.runtime.supervisor.samples import place_samples, prepare
from glowplug.runtime.supervisor.settings import (
    RESTART_MAX_S,
    SHM_NEEDED_BYTES,
    STOP_MARGIN_S,
    FleetSettings,
    check_services,
)
from glowplug.runtime.supervisor.statedir import Secrets, StateDir
from glowplug.runtime.supervisor.sweep import sweep

SAVE_EVERY_S = 0.2
PROGRESS_EVERY_S = 0.5


class LocalFleet:
    """One run. `start` returns when ready, `stop` when nothing is left."""

    def __init__(self, settings: FleetSettings, output: Output, state: StateDir) -> None:
        """`state` stays locked until after `stop`."""
        self.settings, self.output, self.state = settings, output, state
        self.children: list[Child] = []
        self.secrets: Secrets = state.secrets(
            admin_token=settings.admin_token, api_key=settings.api_key, engine_secret=settings.engine_secret
        )
        base = settings.port_base or probe.free_block(settings.host, plan.num_ports(settings.nodes), os.getpid() * 37)
        self.plan = plan.Plan(settings, base)
        self.started_at = time.time()
        self.phase = "starting"  # starting | ready | stopping
        self._nats: embedded.EmbeddedNats | None = None
        self._valkey: embedded.EmbeddedValkey | None = None
        self._changed = asyncio.Event()
        self._saver: asyncio.Task[None] | None = None
        self._unsaved = False
        self.shm_dir = settings.shm_dir or default_shm_dir(state.path)
        self.access_dir = state.path / "access"  # of tenants and keys
        self.models_dir = settings.models_dir or state.path / "models" / settings.engine

    async def start(self) -> None:
        """Raises CannotStart if anything cannot start; still call `stop`."""
        check_services()
        probe.check_ports(self.settings.host, self.plan.ports())
        if self.settings.models_dir is None:
            await asyncio.to_thread(prepare, self.settings.engine, self.models_dir)
            place_samples(self.models_dir, self.settings.engine)
        servers = self._servers()
        self.shm_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._saver = asyncio.create_task(self._save_loop())
        await self._start_tier(servers)
        self.access_dir.mkdir(exist_ok=True)
        env = plan.service_environment(
            self.plan, self.secrets, models_dir=self.models_dir, access_dir=self.access_dir, shm_dir=self.shm_dir
        )
        await self._start_tier(plan.services(self.plan, env, self.servers, self.secrets.engine_secret))
        self.phase = "ready"
        self.save()

    def _servers(self) -> list[ChildSpec]:
        env = plan.base_environment(self.settings, os.environ)
        specs = []
        if not self.settings.nats_url:
            folder = self.state.directory("nats")
            self._nats = embedded.EmbeddedNats(embedded.find_nats(), folder, self.secrets.passwords)
            specs.append(self._nats.spec(env))
        if not self.settings.redis_url:
            folder = self.state.directory("valkey")
            self._valkey = embedded.EmbeddedValkey(embedded.find_valkey(), folder, self.secrets.passwords)
            specs.append(self._valkey.spec(env))
        return specs

    async def _start_tier(self, specs: list[ChildSpec]) -> None:
        """Start all, await all. Raises CannotStart with the last lines of a failed one."""
        started = [
            Child(
                spec,
                self.output,
                lambda _child: self._changed.set(),
                longest_wait_s=RESTART_MAX_S,
                hang_misses=self.settings.hang_misses,
            )
            for spec in specs
        ]
        self.children += started
        for child in started:
            child.start()
        deadline = time.monotonic() + self.settings.ready_timeout_s
        waiting = started
        while waiting := [child for child in waiting if not child.ready.is_set()]:
            looping = next((child for child in waiting if child.crash_looping.is_set()), None)
            if looping is not None:
                raise CannotStart(f"{looping.spec.name} does not start ({looping.exit_reason}){_tail(looping)}")
            if time.monotonic() > deadline:
                late = waiting[0]
                raise CannotStart(
                    f"not ready after {self.settings.ready_timeout_s:g} s: "
                    f"{', '.join(child.spec.name for child in waiting)}{_tail(late)}"
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.5)

    def servers(self, user: str) -> dict[str, str]:
        """Bus and store addresses for a user of runtime/privileges.py, "" if unknown. External servers have one for
        all."""
        nats = self._nats.url(user) if self._nats and self._nats.known else ""
        return {
            "nats_url": self.settings.nats_url or nats,
            "redis_url": self._valkey.url(user) if self._valkey else self.settings.redis_url,
        }

    @property
    def num_ready(self) -> int:
        return sum(child.ready.is_set() for child in self.children)

    def document(self) -> dict[str, Any]:
        """fleet.json: addresses, tokens and states of all processes."""
        me = psutil.Process()
        return {
            "version": __version__,
            "phase": self.phase,
            "pid": me.pid,
            "pid_started_at": me.create_time(),
            "started_at": self.started_at,
            "engine": self.settings.engine,
            "host": self.settings.host,
            "state_dir": str(self.state.path),
            "log_dir": str(self.state.path / "logs"),
            "models_dir": str(self.models_dir),
            "urls": self.plan.urls(),
            "nodes": self.plan.nodes(),
            **self.servers(READER),
            "servers": {user: self.servers(user) for user in USERS if user != READER},
            "admin_token": self.secrets.admin_token,
            "console_key": self.settings.console_key,
            "engine_secret": self.secrets.engine_secret,
            "api_key": plan.enforced_api_key(self.settings, self.secrets),
            "processes": [
                {
                    "name": child.spec.name,
                    "service": child.spec.service,
                    "pid": child.pid,
                    "state": child.state.value,
                    "restarts": child.num_restarts,
                    "exit_reason": child.exit_reason,
                    "problem": child.problem,
                    "url": child.spec.url,
                }
                for child in self.children
            ],
        }

    def save(self) -> bool:
        """Write fleet.json. False on a disk error, which is reported once and ends no running fleet."""
        try:
            self.state.write_fleet(self.document())
        except CannotStart as error:
            if not self._unsaved:
                self.output.notice(str(error))
            self._unsaved = True
            return False
        self._unsaved = False
        return True

    async def _save_loop(self) -> None:
        last: dict[str, Any] = {}
        while True:
            document = self.document()
            if document != last and self.save():
                last = document
            await asyncio.sleep(SAVE_EVERY_S)

    async def stop(self) -> None:
        """Stop the edge first, to finish its streams; then control, nodes and engines; the console, for the last spans;
        the servers."""
        self.phase = "stopping"
        self.save()
        for kinds in (("router",), ("autoscaler", "placer", "predictor"), ("agent", "prefetcher")):
            await self._stop([child for child in self.children if child.spec.service in kinds])
        await asyncio.to_thread(self._sweep_engines)
        await self._stop([child for child in self.children if child.spec.service == "console"])
        await self._stop([child for child in self.children if child.state is not ChildState.STOPPED])
        if self._saver:
            self._saver.cancel()
        if self._valkey:
            self._valkey.remove()
        shutil.rmtree(self.shm_dir, ignore_errors=True)
        self.state.remove_fleet()

    async def _stop(self, children: list[Child]) -> None:
        await asyncio.gather(*(child.stop(self.settings.drain_s + STOP_MARGIN_S) for child in children))

    def _sweep_engines(self) -> None:
        mine = frozenset(child.pid for child in self.children if child.pid)
        sweep(self.state.path, grace_s=2.0, spare=mine)


def _tail(child: Child) -> str:
    lines = [line for line in child.tail if line.strip()]
    return "; its last lines:\n" + "\n".join(f"    {line}" for line in lines) if lines else "; it wrote nothing"


def default_shm_dir(state_dir: Path) -> Path:
    """Host memory for weights: /dev/shm if large enough, else in the state directory."""
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= SHM_NEEDED_BYTES:
        name = hashlib.sha256(str(state_dir).encode()).hexdigest()[:12]
        return shm / f"glowplug-{os.getuid()}-{name}"
    return state_dir / "shm"


async def run_fleet(
    settings: FleetSettings, output: Output, state: StateDir, on_ready: Callable[[LocalFleet], Awaitable[int | None]]
) -> int:
    """Run a fleet in `state` (locked by the caller) and return the exit code. When all is ready `on_ready` is called: a
    number ends the fleet with that code, None keeps it until SIGINT or SIGTERM. A second signal kills without grace.
    Raises CannotStart if the start fails."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()
    left = await asyncio.to_thread(sweep, state.path)
    if left:
        output.say(f"stopped {left} process(es) of an earlier run")
    fleet = LocalFleet(settings, output, state)

    def on_signal() -> None:
        if stopping.is_set():
            for child in fleet.children:
                child.kill()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        return await _until_stopped(fleet, output, stopping, on_ready)
    finally:
        output.show_logs = False
        output.say("stopping ...")
        await fleet.stop()
        output.say("stopped")


async def _until_stopped(
    fleet: LocalFleet, output: Output, stopping: asyncio.Event, on_ready: Callable[[LocalFleet], Awaitable[int | None]]
) -> int:
    signalled = asyncio.create_task(stopping.wait())
    progress = asyncio.create_task(_progress(fleet, output))
    start = asyncio.create_task(fleet.start())
    try:
        await asyncio.wait({start, signalled}, return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
        if not start.done():
            raise CannotStart("stopped before it was ready")
        await start
        ready = asyncio.ensure_future(on_ready(fleet))
        await asyncio.wait({ready, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            code = await ready
            if code is not None:
                return code
            await signalled
        else:
            ready.cancel()
        return 0
    finally:
        for task in (signalled, progress, start):
            task.cancel()
        await asyncio.gather(signalled, progress, start, return_exceptions=True)


async def _progress(fleet: LocalFleet, output: Output) -> None:
    started, last = time.monotonic(), ""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            waiting = [child.spec.name for child in fleet.children if not child.ready.is_set()]
            text = f"starting: {fleet.num_ready} of {len(fleet.children)} ready"
            if waiting and fleet.num_ready:
                text += f", waiting for {', '.join(waiting[:4])}{' ...' if len(waiting) > 4 else ''}"
            if fleet.children and text != last:
                output.progress(f"{text} ({time.monotonic() - started:.1f} s)")
                last = text
            await asyncio.sleep(PROGRESS_EVERY_S)
