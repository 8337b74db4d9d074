"""Read a run's files (listed in jobs.py) and JSON rows, without the simulator."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from glowplug_lab.simulator.scenario.errors import ScenarioError


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Raises ScenarioError for a missing file or anything but a JSON object."""
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError("", f"{folder}: is not a folder of a run ({name}: {error.strerror})") from error
    except ValueError as error:
        raise ScenarioError("", f"{folder / name}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ScenarioError("", f"{folder / name}: is not a JSON object")
    return value


def read_lines(folder: Path, name: str, begins: str = "") -> Iterator[dict[str, Any]]:
    """Raises ScenarioError naming file and line."""
    return read_rows(folder / name, begins)


def read_rows(path: Path, begins: str = "") -> Iterator[dict[str, Any]]:
    """Keep lines that start with `begins`; unpack .gz. Raises ScenarioError naming file and line."""
    opened: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        file = opened(path, "rt", encoding="utf-8-sig")
    except OSError as error:
        raise ScenarioError("", f"{path}: {error.strerror}") from error
    with file:
        for number, line in enumerate(_text(file, path), start=1):
            if begins and not line.startswith(begins):
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ScenarioError("", f"{path}, line {number}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ScenarioError("", f"{path}, line {number}: is not a JSON object")
            yield row


def _text(file: IO[str], path: Path) -> Iterator[str]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ScenarioError("", f"{path}: cannot be read as text: {error}") from error
