"""When a stream counts as storing nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from glowplug.bus.nats_bus import Storing
from tests.waiting import WAIT_S

FACTS, COMMANDS = "FACTS", "COMMANDS"


@dataclass
class FakeServer:
    """Answers pings while `lives`, stores while `has_space`; `asked` lists checked streams."""

    lives: bool = True
    has_space: bool = True
    asked: list[str] = field(default_factory=list)

    async def store(self, stream: str) -> None:
        self.asked.append(stream)
        if not (self.lives and self.has_space):
            raise TimeoutError

    async def answers(self) -> bool:
        return self.lives

    def storing(self, *watched: str) -> Storing:
        return Storing(self.store, self.answers, (TimeoutError,), watched, check_every_s=0.001, quiet_s=0.0)


@asynccontextmanager
async def watching(storing: Storing, connected: bool = True) -> AsyncIterator[None]:
    task = asyncio.create_task(storing.watch(lambda: connected))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(storing: Storing, *, refuses: bool) -> None:
    async with asyncio.timeout(WAIT_S):
        while bool(storing.refusal) is not refuses:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("server", "refuses"),
    [
        pytest.param(FakeServer(has_space=False), True, id="it answers and does not store"),
        pytest.param(FakeServer(lives=False), False, id="it stands still: it is lost"),
        pytest.param(FakeServer(), False, id="one late answer"),
    ],
)
async def test_a_server_refuses_that_answers_and_does_not_store(server: FakeServer, refuses: bool) -> None:
    storing = server.storing()
    await storing.refused(FACTS, TimeoutError())
    assert ("stores no events" in storing.refusal) == bool(storing.of(FACTS)) == refuses
    assert bool(storing.refusal) == refuses and not storing.of(COMMANDS)


async def test_a_stream_that_refuses_is_asked_until_it_stores() -> None:
    server = FakeServer(has_space=False)
    storing = server.storing()
    await storing.refused(FACTS, TimeoutError())
    async with watching(storing):
        await asyncio.sleep(0.01)
        assert storing.refusal and set(server.asked) == {FACTS}
        server.has_space = True
        await until(storing, refuses=False)


async def test_a_quiet_stream_is_asked_before_anybody_needs_it_where_that_is_wished() -> None:
    server = FakeServer(has_space=False)
    storing, unasked = server.storing(COMMANDS), FakeServer(has_space=False)
    async with watching(storing), watching(unasked.storing()):
        await until(storing, refuses=True)
    assert set(server.asked) == {COMMANDS} and not unasked.asked


async def test_nothing_is_asked_while_there_is_no_connection() -> None:
    server = FakeServer(has_space=False)
    async with watching(server.storing(COMMANDS), connected=False):
        await asyncio.sleep(0.01)
    assert not server.asked


async def test_another_server_starts_with_a_clean_sheet() -> None:
    storing = FakeServer(has_space=False).storing()
    await storing.refused(FACTS, TimeoutError())
    storing.reset()
    assert not storing.refusal
