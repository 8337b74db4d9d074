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


NAMES: Final[dict[str, Names]] = {
    "model": lambda fleet: (row["name"] for row in fleet.models()),
    "node": lambda fleet: (row["node_id"] for row in fleet.nodes()),
    "gpu": lambda fleet: (gpu["gpu_id"] for node in fleet.nodes() for gpu in node["gpus"]),
    "instance": lambda fleet: (row["instance_id"] for row in fleet.instances()),
    "process": lambda fleet: (process["name"] for process in fleet.document.get("processes", [])),
    "tenant": lambda fleet: (row["name"] for row in fleet.rows("autoscaler", "/v1/tenants")),
    "key": lambda fleet: (row["prefix"] for row in fleet.rows("autoscaler", "/v1/keys") if row["state"] == "active"),
}
_OF_A_MODEL: Final = (
    "undeploy", "pull", "load", "unload", "wake", "sleep", "pin", "unpin", "drain", "forecast", "run", "chat",
)  # fmt: skip
WORDS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(_OF_A_MODEL, ("model",)),
    **dict.fromkeys(("cordon", "uncordon"), ("node",)),
    **dict.fromkeys(("ps", "requests", "tap"), ()),
    "logs": ("process", "model", "instance"),
    "why": ("model", "gpu", "instance"),
}
_OPTIONS: Final = {"--model": ("model",), "-m": ("model",), "--node": ("node",)}


def stand_in(verb: str) -> Callable[..., None]:
    """Return a command that only completes the arguments of `verb`, one of WORDS."""

    def offered(ctx: typer.Context, incomplete: str) -> list[str]:
        words = ("", *(ctx.params.get("words") or ()))
        folder = next((Path(after) for word, after in pairwise(words) if word == "--state-dir"), None)
        return _found(folder, _OPTIONS.get(words[-1], WORDS[verb]), incomplete)

    def command(words: Annotated[list[str], typer.Argument(autocompletion=offered)]) -> None:
        """Never called."""

    return command


def _found(folder: Path | None, kinds: Iterable[str], incomplete: str) -> list[str]:
    found: set[str] = set()
    try:
        fleet = replace(connect(folder), timeout_s=CALL_S)
        for kind in kinds:
            found.update(NAMES[kind](fleet))
    except (CliError, LookupError, TypeError, AttributeError):
        return []
    return [in_line(name) for name in sorted(found) if name.startswith(incomplete)]


def tenants(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of tenants."""
    return _found(ctx.params.get("state_dir"), ("tenant",), incomplete)


def key_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """The prefixes of keys that are not over."""
    return _found(ctx.params.get("state_dir"), ("key",), incomplete)


def contexts(incomplete: str) -> list[str]:
    try:
        return [name for name in sorted(known.read().named) if name.startswith(incomplete)]
    except CliError:
        return []
