"""The executor with a driver that misbehaves: every effect ends in an outcome, whatever the engine does."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import EngineFailed
from glowplug.domain.instance import Worker
from glowplug.domain.model import WeightsRef
from glowplug.engines import process
from glowplug.engines.port import Ability, EngineCapabilities, EngineHandle, Health, LaunchRequest, LoadReport
from services.agent.executor import EngineExecutor
from services.agent.processes import kill_orphans
from services.agent.settings import AgentSettings
from services.agent.state_file import StateFile
from tests.agent_rig import write_weights
from tests.fleet_builder import a_model
from tests.waiting import until


class FakeEngineDriver:
    """Its engines are real processes that sleep; how they start, load and end is up to the test."""

    name = "fake"
    capabilities = EngineCapabilities(emulated=True)

    def __init__(self) -> None:
        self.launch_error: Exception | None = None
        self.load_error: Exception | None = None
        self.stop_error: Exception | None = None
        self.is_immortal = False
        self.launch_s = 0.0
        self.may_load = asyncio.Event()
        self.may_load.set()

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        return frozenset()

    def unavailable(self) -> str:
        return ""

    async def warm(self) -> None: ...

    async def close(self) -> None: ...

    async def launch(self, request: LaunchRequest) -> EngineHandle:
        await asyncio.sleep(self.launch_s)
        if self.launch_error:
            raise self.launch_error
        argv = [sys.executable, "-c", "print('hello from the engine', flush=True); import time; time.sleep(600)"]
        pid = process.spawn(argv, cwd=request.run_dir, log_path=request.log_path, env=dict(os.environ))
        return EngineHandle(
            engine=self.name,
            instance_id=request.instance_id,
            pid=pid,
            pid_started_at=process.started_at(pid) or 0.0,
            run_dir=str(request.run_dir),
            log_path=str(request.log_path),
        )

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        await self.may_load.wait()
        if self.load_error:
            raise self.load_error
        return LoadReport(handle=handle, phases=())

    async def health(self, handle: EngineHandle) -> Health:
        return Health(ok=self.adopt(handle), alive=self.adopt(handle))

    async def num_in_flight(self, handle: EngineHandle) -> int:
        return 0

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        if self.stop_error:
            raise self.stop_error
        if not self.is_immortal:
            await process.stop_group(handle.pid, handle.pid_started_at, grace_s)

    def adopt(self, handle: EngineHandle) -> bool:
        return process.is_alive(handle.pid, handle.pid_started_at)


class Rig:
    """An executor whose outcomes are kept in a list."""

    def __init__(self, folder: Path, driver: FakeEngineDriver | None = None) -> None:
        self.settings = AgentSettings(node_id="node-1", state_dir=folder / "state", shm_dir=folder / "shm")
        self.settings.node_dir.mkdir(parents=True)
        self.driver = driver or FakeEngineDriver()
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

    async def launch(self) -> EngineHandle:
        worker = Worker(worker_id="i-1-0", node_id="node-1", gpu_id="node-1/0", num_bytes=1)
        await self.do(msg.LaunchEngine("i-1", a_model(engine="fake"), worker, "host", 0))
        await self.outcome(msg.EngineLaunched)
        return self.state.handles["i-1"]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.engines.close()
    for handle in rig.state.handles.values():
        process.kill_group(handle.pid, handle.pid_started_at)


async def test_whole_life(rig: Rig) -> None:
    handle = await rig.launch()
    await rig.do(msg.LoadEngine("i-1", "/weights"))
    await rig.outcome(msg.EngineReady)
    assert rig.engines.living() == {"i-1"}
    await until(lambda: "hello" in rig.engines.log_path("i-1").read_text(), "the engine writes its log")
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean
    assert not process.is_alive(handle.pid, handle.pid_started_at) and not rig.state.handles
    assert not any(isinstance(o, msg.EngineExited) for o in rig.outcomes)
    assert not rig.engines.run_dir("i-1").exists() and "hello" in rig.engines.log_path("i-1").read_text()
    await rig.do(msg.ForgetEngine("i-1"))
    assert not rig.engines.log_path("i-1").exists()


async def test_exit_is_told_at_once_with_the_end_of_the_log(rig: Rig) -> None:
    handle = await rig.launch()
    await until(lambda: "hello" in rig.engines.log_path("i-1").read_text(), "the engine writes its log")
    os.kill(handle.pid, signal.SIGKILL)
    exited = await rig.outcome(msg.EngineExited)
    assert exited.reason.splitlines() == ["the engine process ended by itself", "hello from the engine"]


@pytest.mark.parametrize(
    ("error", "code"), [(EngineFailed("no such binary"), "engine_failed"), (RuntimeError("bug"), "internal_error")]
)
async def test_launch_that_fails_is_told(rig: Rig, error: Exception, code: str) -> None:
    rig.driver.launch_error = error
    worker = Worker(worker_id="i-1-0", node_id="node-1", gpu_id="node-1/0", num_bytes=1)
    await rig.do(msg.LaunchEngine("i-1", a_model(engine="fake"), worker, "host", 0))
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.code == code and str(error) in failed.reason


async def test_load_that_fails_is_told(rig: Rig) -> None:
    await rig.launch()
    rig.driver.load_error = EngineFailed("not a model\nlast line of the log")
    await rig.do(msg.LoadEngine("i-1", "/weights"))
    assert "last line" in (await rig.outcome(msg.EngineStartFailed)).reason


async def test_stop_during_a_launch_leaves_no_process(rig: Rig) -> None:
    rig.driver.launch_s = 0.1
    worker = Worker(worker_id="i-1-0", node_id="node-1", gpu_id="node-1/0", num_bytes=1)
    await rig.do(msg.LaunchEngine("i-1", a_model(engine="fake"), worker, "host", 0))
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean and not rig.state.handles
    assert not kill_orphans(rig.settings.node_dir / "run", ())


async def test_stop_during_a_load_gives_it_up(rig: Rig) -> None:
    await rig.launch()
    rig.driver.may_load.clear()
    await rig.do(msg.LoadEngine("i-1", "/weights"))
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean
    assert not any(isinstance(o, msg.EngineReady | msg.EngineStartFailed) for o in rig.outcomes)


async def test_process_that_outlives_its_stop_is_not_called_gone(rig: Rig) -> None:
    await rig.launch()
    rig.driver.is_immortal = True
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert not (await rig.outcome(msg.EngineGone)).clean and "i-1" in rig.state.handles
    rig.driver.is_immortal = False
    await asyncio.sleep(0.05)
    rig.outcomes.clear()
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean and not rig.state.handles


async def test_stop_that_breaks_is_not_called_gone(rig: Rig) -> None:
    await rig.launch()
    rig.driver.stop_error = RuntimeError("bug")
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert not (await rig.outcome(msg.EngineGone)).clean and "i-1" in rig.state.handles


async def test_stop_of_nothing_is_over_at_once(rig: Rig) -> None:
    await rig.do(msg.StopEngine("i-404", 0.0))
    assert (await rig.outcome(msg.EngineGone)).clean


async def test_weights_are_waited_for(rig: Rig) -> None:
    model = a_model(engine="fake", weights=WeightsRef(uri="file:///w"))
    await rig.do(msg.AwaitWeights("i-1", model.weights, 9e9))
    await asyncio.sleep(0.05)
    assert not rig.outcomes
    region = write_weights(rig.settings.shm_dir.absolute(), model)
    complete = await rig.outcome(msg.WeightsComplete)
    assert complete.path == str(region.blob) and not complete.cached


async def test_weights_in_memory_already_are_cached(rig: Rig) -> None:
    model = a_model(engine="fake", weights=WeightsRef(uri="file:///w"))
    write_weights(rig.settings.shm_dir.absolute(), model)
    await rig.do(msg.AwaitWeights("i-1", model.weights, 9e9))
    assert (await rig.outcome(msg.WeightsComplete)).cached


async def test_weights_kept_for_another_model_are_held_against_the_bytes_that_this_one_declares(rig: Rig) -> None:
    sha256 = "ab" * 32
    write_weights(rig.settings.shm_dir, a_model("m", weights=WeightsRef(uri="file:///w/m", sha256=sha256)))
    await rig.do(msg.AwaitWeights("i-1", WeightsRef(uri="file:///w/m", sha256=sha256, num_bytes=5), deadline_at=9e9))
    failed = await rig.outcome(msg.WeightsFailed)
    assert (failed.code, failed.message) == ("weights_corrupt", "file:///w/m: 4 bytes, expected 5")


async def test_weights_that_fail_are_told_to_those_who_wait(rig: Rig) -> None:
    model = a_model(engine="fake", weights=WeightsRef(uri="file:///w"))
    region = write_weights(rig.settings.shm_dir.absolute(), model)
    region.fail("weights_corrupt", "checksum differs", failed_at=1.0, instance_ids=("i-2",))
    await rig.do(msg.AwaitWeights("i-1", model.weights, 9e9))
    await rig.do(msg.AwaitWeights("i-2", model.weights, 9e9))
    failed = await rig.outcome(msg.WeightsFailed)
    assert failed == msg.WeightsFailed("i-2", "weights_corrupt", "checksum differs")
    await asyncio.sleep(0.05)
    assert len(rig.outcomes) == 1


async def test_checksum_that_is_none_is_refused(rig: Rig) -> None:
    await rig.do(msg.AwaitWeights("i-1", WeightsRef(uri="file:///w", sha256="../../etc"), 9e9))
    assert (await rig.outcome(msg.WeightsFailed)).code == "invalid_model_file"


async def test_health_of_an_engine_nobody_knows(rig: Rig) -> None:
    await rig.do(msg.CheckHealth("i-404"))
    assert not (await rig.outcome(msg.HealthSeen)).alive


def test_orphans_are_found_by_where_they_work_and_the_known_are_spared(tmp_path: Path) -> None:
    run_root = tmp_path / "run"
    (run_root / "i-1").mkdir(parents=True)
    (run_root / "i-2").mkdir()
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    lost, known = (subprocess.Popen(argv, cwd=run_root / i, start_new_session=True) for i in ("i-1", "i-2"))
    elsewhere = subprocess.Popen(argv, cwd=tmp_path, start_new_session=True)
    try:
        assert kill_orphans(run_root, {known.pid}) == [lost.pid]
        assert lost.wait(10) == -signal.SIGKILL and known.poll() is None and elsewhere.poll() is None
    finally:
        for child in (lost, known, elsewhere):
            child.kill()
            child.wait()
