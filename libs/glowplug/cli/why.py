"""`glowplug why`: the decisions behind a request, a model, a GPU, a node or an instance."""

from typing import Annotated, Any

import typer

from glowplug.cli.client import FleetClient, connect, segment
from glowplug.cli.tap import RunOption, decisions_about, request_of
from glowplug.cli.terminal import (
    DEFAULT_STATE_DIR,
    CliError,
    Format,
    OutputOption,
    StateDirOption,
    clock,
    emit,
    in_line,
    pairs,
    say,
    seconds,
)
from glowplug.cli.views import instances
from glowplug.domain.units import show_bytes

MAX_REQUESTS = 10_000  # as many as the router gives at once
FILTERS = ("request", "instance", "gpu", "node")


def why(
    subject: Annotated[str, typer.Argument(metavar="REQUEST|MODEL|GPU|NODE|INSTANCE|DECISION")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Newest decisions to show.")] = 5,
    run: RunOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Print the inputs and the rule that decided, the rivals, and the chain of causes."""
    if run is not None:
        request, undecided = request_of(run, subject), ""
        found = decisions_about(run, subject, request, limit)
    else:
        fleet = connect(state_dir)
        request = _request(fleet, subject)
        found = _decisions(fleet, subject, request, limit)
        undecided = _kind(fleet, subject) if request is None and not found else ""
    if output is Format.JSON:
        emit(output, {"request": request, "decisions": found}, (), ())
        return
    if run is not None:
        say(f"simulated, from {run}\n")
    if request is not None:
        say(_request_text(request))
    if undecided:
        say(f"nothing has been decided about the {undecided} {subject!r} yet")
    if request is not None and not found:
        say(_without_decision(request))
    for decision in found:
        say(decision_text(decision))


def _request(fleet: FleetClient, subject: str) -> dict[str, Any] | None:
    """The router's record of a request, when `subject` is the id of one."""
    try:
        rows = fleet.get("router", "/v1/requests", limit=MAX_REQUESTS)["data"]
    except CliError:
        return None
    found: dict[str, Any] | None = next((row for row in rows if row.get("request_id") == subject), None)
    return found


def _kind(fleet: FleetClient, subject: str) -> str:
    """What a subject is of which nothing was decided: a model without a request yet, an idle GPU. Raises CliError."""
    rows = [("model", row["name"]) for row in fleet.get("autoscaler", "/v1/models")["data"]]
    for node in fleet.get("placer", "/v1/nodes")["data"]:
        rows += [("node", node["node_id"]), *(("GPU", gpu["gpu_id"]) for gpu in node["gpus"])]
    for kind, name in rows:
        if name == subject:
            return kind
    raise CliError(f"nothing is known of {subject!r}: not a request, model, instance, GPU or node of this fleet")


def _decisions(fleet: FleetClient, subject: str, request: dict[str, Any] | None, limit: int) -> list[dict[str, Any]]:
    """Newest first. A request is explained by the decisions about the instance that served it."""
    if request is not None:
        rows = _about(fleet, "request", subject)
        if instance_id := request.get("instance_id"):
            rows += _about(fleet, "instance", instance_id)
        return _merge(rows)[:limit]
    rows = [row for name in FILTERS for row in _about(fleet, name, subject)]
    if not rows and subject.startswith("d-"):
        rows = _decision(fleet, subject)
    if not rows:
        try:
            key = fleet.get("autoscaler", f"/v1/models/{segment(subject)}")["key"]
        except CliError:
            key = subject
        rows = _about(fleet, "model", key)
    if not rows and "/" in subject:  # a GPU of which nothing was decided: show who is on it
        rows = [
            r for i in instances(fleet) if i["gpu_id"] == subject for r in _about(fleet, "instance", i["instance_id"])
        ]
    return _merge(rows)[:limit]


def _about(fleet: FleetClient, name: str, value: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = fleet.get("placer", "/v1/decisions", **{name: value})["data"]
    return rows


def _decision(fleet: FleetClient, decision_id: str) -> list[dict[str, Any]]:
    try:
        return [fleet.get("placer", f"/v1/decisions/{segment(decision_id)}")]
    except CliError:
        return []


def _merge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    unique = {row["decision_id"]: row for row in rows}
    return sorted(unique.values(), key=lambda row: -row["made_at"])


def _request_text(request: dict[str, Any]) -> str:
    return f"request {request['request_id']}\n{pairs(_readable(request))}\n"


def _without_decision(request: dict[str, Any]) -> str:
    if code := request.get("error_code") or request.get("code"):
        model = request.get("model") or request["model_key"]
        return (
            f"it was answered {request['status']} {code}, and no decision names it: `glowplug why {model}` has those\n"
        )
    return "no decision was needed: an instance was there and had room"


def _readable(values: dict[str, Any]) -> dict[str, Any]:
    """Bytes, seconds and moments as people read them; what is empty stays out."""
    shown: dict[str, Any] = {}
    for key, value in values.items():
        if value in ("", None):
            continue
        if key.endswith("_bytes"):
            value = show_bytes(value)
        elif key.endswith("_at"):
            value = clock(value)
        elif key.endswith("_s"):
            value = seconds(value)
        shown[key] = value
    return shown


def _score(rival: dict[str, Any]) -> str:
    """A rival's score in its unit (see Rival): a size, a time, a moment, or a number of something."""
    score, unit = rival["score"], rival.get("unit", "")
    first, _, rest = unit.partition(" ")
    if first == "bytes":
        return f"{show_bytes(score)} {rest}".strip()
    if first == "s":
        return f"{seconds(score)} {rest}".strip()
    if first == "at":
        return f"{rest} {clock(score)}" if score > 0 else f"{rest}: never"
    return f"{score:g} {unit}" if unit else f"score {score:g}"


def decision_text(decision: dict[str, Any]) -> str:
    """One decision as a person reads it."""
    when = clock(decision["made_at"])
    about = {
        key: decision[key]
        for key in ("model_key", "instance_id", "node_id", "gpu_id", "request_id", "chosen", "cause_id")
        if decision.get(key)
    }
    decided = f"{decision['service']} decided to {decision['kind']} by {decision['policy']}: {decision['reason']}"
    lines = [f"{when} {in_line(decided)}", pairs(about)]
    if decision.get("inputs"):
        lines += ["  inputs", pairs(_readable(decision["inputs"]), "    ")]
    if decision.get("rivals"):
        rivals = {r["name"]: f"{_score(r)}  {r['why']}".rstrip() for r in decision["rivals"]}
        lines += ["  rivals", pairs(rivals, "    ")]
    return "\n".join(line for line in lines if line) + f"\n  decision {decision['decision_id']}\n"
