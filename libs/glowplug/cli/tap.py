"""`glowplug tap` and `glowplug record`: events of the bus, live or recorded for the simulator, or of a simulated
run."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import nats
import typer
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from glowplug.bus.nats_bus import CHECK_HEADER
from glowplug.cli.client import FleetClient, Row, connect
from glowplug.cli.options import JsonOption, RunOption, StateDirOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, clock, in_line, say
from glowplug.cli.why import lines_of
from glowplug.domain.errors import GlowplugError
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.filters import DEFAULT_PLANES, PLANES, EventFilter, ends, sight, summary
from glowplug.events.subjects import EVERYTHING, facts_of, parse
from glowplug.runtime.privileges import inbox_of

Take = Callable[[str, bytes], bool]  # of an event's subject and bytes; True ends the listening
CONNECT_TIMEOUT_S = 3


def tap(
    event_type: Annotated[
        list[str] | None, typer.Option("--type", "-t", help="Only events of this type, or whose type starts so.")
    ] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Only events of this model.")] = "",
    entity: Annotated[
        str, typer.Option("--entity", "-e", help="Only events about this kind of thing: instance, placer.")
    ] = "",
    node: Annotated[str, typer.Option("--node", help="Only events about this node.")] = "",
    service: Annotated[
        str, typer.Option("--service", "-s", help="Only events that this service sent: placer, agent.")
    ] = "",
    entity_id: Annotated[
        str, typer.Option("--id", help="Only events with this id of an instance, request or node.")
    ] = "",
    grep: Annotated[str, typer.Option("--grep", "-g", help="Only events that contain this text, ignoring case.")] = "",
    plane: Annotated[
        list[str] | None, typer.Option("--plane", "-p", help="evt, cmd or tel [default: evt and cmd].")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print each message undecoded, with its subject.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after this many events; 0: never.")] = 0,
    run: RunOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the facts and commands on the bus; `-p tel` adds the telemetry, which is frequent. --json prints one object
    per event."""
    planes = tuple(plane or DEFAULT_PLANES)
    if unknown := [p for p in planes if p not in PLANES]:
        raise CliError(f"--plane {unknown[0]!r} is not one of {', '.join(PLANES)}", WRONG_USAGE)
    fleet = connect(state_dir) if run is None else None
    wanted = EventFilter(
        planes=planes,
        types=tuple(event_type or ()),
        entity=entity,
        model=fleet.key_of(model) if fleet and model else model,
        node=node,
        service=service,
        entity_id=entity_id,
        text=grep,
    )
    show = _raw if raw else _json if as_json else _line
    num_shown = 0

    def take(subject: str, data: bytes) -> bool:
        nonlocal num_shown
        event = decoded(data)
        found = [(subject, event, data)]
        if not raw:
            found += [(where, end, json.dumps(end, separators=(",", ":")).encode()) for where, end in ends(event)]
        for one in found:
            if wants(wanted, *one) and (not count or num_shown < count):
                say(show(*one))
                num_shown += 1
        return num_shown == count > 0

    if fleet is not None:
        listen(fleet, "tap", planes, take)
        return
    assert run is not None
    for row in lines_of(run, "events.jsonl"):
        if take(row.pop("subject"), json.dumps(row, separators=(",", ":")).encode()):
            return


def decoded(data: bytes) -> Row:
    try:
        return from_json(data, dict[str, Any])
    except MalformedEvent:
        return {}


def wants(wanted: EventFilter, subject: str, event: Row, raw: bytes) -> bool:
    try:
        seen = sight(subject, str(event.get("issuer") or ""), event.get("data") or {})
    except ValueError:
        return False
    return wanted.wants(seen, raw)


def _raw(subject: str, _event: Row, data: bytes) -> str:
    return f"{subject} {data.decode('utf-8', 'replace')}"


def _json(subject: str, event: Row, _data: bytes) -> str:
    return json.dumps({"subject": subject, **event})


def _line(subject: str, event: Row, _data: bytes) -> str:
    """'13:04:05.123 instance.ready placer-1 instance_id=… model_key=…'."""
    occurred_at = event.get("occurred_at")
    occurred = float(occurred_at) if occurred_at and isinstance(occurred_at, int | float) else time.time()
    when = f"{clock(occurred)}.{int(occurred * 1000) % 1000:03d}"
    kind, issuer = (str(event.get(name, "?")) for name in ("type", "issuer"))
    return in_line(f"{when} {parse(subject).plane} {kind:<22} {issuer:<14} {summary(event.get('data') or {})}")


def record(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, one event a line.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Stop after this many seconds; 0: on Ctrl-C.")] = 0,
    state_dir: StateDirOption = None,
) -> None:
    """Write all facts, commands and telemetry to a file, after the models and nodes present at the start."""
    if out.exists():
        raise CliError(f"{out} exists already", WRONG_USAGE)
    fleet = connect(state_dir)
    first = present(fleet)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    num = 0
    try:
        with partial.open("w", encoding="utf-8") as file:

            def write(row: Row) -> None:
                nonlocal num
                file.write(json.dumps(row) + "\n")
                num += 1

            def take(subject: str, data: bytes) -> bool:
                if event := decoded(data):
                    write({"subject": subject, **event})
                for where, end in ends(event):
                    write({"subject": where, **end})
                return False

            for row in first:
                write(row)
            listen(fleet, "record", PLANES, take, seconds)
        partial.rename(out)
    except OSError as error:
        raise CliError(f"{out}: {error.strerror}", WRONG_USAGE) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    say(f"{num} events in {out}")


def present(fleet: FleetClient) -> list[Row]:
    now = time.time()
    facts = [("model.deployed", row["key"], row["key"], {"model": row}) for row in fleet.models()]
    facts += [("node.beat", "_", row["node_id"], {"node": row}) for row in fleet.nodes()]
    return [
        {
            "subject": facts_of(kind, key).removesuffix("*") + entity_id,
            "event_id": f"present-{kind}-{entity_id}",
            "type": kind,
            "occurred_at": now,
            "issuer": "record",
            "data": data,
        }
        for kind, key, entity_id, data in facts
    ]


def listen(fleet: FleetClient, name: str, planes: Sequence[str], take: Take, seconds: float = 0) -> None:
    """Call `take` with every event until it returns True, `seconds` (0: no limit) have passed, the bus is gone, or
    Ctrl-C or SIGTERM. Raises CliError without a bus."""
    if not fleet.nats_url:
        raise CliError("the address of the bus (NATS) is not known: set GLOWPLUG_NATS_URL")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_listen(fleet.nats_url, name, planes, take, seconds))


async def _listen(url: str, name: str, planes: Sequence[str], take: Take, seconds: float) -> None:
    over = asyncio.Event()
    failed: list[Exception] = []

    async def on_message(msg: Msg) -> None:
        try:
            if not over.is_set() and CHECK_HEADER not in (msg.headers or {}) and take(msg.subject, msg.data):
                over.set()
        except OSError as error:  # the client would only log it: `glowplug tap | head`, a full disk
            failed.append(error)
            over.set()

    async def gone() -> None:
        over.set()

    async def refused(error: Exception) -> None:
        if "permissions violation" in str(error):
            failed.append(
                CliError(
                    "the bus does not let this user subscribe: use the address of the user `reader` (docs/network.md)"
                )
            )
            over.set()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        client = await nats.connect(
            url.split(","),
            name=name,
            connect_timeout=CONNECT_TIMEOUT_S,
            allow_reconnect=False,
            closed_cb=gone,
            error_cb=refused,
            inbox_prefix=inbox_of(url),
        )
    except (OSError, NatsError, TimeoutError) as error:
        raise CliError("the bus does not answer") from error
    for plane in planes:
        for filter_ in EVERYTHING[plane]:
            await client.subscribe(filter_, cb=on_message)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds or None)
    with contextlib.suppress(NatsError, GlowplugError):
        await client.close()
    if failed:
        raise failed[0]
