"""The lines of a batch's input and output. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from glowplug.domain.batch import LineError
from glowplug.engines import apis

ENDPOINTS: Final = (apis.CHAT, apis.COMPLETIONS, apis.EMBEDDINGS, apis.RESPONSES)
MAX_ERRORS: Final = 50  # reported per input
_RETRIED: Final = (429, 503)  # sent again until the window ends
_LOST: Final = (500, 502, 504)  # the engine's fault: sent again a few times
_TIMING = re.compile(rb"queue;dur=([0-9.]+)")


class _Asked(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"")


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None


class _Raw(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


@dataclass(frozen=True, slots=True, repr=False)  # prompts never reach a log
class BatchLine:
    """One request of an input. `number` counts the lines of the file from 1."""

    number: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True, repr=False)
class LineAnswer:
    """The answer to one line, or (`status` 0) the reason, in `code` and `message`, for not sending it. `body`: JSON."""

    status: int
    body: bytes = b""
    request_id: str = ""
    code: str = ""
    message: str = ""
    retry_after_s: float | None = None
    may_retry: bool = True
    held_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.status == 200


class TooLongLine(Exception):
    """A line has more bytes than a request may have. `number` counts as a BatchLine's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class LineSplitter:
    """A splitter of an input into numbered lines. Raises TooLongLine beyond `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._rest, self._number = most, b"", 0

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the lines that the chunk ends, without blank ones."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for raw in whole:
            yield from self._line(raw)
        if len(self._rest) > self._most:
            raise TooLongLine(self._number + 1)

    def end(self) -> Iterator[tuple[int, bytes]]:
        rest, self._rest = self._rest, b""
        yield from self._line(rest) if rest else ()

    def _line(self, raw: bytes) -> Iterator[tuple[int, bytes]]:
        self._number += 1
        if len(raw) > self._most:
            raise TooLongLine(self._number)
        if raw.strip():
            yield self._number, raw


class Checker:
    """The check of one input's lines, with the first errors."""

    def __init__(self, endpoint: str, max_lines: int) -> None:
        self._endpoint, self._max_lines = endpoint, max_lines
        self._ids: set[str] = set()
        self.errors: list[LineError] = []
        self.num_lines = 0

    @property
    def is_full(self) -> bool:
        return len(self.errors) >= MAX_ERRORS

    def take(self, number: int, raw: bytes) -> None:
        self.num_lines += 1
        error = self._wrong(number, raw)
        if error is not None:
            self.errors.append(error)
        elif self.num_lines == self._max_lines + 1:
            self.errors.append(LineError(code="too_many_lines", message=f"More than {self._max_lines} requests."))

    def too_long(self, number: int, most: int) -> None:
        self.errors.append(LineError(code="line_too_long", line=number, message=f"The line exceeds {most} bytes."))

    def end(self) -> tuple[LineError, ...]:
        if not self.num_lines and not self.errors:
            self.errors.append(LineError(code="empty_file", message="The input has no requests."))
        return tuple(self.errors[:MAX_ERRORS])

    def _wrong(self, number: int, raw: bytes) -> LineError | None:
        def error(code: str, message: str, param: str = "") -> LineError:
            return LineError(code=code, message=message, line=number, param=param)

        try:
            asked = msgspec.json.decode(raw, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return error("invalid_json_line", "The line is not a JSON object.")
        if not isinstance(asked.custom_id, str) or not 0 < len(asked.custom_id) <= 512:
            return error("missing_required_parameter", "custom_id: text of 1 to 512 characters is needed.", "custom_id")
        if asked.custom_id in self._ids:
            return error("duplicate_custom_id", "An earlier line has this custom_id.", "custom_id")
        self._ids.add(asked.custom_id)
        if asked.method != "POST":
            return error("invalid_method", "method: only POST is possible.", "method")
        if asked.url != self._endpoint:
            return error("mismatched_url", f"url: it differs from the batch's endpoint, {self._endpoint}.", "url")
        try:
            body = msgspec.json.decode(asked.body, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body = _Body()
        if not isinstance(body.model, str):
            return error("missing_required_parameter", "body: an object with the field `model` is needed.", "body")
        if body.stream:
            return error("invalid_value", "stream: the lines of a batch are answered whole.", "body.stream")
        return None


def read_line(number: int, raw: bytes) -> BatchLine:
    found = msgspec.json.decode(raw, type=_Raw)
    return BatchLine(number, found.custom_id, bytes(found.body))


def is_retried(answer: LineAnswer, num_lost: int, most_lost: int) -> bool:
    """Return whether a line is sent again. `num_lost`: earlier answers that were an engine's fault."""
    if answer.status in _RETRIED:
        return answer.may_retry or answer.retry_after_s is not None
    return answer.status in _LOST and num_lost < most_lost


def is_lost(answer: LineAnswer) -> bool:
    return answer.status in _LOST


def queue_s(head: bytes) -> float:
    """Return an answer's seconds in the queue, by its Server-Timing."""
    found = _TIMING.search(head)
    return float(found[1]) / 1000 if found else 0.0


def output_line(line_id: str, custom_id: str, answer: LineAnswer) -> bytes:
    """Return a line of the output or error file, without its line break."""
    if not answer.status:
        error = {"code": answer.code, "message": answer.message}
        return msgspec.json.encode({"id": line_id, "custom_id": custom_id, "response": None, "error": error})
    body: Any = None
    if answer.body:
        try:
            msgspec.json.decode(answer.body)
            body = msgspec.Raw(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = {"error": {"message": "The answer is not JSON.", "code": "engine_failed"}}
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    made = {"id": line_id, "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(made).replace(b"\n", b" ").replace(b"\r", b" ")  # between the body's tokens


def part_line(number: int, is_output: bool, line: bytes) -> bytes:
    return b"%d %b %b\n" % (number, b"o" if is_output else b"e", line)


def read_part(part: bytes) -> Iterator[tuple[int, bool, bytes]]:
    """Yield (number, is_output, line) of each result. Raises ValueError for malformed bytes."""
    for row in part.split(b"\n"):
        if row:
            number, kind, line = row.split(b" ", 2)
            yield int(number), kind == b"o", line
