"""Shell completion: names of models, nodes, GPUs, instances, tenants and keys of the running fleet.

A person waits, so the command's module is not imported, each call to the fleet gets 0.1 s, and errors mean no offer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import typer

from glowplug.cli import contexts as known
from glowplug.cli.client import FleetClient, connect
from glowplug.cli.terminal import CliError, in_line

CALL_S: Final = 0.1  # at most three calls per word
Names = Callable[[FleetClient], Iterable[str]]


def _models(fleet: FleetClient) -> Iterable[str]:
    return (row["name"] for row in fleet.models())


def _nodes(fleet: FleetClient) -> Iterable[str]:
    return (row["node_id"] for row in fleet.nodes())


def _gpus(fleet: FleetClient) -> Iterable[str]:
    return (gpu["gpu_id"] for node in fleet.nodes() for gpu in node["gpus"])


def _instances(fleet: FleetClient) -> Iterable[str]:
    return (row["instance_id"] for row in fleet.instances())


def _processes(fleet: FleetClient) -> Iterable[str]:
    return (process["name"] for process in fleet.document.get("processes", []))


def _tenants(fleet: FleetClient) -> Iterable[str]:
    return (row["name"] for row in fleet.rows("autoscaler", "/v1/tenants"))


def _keys(fleet: FleetClient) -> Iterable[str]:
    return (row["prefix"] for row in fleet.rows("autoscaler", "/v1/keys") if row["state"] == "active")


_OF_A_MODEL: Final = (
    "undeploy", "pull", "load", "unload", "wake", "sleep", "pin", "unpin", "drain", "forecast", "run", "chat",
)  # fmt: skip
WORDS: Final[dict[str, tuple[Names, ...]]] = {
    **dict.fromkeys(_OF_A_MODEL, (_models,)),
    **dict.fromkeys(("cordon", "uncordon"), (_nodes,)),
    **dict.fromkeys(("ps", "requests", "tap"), ()),
    "logs": (_processes, _models, _instances),
    "why": (_models, _gpus, _instances),
}
_OPTIONS: Final[dict[str, tuple[Names, ...]]] = {"--model": (_models,), "-m": (_models,), "--node": (_nodes,)}


def stand_in(verb: str) -> Callable[..., None]:
    """Return a command that only completes the arguments of `verb`, one of WORDS."""

    def offered(ctx: typer.Context, incomplete: str) -> list[str]:
        words = ("", *(ctx.params.get("words") or ()))
        folder = next((Path(after) for word, after in pairwise(words) if word == "--state-dir"), None)
        return _found(folder, _OPTIONS.get(words[-1], WORDS[verb]), incomplete)

    def command(words: Annotated[list[str], typer.Argument(autocompletion=offered)]) -> None:
        """Never called."""

    return command


def _found(folder: Path | None, kinds: Iterable[Names], incomplete: str) -> list[str]:
    found: set[str] = set()
    try:
        fleet = replace(connect(folder), timeout_s=CALL_S)
        for names in kinds:
            found.update(names(fleet))
    except (CliError, LookupError, TypeError, AttributeError):
        return []
    return [in_line(name) for name in sorted(found) if name.startswith(incomplete)]


def tenants(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of tenants."""
    return _found(ctx.params.get("state_dir"), (_tenants,), incomplete)


def key_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """The prefixes of keys that are not over."""
    return _found(ctx.params.get("state_dir"), (_keys,), incomplete)


def contexts(incomplete: str) -> list[str]:
    try:
        return [name for name in sorted(known.read().named) if name.startswith(incomplete)]
    except CliError:
        return []
