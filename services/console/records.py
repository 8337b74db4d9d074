"""Records as the console keeps and sends them: copied from domain values, the newest only, as JSON or as a stream."""

from collections import OrderedDict
from collections.abc import AsyncIterable
from typing import Any, Final, TypeVar

import msgspec
from fastapi.responses import Response, StreamingResponse

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
RecordT = TypeVar("RecordT", bound=msgspec.Struct)
_encode = msgspec.json.Encoder().encode


def record_of(kind: type[RecordT], source: object, **others: Any) -> RecordT:
    """A record with the fields `others`, and the rest as `source` has them under the same names. A field that neither
    has keeps its default; without one it is a TypeError."""
    names = (name for name in kind.__struct_fields__ if name not in others and hasattr(source, name))
    return kind(**{name: getattr(source, name) for name in names}, **others)


FRESH_S: Final = 1.0  # what a service has answered is given again for this long, to all pages that ask
KEPT: Final = 64  # such answers, of one kind


class Newest(OrderedDict[KeyT, ValueT]):
    """The `max_len` entries that were put last, oldest first. An entry that is put again becomes the newest."""

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self._max_len = max_len

    def put(self, key: KeyT, value: ValueT) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._max_len:
            self.popitem(last=False)


def json_response(value: object) -> Response:
    """A msgspec value as JSON that no cache keeps."""
    return Response(_encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def message(name: str, data: object) -> bytes:
    """One server-sent event. JSON has no raw line break, so one data line is enough."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


def streamed(messages: AsyncIterable[bytes]) -> StreamingResponse:
    """Server-sent events that neither a cache nor a proxy holds back."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages, media_type="text/event-stream", headers=headers)
