"""`glowplug logs`: of a service of the local fleet, or of the engines of a model."""

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, StateDirOption
from glowplug.cli.terminal import CliError, say

POLL_S = 0.3
GONE = ("stopped", "failed")


def logs(
    name: Annotated[str, typer.Argument(metavar="MODEL|SERVICE|INSTANCE", help="smol-chat, placer-1, nats, i-...")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines to show.")] = 50,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Show the last lines a service or a model's engines wrote."""
    fleet = connect(state_dir)
    with contextlib.suppress(KeyboardInterrupt):
        path = _service_log(fleet, name)
        if path is not None:
            _tail_file(path, lines, follow)
        else:
            _engine_logs(fleet, name, lines, follow)


def _service_log(fleet: FleetClient, name: str) -> Path | None:
    """The log file of one process; a service's name alone means its first process."""
    names = [p["name"] for p in fleet.document.get("processes", [])]
    for candidate in (name, f"{name}-1"):
        if candidate in names:
            return Path(fleet.document["log_dir"]) / f"{candidate}.log"
    return None


def _tail_file(path: Path, lines: int, follow: bool) -> None:
    offset = 0
    if path.exists():
        text = path.read_text("utf-8", "replace")
        say("\n".join(text.splitlines()[-lines:]))
        offset = path.stat().st_size
    else:
        say(f"{path.stem} has written nothing yet", err=True)
    while follow:
        time.sleep(POLL_S)
        now = path.stat().st_size if path.exists() else 0
        offset = 0 if now < offset else offset  # it was rotated
        if now > offset:
            with path.open("rb") as file:
                file.seek(offset)
                say(file.read(now - offset).decode("utf-8", "replace"), nl=False)
            offset = now


def _engine_logs(fleet: FleetClient, name: str, lines: int, follow: bool) -> None:
    shown: dict[str, list[str]] = {}
    found = _instances_of(fleet, name)
    if not found:
        raise CliError(f"{name!r} is no service of this fleet and no model with an engine that runs or ran lately")
    while True:
        for row in found if follow else found[:1]:
            known = shown.get(row["instance_id"], [])
            fresh = _fresh(known, _log_lines(fleet, row, lines))
            for line in fresh:
                say(f"{row['instance_id']} | {line}")
            shown[row["instance_id"]] = (known + fresh)[-lines * 4 :]
        if not follow:
            return
        time.sleep(1)
        found = [row for row in _instances_of(fleet, name) if row["state"] not in GONE]


def _fresh(known: list[str], now: list[str]) -> list[str]:
    """The lines of `now` that come after what was shown: the longest overlap of its end with our beginning."""
    for overlap in range(min(len(known), len(now)), 0, -1):
        if known[-overlap:] == now[:overlap]:
            return now[overlap:]
    return now


def _instances_of(fleet: FleetClient, name: str) -> list[Row]:
    """Newest first; living ones before those that are gone."""
    key = fleet.key_of(name)
    rows = [row for row in fleet.instances(gone=True) if name == row["instance_id"] or row["model_key"] == key]
    return sorted(rows, key=lambda row: (row["state"] in GONE, -row["created_at"]))


def _log_lines(fleet: FleetClient, row: Row, lines: int) -> list[str]:
    if not row["workers"]:
        raise CliError(f"{row['instance_id']} says of no node that it ran there")
    node_id = row["workers"][0]["node_id"]
    agents = {node["node_id"]: node["agent_url"] for node in fleet.document.get("nodes", [])}
    if node_id not in agents:
        agents |= {node["node_id"]: node["agent_url"] for node in fleet.nodes()}
    if node_id not in agents:
        raise CliError(f"node {node_id}, where {row['instance_id']} ran, has left")
    agent = FleetClient(urls={"agent": agents[node_id]}, admin_token=fleet.admin_token)
    path = f"/v1/instances/{segment(row['instance_id'])}/logs"
    return agent.get_text("agent", path, tail=lines).splitlines()[-lines:]
