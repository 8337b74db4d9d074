"""Rows of a trace file (CSV or JSON lines, gzip or plain); errors name file, line and field."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from glowplug_lab.simulator.workload.arrival import TraceError

T = TypeVar("T")
GZIP: Final = b"\x1f\x8b"


@dataclass(slots=True)
class Row:
    values: Mapping[str, str]
    source: str
    line: int

    def text(self, field: str) -> str:
        """Raises TraceError when the row is too short."""
        value = self.values.get(field)
        if value is None:
            raise TraceError(self.source, self.line, field, "is missing")
        return value.strip()

    def one_of(self, field: str, words: tuple[str, str]) -> str:
        """Raises TraceError for any other word."""
        text = self.text(field)
        if text not in words:
            raise TraceError(self.source, self.line, field, f"{text[:20]!r} is neither {words[0]} nor {words[1]}")
        return text

    def count(self, field: str) -> int:
        """A whole number from 0 up. Raises TraceError."""
        return self._read(field, int, "a whole number from 0 up", lambda n: n >= 0)

    def seconds(self, field: str) -> float:
        """Finite seconds from 0 up. Raises TraceError."""
        return self._read(field, float, "seconds from 0 up", lambda s: 0 <= s < float("inf"))

    def number(self, field: str) -> float:
        """A finite number from 0 up. Raises TraceError."""
        return self._read(field, float, "a number from 0 up", lambda x: 0 <= x < float("inf"))

    def numbers(self, field: str) -> tuple[int, ...]:
        """Whole numbers, separated by spaces or as a JSON list. Raises TraceError."""
        return self._read(field, lambda text: tuple(map(int, text.strip("[]").replace(",", " ").split())),
                          "whole numbers", lambda _: True)  # fmt: skip

    def positive(self, field: str) -> float:
        """A finite number above 0. Raises TraceError."""
        return self._read(field, float, "a number above 0", lambda x: 0 < x < float("inf"))

    def moment(self, field: str) -> float:
        """Epoch seconds of a calendar time, read as UTC. Raises TraceError."""

        def read(text: str) -> float:
            whole, _, rest = text.partition(".")
            digits = rest.rstrip("Z").partition("+")[0]  # traces have seven digits, Python reads six
            second = datetime.fromisoformat(whole.rstrip("Z").partition("+")[0] + "+00:00").timestamp()
            return second + float(f"0.{digits or 0}")

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
    """Cache results while the file is unchanged. Callers must not change them. Raises the errors of `read`."""
    try:
        there = path.stat()
    except OSError:
        return read(path, *arguments)  # raises the error
    found: T = _kept(read, path, (there.st_mtime_ns, there.st_size), arguments)
    return found


@lru_cache(maxsize=16)
def _kept(read: Callable[..., Any], path: Path, _: tuple[int, int], arguments: tuple[Any, ...]) -> Any:
    return read(path, *arguments)


def open_text(path: Path) -> io.TextIOBase:
    """Unpack gzip by content or .gz. Raises TraceError."""
    return io.TextIOWrapper(_open(path), "utf-8-sig", newline="")


def _open(path: Path) -> io.BufferedReader | gzip.GzipFile:
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP)) == GZIP
        return gzip.open(path, "rb") if packed or path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise TraceError(str(path), 0, "", error.strerror or str(error)) from error


def header(path: Path) -> tuple[str, ...]:
    """Column names; `("{",)` for JSON lines. Raises TraceError for an empty file."""
    with open_text(path) as file:
        line = next(_lines(file, str(path)), "").strip()
    if not line:
        raise TraceError(str(path), 0, "", "is empty")
    if line.startswith("{"):
        return ("{",)
    return tuple(name.strip() for name in next(csv.reader([line])))


def rows(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """`columns` are for a CSV without a header. Raises TraceError for a row with more cells than columns."""
    source = str(path)
    names = columns or header(path)
    with open_text(path) as file:
        if names == ("{",):
            yield from _json_rows(file, source)
            return
        reader = csv.reader(_lines(file, source))
        for number, cells in enumerate(_cells(reader, source)):
            if not cells or (number == 0 and not columns):
                continue
            if len(cells) > len(names) and any(cells[len(names) :]):
                raise TraceError(source, reader.line_num, "", f"has {len(cells)} cells for {len(names)} columns")
            yield Row(dict(zip(names, cells, strict=False)), source, reader.line_num)


def _cells(reader: Any, source: str) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise TraceError(source, reader.line_num, "", f"is not CSV: {error}") from error


def _json_rows(file: io.TextIOBase, source: str) -> Iterator[Row]:
    for number, line in enumerate(_lines(file, source), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(source, number, "", f"is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise TraceError(source, number, "", "is not a JSON object")
        yield Row({str(k): v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}, source, number)


def _lines(file: io.TextIOBase, source: str) -> Iterator[str]:
    number = 1
    try:
        for line in file:
            yield line
            number += 1
    except UnicodeDecodeError as error:
        raise TraceError(source, _undecodable(Path(source)), "", f"is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(source, number, "", f"cannot be read: {error}") from error


def _undecodable(path: Path) -> int:
    """A buffered reader fails at an earlier line."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0
