"""Records of the console: bounded, sent as JSON or as a stream."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec
from fastapi.responses import Response, StreamingResponse

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
HEARTBEAT_S: Final = 10.0
_encode = msgspec.json.Encoder().encode


class Newest(OrderedDict[KeyT, ValueT]):
    """The `max_len` entries put last, oldest first."""

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self._max_len = max_len

    def put(self, key: KeyT, value: ValueT) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_len:
            self.popitem(last=False)


class Mailbox(Generic[ValueT]):
    """The newest `limit` values for one reader. Older ones are dropped and counted."""

    def __init__(self, limit: int) -> None:
        self._waiting: deque[ValueT] = deque(maxlen=limit)
        self._num_dropped = 0
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, value: ValueT) -> int:
        """Return the number dropped for it: 0 or 1."""
        dropped = int(len(self._waiting) == self._waiting.maxlen)
        self._num_dropped += dropped
        self._waiting.append(value)
        self._wake.set()
        return dropped

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def arrivals(self, heartbeat_s: float) -> AsyncIterator[tuple[list[ValueT], int]]:
        """Yield waiting values and the number dropped before; ([], 0) as heartbeat. Ends when closed."""
        while not self._closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), heartbeat_s)
            self._wake.clear()
            taken = list(self._waiting), self._num_dropped
            self._waiting.clear()
            self._num_dropped = 0
            yield taken


def json_response(value: object) -> Response:
    return Response(_encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def message(name: str, data: object) -> bytes:
    """One server-sent event: JSON has no raw line break, so one data line suffices."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def streamed(messages: AsyncIterable[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages, media_type="text/event-stream", headers=headers)
