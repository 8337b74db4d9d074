"""A stage that becomes whole in a process beside its own. Lane: fast, 0.5 s."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import EngineFailed
from glowplug.domain.model import Model
from glowplug.engines import process
from glowplug.engines.port import EngineHandle, LoadReport, Moved
from tests.unit.agent.test_executor import MODEL, FakeStager, rig_of
from tests.waiting import until


class FakeMover(FakeStager):
    """... and becomes whole in a process beside the stage's own. It keeps what the store knew when requests moved."""

    def __init__(self) -> None:
        super().__init__()
        self.beside: EngineHandle | None = None
        self.moved: list[EngineHandle] = []
        self.ports: list[int] = []

    async def consolidate_at(self, handle: EngineHandle, model: Model, port: int) -> int:
        kv_tokens = await super().consolidate(handle, model)
        self.ports.append(port)
        pid = process.spawn(["sleep", "60"], cwd=Path("/"), log_path=Path(handle.log_path), env=dict(os.environ))
        at = process.started_at(pid) or 0.0
        self.beside = replace(handle, pid=pid, pid_started_at=at, url="http://127.0.0.1:2", api_key="k")
        return kv_tokens

    def whole(self, handle: EngineHandle) -> LoadReport | None:
        return LoadReport(handle=self.beside, phases=(), kv_tokens=1200) if self.beside is not None else None

    async def move_requests(self, handle: EngineHandle) -> Moved:
        self.moved.append(handle)
        self.fails("move")
        return Moved()


@pytest.mark.parametrize("fault", [None, EngineFailed("no answer")])
async def test_a_stage_that_becomes_whole_in_another_process_is_that_process_from_then_on(
    tmp_path: Path, fault: Exception | None
) -> None:
    async with rig_of(tmp_path, FakeMover()) as rig:
        stage = await rig.launch()
        if fault is not None:
            rig.driver.errors["move"] = fault
        rig.driver.may_become_whole.set()
        await rig.do(msg.ConsolidateEngine("i-1", MODEL))
        whole = await rig.outcome(msg.EngineConsolidated)
        assert (whole.url, whole.kv_tokens) == ("http://127.0.0.1:2", 1200) and rig.driver.ports == [0]
        (moved,) = await until(lambda: rig.driver.moved, "requests move once that is reported")
        assert moved.pid == rig.state.handles["i-1"].pid == rig.driver.beside.pid != stage.pid
        process.kill_group(stage.pid, stage.pid_started_at)
        await asyncio.sleep(0.05)
        assert not rig.saw(msg.EngineExited), "the end of the stage's own process is none of the engine's"
        process.kill_group(moved.pid, moved.pid_started_at)
        await rig.outcome(msg.EngineExited)
