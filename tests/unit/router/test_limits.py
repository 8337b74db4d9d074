"""A router's limits on callers."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits
from glowplug.events.facts import RouterUsageReported
from glowplug.policies.limits.limiter import Limiter
from glowplug.policies.limits.scope import LimitRefusal, Reservation, Scope
from glowplug.policies.prediction.response_length import ResponseLengths
from glowplug.services.router.limits import CallerLimits, LimitsCopy, _duration

NOW_S = 1_790_000_000.0
OF_DAY = (Scope("tenant/acme", AccessLimits(tokens_per_day=100)),)


def used_up() -> Limiter:
    limiter = Limiter("r-1")
    reserved = limiter.admit(OF_DAY, 100, NOW_S)
    assert isinstance(reserved, Reservation)
    limiter.end(reserved, 100, NOW_S)
    return limiter


async def test_a_day_outlives_its_router(tmp_path: Path) -> None:
    copy, again = LimitsCopy(tmp_path / "r-1" / "limits.json"), Limiter("r-1")
    await copy.write(used_up(), NOW_S)
    copy.read(again, NOW_S + 60)
    assert isinstance(again.admit(OF_DAY, 1, NOW_S + 60), LimitRefusal)


async def test_a_copy_that_cannot_be_read_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, limiter = tmp_path / "limits.json", Limiter("r-1")
    LimitsCopy(path).read(limiter, NOW_S)
    assert not caplog.records
    path.write_bytes(b"{")
    LimitsCopy(path).read(limiter, NOW_S)
    assert len(limiter) == 0 and "starting without it" in caplog.text


@pytest.mark.parametrize("is_needed", [True, False])
async def test_reports_are_sent_while_anybody_has_limits(tmp_path: Path, is_needed: bool) -> None:
    limits, sent = CallerLimits("r-1", lambda _: ResponseLengths(), lambda: NOW_S), list[Any]()
    task = asyncio.create_task(limits.report(sent.append, lambda: is_needed, LimitsCopy(tmp_path / "limits.json")))
    await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    wanted = [RouterUsageReported(router_id="r-1", number=int(NOW_S * 1000), scopes={})] if is_needed else []
    assert sent == wanted


def test_durations_are_written_as_openai_writes_them() -> None:
    written = {0: b"0ms", 120: b"120ms", 1000: b"1s", 7660: b"7.7s", 60_000: b"1m0s", 361_500: b"6m1.5s"}
    assert {milliseconds: _duration(milliseconds) for milliseconds in written} == written
