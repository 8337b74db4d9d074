"""A TCP link whose way back to the client can be stopped, like a page on a bad line or in a sleeping tab."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

CHUNK = 1 << 16


class SlowLink:
    """While `open` is clear, answers are not read, so that the server's buffers fill. `sent`: bytes from clients."""

    def __init__(self, port: int) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.url = ""
        self.sent = bytearray()
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        ways = (self._pump(reader, back, None), self._pump(there, writer, self.open))
        for way in ways:
            task = asyncio.create_task(way)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event | None
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while raw := await reader.read(CHUNK):
                if gate is None:
                    self.sent += raw
                else:
                    await gate.wait()
                writer.write(raw)
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        self.open.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def slow_link(port: int) -> AsyncIterator[SlowLink]:
    link = SlowLink(port)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    link.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield link
    finally:
        server.close()
        await link.close()
