"""`glowplug record`: a live fleet's events to a file, for `glowplug replay`."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from glowplug.cli.client import FleetClient, connect
from glowplug.cli.tap import listen
from glowplug.cli.terminal import DEFAULT_STATE_DIR, CliError, StateDirOption, say
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.filters import PLANES
from glowplug.events.subjects import facts_of


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
