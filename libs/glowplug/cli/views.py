"""Show models, instances (`ps`), nodes, and all of them live (`top`)."""

import contextlib
import json
import sys
import time
from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from glowplug.cli.client import FleetClient, Row, connect
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import CliError, age, clear, clock, emit, say, table
from glowplug.domain.phrasing import STATE_WORDS
from glowplug.domain.units import show_bytes

MODEL_HEADERS = ("model", "engine", "state", "waiting", "running", "memory", "where", "note")
INSTANCE_HEADERS = ("instance", "model", "engine", "state", "gpu", "memory", "at once", "age", "start", "url")
NODE_HEADERS = ("gpu", "kind", "used", "total", "holders", "cached weights", "engines", "state", "seen")
KIND_WORDS = {"host": "host memory", "cuda": "CUDA", "emulated": "emulated"}
WORDS = STATE_WORDS | {"waiting": "waiting for room"}
BAR = 24  # characters
Cells = tuple[object, ...]


def models(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List the deployed models: ready, starting, asleep or cold, and the fault of a model that has one."""
    value = connect(state_dir).get("autoscaler", "/v1/models")
    emit(as_json, value, MODEL_HEADERS, [model_row(row) for row in value["data"]], "no model is deployed")
    if not as_json:
        for file, reason in value.get("errors", {}).items():
            say(f"\n{file} is not in force: {reason}", err=True)


def model_row(row: Row) -> Cells:
    note = row["config_error"] or row.get("warning", "") or row["last_failure"]
    marks = [word for field, word in (("pinned", "pinned"), ("suspended", "drained")) if row[field]]
    if row.get("pinned_at", "") in ("asleep", "host"):
        marks.append(f"kept {row['pinned_at']}")
    return (
        row["name"],
        row["engine"],
        standing(row),
        row["num_waiting"],
        row["num_in_flight"],
        show_bytes(row["memory_bytes"]),
        ", ".join(sorted({i["gpu_id"] for i in row["instances"]})) or "-",
        " ".join([*marks, *note.splitlines()[:1]]).strip() or "-",
    )


def state_word(state: str) -> str:
    return WORDS.get(state, state)


def standing(row: Row) -> str:
    return state_word(row.get("model_state") or row["state"])  # an earlier autoscaler sends only `state`


def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Include stopped and failed instances.")] = False,
    model: Annotated[str, typer.Option("--model", help="Only instances of this model.")] = "",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the running instances, newest first, and how long each took to start. --all also says why each is in its
    state."""
    fleet = connect(state_dir)
    value = fleet.instances(model=fleet.key_of(model) if model else "", gone=everything)
    headers: tuple[str, ...] = INSTANCE_HEADERS
    rows: list[Cells] = [instance_row(row) for row in value]
    if everything:
        headers = (*headers, "why")
        rows = [(*instance_row(row), reason(row)) for row in value]
    emit(as_json, value, headers, rows, "no instance runs")


def instance_row(row: Row) -> Cells:
    start = f"{row['ready_at'] - row['created_at']:.2f} s" if row["ready_at"] and row["created_at"] else "-"
    engine = f"{row['engine']} (emulated)" if row["emulated"] and row["engine"] != "emulated" else row["engine"]
    return (
        row["instance_id"],
        row["model_key"],
        engine,
        state_word(row["state"]) + (", outdated" if row.get("outdated") else ""),
        ", ".join(w["gpu_id"] for w in row["workers"]),
        _memory(row),
        row["max_concurrency"],
        age(time.time() - row["created_at"]),
        start,
        row["url"] or "-",
    )


def _memory(row: Row) -> str:
    if row["state"] == "swapped_out" and row.get("host_bytes"):
        return f"{show_bytes(row['host_bytes'])} of the host"
    return show_bytes(sum(w["num_bytes"] for w in row["workers"]))


def reason(row: Row) -> str:
    return next(iter(row.get("reason", "").splitlines()), "-")


def nodes(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List the nodes with their GPUs, the holders of their memory, the weights in host memory, and cordoned nodes that
    are away."""
    fleet = connect(state_dir)
    value = fleet.nodes()
    used: set[str] = set()
    with contextlib.suppress(CliError):  # nodes are shown without models, too
        used = {row["engine"] for row in fleet.models()}
    rows = [row for node in value for row in node_rows(node, used)]
    if not as_json:
        rows += [away_row(node_id) for node_id in _cordoned_away(fleet)]
    emit(as_json, value, NODE_HEADERS, rows, "no node has joined")


def _cordoned_away(fleet: FleetClient) -> list[str]:
    try:
        cordons = fleet.rows("placer", "/v1/cordons")
    except CliError:
        return []
    return [cordon["node_id"] for cordon in cordons if not cordon["is_alive"]]


def away_row(node_id: str) -> Cells:
    """A cordoned node that is away."""
    return (node_id, *("-" for _ in NODE_HEADERS[1:-2]), "away, cordoned", "-")


def engines_text(able: Sequence[str], used: Collection[str]) -> str:
    """List engines in use, then others that could start: a node that can emulate is not an emulated one."""
    here = [engine for engine in able if engine in used]
    others = ", ".join(engine for engine in able if engine not in used)
    if not here:
        return f"(can start {others})" if others else "-"
    return ", ".join(here) + (f" (can start {others} too)" if others else "")


def node_rows(node: Row, used: Collection[str] = ()) -> list[Cells]:
    """Return a row per GPU. `used`: engines of deployed models."""
    return [
        (
            gpu["gpu_id"],
            KIND_WORDS.get(gpu["kind"], gpu["kind"]),
            show_bytes(_used_bytes(gpu)),
            show_bytes(gpu["total_bytes"]),
            _holders(gpu) or "-",
            _weights(node),
            engines_text(node["engines"], used),
            "draining" if node["draining"] else "up",
            age(time.time() - node["heartbeat_at"]),
        )
        for gpu in node["gpus"]
    ]


def _weights(node: Row) -> str:
    cached, on_disk = node["cached"], node.get("on_disk", ())
    text = f"{len(cached)} ({show_bytes(sum(c['num_bytes'] for c in cached))})" if cached else "-"
    return f"{text}, {len(on_disk)} on disk" if on_disk else text


def _grants(gpu: Row) -> list[Row]:
    return [*gpu["grants"], *gpu.get("sleepers", ())]


def _shared(gpu: Row) -> list[Row]:
    """Return weights read by several instances, which are in no grant."""
    return [weights for weights in gpu.get("shared", ()) if len(weights["holders"]) > 1]


def _used_bytes(gpu: Row) -> int:
    return sum(held["num_bytes"] for held in (*_grants(gpu), *_shared(gpu)))


def _holders(gpu: Row) -> str:
    once = [f"{show_bytes(one['num_bytes'])} of weights once for {len(one['holders'])}" for one in _shared(gpu)]
    names = ", ".join(sorted({grant["holder"] for grant in _grants(gpu)}))
    return f"{names} ({', '.join(once)})" if once else names


def top(
    interval_s: Annotated[float, typer.Option("--interval", "-i", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the fleet until Ctrl-C. In a pipe or file one screen is printed; --json prints one object per interval."""
    fleet = connect(state_dir)
    is_screen = not as_json and sys.stdout.isatty() and not once
    is_live = is_screen or (as_json and not once)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            nodes, models, instances = fleet.nodes(), fleet.models(), fleet.instances()
            value = {"at": time.time(), "models": models, "instances": instances, "nodes": nodes}
            if is_screen:
                clear()
            say(json.dumps(value) if as_json else screen(value, "  Ctrl-C ends" if is_screen else ""))
            if not is_live:
                return
            time.sleep(interval_s)


def screen(value: Row, hint: str = "") -> str:
    bars = []
    for gpu in (gpu for node in value["nodes"] for gpu in node["gpus"]):
        used, total = _used_bytes(gpu), gpu["total_bytes"]
        filled = round(BAR * used / total) if total else 0
        bar = "#" * filled + "." * (BAR - filled)
        bars.append(f"{gpu['gpu_id']:<12} [{bar}] {show_bytes(used)} / {show_bytes(total)}")
    parts = [
        clock(value["at"]) + hint,
        "\n".join(bars) or "no node has joined",
        table(MODEL_HEADERS, [model_row(row) for row in value["models"]]),
    ]
    if value["instances"]:
        parts.append(table(INSTANCE_HEADERS, [instance_row(row) for row in value["instances"]]))
    return "\n\n".join(parts)
