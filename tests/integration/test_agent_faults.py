"""Faults while engines fall asleep, sleep or wake.

One agent holds six instances of a model, each named after its phase. Stopping an engine (SIGSTOP) keeps its instance in
a state for as long as a test needs.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.controllers.agent.record import State
from glowplug.domain.instance import InstanceState
from glowplug.engines.process import is_alive
from tests.agent_rig import DormantRig, complete, start_command, stop_command
from tests.fleet_builder import MIB
from tests.waiting import WAIT_S, until

S = InstanceState
BECOMES = {"falls": "swapped_out", "asleep": "swapped_out", "wakes": "swapped_out"} | dict.fromkeys(
    ("settles", "warm", "grows"), "prewarmed"
)
HELD = {  # instance -> its state meanwhile
    "falls": State.FALLING_ASLEEP,
    "settles": State.FALLING_ASLEEP,
    "wakes-2": State.ACTIVATING,
    "grows-2": State.ACTIVATING,
}
DORMANT = {"asleep": S.SWAPPED_OUT, "warm": S.PREWARMED}
Ends = Mapping[str, tuple[InstanceState, str]]  # instance -> last state, reason


class Faulty(DormantRig):
    """Records every process of an instance, so that none is left over unseen."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **({"gpu_budgets": "2GiB", "health_timeout_s": 60.0} | settings))
        self.engines: dict[str, tuple[int, float]] = {}

    async def serving(self, *names: str) -> None:
        await asyncio.gather(*(self.run(self.model, name) for name in names))
        for name in names:
            handle = self.handle(name)
            self.engines[name] = handle["pid"], handle["pid_started_at"]

    def signal(self, which: signal.Signals, *names: str) -> None:
        for name in names:
            os.kill(self.engines[name][0], which)

    async def lie_down(self, *names: str) -> None:
        for name in names:
            await self.send(stop_command(name, grace_s=0), becomes=BECOMES[name])

    async def wake_up(self, *names: str) -> None:
        for name in names:
            await self.send(start_command(self.model, f"{name}-2"), source=name)

    async def in_every_state(self, *, is_held: bool = True) -> None:
        await self.serving(*BECOMES)
        await self.lie_down("asleep", "wakes", "warm", "grows")
        for name in ("asleep", "wakes", "warm", "grows"):
            await self.reaches(name, InstanceState(BECOMES[name]))
        if is_held:
            self.signal(signal.SIGSTOP, "falls", "settles", "wakes", "grows")
        await self.lie_down("falls", "settles")
        await self.wake_up("wakes", "grows")
        if is_held:
            holdings = self.service.controller.holdings
            await until(lambda: {i: holdings[i].state for i in HELD if i in holdings} == HELD, f"{HELD}")
            await until(lambda: {"wakes-2", "grows-2"} <= {*self.processes}, "their engines have the new names")

    async def expect_ends(self, ends: Ends) -> None:
        for instance_id, (state, why) in ends.items():
            assert why in (await self.reaches(instance_id, state)).reason

        def are_saved() -> bool:
            rows = {i: self.row(i) for i in ends}
            return all(row is not None and row.state is ends[i][0] for i, row in rows.items())

        await until(are_saved, "the store says so")

    async def expect_left(self, *names: str, granted: dict[str, int]) -> None:
        await until(lambda: self.granted() == granted, f"{granted} MiB are granted, not {self.granted()}")

        def living() -> set[str]:
            return {name for name, process in self.engines.items() if is_alive(*process)}

        await until(lambda: living() == {*names}, f"of all engines {names} live, not {living()}")
        self.service.controller.validate()

    async def answers(self, *names: str) -> None:
        """Requests sent meanwhile are answered, by a start from each or by the instance serving under that name."""
        for name in names:
            serves = self.instance(name)
            ready = (
                serves if serves and serves.state is S.READY else await self.run(self.model, f"{name}-3", source=name)
            )
            assert (await complete(ready.url)).status_code == 200


@asynccontextmanager
async def agent(folder: Path, **settings: Any) -> AsyncIterator[Faulty]:
    faulty = Faulty(folder, **settings)
    await faulty.begin()
    try:
        yield faulty
    finally:
        for name, process in faulty.engines.items():
            if is_alive(*process):
                faulty.signal(signal.SIGCONT, name)
        await faulty.service.stop()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Faulty]:
    async with agent(tmp_path) as rig:
        yield rig


async def test_engines_that_are_killed(rig: Faulty) -> None:
    await rig.in_every_state()
    for instance_id in (*HELD, *DORMANT):
        rig.kill(instance_id)
    by_itself = dict.fromkeys(("falls", "settles", *DORMANT), (S.FAILED, "the engine process ended by itself"))
    waking = dict.fromkeys(("wakes-2", "grows-2"), (S.FAILED, "ended by itself while it woke"))
    await rig.expect_ends(by_itself | waking)
    await rig.expect_left(granted={})
    await rig.answers("asleep", "wakes-2")


async def test_engines_that_hang(tmp_path: Path) -> None:
    async with agent(tmp_path, sleep_deadline_s=3.0, wake_deadline_s=3.0) as rig:
        await rig.serving(*BECOMES)
        dormant = [name for name in BECOMES if name not in ("falls", "settles")]
        await rig.lie_down(*dormant)
        for name in dormant:
            await rig.reaches(name, InstanceState(BECOMES[name]))
        rig.signal(signal.SIGSTOP, *BECOMES)
        await rig.lie_down("falls", "settles")
        await rig.wake_up("wakes", "grows")
        asleep = dict.fromkeys(("falls", "settles"), (S.STOPPED, "it was not asleep after 3 s"))
        woken = {f"{name}-2": (S.FAILED, f"{name} did not wake within 3 s") for name in ("wakes", "grows")}
        await rig.expect_ends(asleep | woken | {name: (state, "") for name, state in DORMANT.items()})
        await rig.expect_left(*DORMANT, granted={"prewarm": 60})
        await rig.answers("wakes-2", "falls")


async def test_engines_that_refuse(rig: Faulty) -> None:
    await rig.serving(*BECOMES)
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        for name in BECOMES:
            no = {"sleep_failure" if name in ("falls", "settles") else "wake_failure": f"no, says {name}"}
            url = rig.handle(name)["url"]
            assert (await client.post(f"{url}/admin/config", json=no)).status_code == 200
    await rig.lie_down(*BECOMES)
    for name, state in DORMANT.items():
        await rig.reaches(name, state)
    for name in ("wakes", "grows"):
        await rig.reaches(name, InstanceState(BECOMES[name]))
    await rig.wake_up("wakes", "grows")
    asleep = {
        name: (S.STOPPED, f"could not be put to sleep and is stopped: emulated {name}") for name in ("falls", "settles")
    }
    woken = {f"{name}-2": (S.FAILED, f"no, says {name}") for name in ("wakes", "grows")}
    await rig.expect_ends(asleep | woken)
    await rig.expect_left(*DORMANT, granted={"prewarm": 60})
    await rig.answers("falls", "wakes-2")


AGENT_ALONE: Ends = {
    "falls": (S.SWAPPED_OUT, "it sleeps in host memory"),
    "settles": (S.PREWARMED, "its weights stay on the GPU"),
    "asleep": (S.SWAPPED_OUT, "its agent has restarted and found it again"),
    "warm": (S.PREWARMED, "its agent has restarted and found it again"),
}
AGENT_AND_ENGINES: Ends = {
    **dict.fromkeys(("falls", "settles"), (S.FAILED, "the engine died while its agent was down")),
    **dict.fromkeys(DORMANT, (S.STOPPED, "its engine ended while its agent was down")),
}


@pytest.mark.parametrize(
    ("harm", "ends", "left", "granted"),
    [
        pytest.param(signal.SIGCONT, AGENT_ALONE, tuple(AGENT_ALONE), {"prewarm": 120}, id="the agent alone"),
        pytest.param(signal.SIGKILL, AGENT_AND_ENGINES, (), {}, id="with its engines"),
    ],
)
async def test_an_agent_that_is_killed(
    rig: Faulty, harm: signal.Signals, ends: Ends, left: tuple[str, ...], granted: dict[str, int]
) -> None:
    """A waking instance starts from scratch: its progress is unknown."""
    await rig.in_every_state()
    await rig.crash()
    rig.signal(harm, *BECOMES)
    if harm is signal.SIGKILL:
        await until(lambda: not any(is_alive(*process) for process in rig.engines.values()), "they are gone")
    await rig.start()
    await rig.expect_ends(ends | dict.fromkeys(("wakes-2", "grows-2"), (S.READY, "it is ready after")))
    await rig.expect_left(*left, granted=granted | {"weights": 120, "kv": 200})
    await rig.answers("wakes-2", "grows-2", "asleep", "warm")


async def test_too_little_memory_for_a_sleeper_and_for_a_wake(tmp_path: Path) -> None:
    """Host memory for one sleeper (1.4 of its weights, 84 MiB), GPU memory for one engine."""
    async with agent(tmp_path, gpu_budgets="350MiB", swap_host_bytes=100 * MIB) as rig:
        await rig.serving("asleep", "wakes")
        await rig.lie_down("asleep")
        await rig.reaches("asleep", S.SWAPPED_OUT)
        await rig.lie_down("wakes")
        await rig.expect_ends(
            {"wakes": (S.STOPPED, "84 MiB beside 84 MiB is more than the 100 MiB that engines asleep")}
        )
        await rig.expect_left("asleep", granted={})
        await rig.serving("one", "two")
        await rig.wake_up("asleep")
        await rig.expect_ends({"asleep-2": (S.FAILED, "has 30 MiB of 350 MiB free, asleep-2 needs 160 MiB")})
        await rig.expect_left("asleep", "one", "two", granted={"weights": 120, "kv": 200})
        await rig.stop("two", grace_s=0)
        ready = await rig.grow("asleep-3", "asleep")
        assert ready.source == "asleep"
