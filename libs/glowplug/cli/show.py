"""How values look on a terminal: tables, sizes, ages."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.cli.options import Format
from glowplug.cli.terminal import in_line, say


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


def emit(output: Format, value: Any, headers: Sequence[str], rows: Sequence[Sequence[object]], empty: str = "") -> None:
    """JSON of `value`, or the table of `rows`."""
    if output is Format.JSON:
        say(json.dumps(value, indent=2))
    elif rows:
        say(table(headers, rows))
    else:
        say(empty or "none", err=True)


def pairs(values: Mapping[str, object], indent: str = "  ") -> str:
    """One `name  value` line each, aligned; one that has line ends in it stays one."""
    width = max((len(key) for key in values), default=0)
    return "\n".join(f"{indent}{in_line(key):<{width}}  {in_line(value)}" for key, value in values.items())
