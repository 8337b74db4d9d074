"""`glowplug record`: a live fleet's events to a file, for `glowplug replay`."""

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import IO, Annotated, Any

import nats
import typer
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from glowplug.cli.client import FleetClient, connect
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, StateDirOption
from glowplug.events.filters import PLANES
from glowplug.events.subjects import ROOT, facts_of


def record(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write: one event a line.")],
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="For how long; 0 until Ctrl-C.")] = 0,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Write every fact, command and telemetry to a file, with the models and nodes there are when it begins."""
    if out.exists():
        raise CliError(f"{out} is there already", 2)
    fleet = connect(state_dir)
    if not fleet.nats_url:
        raise CliError("this fleet has no bus address: set GLOWPLUG_NATS_URL")
    first = present(fleet)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    num = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for line in first:
                file.write(json.dumps(line) + "\n")
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(_record(fleet.nats_url, file, seconds))
        num = sum(1 for _ in partial.open(encoding="utf-8"))
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    typer.echo(f"{num} events in {out}")


def present(fleet: FleetClient) -> list[dict[str, Any]]:
    """Models and nodes as they are now, as the facts that would tell of them."""
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


async def _record(url: str, file: IO[str], seconds: float) -> None:
    async def on_message(msg: Msg) -> None:
        with contextlib.suppress(ValueError):  # what is no JSON is no event of ours
            file.write(json.dumps({"subject": msg.subject, **json.loads(msg.data)}) + "\n")

    over = asyncio.Event()

    async def gone() -> None:
        over.set()

    try:
        client = await nats.connect(url, name="record", connect_timeout=3, allow_reconnect=False, closed_cb=gone)
    except (OSError, NatsError, TimeoutError) as error:
        raise CliError("the bus does not answer") from error
    for plane in PLANES:
        await client.subscribe(f"{ROOT}.{plane}.>", cb=on_message)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(over.wait(), seconds or None)
    with contextlib.suppress(NatsError):
        await client.close()
