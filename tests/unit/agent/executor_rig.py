"""An executor rig with drivers that misbehave."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.controllers.agent import messages as msg
from glowplug.domain.hardware import Devices
from glowplug.domain.instance import EngineFigures
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import process
from glowplug.engines.port import (
    EngineCapabilities,
    EngineHandle,
    Health,
    LoadReport,
    Moved,
    Place,
    StageEndpoint,
    Stager,
)
from glowplug.events.commands import StartInstance
from glowplug.services.agent.executor import EngineExecutor
from glowplug.services.agent.settings import AgentSettings
from glowplug.services.agent.state_file import StateFile
from tests.fleet_builder import a_model, a_start
from tests.waiting import until

MODEL = a_model(engine="fake", weights=WeightsRef(uri="file:///w"))


class FakeEngineDriver:
    """Its engines are real processes that sleep."""

    name = "fake"
    capabilities = EngineCapabilities(emulated=True)

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}  # by method
        self.is_immortal = False
        self.launch_s = 0.0
        self.may_load, self.may_stop, self.may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for may in (self.may_load, self.may_stop, self.may_answer):
            may.set()

    def fails(self, method: str) -> None:
        if method in self.errors:
            raise self.errors[method]

    async def launch(self, command: StartInstance, place: Place) -> EngineHandle:
        await asyncio.sleep(self.launch_s)
        self.fails("launch")
        argv = [sys.executable, "-c", "print('hello from the engine', flush=True); import time; time.sleep(600)"]
        pid = process.spawn(argv, cwd=place.run_dir, log_path=place.log_path, env=dict(os.environ))
        return EngineHandle(
            engine=self.name,
            instance_id=command.instance_id,
            pid=pid,
            pid_started_at=process.started_at(pid) or 0.0,
            run_dir=str(place.run_dir),
            log_path=str(place.log_path),
        )

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        await self.may_load.wait()
        self.fails("load")
        return LoadReport(handle=handle, phases=())

    async def health(self, handle: EngineHandle) -> Health:
        await self.may_answer.wait()
        return Health(ok=self.adopt(handle), alive=self.adopt(handle))

    async def num_in_flight(self, handle: EngineHandle) -> int:
        return 0

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        await self.may_stop.wait()
        self.fails("stop")
        if not self.is_immortal:
            await process.stop_group(handle.pid, handle.pid_started_at, grace_s)

    def adopt(self, handle: EngineHandle) -> bool:
        return process.is_alive(handle.pid, handle.pid_started_at)


class FakeSleeper(FakeEngineDriver):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.dies_at_wake = False
        self.shared_bytes = 0
        self.may_limit = asyncio.Event()

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        report = await super().load(handle, weights_path)
        self.calls.append(f"load {weights_path}")
        shared = self.shared_bytes
        figures = EngineFigures(num_slots=3, kv_tokens=6144, lacks=("tool_choice",), shared_bytes=shared, step_s=0.02)
        return replace(report, handle=replace(report.handle, url="http://127.0.0.1:1", figures=figures))

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        self.fails("sleep")
        self.calls.append(becomes)

    async def wake(self, handle: EngineHandle) -> None:
        if self.dies_at_wake:
            process.kill_group(handle.pid, handle.pid_started_at)
        self.fails("wake")
        self.calls.append("wake")

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        return 7

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        self.calls.append(f"kv {num_bytes}")
        await self.may_limit.wait()


class FakeStager(FakeEngineDriver, Stager):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.may_become_whole = asyncio.Event()
        self.left: int | None = None  # KV tokens of a whole engine after an abandoned consolidation

    async def serve_stages(self, handle: EngineHandle, later: Sequence[StageEndpoint] = ()) -> LoadReport:
        self.fails("stages")
        self.calls += [f"stage {one.url} {one.api_key}" for one in later]
        figures = EngineFigures(num_slots=16, kv_tokens=900)
        return LoadReport(handle=replace(handle, url="http://127.0.0.1:1", figures=figures), phases=())

    async def consolidate(self, handle: EngineHandle, model: Model, weights_path: Path) -> int:
        self.fails("stages")
        self.calls.append(f"whole {weights_path.name}")
        await self.may_become_whole.wait()
        return 1200

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        self.fails("stages")
        return self.left


class FakeMover(FakeStager):
    """Becomes whole in a process beside the stage's own; `moved` keeps the handles in use at each move."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: EngineHandle | None = None
        self.stages: list[EngineHandle] = []  # those asked to become whole
        self.may_move = asyncio.Event()
        self.may_move.set()
        self.moved: list[EngineHandle] = []
        self.is_over = True  # the stages are idle
        self.ports: list[int] = []

    async def consolidate_at(self, handle: EngineHandle, model: Model, weights_path: Path, port: int) -> int:
        kv_tokens = await super().consolidate(handle, model, weights_path)
        self.ports.append(port)
        self.stages.append(handle)
        pid = process.spawn(["sleep", "60"], cwd=Path("/"), log_path=Path(handle.log_path), env=dict(os.environ))
        at = process.started_at(pid) or 0.0
        figures = EngineFigures(kv_tokens=kv_tokens)
        url = "http://127.0.0.1:2"
        self.beside = replace(handle, pid=pid, pid_started_at=at, url=url, api_key="k", figures=figures)
        return kv_tokens

    def whole(self, handle: EngineHandle) -> LoadReport | None:
        return LoadReport(handle=self.beside, phases=()) if self.beside is not None else None

    def processes(self, handle: EngineHandle) -> tuple[int, ...]:
        """Stage processes beside their whole engines."""
        return tuple(s.pid for s in self.stages if s.pid != handle.pid and self.adopt(s))

    async def move_requests(self, handle: EngineHandle) -> Moved:
        self.moved.append(handle)
        self.calls.append("move")
        await self.may_move.wait()
        self.fails("move")
        return Moved()

    async def is_stage_over(self, handle: EngineHandle) -> bool:
        self.fails("over")
        return self.is_over

    async def end_stage(self, handle: EngineHandle) -> None:
        self.calls.append("end stage")

    def forget_moved(self, handle: EngineHandle) -> None:
        self.calls.append("forget")


class Rig:
    def __init__(self, folder: Path, driver: Any) -> None:
        self.settings = AgentSettings(node_id="node-1", state_dir=folder / "state", shm_dir=folder / "shm")
        self.settings.node_dir.mkdir(parents=True)
        self.driver = driver
        self.state = StateFile(self.settings.node_dir / "agent.json")
        self.engines = EngineExecutor(self.settings, {"fake": self.driver}, self.state)
        self.outcomes: list[Any] = []
        self.engines.connect(self.keep)
        self.executors = self.engines.executors()

    async def keep(self, stimulus: Any) -> None:
        self.outcomes.append(stimulus)

    async def do(self, effect: Any) -> None:
        await self.executors[type(effect)](effect, None)

    async def outcome(self, kind: type[Any]) -> Any:
        return await until(lambda: next((o for o in self.outcomes if isinstance(o, kind)), None), kind.__name__)

    def saw(self, *kinds: type[Any]) -> bool:
        return any(isinstance(o, kinds) for o in self.outcomes)

    async def begin_launch(
        self, instance_id: str = "i-1", *gpus: int, replica: bool = False, gpu_kind: str = "host"
    ) -> None:
        command = a_start(MODEL, instance_id, replica=replica)
        await self.do(msg.LaunchEngine(command, Devices(kind=gpu_kind, ordinals=gpus or (0,))))

    async def await_weights(
        self, instance_id: str = "i-1", weights: WeightsRef = MODEL.weights, *, streams: bool = False, **fields: Any
    ) -> None:
        command = a_start(replace(MODEL, weights=weights), instance_id, **fields)
        await self.do(msg.AwaitWeights(command, 9e9, streams))

    async def activate(self, instance_id: str = "i-1", source: str = "r-1") -> None:
        await self.do(msg.ActivateEngine(a_start(MODEL, instance_id, source=source)))

    async def launch(self, instance_id: str = "i-1", *, replica: bool = False) -> EngineHandle:
        await self.begin_launch(instance_id, replica=replica)
        await self.outcome(msg.EngineLaunched)
        return self.state.handles[instance_id]


@asynccontextmanager
async def rig_of(folder: Path, driver: FakeEngineDriver) -> AsyncIterator[Rig]:
    rig = Rig(folder, driver)
    yield rig
    await rig.engines.close()
    for handle in rig.state.handles.values():
        process.kill_group(handle.pid, handle.pid_started_at)
