"""`glowplug logs`: of the whole fleet, of a service, or of a model's engines."""

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import CliError, say

POLL_S = 0.3
GONE = ("stopped", "failed")
SERVICES = ("router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "console")
Line = tuple[str, str]


def logs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL|SERVICE|INSTANCE]",
            help="For example smol-chat, placer-1, nats or i-...; none: all services.",
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 50,
    level: Annotated[str, typer.Option("--level", help="Without a name: debug, info, warning or error, and up.")] = "",
    contains: Annotated[list[str] | None, typer.Option("--contains", help="Without a name: words in a line.")] = None,
    about: Annotated[
        list[str] | None, typer.Option("--id", help="Without a name: a request, trace, decision or instance.")
    ] = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the last log lines of the fleet, a service or an engine; --json prints one object per line."""
    fleet = connect(state_dir)
    path = _service_log(fleet, name)
    if not name or (path is None and is_process(name)):
        asked = {"service": name, "level": level, "words": contains or [], "ids": about or [], "limit": lines}
        with contextlib.suppress(KeyboardInterrupt):
            for row in lines_of(fleet, asked, follow):
                say(json.dumps(row) if as_json else shown(row))
        return
    if level or contains or about:
        raise CliError("--level, --contains and --id search the logs of the whole fleet: leave the name out")
    found = _of_engines(fleet, name, lines, follow) if path is None else _of_file(path, lines, follow)
    with contextlib.suppress(KeyboardInterrupt):
        for source, line in found:
            if as_json:
                say(json.dumps({"source": source, "line": line}))
            else:
                say(line if path else f"{source} | {line}")


def is_process(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}-") for one in SERVICES)


def lines_of(fleet: FleetClient, asked: Row, follow: bool) -> Iterator[Row]:
    """Yield lines of the console's API, oldest first; with `follow` for ever. Raises CliError."""
    cursors: Row = {}
    while True:
        page = fleet.through_console("POST", "/api/v1/logs", json={**asked, "cursors": cursors})
        yield from page["lines"]
        cursors = page["cursors"]
        if not follow:
            return
        time.sleep(1)


def shown(line: Row) -> str:
    at = datetime.fromtimestamp(line["at"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = [f"{name}={value}" for name, value in line["fields"].items() if name != "exception"]
    whole = " ".join((at, f"[{line['level']:<7}]", f"{line['source']} |", line["text"], *fields))
    failure = line["fields"].get("exception", "")
    return f"{whole}\n{failure}" if failure else whole


def _service_log(fleet: FleetClient, name: str) -> Path | None:
    """A service's name means its first process."""
    names = [p["name"] for p in fleet.document.get("processes", [])]
    for candidate in (name, f"{name}-1"):
        if candidate in names:
            return Path(fleet.document["log_dir"]) / f"{candidate}.log"
    return None


def _of_file(path: Path, lines: int, follow: bool) -> Iterator[Line]:
    if not path.exists():
        say(f"{path.stem} has written nothing yet", err=True)
    offset, rest, is_first = 0, b"", True
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < offset:
            offset, rest = 0, b""
        if size > offset:
            with path.open("rb") as file:
                file.seek(offset)
                *whole, rest = (rest + file.read(size - offset)).split(b"\n")
            offset = size
            if rest and not follow:
                whole.append(rest)
            for line in whole[-lines:] if is_first else whole:
                yield path.stem, line.decode("utf-8", "replace")
        if not follow:
            return
        is_first = False
        time.sleep(POLL_S)


def _of_engines(fleet: FleetClient, name: str, lines: int, follow: bool) -> Iterator[Line]:
    """Raises CliError for an unknown model or instance."""
    printed: dict[str, list[str]] = {}
    found = _instances_of(fleet, name)
    if not found:
        raise CliError(f"{name!r} is neither a service of this fleet nor a model whose engine runs or ran lately")
    while True:
        for row in found if follow else found[:1]:
            known = printed.get(row["instance_id"], [])
            fresh = _fresh(known, _log_lines(fleet, row, lines))
            yield from ((row["instance_id"], line) for line in fresh)
            printed[row["instance_id"]] = (known + fresh)[-lines * 4 :]
        if not follow:
            return
        time.sleep(1)
        found = [row for row in _instances_of(fleet, name) if row["state"] not in GONE]


def _fresh(known: list[str], now: list[str]) -> list[str]:
    """Return lines after those shown, by the longest overlap."""
    for overlap in range(min(len(known), len(now)), 0, -1):
        if known[-overlap:] == now[:overlap]:
            return now[overlap:]
    return now


def _instances_of(fleet: FleetClient, name: str) -> list[Row]:
    key = fleet.key_of(name)
    rows = [row for row in fleet.instances(gone=True) if name == row["instance_id"] or row["model_key"] == key]
    return sorted(rows, key=lambda row: (row["state"] in GONE, -row["created_at"]))


def _log_lines(fleet: FleetClient, row: Row, lines: int) -> list[str]:
    if not row["workers"]:
        raise CliError(f"{row['instance_id']} has no worker on any node, so there is no log of it")
    node_id = row["workers"][0]["node_id"]
    agents = {node["node_id"]: node["agent_url"] for node in fleet.document.get("nodes", [])}
    if node_id not in agents:
        agents |= {node["node_id"]: node["agent_url"] for node in fleet.nodes()}
    if node_id not in agents:
        raise CliError(f"{row['instance_id']} ran on node {node_id}, which has left the fleet with its logs")
    agent = FleetClient(urls={"agent": agents[node_id]}, admin_token=fleet.admin_token)
    path = f"/v1/instances/{segment(row['instance_id'])}/logs"
    return agent.get_text("agent", path, tail=lines).splitlines()[-lines:]
