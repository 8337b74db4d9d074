"""Assemble an agent: its controller, shell, engines and log reader."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry

from glowplug.bus.port import Bus
from glowplug.controllers.agent.controller import NODES, AgentController
from glowplug.controllers.agent.messages import NodeStopping, Recalled, Surroundings
from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.controllers.agent.reads import READS
from glowplug.controllers.effects import Publish, Remove, Tick
from glowplug.domain.address import is_wildcard
from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.engines import drivers
from glowplug.engines.port import Ability, EngineDriver, RefusingSleeper
from glowplug.events.facts import NodeJoined, NodeLeft
from glowplug.memory.discovery import EMULATED, HOST, discover
from glowplug.memory.ledger import ByteLedger
from glowplug.runtime.clock import now_s
from glowplug.runtime.host_memory import memory_bytes, sleepers_bytes
from glowplug.runtime.service import announce
from glowplug.runtime.shell import Shell
from glowplug.runtime.tasks import end
from glowplug.services.agent.cores import CoresWatch, num_cores
from glowplug.services.agent.executor import EngineExecutor
from glowplug.services.agent.processes import kill_orphans, reap_strays
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.agent.state_file import NodeLock, StateFile
from glowplug.services.agent.telemetry import NodeCollector, Reporter
from glowplug.state.port import Store
from glowplug.telemetry.log_ring import LogRing
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.weights.inventory import read_cached, read_disk, read_links

# Followed log files of engines.

POLL_S: Final = 0.5
MAX_READ_BYTES: Final = 64 << 10  # of one file at a time; of more, the newest
_LEVEL: Final = re.compile(r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b", re.IGNORECASE)
_LEVELS: Final = {"warn": "warning", "fatal": "critical"}
_LEVEL_CHARS: Final = 80


@dataclass(slots=True)
class _File:
    offset: int
    rest: bytes = b""


class EngineOutputs:
    """Follow engines' log files into `ring`. Two instances of one process share a file, whose lines count for the newer
    one."""

    def __init__(self, ring: LogRing, node_id: str, path_of: Callable[[str], Path]) -> None:
        self.ring = ring
        self._node_id, self._path_of = node_id, path_of
        self._files: dict[tuple[int, int], _File] = {}  # by (device, inode)

    async def follow(self, instances: Callable[[], Iterable[Instance]]) -> None:
        while True:
            rows = sorted(instances(), key=lambda row: -row.created_at)
            await asyncio.to_thread(self.read, rows, time.time())
            await asyncio.sleep(POLL_S)

    def read(self, instances: Iterable[Instance], now_s: float) -> None:
        seen: dict[tuple[int, int], _File] = {}
        for instance in instances:
            path = self._path_of(instance.instance_id)
            try:
                stat = path.stat()
            except OSError:
                continue
            place = (stat.st_dev, stat.st_ino)
            if place in seen:
                continue
            file = seen[place] = self._files.get(place) or _File(max(0, stat.st_size - MAX_READ_BYTES))
            if stat.st_size != file.offset:
                self._take(path, stat.st_size, file, instance, now_s)
        self._files = seen

    def _take(self, path: Path, size: int, file: _File, instance: Instance, now_s: float) -> None:
        begin = file.offset if file.offset <= size else 0  # it was truncated
        if size - begin > MAX_READ_BYTES:
            begin, file.rest = size - MAX_READ_BYTES, b""
        try:
            with path.open("rb") as log:
                log.seek(begin)
                data = log.read(size - begin)
        except OSError:
            return
        file.offset = begin + len(data)
        *lines, file.rest = (file.rest + data).split(b"\n")
        fields = {"instance": instance.instance_id, "model": instance.model_key, "node": self._node_id}
        for line in lines:
            if text := line.decode("utf-8", "replace").rstrip():
                self.ring.put(now_s, level_of(text), text, fields)
        if len(file.rest) > MAX_READ_BYTES:
            file.rest = b""


def level_of(line: str) -> str:
    found = _LEVEL.search(line, 0, _LEVEL_CHARS)
    word = found[1].lower() if found else "info"
    return _LEVELS.get(word, word)


log = logging.getLogger(__name__)
CONNECT_S = 2.0
LINKS_S = 0.2  # between looks while the prefetcher's links are unknown
QUIET_TICK_S = 0.25  # between ticks while nothing changes
STOP_MARGIN_S = 2.0  # for the kernel to free a large engine's memory


class AgentService:
    """Take the node's lock and memory. Raises NodeTaken, ValueError or HardwareUnavailable."""

    def __init__(
        self,
        settings: AgentSettings,
        bus: Bus,
        store: Store,
        metrics: ShellMetrics,
        *,
        drivers: dict[str, EngineDriver] | None = None,
        registry: CollectorRegistry = REGISTRY,
        connect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.settings, self._bus, self._connect = settings, bus, connect
        self._lock = NodeLock(settings.node_dir, settings.node)
        self._drivers, refused = find_engines(settings) if drivers is None else (drivers, {})
        kind = gpu_kind(settings.gpu_kind, self._drivers)
        may = {"streams": settings.stream_weights, "stages": bool(settings.stages_at)}
        started = {name: engine_kind(driver, kind, **may) for name, driver in self._drivers.items()}
        kinds = refused | started
        found = discover(settings.node, kind, settings.gpu_budgets.split(","))
        self.warnings = found.warnings
        for warning in self.warnings:
            log.warning("the agent starts with a limitation: %s", warning)
        if is_wildcard(settings.host) and not settings.advertise_host:
            log.warning("GLOWPLUG_ADVERTISE_HOST is empty: other machines cannot reach this agent and its engines")
        self._state = StateFile(settings.node_dir / "agent.json")
        self.engines = EngineExecutor(settings, self._drivers, self._state)
        reporter = Reporter(registry)
        self.controller = AgentController(
            settings.node,
            ByteLedger(found.gpus),
            kinds,
            stages_at=settings.stages_at,
            params=with_bound(settings.params, kind),
            memory=self._state.memory,
        )
        self.shell = Shell(
            "agent",
            settings.service_id,
            self.controller,
            bus,
            store,
            metrics,
            reads=READS,
            executors={**self.engines.executors(), **reporter.executors()},
            tick_s=settings.tick_s,
            quiet_tick_s=max(settings.tick_s, QUIET_TICK_S),
            is_quiet=lambda: self.controller.is_quiet,
            resync_s=settings.resync_s,
        )
        self.engines.connect(self.shell.put)
        self.outputs = EngineOutputs(LogRing(), settings.node, self.engines.log_path)
        registry.register(NodeCollector(self.controller))
        self._tasks: list[asyncio.Task[None]] = []
        self._cores, self._num_cores = CoresWatch(), num_cores()
        self._is_joined = False

    def not_ready(self) -> str:
        if not self.shell.restored:
            return "connecting to the store"
        if not self._is_joined or not self._bus.connected:
            return "connecting to the bus"
        return self._bus.refusal or self.shell.store.refusal

    async def start(self, url: str = "") -> None:
        """Resume living engines, then serve. Returns at once."""
        self.controller.agent_url = url
        living = self.engines.living()
        unknown = self._state.handles.keys() - self.controller.holdings.keys()
        for instance_id in unknown:
            self._state.drop_handle(instance_id)
        await asyncio.to_thread(kill_orphans, self.settings.node_dir / "run", self.engines.processes())
        self.engines.tidy()
        if living:
            log.info("the agent resumes the engines of %s", ", ".join(sorted(living)))
        await self.shell.put(Recalled(living))
        warmed = [driver for driver in self._drivers.values() if self.settings.warms(driver.name)]
        reading = self.outputs.follow(lambda: self.controller.instances)
        lasting = (
            self._join(),
            self._look_around(),
            self._cores.watch(),
            self.engines.watch_memory(),
            reap_strays(),
            reading,
        )
        bodies = (*lasting, *(self._warm(driver) for driver in warmed))
        self._tasks = [asyncio.create_task(body) for body in bodies]
        for task in self._tasks:
            task.add_done_callback(_log_fault)

    async def _join(self) -> None:
        connecting = asyncio.ensure_future(self._connect()) if self._connect is not None else None
        if connecting is not None:
            await asyncio.wait([connecting], timeout=CONNECT_S)  # engines need care without a bus
        try:
            await self.shell.start()
            if connecting is not None:
                await connecting
        finally:
            if connecting is not None:
                connecting.cancel()
        node_id = self.settings.node
        await self._bus.subscribe(READS.command_filters(node_id), self.shell.on_event, durable=f"agent-{node_id}")
        await self.shell.execute([Publish(NodeJoined(node=self.controller.node(now_s())))])
        await announce(self.shell, self.controller.agent_url)
        self._is_joined = True
        log.info(
            "node %s has joined the fleet with %s",
            node_id,
            ", ".join(sorted(self._drivers)) or "no engine that can start",
        )

    async def _look_around(self) -> None:
        """Report the prefetcher's host memory and links. Unknown links count as fast, so look more often until they are
        known."""
        before: Surroundings | None = None
        while True:
            around = await asyncio.to_thread(self._surroundings)
            self._state.retry()
            if around != before:
                before = around
                await self.shell.put(around)
            await asyncio.sleep(next_look_s(around, self.settings.inventory_s))

    def _surroundings(self) -> Surroundings:
        where = (self.settings.shm_dir.absolute(), self.settings.node)
        disk = read_disk(*where)
        return Surroundings(
            cached=read_cached(*where),
            links=read_links(*where),
            host_cache_bytes=self.settings.host_cache_bytes,
            prefetcher_url=self.settings.prefetcher_url,
            on_disk=disk.copies,
            disk_bytes_per_s=disk.bytes_per_s,
            num_cores=self._num_cores,
            num_runnable=self._cores.num_runnable,
        )

    async def _warm(self, driver: EngineDriver) -> None:
        try:
            await driver.warm()
        except Exception:  # starts are only slower
            log.exception("the agent cannot prepare the engine %s", driver.name)

    async def stop(self) -> None:
        """Drain and stop every engine (or leave them, as set), and leave the fleet."""
        settings = self.settings
        is_final = settings.engines_on_stop == "stop"
        if is_final:
            await self._stop_engines()
        await end(self._tasks)
        await self.shell.stop()
        if is_final:
            left = NodeLeft(node_id=settings.node, reason="the agent was asked to stop")
            await self.shell.execute([Publish(left), Remove(NODES, settings.node)])
        await self.engines.close()
        if is_final:
            await self.engines.end_all()
        for driver in self._drivers.values():
            with contextlib.suppress(OSError):
                await driver.close()
        self._lock.release()

    async def _stop_engines(self) -> None:
        settings = self.settings
        await self.shell.put(NodeStopping("the agent was asked to stop", settings.drain_s))
        deadline = time.monotonic() + settings.drain_s + settings.params.stop_grace_s + STOP_MARGIN_S
        await asyncio.sleep(0)
        while time.monotonic() < deadline and (self.shell.restored and not self._has_stopped()):
            await asyncio.sleep(0.02)
        with contextlib.suppress(TimeoutError):  # the last decisions are published and saved
            await asyncio.wait_for(self.shell.ask(Tick()), STOP_MARGIN_S if self.shell.restored else 0)

    def _has_stopped(self) -> bool:
        return self.controller.is_stopping and self.controller.num_living == 0


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a background task of the agent failed", exc_info=error)


def next_look_s(around: Surroundings, inventory_s: float) -> float:
    is_awaited = bool(around.prefetcher_url) and not around.links
    return min(inventory_s, LINKS_S) if is_awaited else inventory_s


def find_engines(settings: AgentSettings) -> tuple[dict[str, EngineDriver], dict[str, EngineKind]]:
    """Return startable drivers, and the other requested engines with the reason."""
    asked = [name.strip() for name in settings.engines.split(",") if name.strip()] or drivers.installed()
    found: dict[str, EngineDriver] = {}
    refused: dict[str, EngineKind] = {}
    for name in asked:
        try:
            driver = drivers.driver(name, settings.driver)
            why, emulated = driver.unavailable(), driver.capabilities.emulated
        except (GlowplugError, ImportError) as error:
            driver, why, emulated = None, str(error), False
        if driver is not None and not why:
            found[name] = driver
        else:
            log.info("engine %s is not available on %s: %s", name, settings.node, why)
            refused[name] = EngineKind(name=name, emulated=emulated, unavailable=why)
    return found, refused


def engine_kind(driver: EngineDriver, gpu_kind: str, *, streams: bool = True, stages: bool = True) -> EngineKind:
    """`streams`, `stages`: whether those abilities may be used; stages need a port."""
    barred = {ability for ability, may in ((Ability.STREAM, streams), (Ability.STAGES, stages)) if not may}
    abilities = frozenset(driver.abilities(gpu_kind)) - barred
    known = driver.capabilities
    return EngineKind(
        name=driver.name,
        emulated=known.emulated,
        abilities=abilities,
        groups_lack=known.groups_lack if gpu_kind == HOST else frozenset(),
        holds_layers=Ability.FIRST_LAYERS in abilities,
        refuses=isinstance(driver, RefusingSleeper),
        asleep_bytes=known.asleep_bytes,
    )


def with_bound(params: AgentParams, gpu_kind: str) -> AgentParams:
    """Bound sleepers by the machine's memory unless set; those of emulated GPUs take next to none."""
    if params.swap_host_bytes is not None or gpu_kind == EMULATED:
        return params
    return replace(params, swap_host_bytes=sleepers_bytes(memory_bytes()))


def gpu_kind(asked: str, available: Mapping[str, EngineDriver]) -> str:
    only_emulated = bool(available) and all(driver.capabilities.emulated for driver in available.values())
    return EMULATED if asked == HOST and only_emulated else asked
