"""Errors that end a command, and output to a terminal.

All output goes through `say`, since most of it is from elsewhere: names, log lines, answers of models. Control
characters and overrides of the writing direction are printed as escapes, `\\x1b` or `\\u202e`. JSON needs none: ours
is ASCII."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

_KEPT: Final = "\n\t"
_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0))  # C0, DEL and C1
# Marks, embeddings, overrides and isolates of the writing direction; line and paragraph separators; invisible tags.
_DIRECTIONS: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080))
_SURROGATES: Final = range(0xD800, 0xE000)  # lone ones cannot be encoded


FAILED, WRONG_USAGE, NO_FLEET = 1, 2, 3


class CliError(Exception):
    """End the command with one line on stderr."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NoFleet(CliError):
    """No fleet runs in `state_dir`. `context`: its context's name, or ""."""

    def __init__(self, state_dir: Path, context: str = "") -> None:
        self.state_dir = state_dir.absolute()
        named = f" (context {context}; `glowplug context` lists others)" if context else ""
        super().__init__(f"no fleet runs in {self.state_dir}{named}: start one with `glowplug up`", NO_FLEET)


def _shown(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_TABLE: Final = {code: _shown(code) for code in (*_CONTROLS, *_DIRECTIONS, *_SURROGATES) if chr(code) not in _KEPT}
_IN_LINE: Final = _TABLE | {ord(kept): repr(kept)[1:-1] for kept in _KEPT}


def safe(text: str) -> str:
    return text.replace("\r\n", "\n").translate(_TABLE)


def in_line(value: object) -> str:
    """Escape a value for one line, line ends included."""
    return str(value).translate(_IN_LINE)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    typer.echo(safe(text), err=err, nl=nl)


def say_json(value: Any) -> None:
    say(json.dumps(value, indent=2))


def clear() -> None:
    if sys.stdout.isatty():
        typer.echo("\x1b[2J\x1b[H", nl=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[in_line(cell) for cell in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells), 0) for i, h in enumerate(headers)]
    right = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)).rstrip()

    return "\n".join([line([h.upper() for h in headers]), *(line(row) for row in cells)])


def _is_number(text: str) -> bool:
    return text.split(" ")[0].rstrip("s%").replace(".", "", 1).replace("-", "", 1).isdigit() or text in ("", "-")


def age(seconds: float) -> str:
    """'45s', '12m', '3h', '2d'."""
    seconds = max(0.0, seconds)
    for unit, step in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * step:
            return f"{seconds / step:.0f}{unit}"
    return f"{seconds:.0f}s"


def clock(at: float) -> str:
    """'13:04:05' in local time; '--:--:--' for times beyond the calendar."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def seconds(value: float | None) -> str:
    """'1.234 s', or '-' for None."""
    return "-" if value is None else f"{value:.3f} s"


def emit(as_json: bool, value: Any, headers: Sequence[str], rows: Sequence[Sequence[object]], empty: str = "") -> None:
    if as_json:
        say_json(value)
    elif rows:
        say(table(headers, rows))
    else:
        say(empty or "none", err=True)


def pairs(values: Mapping[str, object], indent: str = "  ") -> str:
    """Return one aligned `name  value` line each."""
    width = max((len(key) for key in values), default=0)
    return "\n".join(f"{indent}{in_line(key):<{width}}  {in_line(value)}" for key, value in values.items())
