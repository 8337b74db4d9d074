"""`glowplug tap` and `glowplug record`: the bus, live and decoded, or written down for the simulator; and the events
of a simulated run's folder."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import nats
import typer
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from glowplug.bus.nats_bus import CHECK_HEADER
from glowplug.cli.client import FleetClient, Row, connect
from glowplug.cli.options import DEFAULT_STATE_DIR, Format, OutputOption, RunOption, StateDirOption
from glowplug.cli.terminal import CliError, clock, in_line, say
from glowplug.domain.errors import GlowplugError
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.filters import DEFAULT_PLANES, PLANES, EventFilter, sight, summary
from glowplug.events.subjects import ROOT, facts_of, parse
from glowplug.runtime.privileges import inbox_of
from glowplug.simulator.run_files import read_json, read_lines
from glowplug.simulator.scenario.errors import ScenarioError

Take = Callable[[str, bytes], bool]  # subject and bytes of an event; whether that was enough
CONNECT_TIMEOUT_S = 3


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
    run: RunOption = None,
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
    num_shown = 0

    def take(subject: str, data: bytes) -> bool:
        nonlocal num_shown
        event = decoded(data)
        if wants(wanted, subject, event, data):
            say(show(subject, event, data))
            num_shown += 1
        return num_shown == count > 0

    if run is None:
        listen(connect(state_dir), "tap", planes, take)
        return
    for row in lines_of(run, "events.jsonl"):
        if take(row.pop("subject"), json.dumps(row, separators=(",", ":")).encode()):
            return


def decoded(data: bytes) -> Row:
    """An event as JSON has it, of this version or another; {} for what is none."""
    try:
        return from_json(data, dict[str, Any])
    except MalformedEvent:
        return {}


def wants(wanted: EventFilter, subject: str, event: Row, raw: bytes) -> bool:
    """Whether to show an event; False for one of a subject that is none of ours."""
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
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write: one event a line.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="For how long; 0 until Ctrl-C.")] = 0,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Write every fact, command and telemetry to a file, with the models and nodes there are when it begins."""
    if out.exists():
        raise CliError(f"{out} is there already", 2)
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
                return False

            for row in first:
                write(row)
            listen(fleet, "record", PLANES, take, seconds)
        partial.rename(out)
    except OSError as error:
        raise CliError(f"{out}: {error.strerror}", 2) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    say(f"{num} events in {out}")


def present(fleet: FleetClient) -> list[Row]:
    """Models and nodes as they are now, as the facts that would report them."""
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
    """Call `take` with every event of the planes until it has enough, `seconds` (0: without end) have passed, the bus
    is gone, or a person (Ctrl-C) or a service manager (SIGTERM) ends it. Raises CliError where no bus answers."""
    if not fleet.nats_url:
        raise CliError("this fleet has no bus address: set GLOWPLUG_NATS_URL")
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
            failed.append(CliError("the bus lets this user not watch: use the address of `reader` (docs/network.md)"))
            over.set()

    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        client = await nats.connect(
            url,
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
        await client.subscribe(f"{ROOT}.{plane}.>", cb=on_message)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds or None)
    with contextlib.suppress(NatsError, GlowplugError):
        await client.close()
    if failed:
        raise failed[0]


def lines_of(run: Path, name: str) -> Iterator[Row]:
    """The rows of one file of a simulated run's folder. Raises CliError."""
    try:
        read_json(run, "setup.json")
        yield from read_lines(run, name)
    except ScenarioError as error:
        raise CliError(f"--run: {error}", 2) from error
