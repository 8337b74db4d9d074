"""A simulated run's folder in place of a fleet: its events for `tap`, its decisions for `why`. Nothing connects."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from glowplug.cli.options import CliError
from glowplug.events.filters import EventFilter, sight
from glowplug.simulator.run_folder import read_json, read_lines
from glowplug.simulator.scenario.errors import ScenarioError

RunOption = Annotated[Path | None, typer.Option("--run", help="A simulated run's folder instead of a fleet.")]
Row = dict[str, Any]


def events(run: Path, wanted: EventFilter, show: Callable[[str, Row, bytes], str], count: int) -> Iterator[str]:
    """Lines of the events that are wanted, up to `count` of them (0: all). Raises CliError."""
    return islice(_events(run, wanted, show), count or None)


def _events(run: Path, wanted: EventFilter, show: Callable[[str, Row, bytes], str]) -> Iterator[str]:
    for row in _lines(run, "events.jsonl"):
        subject = row.pop("subject")
        raw = json.dumps(row, separators=(",", ":")).encode()
        if wanted.wants(sight(subject, row["issuer"], row["data"]), raw):
            yield show(subject, row, raw)


def request_of(run: Path, subject: str) -> Row | None:
    """The end of a request, when `subject` is the id of one."""
    found: Row | None = next((row for row in _lines(run, "requests.jsonl") if row["request_id"] == subject), None)
    return found


def decisions_about(run: Path, subject: str, request: Row | None, limit: int) -> list[Row]:
    """Newest first. A request is explained by the decisions about it and about the instance that served it. Raises
    CliError for something the run knows nothing of."""
    names = {subject, (request or {}).get("instance_id", "")} - {""}
    fields: tuple[str, ...] = ("decision_id", "request_id", "instance_id", "model_key", "gpu_id", "node_id")
    if request is not None:
        fields = ("request_id", "instance_id")
    found = [row for row in _lines(run, "decisions.jsonl") if any(row.get(name) in names for name in fields)]
    if not found and request is None and not _is_known(run, subject):
        raise CliError(f"nothing is known of {subject!r}: not a request, model, instance, GPU or node of this run")
    return sorted(found, key=lambda row: -row["made_at"])[:limit]


def _is_known(run: Path, subject: str) -> bool:
    known: set[str] = set()
    for row in _lines(run, "events.jsonl"):
        data = row["data"]
        for holder in ("model", "node", "instance"):
            inner = data.get(holder) or {}
            known |= {str(inner.get(name, "")) for name in ("key", "name", "node_id", "instance_id")}
            known |= {gpu["gpu_id"] for gpu in inner.get("gpus") or ()}
        if subject in known:
            return True
    return False


def _lines(run: Path, name: str) -> Iterator[Row]:
    try:
        read_json(run, "setup.json")
        yield from read_lines(run, name)
    except ScenarioError as error:
        raise CliError(f"--run: {error}", 2) from error
