"""What there is now: models, instances (`ps`), nodes."""

import time
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import typer

from glowplug.cli.client import FleetClient, connect
from glowplug.cli.terminal import DEFAULT_STATE_DIR, CliError, Format, OutputOption, StateDirOption, age, emit, say
from glowplug.domain.units import show_bytes

MODEL_HEADERS = ("model", "engine", "state", "waiting", "running", "memory", "where", "note")
INSTANCE_HEADERS = ("instance", "model", "engine", "state", "gpu", "memory", "age", "start", "url")


def models(state_dir: StateDirOption = DEFAULT_STATE_DIR, output: OutputOption = Format.TABLE) -> None:
    """Every deployed model: hot, starting or cold, and why when something is wrong."""
    value = connect(state_dir).get("autoscaler", "/v1/models")
    emit(output, value, MODEL_HEADERS, [model_row(row) for row in value["data"]], "no model is deployed")
    if output is Format.TABLE:
        for file, reason in value.get("errors", {}).items():
            say(f"\nnot in force: {file}: {reason}", err=True)


def model_row(row: dict[str, Any]) -> tuple[object, ...]:
    """One model as `glowplug models` shows it."""
    note = row["config_error"] or row["last_failure"]
    marks = [word for word, on in (("pinned", row["pinned"]), ("suspended", row["suspended"])) if on]
    where = ", ".join(sorted({i["gpu_id"] for i in row["instances"]})) or "-"
    return (
        row["name"],
        row["engine"],
        row["state"],
        row["num_waiting"],
        row["num_in_flight"],
        show_bytes(row["memory_bytes"]),
        where,
        " ".join([*marks, note.splitlines()[0] if note else ""]).strip() or "-",
    )


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Stopped and failed instances too.")] = False,
    model: Annotated[str, typer.Option("--model", help="Only instances of this model key.")] = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Running instances, newest first, with how long their start took."""
    value = instances(connect(state_dir), model=model, gone=everything)
    emit(output, value, INSTANCE_HEADERS, [instance_row(row) for row in value], "no instance runs")


def instances(fleet: FleetClient, *, model: str = "", gone: bool = False) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = fleet.get("placer", "/v1/instances", model=model, gone=str(gone).lower())["data"]
    return rows


def instance_row(row: dict[str, Any]) -> tuple[object, ...]:
    """One instance as `glowplug ps` shows it; what is emulated says so."""
    start = f"{row['ready_at'] - row['created_at']:.2f} s" if row["ready_at"] and row["created_at"] else "-"
    engine = f"{row['engine']} (emulated)" if row["emulated"] and row["engine"] != "emulated" else row["engine"]
    return (
        row["instance_id"],
        row["model_key"],
        engine,
        row["state"],
        ", ".join(w["gpu_id"] for w in row["workers"]),
        show_bytes(sum(w["num_bytes"] for w in row["workers"])),
        age(time.time() - row["created_at"]),
        start,
        row["url"] or "-",
    )


def nodes(state_dir: StateDirOption = DEFAULT_STATE_DIR, output: OutputOption = Format.TABLE) -> None:
    """Nodes, their GPUs and who holds the bytes, and the weights in their host memory; cordoned ones that are away."""
    fleet = connect(state_dir)
    value = fleet.get("placer", "/v1/nodes")["data"]
    value = list(value.values()) if isinstance(value, dict) else value
    used = _engines_in_use(fleet)
    rows = [row for node in value for row in node_rows(node, used)]
    if output is Format.TABLE:
        rows += [away_row(node_id) for node_id in _cordoned_away(fleet)]
    emit(output, value, NODE_HEADERS, rows, "no node has joined")


def _cordoned_away(fleet: FleetClient) -> list[str]:
    try:
        cordons = fleet.get("placer", "/v1/cordons")["data"]
    except CliError:  # a placer of an earlier version does not list them
        return []
    return [cordon["node_id"] for cordon in cordons if not cordon["is_alive"]]


def away_row(node_id: str) -> tuple[object, ...]:
    """A node that is not there and would come back cordoned, as `glowplug nodes` shows it."""
    return (node_id, *("-" for _ in NODE_HEADERS[1:-2]), "away, cordoned", "-")


NODE_HEADERS = ("gpu", "kind", "used", "total", "holders", "cached weights", "engines", "state", "seen")


KIND_WORDS = {"host": "host memory", "cuda": "CUDA", "emulated": "emulated"}


def engines_text(able: Sequence[str], used: Collection[str]) -> str:
    """Those that models use, then those that could start there too: a node that can emulate is not an emulated one."""
    here = [engine for engine in able if engine in used]
    others = ", ".join(engine for engine in able if engine not in used)
    if not here:
        return f"(can start {others})" if others else "-"
    return ", ".join(here) + (f" (can start {others} too)" if others else "")


def _engines_in_use(fleet: FleetClient) -> set[str]:
    try:
        return {row["engine"] for row in fleet.get("autoscaler", "/v1/models")["data"]}
    except CliError:  # the nodes are there to see without it
        return set()


def node_rows(node: dict[str, Any], used: Collection[str] = ()) -> list[tuple[object, ...]]:
    """One row per GPU of a node, as `glowplug nodes` shows it. `used`: engines of the models that are deployed."""
    cached = (
        f"{len(node['cached'])} ({show_bytes(sum(c['num_bytes'] for c in node['cached']))})" if node["cached"] else "-"
    )
    rows: list[tuple[object, ...]] = []
    for gpu in node["gpus"]:
        holders = sorted({grant["holder"] for grant in gpu["grants"]})
        rows.append(
            (
                gpu["gpu_id"],
                KIND_WORDS.get(gpu["kind"], gpu["kind"]),
                show_bytes(sum(grant["num_bytes"] for grant in gpu["grants"])),
                show_bytes(gpu["total_bytes"]),
                ", ".join(holders) or "-",
                cached,
                engines_text(node["engines"], used),
                "draining" if node["draining"] else "up",
                age(time.time() - node["heartbeat_at"]),
            )
        )
    return rows
