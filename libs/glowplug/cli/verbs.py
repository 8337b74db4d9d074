"""Commands that move a model between its rungs: load, unload, wake, sleep, drain, pin and unpin.

Each first asks the placer for the cost (seconds, their source, bytes, who would have to leave), says so, and then
asks the owner: the autoscaler for instances, the placer for weights in host memory. `--dry-run` ends after the cost;
`--wait` ends when it is done, with the seconds that it took beside those predicted.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Final

import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import JsonOption, ModelArgument, StateDirOption
from glowplug.cli.terminal import CliError, say, say_json
from glowplug.cli.views import standing, state_word
from glowplug.domain.model import Rung, WeightsRef
from glowplug.domain.phrasing import doing, listed
from glowplug.domain.units import show_bytes

POLL_S: Final = 0.05
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show the cost.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when it is done, with the seconds it took.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.0, help="Longest time for --wait, in seconds.")]
NodeOption = Annotated[str, typer.Option("--node", help="Only on this node.")]

Reached = Callable[[FleetClient, Row], bool]
Owner = tuple[str, str, Mapping[str, str]]  # service, verb there, its fields


@dataclass(frozen=True, kw_only=True)
class VerbAsked:
    """One command as typed. `done`: printed once the owner has accepted; `rung` "": none."""

    model: str
    verb: str
    done: str
    rung: str = ""
    node: str = ""
    dry_run: bool = False
    wait: bool = False
    timeout_s: float = 300.0
    as_json: bool = False


def load(
    model: ModelArgument,
    to: Annotated[Rung, typer.Option("--to", help="How close to serving the model is brought.")] = Rung.READY,
    node: NodeOption = "",
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start an instance now, also of a drained model; or bring the model closer: asleep, prewarmed, or its weights in
    host memory."""
    asked = VerbAsked(
        model=model, verb="load", done="load requested", rung=to.value, node=node, dry_run=dry_run, wait=wait,
        timeout_s=timeout, as_json=as_json,
    )  # fmt: skip
    if to is Rung.HOST:
        _carry_out(connect(state_dir), asked, ("placer", "fetch", {"node": node}), _in_host_memory(node))
    else:
        body = {name: text for name, text in (("to", to.value), ("node", node)) if text not in ("", Rung.READY.value)}
        _carry_out(connect(state_dir), asked, ("autoscaler", "load", body), _stands(to, node))


def unload(
    model: ModelArgument,
    rung: Annotated[
        Rung | None,
        typer.Option(
            "--from", help="Only instances in this state; host: all of them, and the weights in host memory too."
        ),
    ] = None,
    node: Annotated[
        str,
        typer.Option("--node", help="With --from host: only the host memory of this node."),
    ] = "",
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drain the instances of a model. The next request starts one again."""
    if node and rung is not Rung.HOST:
        raise CliError("--node needs --from host: instances are unloaded on every node")
    asked = VerbAsked(
        model=model, verb="unload", done="unload requested", rung=rung.value if rung else "", node=node,
        dry_run=dry_run, wait=wait, timeout_s=timeout, as_json=as_json,
    )  # fmt: skip
    fleet = connect(state_dir)
    if rung is Rung.HOST:
        instances: tuple[Owner, ...] = () if node else (("autoscaler", "unload", {}),)

        def is_gone(f: FleetClient, row: Row) -> bool:
            return not _in_host_memory(node)(f, row)

        # placer first: if it refuses, nothing is drained; its drop waits until no instance reads the weights
        _carry_out(fleet, asked, ("placer", "drop", {"node": node}), is_gone, then=instances)
    else:
        body = {"from": rung.value} if rung else {}
        _carry_out(fleet, asked, ("autoscaler", "unload", body), lambda _, row: not _at(row, rung))


def pin(
    model: ModelArgument,
    at: Annotated[
        Rung, typer.Option("--at", help="Keep a ready instance, one asleep, or the weights in host memory.")
    ] = Rung.READY,
    dry_run: DryRunOption = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 300.0,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a model for good: an instance that is never evicted and never sleeps, one that may sleep, or the weights in
    host memory."""
    asked = VerbAsked(
        model=model, verb="pin", done="pinned" if at is Rung.READY else f"pinned at {at.value}", rung=at.value,
        dry_run=dry_run, wait=wait, timeout_s=timeout, as_json=as_json,
    )  # fmt: skip
    reached = _in_host_memory("") if at is Rung.HOST else _stands(at, "")
    body = {} if at is Rung.READY else {"at": at.value}
    _carry_out(connect(state_dir), asked, ("autoscaler", "pin", body), reached)


def _plain(name: str, done: str, text: str, reached: Reached) -> Callable[..., None]:
    def command(
        model: ModelArgument,
        dry_run: DryRunOption = False,
        wait: WaitOption = False,
        timeout: TimeoutOption = 300.0,
        state_dir: StateDirOption = None,
        as_json: JsonOption = False,
    ) -> None:
        asked = VerbAsked(
            model=model, verb=name, done=done, dry_run=dry_run, wait=wait, timeout_s=timeout, as_json=as_json
        )  # fmt: skip
        _carry_out(connect(state_dir), asked, ("autoscaler", name, {}), reached)

    command.__name__, command.__doc__ = name, text
    return command


def _carry_out(
    fleet: FleetClient, asked: VerbAsked, owner: Owner, reached: Reached, then: tuple[Owner, ...] = ()
) -> None:
    """Print the cost, ask the owner (and those of `then`, unless it refuses), and wait if asked to."""
    cost = _cost(fleet, asked)
    if asked.dry_run:
        if "error" in cost:
            raise CliError(str(cost["error"]))
        if asked.as_json:
            say_json(cost)
        else:
            say(described(cost))
        return
    before = time.monotonic()
    for service, verb, body in (owner, *then):
        fields = {name: text for name, text in body.items() if text}
        fleet.call("POST", service, _path(asked.model, verb), **({"json": fields} if fields else {}))
    row = fleet.get("autoscaler", f"/v1/models/{segment(asked.model)}")
    if not asked.as_json:
        say(f"{row['name']}: {asked.done} (now {standing(row)})")
        say(f"  {described(cost)}" if "error" not in cost else f"  the cost is not known: {cost['error']}")
        if row.get("warning"):
            say(f"  {row['warning']}", err=True)
    actual_s = _waited(fleet, asked, before, reached) if asked.wait else None
    if asked.as_json:
        say_json({"model": row, "cost": cost, "actual_s": actual_s})
    elif actual_s is not None:
        predicted = f" ({cost['seconds']:.2f} s predicted)" if cost.get("is_possible_now") else ""
        say(f"  done in {actual_s:.2f} s{predicted}")


def _cost(fleet: FleetClient, asked: VerbAsked) -> Row:
    """Return the placer's cost, or {"error": why}, so that the verb is carried out all the same."""
    path = f"/v1/models/{segment(asked.model)}/cost"
    try:
        found: Row = fleet.get("placer", path, verb=asked.verb, rung=asked.rung, node=asked.node)
    except CliError as error:
        return {"error": str(error)}
    return found


def _waited(fleet: FleetClient, asked: VerbAsked, before: float, reached: Reached) -> float:
    """Return seconds until it was done. Raises CliError after the timeout."""
    while True:
        row = fleet.get("autoscaler", f"/v1/models/{segment(asked.model)}")
        took = time.monotonic() - before
        if reached(fleet, row):
            return round(took, 3)
        if took >= asked.timeout_s:
            why = f": {row['last_failure']}" if row["last_failure"] else ""
            raise CliError(
                f"{row['name']} is {standing(row)} after {asked.timeout_s:g} s, so {asked.verb} is not done yet{why}"
            )
        time.sleep(POLL_S)


def described(cost: Row) -> str:
    if not cost["is_possible_now"]:
        return f"it has to wait: {cost['reason']}"
    if not (cost["seconds"] or cost["leaving"] or cost["freed_host_bytes"]):
        return f"nothing to do: {cost['reason']}"
    parts = [f"about {cost['seconds']:.2f} s"]
    if cost["kind"]:
        parts[0] += f" ({_KINDS.get(cost['kind'], cost['kind'])} on {cost['node_id']})"
    for name, text in _BYTES.items():
        if cost[name]:
            parts.append(text.format(show_bytes(cost[name])))
    if names := [
        f"{one['model_key']} ({show_bytes(one['num_bytes'])}, then {state_word(one['becomes'])})"
        for one in cost["leaving"]
    ]:
        parts.append(f"{listed(names)} {'leaves' if len(names) == 1 else 'leave'}")
    if cost["num_in_flight"]:
        parts.append(f"{doing(cost['num_in_flight'], 'request', 'runs')} there and must end first")
    if cost["source"]:
        parts.append(cost["source"])
    return "; ".join([*parts, *([cost["reason"]] if cost["reason"] else [])])


_KINDS: Final = {
    "cold": "a cold start", "disk": "a start from disk", "cached": "a start from host memory", "wake": "a wake",
    "growth": "a replica becomes ready", "join": "a replica on its way becomes ready",
}  # fmt: skip
_BYTES: Final = {
    "fetch_bytes": "{} fetched into host memory",
    "gpu_bytes": "{} of GPU memory",
    "freed_gpu_bytes": "{} of GPU memory freed",
    "freed_host_bytes": "{} of host memory freed",
}
_STATES: Final = {
    Rung.READY: ("starting", "loading", "ready", "draining"),
    Rung.PREWARMED: ("prewarmed",),
    Rung.ASLEEP: ("swapped_out",),
}
_AT_LEAST: Final = {
    Rung.READY: {"ready"},
    Rung.PREWARMED: {"prewarmed", "ready"},
    Rung.ASLEEP: {"swapped_out", "prewarmed", "ready"},
}


def _at(row: Row, rung: Rung | None) -> list[Any]:
    states = _STATES[rung] if rung else tuple(chain.from_iterable(_STATES.values()))
    return [one for one in row["instances"] if one["state"] in states]


def _stands(rung: Rung, node: str) -> Reached:
    def reached(_: FleetClient, row: Row) -> bool:
        here = {one["state"] for one in row["instances"] if node in ("", one["node_id"])}
        is_on_its_way = here.isdisjoint(_STATES[rung]) and row.get("is_being_put_away", False)
        return bool(here & _AT_LEAST[rung]) and not is_on_its_way

    return reached


def _in_host_memory(node: str) -> Reached:
    def reached(fleet: FleetClient, row: Row) -> bool:
        digest = WeightsRef(uri=row["weights"]["uri"], sha256=row["weights"]["sha256"]).digest
        nodes = (one for one in fleet.nodes() if node in ("", one["node_id"]))
        return any(cached["digest"] == digest for one in nodes for cached in one["cached"])

    return reached


def _path(model: str, verb: str) -> str:
    return f"/v1/models/{segment(model)}/{verb}"


def _is_asleep(_: FleetClient, row: Row) -> bool:
    return not _at(row, Rung.READY)


wake = _plain(
    "wake", "wake requested", "Wake a sleeping instance, or start one if none sleeps.", _stands(Rung.READY, "")
)
sleep = _plain(
    "sleep",
    "sleep requested",
    "Put the engines of a model to sleep once they are idle. An engine that cannot sleep stops.",
    _is_asleep,
)
unpin = _plain("unpin", "unpinned", "Allow a pinned model to sleep and to be evicted again.", lambda _, row: True)
drain = _plain(
    "drain",
    "drain requested",
    "Drain the instances of a model, and start none until `glowplug load`.",
    lambda _, row: not _at(row, None),
)
