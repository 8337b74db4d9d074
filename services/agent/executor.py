"""Execute the engine effects of the agent's controller.

Nothing blocks the shell's loop: each effect becomes a task whose outcome returns to the controller as a stimulus."""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.controllers.agent import messages as msg
from glowplug.domain.address import advertised
from glowplug.domain.engine_key import engine_key
from glowplug.domain.errors import EngineFailed, EngineUnable, GlowplugError, NoSpace
from glowplug.domain.instance import EngineFigures, Phase, PhaseName
from glowplug.domain.moment import moved
from glowplug.engines.port import (
    AdapterHost,
    EngineDriver,
    EngineHandle,
    LoadReport,
    Moved,
    Mover,
    Place,
    RefusingSleeper,
    Sleeper,
    StageEndpoint,
    Stager,
)
from glowplug.engines.process import is_alive, log_tail, stop_group
from glowplug.fleet.clocks import AHEAD_S
from glowplug.memory.discovery import CUDA
from glowplug.runtime.clock import now_s
from glowplug.runtime.shell import Executor
from glowplug.services.agent.engine_files import keep_newest_logs, remove_run_dirs
from glowplug.services.agent.processes import LIMIT, EnginePorts, MemoryWatch, bytes_kept, limit_bytes, until_exit
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.agent.state_file import StateFile
from glowplug.services.agent.weights_watch import WeightsWatch
from glowplug.weights.writer import FULL

# Keys of the agent's own entries in the data of an engine's handle.

KEY_ID = "key_id"
REPLICA = "replica"  # to hold weights, not to serve
SHARED, SHARED_FILE = "shared", "shared_file"  # the weights in shared pages: their path, and their file at the load


def noting_shared(handle: EngineHandle, path: str) -> EngineHandle:
    """Note the weights at `path` that a loaded engine reads in shared pages, if any."""
    if not handle.figures.shared_bytes:
        return handle
    return replace(handle, data={**handle.data, SHARED: path, SHARED_FILE: _file(path)})


def figures(handle: EngineHandle) -> EngineFigures:
    """Return the figures of the last load. No bytes are shared once the node has fetched the weights anew: the engine
    keeps those of its open file."""
    file = handle.data.get(SHARED_FILE)
    is_same = bool(file) and _file(handle.data[SHARED]) == file
    return handle.figures if is_same else replace(handle.figures, shared_bytes=0)


def key_id(handle: EngineHandle) -> str:
    return handle.data.get(KEY_ID, "") if handle.api_key else ""


def _file(path: str) -> str:
    """Identify a file or folder, so that a replacement at the same path differs; "" if missing."""
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return f"{found.st_dev}:{found.st_ino}"
    return ""


log = logging.getLogger(__name__)
STREAMS_MOVE_S = 1.0  # for routers to take their streams away
STAGE_POLL_S = 0.2
KV_MOVES_S = 10.0  # for the KV cache to move
KV_KEPT_S = 30.0  # for routers to claim the moved KV cache
SETTLE_S, SETTLE_POLL_S = 2.0, 0.05  # for a sleeper's bytes to return
FREED_S = 10.0  # for a load or wake to wait for bytes of killed engines
END_S, END_POLL_S = 0.2, 0.01  # a connection may break this long before its process is gone
# File systems take names of 255 bytes, some of them for a suffix.
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FAILED: dict[str, Callable[[str, str, str], msg.Outcome]] = {  # (instance_id, code, why) -> outcome
    **dict.fromkeys(("launch", "load", "serve"), msg.EngineStartFailed),
    "weights": msg.WeightsFailed,
    "sleep": lambda instance_id, _, why: msg.SleepFailed(instance_id, why),
    "consolidate": lambda instance_id, code, why: msg.ConsolidationFailed(instance_id, why, code),
    "finish": lambda instance_id, *_: msg.StagesFinished(instance_id, cut=True),
    "stop": lambda instance_id, *_: msg.EngineGone(instance_id, clean=False),
}


class EngineExecutor:
    def __init__(
        self,
        settings: AgentSettings,
        drivers: Mapping[str, EngineDriver],
        state: StateFile,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self._settings, self._drivers, self._state, self._clock = settings, drivers, state, clock
        self._put: Callable[[Any], Awaitable[None]] | None = None
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._weights: dict[str, str] = {}
        self._kv_limits: dict[str, int] = {}
        self._weights_watch = WeightsWatch(settings, clock, self._report)
        self._ports = EnginePorts(settings.host, settings.port_range)
        self._killed: set[str] = set()  # to end without grace
        self._moving: dict[str, asyncio.Event] = {}  # whose requests move to another process

    def connect(self, put: Callable[[Any], Awaitable[None]]) -> None:
        self._put = put

    def executors(self) -> dict[type[Any], Executor]:
        def as_task(kind: str, body: Callable[[Any], Coroutine[Any, Any, None]]) -> Executor:
            async def execute(effect: Any, _: Any) -> None:
                self._begin(effect.instance_id, kind, body(effect))

            return execute

        async def load(effect: msg.LoadEngine, _: Any) -> None:
            self._weights[effect.instance_id] = effect.path
            self._begin(effect.instance_id, "load", self._load(effect))

        async def stop(effect: msg.StopEngine, _: Any) -> None:
            if not effect.grace_s:
                self._killed.add(effect.instance_id)
            self._begin(effect.instance_id, "stop", self._stop(effect))

        async def limit(effect: msg.LimitKv, _: Any) -> None:
            self._kv_limits[effect.instance_id] = effect.num_bytes
            self._begin(effect.instance_id, "limit", self._limit_kv(effect.instance_id))

        async def remember(effect: msg.Remember, _: Any) -> None:
            self._state.remember(effect.memory)

        async def forget(effect: msg.ForgetEngine, _: Any) -> None:
            shutil.rmtree(self.run_dir(effect.instance_id), ignore_errors=True)
            self.log_path(effect.instance_id).unlink(missing_ok=True)

        return {
            msg.LaunchEngine: as_task("launch", self._launch),
            msg.AwaitWeights: as_task("weights", self._weights_watch.until_there),
            msg.LoadEngine: load,
            msg.LoadAdapter: as_task("load", self._load_adapter),
            msg.UnloadAdapter: as_task("stop", self._unload_adapter),
            msg.ActivateEngine: as_task("load", self._activate),
            msg.ServeStages: as_task("serve", self._serve_stages),
            msg.ConsolidateEngine: as_task("consolidate", self._consolidate),
            msg.AbandonConsolidation: as_task("abandon", self._abandon),
            msg.FinishStages: as_task("finish", self._finish_stages),
            msg.SleepEngine: as_task("sleep", self._sleep),
            msg.LimitKv: limit,
            msg.StopEngine: stop,
            msg.CheckHealth: as_task("health", self._check_health),
            msg.CountInFlight: as_task("count", self._count),
            msg.Remember: remember,
            msg.ForgetEngine: forget,
        }

    def run_dir(self, instance_id: str) -> Path:
        return self._settings.node_dir / "run" / file_name(instance_id)

    def log_path(self, instance_id: str) -> Path:
        return self._settings.node_dir / "logs" / f"{file_name(instance_id)}.log"

    def living(self) -> frozenset[str]:
        """Return remembered instances whose process still lives, and watch each of them."""
        handles = self._state.handles
        living = {i for i, handle in handles.items() if handle.engine in self._drivers and self._is_alive(handle)}
        busy = {holding.engine for holding in self._state.memory.holdings if holding.consolidation is not None}
        for instance_id in living:
            self._begin(instance_id, "watch", self._watch(handles[instance_id]))
            if isinstance(driver := self._driver(handles[instance_id]), Mover) and instance_id not in busy:
                kept_until = self._clock() + KV_KEPT_S
                self._begin(instance_id, "leave", self._leave_stage(driver, handles[instance_id], kept_until))
        return frozenset(living)

    def tidy(self) -> None:
        """Remove what engines left that ended while no agent ran."""
        handles = self._state.handles.values()
        remove_run_dirs(self._settings.node_dir / "run", handles)
        keep_newest_logs(self._settings.node_dir / "logs", handles)

    def processes(self) -> set[int]:
        """Return the leaders of all processes of remembered instances: a stage and its successor beside it are two."""
        found: set[int] = set()
        for handle in self._state.handles.values():
            driver = self._drivers.get(handle.engine)
            found |= {handle.pid, *(driver.processes(handle) if isinstance(driver, Mover) else ())}
        return found

    async def close(self) -> None:
        """Cancel every task. Engines live on."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def end_all(self) -> None:
        """Kill engines that outlived the drain. The node's next agent reports their ends."""
        for handle in self._state.handles.values():
            if handle.engine in self._drivers and self._is_alive(handle):
                log.warning("the agent kills the engine of %s, which still runs after its drain", handle.instance_id)
                await self._driver(handle).stop(handle, 0.0)

    def _begin(self, instance_id: str, kind: str, body: Coroutine[Any, Any, None]) -> None:
        key = (instance_id, kind)
        if key in self._tasks:
            body.close()
            return
        task = asyncio.create_task(self._guard(kind, instance_id, body))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._tasks.pop(key) if self._tasks.get(key) is done else None)
        task.add_done_callback(lambda _: body.close())  # for a task cancelled before it began

    async def _guard(self, kind: str, instance_id: str, body: Coroutine[Any, Any, None]) -> None:
        """Turn errors of engines, drivers and our own code into outcomes: none of them ends the agent."""
        try:
            await body
        except Exception as error:
            if isinstance(error, GlowplugError) and kind in _FAILED and kind != "stop":
                code, why = error.code, error.message
            elif isinstance(error, OSError) and error.errno in FULL and kind != "stop":
                code, why = NoSpace.code, f"{kind}: {error}"
            else:
                log.exception("the task %r of the agent failed for %s", kind, instance_id)
                code, why = "internal_error", f"{kind}: {error!r}"
            if (outcome := _FAILED.get(kind)) is not None:
                await self._report(outcome(instance_id, code, why))

    async def _report(self, stimulus: Any) -> None:
        assert self._put is not None, "connect() first"
        await self._put(stimulus)

    def _driver(self, handle: EngineHandle) -> EngineDriver:
        return self._drivers[handle.engine]

    def _is_alive(self, handle: EngineHandle) -> bool:
        driver = self._drivers.get(handle.engine)
        return driver.adopt(handle) if driver else is_alive(handle.pid, handle.pid_started_at)

    async def _launch(self, effect: msg.LaunchEngine) -> None:
        command, devices = effect.command, effect.devices
        driver, num_gpus = self._drivers[command.model.engine], len(devices.ordinals)
        if num_gpus > 1 and not driver.capabilities.groups:
            reason = f"{command.model.engine} runs on one GPU, not on {num_gpus}"
            await self._report(msg.EngineStartFailed(effect.instance_id, "engine_unavailable", reason))
            return
        run_dir, log_path = self.run_dir(effect.instance_id), self.log_path(effect.instance_id)
        own_key = secrets.token_hex(8)
        try:
            port = self._ports.take(effect.instance_id, (handle.port for handle in self._state.handles.values()))
            place = Place(
                run_dir=run_dir,
                log_path=log_path,
                devices=devices,
                traceparent=effect.traceparent,
                host=self._settings.host,
                port=port,
                api_key=engine_key(self._settings.engine_secret, own_key),
                address=self._settings.address,
            )
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True, mode=0o700)
            log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = await driver.launch(command, place)
        except OSError as error:
            raise NoSpace(f"cannot prepare {run_dir}: {error}") from error
        else:
            overhead_bytes = self._settings.engine_overhead_bytes or driver.capabilities.overhead_bytes
            limit = limit_bytes(command.model, devices, overhead_bytes)
            data = {**handle.data, LIMIT: str(limit), KEY_ID: own_key} | ({REPLICA: "1"} if command.replica else {})
            handle = replace(handle, devices=devices, data=data)
            self._state.put_handle(handle)
            self._begin(effect.instance_id, "watch", self._watch(handle))
            await self._report(msg.EngineLaunched(effect.instance_id))
        finally:
            self._ports.settled(effect.instance_id)

    async def watch_memory(self) -> None:
        watch = MemoryWatch(lambda: self._state.handles, self._is_alive, self._report)
        await watch.run(self._settings.engine_memory_s)

    async def _load(self, effect: msg.LoadEngine) -> None:
        handle = self._state.handles[effect.instance_id]
        driver = self._driver(handle)
        await self._until_freed(handle)
        report = await driver.load(handle, Path(effect.path))
        loaded = noting_shared(report.handle, effect.path)
        self._state.put_handle(loaded)
        if REPLICA in handle.data:
            if isinstance(driver, Sleeper):
                await driver.sleep(loaded, "prewarmed")
            await self._report(msg.EnginePrewarmed(effect.instance_id, figures(loaded)))
            return
        await self._report(self._ready(effect.instance_id, loaded, report.phases))

    async def _load_adapter(self, effect: msg.LoadAdapter) -> None:
        """Report the host's engine, which now answers for the adapter. Raises EngineFailed, EngineUnable if engines of
        its kind take no adapters."""
        host_id = effect.command.host_id
        handle = self._host(host_id)
        if handle is None:
            raise EngineFailed(f"the engine of {host_id}, which should load the adapter, is gone")
        await self._adapter_host(handle).load_adapter(handle, effect.command.model, Path(effect.path))
        await self._report(self._ready(effect.instance_id, handle, ()))

    def _host(self, host_id: str) -> EngineHandle | None:
        handle = self._state.handles.get(host_id)
        return handle if handle is not None and self._is_alive(handle) else None

    def _adapter_host(self, handle: EngineHandle) -> AdapterHost:
        driver = self._driver(handle)
        if not isinstance(driver, AdapterHost):
            raise EngineUnable(f"{handle.engine} takes no adapters")
        return driver

    async def _activate(self, effect: msg.ActivateEngine) -> None:
        source = effect.command.source
        for kind in ("load", "sleep", "limit", "watch", "health", "count"):
            await self._cancel(source, kind)
        handle = self._state.rename_handle(source, effect.instance_id)
        path = self._weights.pop(source, "")
        if handle is None or not self._is_alive(handle):
            raise EngineFailed(f"the engine of {source} is gone")
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(handle.log_path, self.log_path(effect.instance_id))  # one log under both names
        self._begin(effect.instance_id, "watch", self._watch(handle))
        driver, began = self._driver(handle), self._clock()
        await self._until_freed(handle)
        if not handle.url:
            handle = noting_shared((await driver.load(handle, Path(path))).handle, path)
        handle = replace(handle, data={k: v for k, v in handle.data.items() if k != REPLICA})
        self._state.put_handle(handle)
        if isinstance(driver, Sleeper):
            await self._wake(handle, driver)
        load = Phase(name=PhaseName.LOAD, started_at=began, ended_at=self._clock())
        await self._report(self._ready(effect.instance_id, handle, (load,)))

    async def _until_freed(self, handle: EngineHandle) -> None:
        """Wait for the device memory of killed engines.

        Their grant passes to others at once, but the device frees it only with the process. Host memory tolerates
        the overlap."""
        if handle.devices.kind != CUDA:
            return
        device = handle.devices.ordinals[0]
        there = {i for i, known in self._state.handles.items() if known.devices.ordinals[0] == device} & self._killed
        ending = [task for (i, kind), task in self._tasks.items() if kind == "stop" and i in there]
        if ending:
            await asyncio.wait(ending, timeout=FREED_S)

    async def _wake(self, handle: EngineHandle, driver: Sleeper) -> None:
        """Wake the engine. Raises EngineFailed, with the end of its log if the process has ended."""
        try:
            await driver.wake(handle)
        except EngineFailed as error:
            if not await self._ends(handle):
                raise
            tail = log_tail(Path(handle.log_path))
            raise EngineFailed(f"the engine process ended by itself while it woke\n{tail}".strip()) from error

    async def _ends(self, handle: EngineHandle) -> bool:
        deadline = time.monotonic() + END_S
        while self._is_alive(handle):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(END_POLL_S)
        return True

    def _ready(self, instance_id: str, handle: EngineHandle, phases: tuple[Phase, ...]) -> msg.EngineReady:
        url = advertised(handle.url, self._settings.advertise_host)
        by_s = self._clock() - time.time()  # engines tell times by the wall clock
        if abs(by_s) > AHEAD_S:
            phases = tuple(moved(phase, by_s) for phase in phases)
        return msg.EngineReady(instance_id, url, phases, key_id(handle), figures(handle))

    def _staged(self, instance_id: str) -> tuple[EngineHandle, Stager]:
        """Raises EngineFailed if the instance has no engine, EngineUnable for an engine without stages."""
        handle = self._state.handles.get(instance_id)
        if handle is None:
            raise EngineFailed("this agent has no engine of that instance")
        driver = self._driver(handle)
        if not isinstance(driver, Stager):
            raise EngineUnable(f"{handle.engine} does not run in stages")
        return handle, driver

    async def _serve_stages(self, effect: msg.ServeStages) -> None:
        handle, driver = self._staged(effect.instance_id)
        secret = self._settings.engine_secret
        later = [StageEndpoint(url=one.url, api_key=engine_key(secret, one.key_id)) for one in effect.later]
        loaded = await driver.serve_stages(handle, later)
        self._state.put_handle(loaded.handle)
        await self._report(self._ready(effect.instance_id, loaded.handle, loaded.phases))

    async def _consolidate(self, effect: msg.ConsolidateEngine) -> None:
        """Await the rest of the weights first, which the node's prefetcher fetches at the placer's request."""
        handle, driver = self._staged(effect.instance_id)
        began = self._clock()
        path = Path(await self._weights_watch.until_whole(effect.instance_id, effect.model.weights))
        fetched = self._clock()
        if isinstance(driver, Mover):
            own = f"{effect.instance_id}.whole"
            port = self._ports.take(own, (handle.port for handle in self._state.handles.values()))
            try:
                kv_tokens = await driver.consolidate_at(handle, effect.model, path, port)
            finally:
                self._ports.settled(own)
        else:
            kv_tokens = await driver.consolidate(handle, effect.model, path)
        phases = (_phase(PhaseName.FETCH, began, fetched), _phase(PhaseName.LOAD, fetched, self._clock()))
        await self._became_whole(handle, driver, kv_tokens, phases)

    async def _became_whole(
        self, handle: EngineHandle, driver: Stager, kv_tokens: int, phases: tuple[Phase, ...] = ()
    ) -> None:
        if not isinstance(driver, Mover):
            await self._whole(handle.instance_id, kv_tokens, phases)
        elif (whole := driver.whole(handle)) is None:
            raise EngineFailed("the process that should run the whole model has ended")
        else:
            await self._moved(handle.instance_id, driver, whole, phases)

    async def _moved(self, instance_id: str, driver: Mover, whole: LoadReport, phases: tuple[Phase, ...]) -> None:
        """Hand the requests in the stages over to the process that runs the whole model.

        The KV cache is read while all stages live, then routers continue their streams in the new process
        (docs/adr/0024-stages-of-real-engines.md). If a stage ends meanwhile, the KV cache is computed anew."""
        handle = whole.handle
        self._moving[instance_id] = asyncio.Event()
        try:
            came = await self._kv_moved(driver, handle)
            log.info("%s becomes whole in another process: %s", instance_id, came)
            self._state.put_handle(handle)
        finally:
            self._moving.pop(instance_id).set()
        for kind in ("watch", "health", "count"):
            await self._cancel(instance_id, kind)
        self._begin(instance_id, "watch", self._watch(handle))
        url = advertised(handle.url, self._settings.advertise_host)
        await self._report(msg.EngineConsolidated(instance_id, handle.figures.kv_tokens, url, key_id(handle), phases))

    async def _kv_moved(self, driver: Mover, handle: EngineHandle) -> Moved | str:
        """Return the moved part of the KV cache, or the reason why nothing moved."""
        if not self._weights_watch.is_as_read(handle.instance_id):
            return "its weights were fetched again, so its KV cache is recomputed"
        try:
            async with asyncio.timeout(KV_MOVES_S):
                return await driver.move_requests(handle)
        except EngineFailed as error:
            return error.message
        except TimeoutError:
            return f"its KV cache did not arrive within {KV_MOVES_S:g} s"

    async def _finish_stages(self, effect: msg.FinishStages) -> None:
        """Let routers take their streams away first; the rest, and requests that have not begun, end in the stages.
        Then the placer ends the later ones, and the first ends."""
        handle = self._state.handles.get(effect.instance_id)
        driver = self._driver(handle) if handle is not None else None
        if handle is None or not isinstance(driver, Mover):
            await self._report(msg.StagesFinished(effect.instance_id))
            return
        kept_until = self._clock() + KV_KEPT_S
        await asyncio.sleep(STREAMS_MOVE_S)
        while not (is_over := await self._is_stage_over(handle, driver)):
            if effect.deadline_at and self._clock() >= effect.deadline_at:
                log.warning(
                    "the agent ends the stages of %s and the requests that still run in them", effect.instance_id
                )
                break
            if self._clock() >= kept_until:
                driver.forget_moved(handle)
            await asyncio.sleep(STAGE_POLL_S)
        await self._report(msg.StagesFinished(effect.instance_id, cut=not is_over))
        await asyncio.sleep(STREAMS_MOVE_S)
        await self._leave_stage(driver, handle, kept_until)

    async def _is_stage_over(self, handle: EngineHandle, driver: Mover) -> bool:
        """Return False for a stage that does not answer: it may still run requests."""
        try:
            return await driver.is_stage_over(handle)
        except EngineFailed as error:
            log.warning("the stage of %s does not say whether it is idle: %s", handle.instance_id, error.message)
            return False

    async def _leave_stage(self, driver: Mover, handle: EngineHandle, kept_until: float) -> None:
        await driver.end_stage(handle)
        await asyncio.sleep(max(kept_until - self._clock(), 0.0))
        driver.forget_moved(handle)

    async def _abandon(self, effect: msg.AbandonConsolidation) -> None:
        """Ask the engine for the outcome; one that cannot become whole stays a stage."""
        await self._cancel(effect.instance_id, "consolidate")
        try:
            handle, driver = self._staged(effect.instance_id)
            kv_tokens = await driver.abandon_consolidation(handle)
        except EngineUnable as error:
            await self._report(msg.ConsolidationFailed(effect.instance_id, error.message))
        except EngineFailed as error:
            log.warning(
                "the engine of %s does not say how its consolidation ended: %s", effect.instance_id, error.message
            )
        else:
            if kv_tokens is None:
                await self._report(msg.ConsolidationFailed(effect.instance_id, "given up"))
            else:
                await self._became_whole(handle, driver, kv_tokens)

    async def _whole(self, instance_id: str, kv_tokens: int, phases: tuple[Phase, ...] = ()) -> None:
        handle = self._state.handles.get(instance_id)
        if handle is not None:
            self._state.put_handle(replace(handle, figures=replace(handle.figures, kv_tokens=kv_tokens)))
        await self._report(msg.EngineConsolidated(instance_id, kv_tokens, phases=phases))

    async def _sleep(self, effect: msg.SleepEngine) -> None:
        handle = self._state.handles.get(effect.instance_id)
        driver = self._driver(handle) if handle is not None else None
        if handle is None or not isinstance(driver, Sleeper):
            raise EngineFailed(f"{effect.instance_id} cannot sleep")
        await self._cancel(effect.instance_id, "finish")
        if isinstance(driver, Mover) and not effect.if_idle:
            await driver.end_stage(handle)
            driver.forget_moved(handle)
        try:
            if effect.if_idle and isinstance(driver, RefusingSleeper):
                num_in_flight = await driver.sleep_if_idle(handle, effect.becomes)
                if num_in_flight:
                    await self._report(msg.EngineBusy(effect.instance_id, num_in_flight))
                    return
            else:
                await driver.sleep(handle, effect.becomes)
        except EngineFailed:
            if await self._ends(handle):
                return  # its watcher reports the end
            raise
        kept = await self._kept(handle, driver, effect.becomes)
        await self._report(msg.EngineAsleep(effect.instance_id, kept))

    async def _kept(self, handle: EngineHandle, driver: EngineDriver, becomes: str) -> int:
        """Return the bytes held by the device's account; devices return pages with a delay."""
        most = driver.capabilities.asleep_bytes if becomes == "swapped_out" else 0
        deadline = self._clock() + SETTLE_S
        while True:
            kept: int = await asyncio.to_thread(bytes_kept, handle)
            if not most or kept <= most or self._clock() > deadline:
                return kept
            await asyncio.sleep(SETTLE_POLL_S)

    async def _stop(self, effect: msg.StopEngine) -> None:
        await self._end_work(effect.instance_id)
        handle = self._state.handles.get(effect.instance_id)
        if handle is not None:
            if handle.engine in self._drivers:
                await self._driver(handle).stop(handle, effect.grace_s)
            else:  # an engine that this agent can no longer start
                await stop_group(handle.pid, handle.pid_started_at, effect.grace_s)
            if self._is_alive(handle):
                log.error("the engine of %s (pid %s) still runs after it was stopped", effect.instance_id, handle.pid)
                await self._report(msg.EngineGone(effect.instance_id, clean=False))
                return
        self._state.drop_handle(effect.instance_id)
        shutil.rmtree(handle.run_dir if handle else self.run_dir(effect.instance_id), ignore_errors=True)
        keep_newest_logs(self._settings.node_dir / "logs", self._state.handles.values())
        self._killed.discard(effect.instance_id)
        # End the stop before reporting it, so that a retry or a relaunch finds the place free.
        self._tasks.pop((effect.instance_id, "stop"), None)
        await self._report(msg.EngineGone(effect.instance_id))

    async def _unload_adapter(self, effect: msg.UnloadAdapter) -> None:
        await self._end_work(effect.instance_id)
        if (handle := self._host(effect.command.host_id)) is not None:
            try:
                await self._adapter_host(handle).unload_adapter(handle, effect.command.model)
            except EngineFailed:
                if self._is_alive(handle):
                    raise
        self._tasks.pop((effect.instance_id, "stop"), None)
        await self._report(msg.EngineGone(effect.instance_id))

    async def _end_work(self, instance_id: str) -> None:
        launching = self._tasks.get((instance_id, "launch"))
        if launching is not None:  # a launch cut short would leave an unknown process
            await asyncio.wait([launching])
        for owner, kind in list(self._tasks):
            if owner == instance_id and kind != "stop":
                await self._cancel(owner, kind)
        self._weights.pop(instance_id, None)
        self._kv_limits.pop(instance_id, None)
        self._weights_watch.forget(instance_id)

    async def _cancel(self, instance_id: str, kind: str) -> None:
        task = self._tasks.get((instance_id, kind))
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self, handle: EngineHandle) -> None:
        await until_exit(handle, self._is_alive)
        if (moving := self._moving.get(handle.instance_id)) is not None:
            await moving.wait()
        known = self._state.handles.get(handle.instance_id)
        if known is not None and known.pid != handle.pid:
            return  # the engine is another process by now
        loading = self._tasks.get((handle.instance_id, "load"))
        if loading is not None:  # the load sees the same end and knows its reason
            await asyncio.wait([loading], timeout=2.0)
        await self._report_exit(handle)

    async def _report_exit(self, handle: EngineHandle) -> None:
        tail = log_tail(Path(handle.log_path))
        await self._report(msg.EngineExited(handle.instance_id, f"the engine process ended by itself\n{tail}".strip()))

    async def _check_health(self, effect: msg.CheckHealth) -> None:
        handle = self._state.handles.get(effect.instance_id)
        if handle is None:
            unknown = msg.HealthSeen(
                effect.instance_id, ok=False, alive=False, reason="this agent has no engine of that instance"
            )
            await self._report(unknown)
            return
        seen = await self._driver(handle).health(handle)
        known = self._state.handles.get(effect.instance_id)
        if effect.instance_id in self._moving or known is None or known.pid != handle.pid:
            return  # the answer is of a paused stage, or of a process that was replaced
        if not seen.alive:
            await self._report_exit(handle)
            return
        await self._report(msg.HealthSeen(effect.instance_id, seen.ok, seen.alive, seen.reason))

    async def _count(self, effect: msg.CountInFlight) -> None:
        name, adapter, kv_bytes_used = effect.instance_id, effect.adapter, -1
        handle = self._state.handles.get(adapter.host_id if adapter is not None else name)
        if handle is None:
            return
        driver = self._driver(handle)
        try:
            if adapter is not None and isinstance(driver, AdapterHost):
                num_in_flight = await driver.num_of_adapter(handle, adapter.model)
            else:
                num_in_flight = await driver.num_in_flight(handle)
        except EngineFailed as error:
            log.warning("the engine of %s does not say how many requests its drain has left: %s", name, error.message)
            return
        if self._settings.params.reservation and isinstance(driver, Sleeper):
            try:
                kv_bytes_used = await driver.kv_bytes_used(handle)
            except EngineFailed as error:
                log.warning("the engine of %s does not say how full its KV cache is: %s", name, error.message)
        await self._report(msg.InFlight(name, num_in_flight, kv_bytes_used))

    async def _limit_kv(self, instance_id: str) -> None:
        while (num_bytes := self._kv_limits.pop(instance_id, None)) is not None:
            handle = self._state.handles.get(instance_id)
            driver = self._driver(handle) if handle is not None else None
            if handle is not None and isinstance(driver, Sleeper):
                try:
                    await driver.limit_kv(handle, num_bytes)
                except EngineFailed as error:
                    log.warning(
                        "the engine of %s has not changed the size of its KV cache: %s", instance_id, error.message
                    )
        self._tasks.pop((instance_id, "limit"), None)


def file_name(given: str) -> str:
    """Return an id as a safe file name: `given` itself or a digest of it."""
    if _SAFE_NAME.fullmatch(given):
        return given
    return f"id-{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def _phase(name: PhaseName, began: float, ended: float) -> Phase:
    return Phase(name=name, started_at=began, ended_at=ended)
