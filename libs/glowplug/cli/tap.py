"""`glowplug tap`: the bus, live and decoded."""

import json
import time
from typing import Annotated, Any

import typer

from glowplug.cli import past
from glowplug.cli.bus_ear import listen
from glowplug.cli.client import connect
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, Format, OutputOption, StateDirOption
from glowplug.cli.show import clock
from glowplug.cli.terminal import in_line, say
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.filters import DEFAULT_PLANES, PLANES, EventFilter, sight, summary
from glowplug.events.subjects import parse


def tap(
    event_type: Annotated[list[str] | None, typer.Option("--type", "-t", help="Only this type; a prefix does.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Only events of this model key.")] = "",
    entity: Annotated[str, typer.Option("--entity", "-e", help="Only this entity or service: instance, placer.")] = "",
    node: Annotated[str, typer.Option("--node", help="Only events about this node.")] = "",
    service: Annotated[str, typer.Option("--service", "-s", help="Only what this service wrote: placer, agent.")] = "",
    entity_id: Annotated[str, typer.Option("--id", help="Only this id: an instance, a request, a node.")] = "",
    grep: Annotated[str, typer.Option("--grep", "-g", help="Only events with this text anywhere, in any case.")] = "",
    plane: Annotated[
        list[str] | None, typer.Option("--plane", "-p", help="evt, cmd or tel; default evt and cmd.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The bytes as they are, with their subject.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many; 0 never.")] = 0,
    run: past.RunOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show facts and commands as they pass; `-p tel` adds the high-rate telemetry."""
    planes = tuple(plane or DEFAULT_PLANES)
    if unknown := [p for p in planes if p not in PLANES]:
        raise CliError(f"--plane {unknown[0]!r} is none of {', '.join(PLANES)}", 2)
    wanted = EventFilter(
        planes=planes,
        types=tuple(event_type or ()),
        entity=entity,
        model=model,
        node=node,
        service=service,
        entity_id=entity_id,
        text=grep,
    )
    show = _raw if raw else _json if output is Format.JSON else _line
    if run is not None:
        for line in past.events(run, wanted, show, count):
            say(line)
        return
    num_shown = 0

    def hear(subject: str, data: bytes) -> bool:
        nonlocal num_shown
        event = _event(data)
        if _wants(wanted, subject, event, data):
            say(show(subject, event, data))
            num_shown += 1
        return num_shown == count > 0

    listen(connect(state_dir), "tap", planes, hear)


def _event(data: bytes) -> dict[str, Any]:
    """An event as JSON has it, of this version or another; {} for what is none."""
    try:
        return from_json(data, dict[str, Any])
    except MalformedEvent:
        return {}


def _wants(wanted: EventFilter, subject: str, event: dict[str, Any], raw: bytes) -> bool:
    try:
        seen = sight(subject, str(event.get("issuer") or ""), event.get("data") or {})
    except ValueError:
        return False
    return wanted.wants(seen, raw)


def _raw(subject: str, _event: dict[str, Any], data: bytes) -> str:
    return f"{subject} {data.decode('utf-8', 'replace')}"


def _json(subject: str, event: dict[str, Any], _data: bytes) -> str:
    return json.dumps({"subject": subject, **event})


def _line(subject: str, event: dict[str, Any], _data: bytes) -> str:
    """'13:04:05.123 instance.ready placer-1 instance_id=… model_key=…'."""
    told = event.get("occurred_at")
    occurred = float(told) if told and isinstance(told, int | float) else time.time()
    when = f"{clock(occurred)}.{int(occurred * 1000) % 1000:03d}"
    kind, issuer = (str(event.get(name, "?")) for name in ("type", "issuer"))
    return in_line(f"{when} {parse(subject).plane} {kind:<22} {issuer:<14} {summary(event.get('data') or {})}")
