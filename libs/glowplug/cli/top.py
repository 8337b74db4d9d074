"""`glowplug top`: models, instances and GPUs, live."""

import contextlib
import json
import time
from typing import Annotated, Any

import typer

from glowplug.cli.client import FleetClient, connect
from glowplug.cli.terminal import DEFAULT_STATE_DIR, Format, OutputOption, StateDirOption, clear, clock, say, table
from glowplug.cli.views import INSTANCE_HEADERS, MODEL_HEADERS, instance_row, instances, model_row
from glowplug.domain.units import show_bytes

BAR = 24


def top(
    interval_s: Annotated[float, typer.Option("--interval", "-i", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Watch the fleet until Ctrl-C."""
    fleet = connect(state_dir)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            value = snapshot(fleet)
            text = json.dumps(value) if output is Format.JSON else screen(value)
            if output is Format.TABLE and not once:
                clear()
            say(text)
            if once:
                return
            time.sleep(interval_s)


def snapshot(fleet: FleetClient) -> dict[str, Any]:
    nodes = fleet.get("placer", "/v1/nodes")["data"]
    return {
        "at": time.time(),
        "models": fleet.get("autoscaler", "/v1/models")["data"],
        "instances": instances(fleet),
        "nodes": list(nodes.values()) if isinstance(nodes, dict) else nodes,
    }


def screen(value: dict[str, Any]) -> str:
    """One screen of text."""
    bars = []
    for node in value["nodes"]:
        for gpu in node["gpus"]:
            used = sum(grant["num_bytes"] for grant in gpu["grants"])
            filled = round(BAR * used / gpu["total_bytes"]) if gpu["total_bytes"] else 0
            bars.append(
                f"{gpu['gpu_id']:<12} [{'#' * filled}{'.' * (BAR - filled)}] "
                f"{show_bytes(used)} / {show_bytes(gpu['total_bytes'])}"
            )
    parts = [
        clock(value["at"]) + "  Ctrl-C ends",
        "\n".join(bars) or "no node has joined",
        table(MODEL_HEADERS, [model_row(row) for row in value["models"]]),
    ]
    if value["instances"]:
        parts.append(table(INSTANCE_HEADERS, [instance_row(row) for row in value["instances"]]))
    return "\n\n".join(parts)
