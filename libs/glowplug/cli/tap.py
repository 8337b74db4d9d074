"""`glowplug tap`: the bus, live and decoded."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import nats
import typer
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from glowplug.cli.client import connect
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, Format, OutputOption, StateDirOption
from glowplug.domain.errors import GlowplugError
from glowplug.events.subjects import ROOT, parse

PLANES = ("evt", "cmd", "tel")
_SHORT = ("instance_id", "model_key", "node_id", "state", "reason", "status", "num_waiting", "num_bytes", "chosen")


def tap(
    event_type: Annotated[list[str] | None, typer.Option("--type", "-t", help="Only this type; a prefix does.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Only events of this model key.")] = "",
    entity: Annotated[str, typer.Option("--entity", "-e", help="Only this entity or service: instance, placer.")] = "",
    entity_id: Annotated[str, typer.Option("--id", help="Only this id: an instance, a request, a node.")] = "",
    plane: Annotated[
        list[str] | None, typer.Option("--plane", "-p", help="evt, cmd or tel; default evt and cmd.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The bytes as they are, with their subject.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Stop after so many; 0 never.")] = 0,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show facts and commands as they pass; `-p tel` adds the high-rate telemetry."""
    planes = tuple(plane or ("evt", "cmd"))
    if unknown := [p for p in planes if p not in PLANES]:
        raise CliError(f"--plane {unknown[0]!r} is none of {', '.join(PLANES)}", 2)
    fleet = connect(state_dir)
    if not fleet.nats_url:
        raise CliError("this fleet has no bus address: set GLOWPLUG_NATS_URL")
    wanted = _filter(tuple(event_type or ()), model, entity, entity_id)
    show = _raw if raw else _json if output is Format.JSON else _line
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_tap(fleet.nats_url, planes, wanted, show, count))


def _filter(types: tuple[str, ...], model: str, entity: str, entity_id: str) -> Callable[[str, dict[str, Any]], bool]:
    def wanted(subject: str, event: dict[str, Any]) -> bool:
        try:
            where = parse(subject)
        except ValueError:
            return False
        kind = f"{where.entity}.{where.verb}"
        of_model = where.model_key == model or _model_of(event) == model
        return (
            (not types or any(kind == t or kind.startswith(t.rstrip("*")) for t in types))
            and (not model or of_model)
            and (not entity or where.entity == entity)
            and (not entity_id or where.entity_id == entity_id or entity_id in json.dumps(event.get("data")))
        )

    return wanted


def _model_of(event: dict[str, Any]) -> str:
    data = event.get("data") or {}
    inner = data.get("instance") or data.get("decision") or data
    return str(inner.get("model_key") or (data.get("model") or {}).get("key") or "")


async def _tap(
    url: str,
    planes: tuple[str, ...],
    wanted: Callable[[str, dict[str, Any]], bool],
    show: Callable[[str, dict[str, Any], bytes], str],
    count: int,
) -> None:
    done = asyncio.Event()
    num_shown = 0

    async def on_message(msg: Msg) -> None:
        nonlocal num_shown
        try:
            event = json.loads(msg.data)
        except ValueError:
            event = {}
        if done.is_set() or not wanted(msg.subject, event):
            return
        typer.echo(show(msg.subject, event, msg.data))
        num_shown += 1
        if num_shown == count:
            done.set()

    async def gone() -> None:
        done.set()

    try:
        client = await nats.connect(url, name="tap", connect_timeout=3, allow_reconnect=False, closed_cb=gone)
    except (OSError, NatsError, TimeoutError) as error:
        raise CliError("the bus does not answer") from error
    for plane in planes:
        await client.subscribe(f"{ROOT}.{plane}.>", cb=on_message)
    await done.wait()
    with contextlib.suppress(NatsError, GlowplugError):
        await client.close()


def _raw(subject: str, _event: dict[str, Any], data: bytes) -> str:
    return f"{subject} {data.decode('utf-8', 'replace')}"


def _json(subject: str, event: dict[str, Any], _data: bytes) -> str:
    return json.dumps({"subject": subject, **event})


def _line(subject: str, event: dict[str, Any], _data: bytes) -> str:
    """'13:04:05.123 instance.ready placer-1 instance_id=… model_key=…'."""
    occurred = float(event.get("occurred_at") or time.time())
    clock = time.strftime("%H:%M:%S", time.localtime(occurred)) + f".{int(occurred * 1000) % 1000:03d}"
    data = event.get("data") or {}
    inner = data.get("instance") or data.get("decision") or data.get("node") or data
    words = [f"{key}={inner[key]}" for key in _SHORT if inner.get(key) not in (None, "", 0)]
    if not words and (model := data.get("model")):
        words = [f"model={model.get('key')}"]
    plane = parse(subject).plane
    return f"{clock} {plane} {event.get('type', '?'):<22} {event.get('issuer', '?'):<14} {' '.join(words)}"
