"""The engine room with an engine that sleeps, or should and cannot."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.controllers.agent.messages import (
    ActivateEngine,
    EngineAsleep,
    EngineExited,
    EngineGone,
    EngineLaunched,
    EnginePrewarmed,
    EngineReady,
    EngineStartFailed,
    LaunchEngine,
    LimitKv,
    LoadEngine,
    SleepEngine,
    StopEngine,
)
from glowplug.domain.errors import EngineFailed
from glowplug.engines import process
from glowplug.engines.port import EngineCapabilities, EngineHandle, LoadReport
from services.agent.handlers import abilities_of
from tests.agent_steps import workers
from tests.fleet_builder import a_model
from tests.unit.agent.test_engine_room import FakeEngineDriver, Room

MODEL = a_model(engine="fake")


class FakeSleeper(FakeEngineDriver):
    """Keeps what it was told, in order."""

    capabilities = EngineCapabilities(emulated=True, sleep=True, prewarm=True)

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


class SleepyRoom(Room):
    """A room of engines that sleep."""

    def __init__(self, folder: Path) -> None:
        self.driver: FakeSleeper
        super().__init__(folder, FakeSleeper())

    async def replica(self) -> None:
        await self.do(LaunchEngine("r-1", MODEL, workers("r-1", 0)[0], "host", 0, "", workers("r-1", 0), True))
        await self.outcome(EngineLaunched)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[SleepyRoom]:
    room = SleepyRoom(tmp_path)
    yield room
    await room.room.close()
    for handle in room.state.handles.values():
        process.kill_group(handle.pid, handle.pid_started_at)


async def test_a_replica_is_parked_once_loaded_and_goes_on_under_a_new_id(room: SleepyRoom) -> None:
    await room.replica()
    await room.do(LoadEngine("r-1", "/w"))
    await room.outcome(EnginePrewarmed)
    assert room.driver.told == ["load /w", "prewarmed"]
    pid = room.state.handles["r-1"].pid
    await room.do(ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    ready = await room.outcome(EngineReady)
    assert room.driver.told[2:] == ["wake"] and ready.url == "http://127.0.0.1:1"
    assert [phase.name.value for phase in ready.phases] == ["load"]
    assert (ready.num_slots, ready.kv_tokens, ready.lacks) == (3, 6144, ("tool_choice",)), "as its load has said"
    handles = room.state.handles
    assert list(handles) == ["i-1"] and (handles["i-1"].pid, handles["i-1"].instance_id) == (pid, "i-1")
    process.kill_group(pid, handles["i-1"].pid_started_at)
    assert (await room.outcome(EngineExited)).instance_id == "i-1"


async def test_a_load_and_an_activation_in_one_turn_load_once(room: SleepyRoom) -> None:
    await room.replica()
    room.driver.may_load.clear()
    await room.do(LoadEngine("r-1", "/w"))
    await room.do(ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    await asyncio.sleep(0.01)
    room.driver.may_load.set()
    assert (await room.outcome(EngineReady)).instance_id == "i-1"
    assert room.driver.told == ["load /w", "wake"]
    assert not any(isinstance(o, EnginePrewarmed | EngineStartFailed) for o in room.outcomes)


async def test_a_stop_right_behind_an_activation_ends_the_process(room: SleepyRoom) -> None:
    await room.replica()
    await room.do(LoadEngine("r-1", "/w"))
    await room.outcome(EnginePrewarmed)
    handle = room.state.handles["r-1"]
    await room.do(ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    await room.do(StopEngine("i-1", 0.0))
    assert (await room.outcome(EngineGone)).instance_id == "i-1"
    assert not room.state.handles and not process.is_alive(handle.pid, handle.pid_started_at)


async def test_an_activation_of_what_is_gone_fails(room: SleepyRoom) -> None:
    await room.do(ActivateEngine("i-1", "r-1", MODEL, workers("i-1", 0)))
    failed = await room.outcome(EngineStartFailed)
    assert (failed.instance_id, failed.code) == ("i-1", "engine_failed") and "r-1 is gone" in failed.reason


async def test_an_engine_that_cannot_sleep_is_stopped(room: SleepyRoom) -> None:
    await room.replica()
    room.driver.sleep_error = EngineFailed("it will not")
    await room.do(SleepEngine("r-1", "swapped_out"))
    assert (await room.outcome(EngineGone)).clean and not room.state.handles
    assert not any(isinstance(o, EngineAsleep) for o in room.outcomes)


async def test_one_that_sleeps_says_so(room: SleepyRoom) -> None:
    await room.replica()
    await room.do(SleepEngine("r-1", "swapped_out"))
    assert await room.outcome(EngineAsleep) and room.driver.told == ["swapped_out"]
    await room.do(SleepEngine("i-404", "prewarmed"))
    assert (await room.outcome(EngineGone)).instance_id == "i-404"


async def test_of_limits_that_come_fast_the_newest_counts(room: SleepyRoom) -> None:
    await room.replica()
    await room.do(LimitKv("r-1", 30))
    await asyncio.sleep(0.01)
    for num_bytes in (20, 10):
        await room.do(LimitKv("r-1", num_bytes))
    room.driver.may_limit.set()
    await asyncio.sleep(0.01)
    assert room.driver.told == ["kv 30", "kv 10"]
    await room.do(LimitKv("r-1", 40))
    await asyncio.sleep(0.01)
    assert room.driver.told[2:] == ["kv 40"]


async def test_several_gpus_are_for_engines_that_say_so(room: SleepyRoom) -> None:
    group = workers("i-1", 0, 1)
    await room.do(LaunchEngine("i-1", MODEL, group[0], "host", 0, "", group))
    failed = await room.outcome(EngineStartFailed)
    assert failed.code == "engine_unavailable" and "not on 2" in failed.reason


def test_abilities_are_those_of_the_driver() -> None:
    assert abilities_of(FakeEngineDriver()) == frozenset()
    assert abilities_of(FakeSleeper()) == {"prewarm", "swap"}
