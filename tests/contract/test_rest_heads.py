"""What a REST port bears before it has read a key.

Lane: fast, 1 s.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from glowplug.runtime import rest_server
from glowplug.runtime.rest import make_app
from glowplug.runtime.service import serve_rest
from glowplug.runtime.settings import ServiceSettings
from tests.waiting import WAIT_S, until

HEAD = b"POST /v1/sizes HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
LONG = b"x-long: " + b"a" * 30_000 + b"\r\n"


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, Any]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT_S)
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = await self.reader.readexactly(int(length.partition(b":")[2]))
        return int(head.split()[1]), json.loads(body)

    async def refused(self) -> tuple[int, str]:
        status, said = await self.answer()
        assert await asyncio.wait_for(self.reader.read(), WAIT_S) == b"", "its connection is closed"
        return status, said["error"]["code"]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = make_app("placer", "placer-1", ready=lambda: "", policies=dict)

    @app.post("/v1/sizes")
    async def size(body: list[int]) -> int:
        return len(body)

    server, url = await serve_rest(app, ServiceSettings())
    yield int(url.rpartition(":")[2])
    server.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await server


async def peer(port: int, *sent: bytes) -> Peer:
    made = Peer(*await asyncio.open_connection("127.0.0.1", port))
    with contextlib.suppress(ConnectionError):  # refused meanwhile
        for data in sent:
            made.writer.write(data)
            await made.writer.drain()
    return made


def asking(num: int, more: bytes = b"") -> bytes:
    body = json.dumps([0] * num).encode()
    return HEAD + more + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_a_head_within_its_bound_and_a_body_beyond_it_are_read_alone_or_one_behind_another(port: int) -> None:
    one = await peer(port, asking(3, LONG), asking(100_000), asking(5, LONG))
    assert [await one.answer() for _ in range(3)] == [(200, 3), (200, 100_000), (200, 5)]
    behind = await peer(port, asking(3) + asking(4, LONG)[:10])
    assert await behind.answer() == (200, 3)
    behind.writer.write(asking(4, LONG)[10:])
    assert await behind.answer() == (200, 4)


@pytest.mark.parametrize(
    "sent", [HEAD + LONG * 2, (HEAD + LONG, LONG), HEAD + b"x" * (4 << 20)], ids=["at once", "in parts", "one line"]
)
async def test_a_head_beyond_its_bound_is_refused(port: int, sent: Any) -> None:
    assert await (await peer(port, *([sent] if isinstance(sent, bytes) else sent))).refused() == (
        431,
        "headers_too_large",
    )
    late = await peer(port, asking(1))
    assert await late.answer() == (200, 1)
    late.writer.write(HEAD + LONG * 2)
    assert await late.refused() == (431, "headers_too_large"), "of a later request, too"


async def test_a_head_that_never_ends_is_refused_and_a_slow_body_is_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, whole = await peer(port, asking(1)), asking(3)
    assert await later.answer() == (200, 1)
    slow = await peer(port, HEAD, whole.removeprefix(HEAD)[:-1])
    monkeypatch.setattr(rest_server, "HEAD_S", 0.05)
    later.writer.write(HEAD)
    for late in (later, await peer(port), await peer(port, HEAD)):
        assert await late.refused() == (408, "request_timeout")
    slow.writer.write(whole[-1:])
    assert await slow.answer() == (200, 3)


async def test_connections_beyond_their_number_are_refused_until_one_ends(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest_server, "MAX_CONNECTIONS", 2)
    first, second = await peer(port, asking(1)), await peer(port, asking(2))
    assert [await first.answer(), await second.answer()] == [(200, 1), (200, 2)]
    assert await (await peer(port)).refused() == (503, "no_capacity")
    first.writer.close()

    async def is_served() -> bool:
        with contextlib.suppress(asyncio.IncompleteReadError):
            return await (await peer(port, asking(3))).answer() == (200, 3)
        return False

    await until(is_served, "the place of the one that has left is free")
