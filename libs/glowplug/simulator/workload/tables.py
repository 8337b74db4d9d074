"""Rows of a trace file, gzip or plain, CSV or JSON lines, with errors that name file, line and field."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from glowplug.simulator.workload.arrival import TraceError

T = TypeVar("T")


class Row:
    """One line of a table."""

    __slots__ = ("line", "source", "values")

    def __init__(self, values: Mapping[str, str], source: str, line: int) -> None:
        self.values, self.source, self.line = values, source, line

    def text(self, field: str) -> str:
        """The field as it is written. Raises TraceError when the row is too short."""
        value = self.values.get(field)
        if value is None:
            raise TraceError(self.source, self.line, field, "is missing")
        return value.strip()

    def count(self, field: str) -> int:
        """A whole number from 0 up."""
        return self._read(field, int, "a whole number from 0 up", lambda n: n >= 0)

    def seconds(self, field: str) -> float:
        """A finite number from 0 up."""
        return self._read(field, float, "seconds from 0 up", lambda s: 0 <= s < float("inf"))

    def positive(self, field: str) -> float:
        """A finite number above 0."""
        return self._read(field, float, "a number above 0", lambda x: 0 < x < float("inf"))

    def moment(self, field: str) -> float:
        """A calendar time, in epoch seconds (a time without a zone is read as UTC)."""

        def read(text: str) -> float:
            whole, dot, rest = text.partition(".")
            digits = rest.rstrip("Z").partition("+")[0]  # traces carry seven digits, Python reads six
            return datetime.fromisoformat(whole.rstrip("Z").partition("+")[0] + "+00:00").timestamp() + (
                float(f"0.{digits}") if dot and digits else 0.0
            )

        return self._read(field, read, "a time such as 2023-11-16 18:17:03.97", lambda _: True)

    def _read(self, field: str, read: Callable[[str], T], wanted: str, holds: Callable[[T], bool]) -> T:
        text = self.text(field)
        try:
            value = read(text)
        except ValueError as error:
            raise TraceError(self.source, self.line, field, f"{text[:40]!r} is not {wanted}") from error
        if not holds(value):
            raise TraceError(self.source, self.line, field, f"{text[:40]!r} is not {wanted}")
        return value


def read_once(read: Callable[..., T], path: Path, *arguments: Any) -> T:
    """`read(path, *arguments)`, kept for as long as the file stays as it is: the runs of a sweep share what their
    traces hold. What `read` returns must not be changed. Raises what `read` raises."""
    try:
        there = path.stat()
    except OSError:
        return read(path, *arguments)  # which says what is wrong
    found: T = _kept(read, path, (there.st_mtime_ns, there.st_size), arguments)
    return found


@lru_cache(maxsize=16)
def _kept(read: Callable[..., Any], path: Path, _: tuple[int, int], arguments: tuple[Any, ...]) -> Any:
    return read(path, *arguments)


def open_text(path: Path) -> io.TextIOBase:
    """A trace file as text, unpacked when its name ends in .gz. Raises TraceError when it cannot be read."""
    try:
        if path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(path, "rb"), "utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TraceError(str(path), 0, "", error.strerror or str(error)) from error


def header(path: Path) -> tuple[str, ...]:
    """The names of a CSV's columns, or `("{",)` for JSON lines. Raises TraceError for an empty file."""
    with open_text(path) as file:
        first = _lines(file, str(path), 1)
        line = next(first, "").strip()
    if not line:
        raise TraceError(str(path), 0, "", "is empty")
    if line.startswith("{"):
        return ("{",)
    return tuple(name.strip() for name in next(csv.reader([line])))


def rows(path: Path) -> Iterator[Row]:
    """Every line but the first of a CSV, every line of JSON lines; blank ones are skipped."""
    source = str(path)
    names = header(path)
    with open_text(path) as file:
        if names == ("{",):
            yield from _json_rows(file, source)
            return
        reader = csv.reader(_lines(file, source, 1))
        next(reader)
        for cells in reader:
            if cells:
                yield Row(dict(zip(names, cells, strict=False)), source, reader.line_num)


def _json_rows(file: io.TextIOBase, source: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, source, 1), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise TraceError(source, number, "", f"is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise TraceError(source, number, "", "is not a JSON object")
        yield Row({str(k): v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}, source, number)


def _lines(file: io.TextIOBase, source: str, first: int) -> Iterator[str]:
    number = first
    try:
        for line in file:
            yield line
            number += 1
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(source, number, "", f"cannot be read: {error}") from error
