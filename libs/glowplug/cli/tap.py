"""`glowplug tap` and `glowplug record`: the bus, live and decoded, or written down for the simulator; and the events
of a simulated run's folder."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import nats
import typer
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from glowplug.bus.nats_bus import CHECK_HEADER
from glowplug.cli.client import FleetClient, connect
from glowplug.cli.terminal import DEFAULT_STATE_DIR, CliError, Format, OutputOption, StateDirOption, clock, in_line, say
from glowplug.domain.errors import GlowplugError
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.filters import DEFAULT_PLANES, PLANES, EventFilter, sight, summary
from glowplug.events.subjects import ROOT, facts_of, parse
from glowplug.runtime.privileges import inbox_of
from glowplug.simulator.run_folder import read_json, read_lines
from glowplug.simulator.scenario.errors import ScenarioError

Take = Callable[[str, bytes], bool]  # subject and bytes of an event; whether that was enough
CONNECT_TIMEOUT_S = 3
RunOption = Annotated[Path | None, typer.Option("--run", help="A simulated run's folder instead of a fleet.")]
Row = dict[str, Any]


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
    if run is not None:
        for line in events(run, wanted, show, count):
            say(line)
        return
    num_shown = 0

    def take(subject: str, data: bytes) -> bool:
        nonlocal num_shown
        event = _event(data)
        if _wants(wanted, subject, event, data):
            say(show(subject, event, data))
            num_shown += 1
        return num_shown == count > 0

    listen(connect(state_dir), "tap", planes, take)


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
            for line in first:
                file.write(json.dumps(line) + "\n")

            def take(subject: str, data: bytes) -> bool:
                with contextlib.suppress(MalformedEvent):  # what cannot be read is no event of ours
                    file.write(json.dumps({"subject": subject, **from_json(data, dict[str, Any])}) + "\n")
                return False

            listen(fleet, "record", PLANES, take, seconds)
        num = sum(1 for _ in partial.open(encoding="utf-8"))
        partial.rename(out)
    except OSError as error:
        raise CliError(f"{out}: {error.strerror}", 2) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    say(f"{num} events in {out}")


def present(fleet: FleetClient) -> list[dict[str, Any]]:
    """Models and nodes as they are now, as the facts that would report them."""
    now = time.time()
    models = fleet.get("autoscaler", "/v1/models")["data"]
    nodes = fleet.get("placer", "/v1/nodes")["data"]
    nodes = list(nodes.values()) if isinstance(nodes, dict) else nodes
    facts = [("model.deployed", model["key"], model["key"], {"model": model}) for model in models]
    facts += [("node.beat", "_", node["node_id"], {"node": node}) for node in nodes]
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
