"""Logs of a whole fleet, merged by its console: for fleets elsewhere, and for a search over all services."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from glowplug.cli.client import FleetClient, Row

PATH: Final = "/api/v1/logs"
POLL_S: Final = 1.0
SERVICES: Final = ("router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "console")


def is_process(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}-") for one in SERVICES)


def lines_of(fleet: FleetClient, asked: Row, follow: bool) -> Iterator[Row]:
    """Yield lines of the console's API, oldest first; with `follow` for ever. Raises CliError."""
    cursors: Row = {}
    while True:
        page = fleet.through_console("POST", PATH, json={**asked, "cursors": cursors})
        yield from page["lines"]
        cursors = page["cursors"]
        if not follow:
            return
        time.sleep(POLL_S)


def shown(line: Row) -> str:
    at = datetime.fromtimestamp(line["at"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = [f"{name}={value}" for name, value in line["fields"].items() if name != "exception"]
    whole = " ".join((at, f"[{line['level']:<7}]", f"{line['source']} |", line["text"], *fields))
    failure = line["fields"].get("exception", "")
    return f"{whole}\n{failure}" if failure else whole
