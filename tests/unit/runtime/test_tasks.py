"""Background tasks: what must not be missed is not missed in silence."""

import asyncio

from glowplug.runtime.tasks import essential


async def test_an_essential_part_that_fails_stops_its_service() -> None:
    stopping = asyncio.Event()

    async def failing() -> None:
        raise OSError("gone")

    essential(asyncio.create_task(failing()), stopping)
    async with asyncio.timeout(10):
        await stopping.wait()
    assert stopping.is_set()


async def test_an_essential_part_that_is_over_or_cancelled_stops_nothing() -> None:
    stopping = asyncio.Event()
    over = essential(asyncio.create_task(asyncio.sleep(0)), stopping)
    cancelled = essential(asyncio.create_task(asyncio.sleep(60)), stopping)
    await over
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await asyncio.sleep(0)
    assert not stopping.is_set()
