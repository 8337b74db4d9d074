"""The clock of a process: it never steps, follows the wall clock slowly, and leaves pauses out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest

from glowplug.runtime.clock import CLOCK, MAX_GAP_S, SteadyClock, published
from tests.fleet_builder import an_instance


class Machine:
    """Its two clocks; it runs for a while in steps of a second, or stands still."""

    def __init__(self) -> None:
        self.monotonic_s, self.wall_s = 50.0, 1000.0
        self.clock = SteadyClock(lambda: self.monotonic_s, lambda: self.wall_s)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        keeping = asyncio.create_task(self.clock.keep())
        await asyncio.sleep(0)
        yield
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

    def still(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.wall_s += seconds

    def run(self, seconds: int) -> list[float]:
        return [self.clock.now_s() for _ in range(seconds) if not self.still(1.0)]  # type: ignore[func-returns-value]


async def test_it_is_the_wall_clock_while_nothing_happens() -> None:
    machine = Machine()
    async with machine.kept():
        assert machine.run(3) == [1001.0, 1002.0, 1003.0]
    assert machine.clock.offset_s == 950.0


@pytest.mark.parametrize(("set_by_s", "pace"), [(3600.0, 1.1), (-3600.0, 0.9), (1.0, 1.1)])
async def test_a_wall_clock_that_is_set_is_followed_by_a_tenth(set_by_s: float, pace: float) -> None:
    machine = Machine()
    machine.run(1)
    machine.wall_s += set_by_s
    times = [machine.clock.now_s(), *machine.run(5)]
    assert times[0] == 1001.0
    assert [b - a for a, b in pairwise(times)] == pytest.approx([pace] * 5)
    machine.run(int(abs(set_by_s) / 0.1))
    assert machine.clock.now_s() == pytest.approx(machine.wall_s)


async def test_a_pause_of_the_process_is_no_time() -> None:
    machine = Machine()
    async with machine.kept():
        machine.run(1)
        machine.still(MAX_GAP_S + 60.0)
        assert machine.clock.now_s() == pytest.approx(1001.0)
        assert machine.run(2) == pytest.approx([1002.1, 1003.2]), "it goes on, and follows the wall clock slowly"
        assert machine.clock.behind_s == pytest.approx(MAX_GAP_S + 60.0 - 0.2)


def test_times_leave_a_process_that_was_paused_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    row = an_instance(changed_at=100.0)
    assert published(row) is row
    monkeypatch.setattr(CLOCK, "behind_s", 60.0)
    assert (published(row).changed_at, published(row).drain_ends_at) == (160.0, 0.0)


async def test_only_a_kept_clock_takes_a_gap_for_a_pause() -> None:
    machine = Machine()
    async with machine.kept():
        pass
    machine.still(600.0)
    assert machine.clock.now_s() == 1600.0
