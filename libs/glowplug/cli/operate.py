"""Deploy and undeploy models, cordon nodes, print the environment of a service started by hand."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from glowplug.cli.client import FleetClient, connect, segment
from glowplug.cli.options import JsonOption, ModelArgument, NodeArgument, StateDirOption
from glowplug.cli.sources import measure
from glowplug.cli.terminal import CliError, emit, say
from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.model import model_key
from glowplug.runtime import model_files, plain_yaml
from glowplug.runtime.privileges import READER, USERS
from glowplug.weights.files import NoAnswer
from glowplug.weights.source import local_path

SERVICES = tuple(user for user in USERS if user != READER)
NODE = "node"


def deploy(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which instances it would replace.")] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or change models from YAML files. If one file is wrong, none is applied."""
    fleet = connect(state_dir)
    bodies = [body for file in files for body in _bodies(file)]
    if dry_run:
        checked = [_checked(fleet, body) for body in bodies]
        rows = [
            (body["name"], one["change"] or "Nothing of it runs") for body, one in zip(bodies, checked, strict=True)
        ]
        emit(as_json, checked, ("model", "change"), rows)
        return
    shown = [fleet.call("PUT", "autoscaler", f"/v1/models/{segment(body['name'])}", json=body) for body in bodies]
    for row in shown:
        if row.get("warning"):
            say(f"{row['name']}: {row['warning']}", err=True)
    emit(as_json, shown, ("model", "engine", "state"), [(row["name"], row["engine"], row["state"]) for row in shown])


def _checked(fleet: FleetClient, body: dict[str, Any]) -> dict[str, Any]:
    """Return the autoscaler's answer about a draft. Raises CliError for a wrong one."""
    key = model_key(body["name"])
    edits = key if any(row["key"] == key for row in fleet.models()) else ""
    answer: dict[str, Any] = fleet.call("POST", "autoscaler", "/v1/model_files", json={"fields": body, "edits": edits})
    if faults := answer["errors"]:
        raise CliError(f"{body['name']}: {faults[0]['message']}")
    return answer


def _bodies(path: Path) -> list[dict[str, Any]]:
    """Read documents, checked here so that errors name the file; paths of weights become absolute."""
    try:
        checked = model_files.load(path, measure)
        documents = [d for d in plain_yaml.load_all(path.read_text("utf-8")) if d is not None]
    except InvalidModelFile as error:
        raise CliError(f"{path}: {error.message}") from error
    except NoAnswer as error:
        raise CliError(
            f"{path}: the size of the weights cannot be read from this machine ({error.strerror}): state weights_bytes"
        ) from error
    for document, model in zip(documents, checked, strict=True):
        if model.base:
            document["adapter"] = msgspec.to_builtins(model.weights)
        elif model.weights.uri:
            document["weights"] = msgspec.to_builtins(model.weights)
            if local_path(model.weights.uri) is None:
                document["weights_bytes"] = model.weights_bytes
    return documents


def undeploy(model: ModelArgument, state_dir: StateDirOption = None) -> None:
    """Remove a model. Its instances finish their requests and stop."""
    connect(state_dir).call("DELETE", "autoscaler", f"/v1/models/{segment(model)}")
    say(f"{model} undeployed")


def cordon(node: NodeArgument, state_dir: StateDirOption = None) -> None:
    """Drain a node. Nothing is placed there until `glowplug uncordon`, not even after a restart."""
    connect(state_dir).call("POST", "placer", f"/v1/nodes/{segment(node)}/drain")
    say(f"{node} is draining; nothing is placed there until `glowplug uncordon {node}`")


def uncordon(node: NodeArgument, state_dir: StateDirOption = None) -> None:
    """Place instances on a node again. A node that is away will not be cordoned when it is back."""
    connect(state_dir).call("POST", "placer", f"/v1/nodes/{segment(node)}/undrain")
    say(f"{node} takes instances again")


def env(
    service: Annotated[
        str, typer.Argument(metavar="[SERVICE]", help=f"The service to start: {', '.join(SERVICES)}, or {NODE}.")
    ] = READER,
    state_dir: StateDirOption = None,
) -> None:
    """Print addresses and TOKENS as shell exports, for a service started by hand: eval "$(glowplug env router)".
    SERVICE decides with whose rights bus and store are reached; without it they can only be read."""
    if service not in (*USERS, NODE):
        raise CliError(f"there is no service {service!r}; there are: {', '.join(SERVICES)}, {NODE}")
    for name, value in exports(connect(state_dir), service).items():
        say(f"export {name}={shlex.quote(value)}")


def exports(fleet: FleetClient, service: str) -> dict[str, str]:
    """Return addresses and tokens for one service, or for a node: then bus and store are the agent's, and its
    prefetcher's begin with PREFETCHER_. Unknown ones are left out."""
    values = {f"GLOWPLUG_{name.upper()}_URL": url for name, url in fleet.urls.items()}
    values |= _servers(fleet, "agent" if service == NODE else service)
    if service == NODE:
        values |= {f"PREFETCHER_{name}": url for name, url in _servers(fleet, "prefetcher").items()}
    values |= {
        "GLOWPLUG_ADMIN_TOKEN": fleet.admin_token,
        "GLOWPLUG_API_KEY": fleet.api_key,
        "GLOWPLUG_CONSOLE_KEY": fleet.console_key,
        "GLOWPLUG_ENGINE_SECRET": fleet.document.get("engine_secret") or os.environ.get("GLOWPLUG_ENGINE_SECRET", ""),
    }
    return {name: value for name, value in values.items() if value}


def _servers(fleet: FleetClient, user: str) -> dict[str, str]:
    own = fleet.document.get("servers", {}).get(user, {})
    return {
        "GLOWPLUG_NATS_URL": own.get("nats_url") or fleet.nats_url,
        "GLOWPLUG_REDIS_URL": own.get("redis_url") or fleet.redis_url,
    }
