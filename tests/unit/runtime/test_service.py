"""The end of a service's process."""

import asyncio

import pytest

from glowplug.runtime.service import FAILED, run
from glowplug.runtime.tasks import essential


def test_a_service_whose_essential_part_fails_ends_with_a_code_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def failing() -> None:
        raise ZeroDivisionError("of a part")

    async def serve(stopping: asyncio.Event) -> None:
        essential(asyncio.create_task(failing(), name="the part"), stopping)
        await stopping.wait()

    with pytest.raises(SystemExit) as ended:
        run(serve)
    assert ended.value.code == FAILED
    (record,) = [one for one in caplog.records if one.exc_info]
    assert record.levelname == "CRITICAL" and "the part ended" in record.getMessage()


def test_a_service_that_is_asked_to_stop_ends_well() -> None:
    ended = []

    async def serve(stopping: asyncio.Event) -> None:
        stopping.set()
        await stopping.wait()
        ended.append("well")

    run(serve)
    assert ended == ["well"]
