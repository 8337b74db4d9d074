"""The smallest proxy on the router's event loop and parser: the least that a data port built on them can cost.

    python -m bench.router.floor PORT ENGINE_PORT

A request is parsed to its end and sent unchanged over an idle connection to the engine; every read of the answer is
parsed and passed on as it is. It chooses, counts, checks, limits, names and retries nothing.
"""

import asyncio
import sys

import httptools
import uvloop

from glowplug.services.router import wire


class Client(asyncio.Protocol):
    def __init__(self, idle: "list[Engine]", engine_port: int) -> None:
        self._idle, self._engine_port = idle, engine_port
        self._parser = httptools.HttpRequestParser(self)
        self._request, self._is_whole = b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.write = wire.writer(transport)  # type: ignore[arg-type]

    def on_message_complete(self) -> None:
        self._is_whole = True

    def data_received(self, data: bytes) -> None:
        self._request += data
        self._parser.feed_data(data)
        if not self._is_whole:
            return
        request, self._request, self._is_whole = self._request, b"", False
        if self._idle:
            self._idle.pop().send(request, self)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(request))

    async def _connect(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, engine = await loop.create_connection(lambda: Engine(self._idle), "127.0.0.1", self._engine_port)
        engine.send(request, self)


class Engine(asyncio.Protocol):
    def __init__(self, idle: "list[Engine]") -> None:
        self._idle, self._is_whole = idle, False
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = wire.writer(transport)  # type: ignore[arg-type]

    def send(self, request: bytes, client: Client) -> None:
        self._client = client
        self._write(request)

    def on_message_complete(self) -> None:
        self._is_whole = True

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._client.write(data)
        if self._is_whole:
            self._is_whole = False
            self._idle.append(self)


async def main(port: int, engine_port: int) -> None:
    idle: list[Engine] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(idle, engine_port), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
