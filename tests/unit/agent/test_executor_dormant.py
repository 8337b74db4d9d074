"""The executor with an engine that sleeps or runs in stages, or should and cannot."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import EngineFailed
from glowplug.domain.model import Model
from glowplug.engines import process
from glowplug.engines.port import EngineHandle, LoadReport, Stager
from tests.agent_steps import workers
from tests.fleet_builder import a_model
from tests.unit.agent.test_executor import FakeEngineDriver, Rig

MODEL = a_model(engine="fake")


class FakeSleeper(FakeEngineDriver):
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.sleep_error: EngineFailed | None = None
        self.may_limit = asyncio.Event()

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        report = await super().load(handle, weights_path)
        self.told.append(f"load {weights_path}")
        handle = replace(report.handle, url="http://127.0.0.1:1")
        return replace(report, handle=handle, num_slots=3, kv_tokens=6144, lacks=("tool_choice",))

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        if self.sleep_error is not None:
            raise self.sleep_error
        self.told.append(becomes)

    async def wake(self, handle: EngineHandle) -> None:
        self.told.append("wake")

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        return 7

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        self.told.append(f"kv {num_bytes}")
        await self.may_limit.wait()


class SleepyRig(Rig):
    """An executor of engines that sleep."""

    def __init__(self, folder: Path) -> None:
        self.driver: FakeSleeper
        super().__init__(folder, FakeSleeper())

    async def replica(self) -> None:
        await self.do(msg.LaunchEngine("r-1", MODEL, workers("r-1", 0)[0], "host", 0, "", workers("r-1", 0), True))
        await self.outcome(msg.EngineLaunched)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[SleepyRig]:
    rig = SleepyRig(tmp_path)
    yield rig
    await rig.engines.close()
    for handle in rig.state.handles.values():
        process.kill_group(handle.pid, handle.pid_started_at)


async def test_a_replica_is_parked_once_loaded_and_goes_on_under_a_new_id(rig: SleepyRig) -> None:
    await rig.replica()
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.outcome(msg.EnginePrewarmed)
    assert rig.driver.told == ["load /w", "prewarmed"]
    pid = rig.state.handles["r-1"].pid
    await rig.do(msg.ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    ready = await rig.outcome(msg.EngineReady)
    assert rig.driver.told[2:] == ["wake"] and ready.url == "http://127.0.0.1:1"
    assert [phase.name.value for phase in ready.phases] == ["load"]
    assert (ready.num_slots, ready.kv_tokens, ready.lacks) == (3, 6144, ("tool_choice",)), "as its load has said"
    handles = rig.state.handles
    assert list(handles) == ["i-1"] and (handles["i-1"].pid, handles["i-1"].instance_id) == (pid, "i-1")
    process.kill_group(pid, handles["i-1"].pid_started_at)
    assert (await rig.outcome(msg.EngineExited)).instance_id == "i-1"


async def test_a_load_and_an_activation_in_one_turn_load_once(rig: SleepyRig) -> None:
    await rig.replica()
    rig.driver.may_load.clear()
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.do(msg.ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    await asyncio.sleep(0.01)
    rig.driver.may_load.set()
    assert (await rig.outcome(msg.EngineReady)).instance_id == "i-1"
    assert rig.driver.told == ["load /w", "wake"]
    assert not any(isinstance(o, msg.EnginePrewarmed | msg.EngineStartFailed) for o in rig.outcomes)


async def test_a_stop_right_behind_an_activation_ends_the_process(rig: SleepyRig) -> None:
    await rig.replica()
    await rig.do(msg.LoadEngine("r-1", "/w"))
    await rig.outcome(msg.EnginePrewarmed)
    handle = rig.state.handles["r-1"]
    await rig.do(msg.ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    await rig.do(msg.StopEngine("i-1", 0.0))
    assert (await rig.outcome(msg.EngineGone)).instance_id == "i-1"
    assert not rig.state.handles and not process.is_alive(handle.pid, handle.pid_started_at)


async def test_an_activation_of_what_is_gone_fails(rig: SleepyRig) -> None:
    await rig.do(msg.ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    failed = await rig.outcome(msg.EngineStartFailed)
    assert (failed.instance_id, failed.code) == ("i-1", "engine_failed") and "r-1 is gone" in failed.reason


async def test_an_engine_that_cannot_sleep_is_stopped(rig: SleepyRig) -> None:
    await rig.replica()
    rig.driver.sleep_error = EngineFailed("it will not")
    await rig.do(msg.SleepEngine("r-1", "swapped_out"))
    assert (await rig.outcome(msg.EngineGone)).clean and not rig.state.handles
    assert not any(isinstance(o, msg.EngineAsleep) for o in rig.outcomes)


async def test_one_that_sleeps_says_so(rig: SleepyRig) -> None:
    await rig.replica()
    await rig.do(msg.SleepEngine("r-1", "swapped_out"))
    assert await rig.outcome(msg.EngineAsleep) and rig.driver.told == ["swapped_out"]
    await rig.do(msg.SleepEngine("i-404", "prewarmed"))
    assert (await rig.outcome(msg.EngineGone)).instance_id == "i-404"


async def test_of_limits_that_come_fast_the_newest_counts(rig: SleepyRig) -> None:
    await rig.replica()
    await rig.do(msg.LimitKv("r-1", 30))
    await asyncio.sleep(0.01)
    for num_bytes in (20, 10):
        await rig.do(msg.LimitKv("r-1", num_bytes))
    rig.driver.may_limit.set()
    await asyncio.sleep(0.01)
    assert rig.driver.told == ["kv 30", "kv 10"]
    await rig.do(msg.LimitKv("r-1", 40))
    await asyncio.sleep(0.01)
    assert rig.driver.told[2:] == ["kv 40"]


async def test_several_gpus_are_for_engines_that_say_so(rig: SleepyRig) -> None:
    group = workers("i-1", 0, 1)
    await rig.do(msg.LaunchEngine("i-1", MODEL, group[0], "host", 0, "", group))
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.code == "engine_unavailable" and "not on 2" in failed.reason


class FakeStager(FakeEngineDriver, Stager):
    """An engine that runs in stages; how that goes is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.may_become_whole = asyncio.Event()
        self.left: int | None = None  # what an abandoned consolidation has left: KV tokens of a whole one

    async def serve_stages(self, handle: EngineHandle) -> LoadReport:
        if self.error is not None:
            raise self.error
        return LoadReport(handle=replace(handle, url="http://127.0.0.1:1"), phases=(), num_slots=16, kv_tokens=900)

    async def consolidate(self, handle: EngineHandle, model: Model) -> int:
        if self.error is not None:
            raise self.error
        await self.may_become_whole.wait()
        return 1200

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        if self.error is not None:
            raise self.error
        return self.left


@pytest.fixture
async def staged(tmp_path: Path) -> AsyncIterator[Rig]:
    staged = Rig(tmp_path, FakeStager())
    await staged.launch()
    yield staged
    await staged.engines.close()
    for handle in staged.state.handles.values():
        process.kill_group(handle.pid, handle.pid_started_at)


def test_every_effect_has_an_executor(tmp_path: Path) -> None:
    """ReportStart is performed by the reporter of starts (see handlers.executors)."""
    assert {*Rig(tmp_path).executors, msg.ReportStart} == set(msg.EFFECTS)


async def test_stages_serve_and_become_whole(staged: Rig) -> None:
    await staged.do(msg.ServeStages("i-1"))
    ready = await staged.outcome(msg.EngineReady)
    assert (ready.url, ready.num_slots, ready.kv_tokens) == ("http://127.0.0.1:1", 16, 900)
    staged.driver.may_become_whole.set()  # type: ignore[attr-defined]
    await staged.do(msg.ConsolidateEngine("i-1", MODEL))
    assert (await staged.outcome(msg.EngineConsolidated)).kv_tokens == 1200
    assert json.loads(staged.state.handles["i-1"].data["holds"])["kv_tokens"] == 1200, "a wake reports it"


@pytest.mark.parametrize("left", [None, 77])
async def test_a_consolidation_that_is_given_up_says_what_it_has_left(staged: Rig, left: int | None) -> None:
    staged.driver.left = left  # type: ignore[attr-defined]
    await staged.do(msg.ConsolidateEngine("i-1", MODEL))
    await staged.do(msg.AbandonConsolidation("i-1"))
    if left is None:
        assert (await staged.outcome(msg.ConsolidationFailed)).reason == "given up"
    else:
        assert (await staged.outcome(msg.EngineConsolidated)).kv_tokens == 77
    assert len([o for o in staged.outcomes if isinstance(o, msg.EngineConsolidated | msg.ConsolidationFailed)]) == 1


@pytest.mark.parametrize("error", [EngineFailed("a stage is gone"), RuntimeError("a stage is gone")])
async def test_stages_that_fail_are_reported(staged: Rig, error: Exception) -> None:
    staged.driver.error = error  # type: ignore[attr-defined]
    await staged.do(msg.ServeStages("i-1"))
    assert "a stage is gone" in (await staged.outcome(msg.EngineStartFailed)).reason
    await staged.do(msg.ConsolidateEngine("i-1", MODEL))
    assert "a stage is gone" in (await staged.outcome(msg.ConsolidationFailed)).reason


async def test_an_engine_that_does_not_answer_says_nothing_of_its_consolidation(staged: Rig) -> None:
    staged.driver.error = EngineFailed("no answer")  # type: ignore[attr-defined]
    staged.outcomes.clear()
    await staged.do(msg.AbandonConsolidation("i-1"))
    await asyncio.sleep(0.05)
    assert not staged.outcomes, "its bytes stay granted, and the controller asks again"


@pytest.mark.parametrize("is_launched", [True, False])
async def test_an_engine_without_stages_says_so(rig: SleepyRig, is_launched: bool) -> None:
    """The ability keeps such a command away; without that, it has an outcome all the same."""
    if is_launched:
        await rig.replica()
    why = "does not" if is_launched else "no engine is known"
    await rig.do(msg.ServeStages("r-1"))
    failed = await rig.outcome(msg.EngineStartFailed)
    assert failed.code == ("engine_unable" if is_launched else "engine_failed") and why in failed.reason
    await rig.do(msg.ConsolidateEngine("r-1", MODEL))
    assert why in (await rig.outcome(msg.ConsolidationFailed)).reason
    if is_launched:
        rig.outcomes.clear()
        await rig.do(msg.AbandonConsolidation("r-1"))
        assert why in (await rig.outcome(msg.ConsolidationFailed)).reason


async def test_stop_ends_a_consolidation(staged: Rig) -> None:
    await staged.do(msg.ConsolidateEngine("i-1", MODEL))
    await staged.do(msg.StopEngine("i-1", 0.0))
    assert (await staged.outcome(msg.EngineGone)).clean
    assert not any(isinstance(o, msg.EngineConsolidated | msg.ConsolidationFailed) for o in staged.outcomes)
