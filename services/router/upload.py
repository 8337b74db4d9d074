"""A file upload, received into an unnamed file on this router's disk.

Memory holds only a buffer, and nothing stays on disk after a dropped request or this process's death: the kernel frees
an unnamed file at its close.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from glowplug.domain.errors import BadRequest
from glowplug.services.router.api_errors import ApiError, refused

WRITE_BYTES: Final = 512 * 1024
MOST_BUFFERED: Final = 4 << 20  # not on the disk yet: more waits in the kernel
MOST_FIELD_BYTES: Final = 4096  # of a field without a file
MOST_UPLOADS: Final = 16  # of one router
_FORM: Final = 64 * 1024  # of a form besides its file
_PIECE: Final = 1 << 20
_BOUNDARY = re.compile(rb'boundary="?([0-9A-Za-z\'()+_,./:=? -]{1,70})"?', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="?([^";\r\n]*)"?', re.IGNORECASE)
_FILENAME = re.compile(rb'filename="?([^"\r\n]*?)"?(?:;|\r|\n|$)', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of an upload, and the position of its file's bytes."""

    fields: dict[str, str]
    file_name: str
    start: int
    end: int


class Upload:
    """`pause(True)` is called while the client outruns the disk."""

    def __init__(
        self, file: IO[bytes], most_bytes: int, writer: ThreadPoolExecutor, release: Callable[[], None]
    ) -> None:
        self._file, self._most, self._writer, self._release = file, most_bytes + _FORM, writer, release
        self._loop = asyncio.get_running_loop()
        self.pause: Callable[[bool], None] = lambda paused: None
        self._buffer = bytearray()
        self._writing: asyncio.Future[None] | None = None
        self._paused = self._released = False
        self._error: Exception | None = None
        self.num_bytes = 0

    def feed(self, data: bytes) -> None:
        """Raises ApiError: 413."""
        self.num_bytes += len(data)
        if self.num_bytes > self._most:
            raise too_large(self._most - _FORM)
        self._buffer += data
        if self._writing is None and len(self._buffer) >= WRITE_BYTES:
            self._write()
        if not self._paused and len(self._buffer) > MOST_BUFFERED:
            self._paused = True
            self.pause(True)

    def _write(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        self._writing = self._loop.run_in_executor(self._writer, self._append, data)
        self._writing.add_done_callback(self._written)

    def _append(self, data: bytes) -> None:
        self._file.write(data)

    def _written(self, done: "asyncio.Future[None]") -> None:
        self._writing = None
        if not done.cancelled() and (error := done.exception()) is not None:
            self._error = error if isinstance(error, Exception) else None
            self._buffer = bytearray()
        elif len(self._buffer) >= WRITE_BYTES:
            self._write()
        if self._paused and len(self._buffer) <= MOST_BUFFERED:
            self._paused = False
            self.pause(False)

    async def form(self, content_type: bytes) -> Form:
        """Return the form, after the whole body. Raises ApiError for a full disk, BadRequest for another form."""
        while self._writing is not None or self._buffer:
            if self._writing is None:
                self._write()
            assert self._writing is not None
            await asyncio.wait((self._writing,))
            await asyncio.sleep(0)
        if self._error is not None:
            raise ApiError(503, "The router's disk cannot store the file.", "service_unavailable", "no_space", None, 5)
        self._file.flush()
        return await asyncio.to_thread(_read_form, self._file.fileno(), self.num_bytes, content_type)

    async def content(self, form: Form) -> AsyncIterator[bytes]:
        at = form.start
        while at < form.end:
            piece = await asyncio.to_thread(os.pread, self._file.fileno(), min(_PIECE, form.end - at), at)
            if not piece:
                return
            at += len(piece)
            yield piece

    def close(self) -> None:
        if not self._released:
            self._released = True
            self._release()
            self._file.close()

    def __del__(self) -> None:
        self.close()


class Uploads:
    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most, self._num = folder, most_bytes, 0
        self._writer = ThreadPoolExecutor(2, thread_name_prefix="uploads")

    def begin(self, length: int | None) -> Upload:
        """Receive `length` bytes (None: unknown). Raises ApiError: 413, 503."""
        if length is not None and length > self._most + _FORM:
            raise too_large(self._most)
        if self._num >= MOST_UPLOADS:
            raise refused(503, "Too many files are being sent; try again.", "overloaded", retry_after_s=2.0)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 it outlives this call
        except OSError as error:
            raise refused(503, "The router's disk cannot store the file.", "no_space", retry_after_s=5.0) from error
        self._num += 1
        return Upload(file, self._most, self._writer, self._released)

    def _released(self) -> None:
        self._num -= 1


def too_large(most_bytes: int) -> ApiError:
    return refused(413, f"The file is larger than {most_bytes} bytes.", "request_too_large")


def _read_form(fd: int, num_bytes: int, content_type: bytes) -> Form:
    found = _BOUNDARY.search(content_type)
    if found is None or not content_type.lower().startswith(b"multipart/form-data"):
        raise BadRequest("The body is expected as multipart/form-data, with the fields `purpose` and `file`.")
    mark = b"\r\n--" + found[1].strip()
    fields: dict[str, str] = {}
    name, span = "", (0, -1)
    head_at = len(mark) - 2  # the first boundary has no line break before it
    if os.pread(fd, head_at, 0) != mark[2:]:
        raise BadRequest("The form does not begin with its boundary.")
    for _ in range(64):
        head = os.pread(fd, MOST_FIELD_BYTES, head_at)
        if head.startswith(b"--"):
            break
        lines, is_whole, _ = head.partition(b"\r\n\r\n")
        end = _find(fd, mark, head_at + len(lines) + 2, num_bytes)
        field = _NAME.search(lines)
        if not is_whole or end < 0 or field is None:
            raise BadRequest("The form is incomplete.")
        start, key = head_at + len(lines) + 4, field[1].decode("utf-8", "replace")
        if key == "file":
            given = _FILENAME.search(lines)
            name, span = (given[1].decode("utf-8", "replace") if given else ""), (start, max(end, start))
        elif end - start > MOST_FIELD_BYTES:
            raise BadRequest(f"{key[:40]}: the field is too long.", param=key[:40])
        else:
            fields[key] = os.pread(fd, max(end - start, 0), start).decode("utf-8", "replace")
        head_at = end + len(mark)
    if span[1] < 0:
        raise BadRequest("file: the form has no file.", param="file")
    return Form(fields, name.replace("\\", "/").rpartition("/")[2][:255] or "file", *span)


def _find(fd: int, mark: bytes, at: int, num_bytes: int) -> int:
    """Return the position of `mark`, or -1."""
    while at < num_bytes:
        piece = os.pread(fd, _PIECE + len(mark), at)
        found = piece.find(mark)
        if found >= 0:
            return at + found
        at += _PIECE
    return -1
