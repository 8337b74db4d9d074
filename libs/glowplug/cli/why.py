"""`glowplug why`: the decisions behind a request, a model, a GPU, a node or an instance."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import JsonOption, RunOption, StateDirOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, clock, in_line, pairs, say, say_json, seconds, table
from glowplug.domain.units import show_bytes

MAX_REQUESTS = 10_000  # the router's limit
FILTERS = ("request", "instance", "gpu", "node")
ABOUT = ("model_key", "instance_id", "node_id", "gpu_id", "request_id")
KNOWN = "is not a request, model, instance, GPU or node"
EVENTS = "events.jsonl"
GOES = {"draining": "leaves", "swapped_out": "-"}  # states of holders that need not leave


def why(
    subject: Annotated[str, typer.Argument(metavar="REQUEST|MODEL|GPU|NODE|INSTANCE|DECISION")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many of the newest decisions to show.")] = 5,
    run: RunOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain decisions: their inputs, rule, rivals and causes."""
    undecided, prices = "", None
    if run is not None:
        request = next((row for row in lines_of(run, "requests.jsonl") if row["request_id"] == subject), None)
        found = _decisions_of_run(run, subject, request, limit)
    else:
        fleet = connect(state_dir)
        request = request_of(fleet, subject)
        found = decisions_about(fleet, subject, request, limit)
        undecided = _kind(fleet, subject) if request is None and not found else ""
        prices = _prices(fleet, subject)
    if as_json:
        say_json({"request": request, "decisions": found} | ({"prices": prices} if prices else {}))
        return
    if run is not None:
        say(f"simulated, from {run}\n")
    if request is not None:
        say(f"request {request['request_id']}\n{pairs(_readable(request))}\n")
    if prices is not None:
        say(price_list(prices))
    if undecided:
        say(f"no decision has been made about the {undecided} {subject!r} yet")
    if request is not None and not found:
        say(_without_decision(request))
    for decision in found:
        say(decision_text(decision))


def _decisions_of_run(run: Path, subject: str, request: Row | None, limit: int) -> list[Row]:
    """Newest first, for a request also those about its instance. Raises CliError for a subject unknown to the run."""
    names = {subject, (request or {}).get("instance_id", "")} - {""}
    fields = ("request_id", "instance_id") if request else ("decision_id", *ABOUT)
    found = [row for row in lines_of(run, "decisions.jsonl") if any(row.get(name) in names for name in fields)]
    if not found and request is None and not any(subject in _names(row["data"]) for row in lines_of(run, EVENTS)):
        raise CliError(f"{subject!r} {KNOWN} of this run")
    return sorted(found, key=lambda row: -row["made_at"])[:limit]


def _names(data: Row) -> set[str]:
    known: set[str] = set()
    for holder in ("model", "node", "instance"):
        inner = data.get(holder) or {}
        known |= {str(inner.get(name, "")) for name in ("key", "name", "node_id", "instance_id")}
        known |= {gpu["gpu_id"] for gpu in inner.get("gpus") or ()}
    return known


def request_of(fleet: FleetClient, subject: str) -> Row | None:
    """Return the router's record if `subject` is a request's id."""
    try:
        rows = fleet.rows("router", "/v1/requests", limit=MAX_REQUESTS)
    except CliError:
        return None
    return next((row for row in rows if row.get("request_id") == subject), None)


def _kind(fleet: FleetClient, subject: str) -> str:
    """Classify a subject without decisions: a model without a request, an idle GPU. Raises CliError."""
    nodes = fleet.nodes()
    kinds = {gpu["gpu_id"]: "GPU" for node in nodes for gpu in node["gpus"]}
    kinds |= {node["node_id"]: "node" for node in nodes}
    kinds |= {row["name"]: "model" for row in fleet.models()}
    if subject not in kinds:
        raise CliError(f"{subject!r} {KNOWN} of this fleet")
    return kinds[subject]


def _prices(fleet: FleetClient, subject: str) -> Row | None:
    if not any(gpu["gpu_id"] == subject for node in fleet.nodes() for gpu in node["gpus"]):
        return None
    found: Row = fleet.get("placer", f"/v1/gpus/{subject}/worth")
    return found


def price_list(prices: Row) -> str:
    free, total = show_bytes(prices["free_bytes"]), show_bytes(prices["total_bytes"])
    head = f"{prices['gpu_id']}: {free} of {total} are free"
    if not prices["holders"]:
        return f"{head}, and nothing uses it\n"
    rows = [
        (
            one["order"] or GOES.get(one.get("state", ""), "stays"),
            one["instance_id"],
            one["model"],
            one["rung"],
            _held(one),
            f"{one['asked']:.3g}",
            seconds(one["climb_s"]),
            f"{one['worth'] * (1 << 30):.3g}",
            one["why"],
        )
        for one in prices["holders"]
    ]
    heads = ("goes", "instance", "model", "rung", "holds", "asked", "saves each", "s per GiB", "why")
    said = "asked: requests expected within the time of a reload; s per GiB: asked x saves each / holds"
    return f"{head}\n{table(heads, rows)}\n{said}\n"


def _held(one: Row) -> str:
    shared = one.get("shared_bytes", 0)  # a placer of an earlier version counts no shared bytes
    return show_bytes(one["num_bytes"]) + (f" ({show_bytes(shared)} shared)" if shared else "")


def decisions_about(fleet: FleetClient, subject: str, request: Row | None, limit: int) -> list[Row]:
    """Newest first. A request is explained by the decisions about its instance."""

    def about(name: str, value: str) -> list[Row]:
        return fleet.rows("placer", "/v1/decisions", **{name: value})

    if request is not None:
        rows = about("request", subject)
        if instance_id := request.get("instance_id"):
            rows += about("instance", instance_id)
    else:
        rows = [row for name in FILTERS for row in about(name, subject)]
        if not rows and subject.startswith("d-"):
            with suppress(CliError):
                rows = [fleet.get("placer", f"/v1/decisions/{segment(subject)}")]
        rows = rows or about("model", fleet.key_of(subject))
        if not rows and "/" in subject:  # a GPU without decisions: show its instances
            known = fleet.instances()
            there = [r["instance_id"] for r in known if any(w["gpu_id"] == subject for w in r["workers"])]
            rows = [row for instance_id in there for row in about("instance", instance_id)]
    unique = {row["decision_id"]: row for row in rows}
    return sorted(unique.values(), key=lambda row: -row["made_at"])[:limit]


def _without_decision(request: Row) -> str:
    code = request.get("error_code") or request.get("code")
    if not code:
        return "no decision was needed: a ready instance had a free slot for the request"
    answered = f"the request was answered {request['status']} {code}"
    if model := request.get("model") or request["model_key"]:
        return f"{answered}, and no decision names it; see `glowplug why {model}`\n"
    return f"{answered} before its model was known, so no decision was made\n"


def _readable(values: Row) -> Row:
    """Format bytes, seconds and times; omit empty values."""
    shown: Row = {}
    for key, value in values.items():
        if value in ("", None):
            continue
        if key.endswith("_bytes"):
            value = show_bytes(value)
        elif key.endswith("_bytes_per_s"):
            value = f"{show_bytes(int(value))}/s"
        elif key.endswith("_at"):
            value = clock(value)
        elif key.endswith("_s"):
            value = seconds(value)
        shown[key] = value
    return shown


def _score(rival: Row) -> str:
    """Format a score in its unit (see Rival)."""
    score, unit = rival["score"], rival.get("unit", "")
    first, _, rest = unit.partition(" ")
    if first == "bytes":
        return f"{show_bytes(score)} {rest}".strip()
    if first == "s":
        return f"{seconds(score)} {rest}".strip()
    if first == "at":
        return f"{rest} {clock(score)}" if score > 0 else f"{rest}: never"
    return f"{score:g} {unit}" if unit else f"score {score:g}"


def decision_text(decision: Row) -> str:
    when = clock(decision["made_at"])
    about = {key: decision[key] for key in (*ABOUT, "chosen", "cause_id") if decision.get(key)}
    decided = f"{decision['service']} decided to {decision['kind']} by {decision['policy']}: {decision['reason']}"
    lines = [f"{when} {in_line(decided)}", pairs(about)]
    if decision.get("inputs"):
        lines += ["  inputs", pairs(_readable(decision["inputs"]), "    ")]
    if decision.get("rivals"):
        rivals = {r["name"]: f"{_score(r)}  {r['why']}".rstrip() for r in decision["rivals"]}
        lines += ["  rivals", pairs(rivals, "    ")]
    return "\n".join(line for line in lines if line) + f"\n  decision {decision['decision_id']}\n"


def lines_of(run: Path, name: str) -> Iterator[Row]:
    """Read a file of a simulated run's folder. Raises CliError."""
    path = run / name
    try:
        if not (run / "setup.json").is_file():
            raise CliError(f"--run: {run}: is not the folder of a run", WRONG_USAGE)
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)
    except (OSError, ValueError) as error:
        raise CliError(f"--run: {path}: {error}", WRONG_USAGE) from error
