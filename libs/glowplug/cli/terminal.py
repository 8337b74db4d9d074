"""The errors that commands end with, and how text and values look on a terminal.

All that a command prints goes through `say`, since most of it came from somewhere else: model names, ids, events, log
lines, answers of models, files. A control character moves the cursor, hides text or asks the terminal to do things; an
override of the writing direction shows text in another order than it has. Both are printed as what they are, `\\x1b` or
`\\u202e`. JSON needs none of it: ours is ASCII, with every control character escaped."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer

_KEPT: Final = "\n\t"
_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0))  # C0, DEL and C1
# Marks, embeddings, overrides and isolates of the writing direction; line and paragraph separators; tags, not seen.
_DIRECTIONS: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xE0000, 0xE0080))
_SURROGATES: Final = range(0xD800, 0xE000)  # lone ones cannot be written at all


FAILED, WRONG_USAGE, NO_FLEET = 1, 2, 3


class CliError(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NoFleet(CliError):
    """No fleet runs in `state_dir`, which the context of that name stands for; "": no context named it."""

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
    """`text` without what a terminal obeys; its lines and tabs stay."""
    return text.replace("\r\n", "\n").translate(_TABLE)


def in_line(value: object) -> str:
    """A value as part of one line: a name with a line end in it begins no line of its own."""
    return str(value).translate(_IN_LINE)


def say(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print, to stderr with `err`, with a line end but for `nl`."""
    typer.echo(safe(text), err=err, nl=nl)


def say_json(value: Any) -> None:
    """Print one document of JSON."""
    say(json.dumps(value, indent=2))


def clear() -> None:
    """Begin at the top of an empty screen, where there is one."""
    if sys.stdout.isatty():
        typer.echo("\x1b[2J\x1b[H", nl=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
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
    """'13:04:05' of epoch seconds, local time; '--:--:--' for a moment that no calendar has."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return "--:--:--"


def seconds(value: float | None) -> str:
    """'1.234 s', or '-' when there is none."""
    return "-" if value is None else f"{value:.3f} s"


def emit(as_json: bool, value: Any, headers: Sequence[str], rows: Sequence[Sequence[object]], empty: str = "") -> None:
    """The JSON of `value`, or the table of `rows`."""
    if as_json:
        say_json(value)
    elif rows:
        say(table(headers, rows))
    else:
        say(empty or "none", err=True)


def pairs(values: Mapping[str, object], indent: str = "  ") -> str:
    """One `name  value` line each, aligned; one that has line ends in it stays one."""
    width = max((len(key) for key in values), default=0)
    return "\n".join(f"{indent}{in_line(key):<{width}}  {in_line(value)}" for key, value in values.items())
