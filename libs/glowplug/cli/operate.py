"""Commands that change what is there: deploy and undeploy models, cordon nodes; and what a service that is started by
hand needs to join. What moves a model between its rungs is in verbs.py.
"""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from glowplug.cli.client import connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, Format, OutputOption, StateDirOption
from glowplug.cli.sources import measure
from glowplug.cli.terminal import CliError, emit, say
from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime import model_files
from glowplug.runtime.privileges import READER, USERS
from glowplug.weights.files import NoAnswer
from glowplug.weights.source import local_path

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Name, alias or key of a model.")]
SERVICES = tuple(user for user in USERS if user != READER)
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id of a node: `glowplug nodes`.")]


def deploy(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False)],
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create or change models from YAML files. Nothing is sent when any of them is wrong."""
    fleet = connect(state_dir)
    bodies = [body for file in files for body in _bodies(file)]
    shown = [fleet.call("PUT", "autoscaler", f"/v1/models/{segment(body['name'])}", json=body) for body in bodies]
    for row in shown:
        if row.get("warning"):
            say(f"{row['name']}: {row['warning']}", err=True)
    emit(output, shown, ("model", "engine", "state"), [(row["name"], row["engine"], row["state"]) for row in shown])


def _bodies(path: Path) -> list[dict[str, Any]]:
    """The documents of one file, checked here so that the message names the file; weight paths made absolute."""
    try:
        checked = model_files.load(path, measure)
        documents = [d for d in yaml.safe_load_all(path.read_text("utf-8")) if d is not None]
    except InvalidModelFile as error:
        raise CliError(f"{path}: {error.message}") from error
    except NoAnswer as error:
        raise CliError(
            f"{path}: weights_bytes: give the size, it cannot be read from here: {error.strerror}"
        ) from error
    for document, model in zip(documents, checked, strict=True):
        if model.weights.uri:
            document["weights"] = msgspec.to_builtins(model.weights)
            if local_path(model.weights.uri) is None:
                document["weights_bytes"] = model.weights_bytes  # asked once, here
    return documents


def undeploy(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Remove a model; its instances finish what they have and stop."""
    connect(state_dir).call("DELETE", "autoscaler", f"/v1/models/{segment(model)}")
    say(f"{model} undeployed")


def cordon(node: NodeArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Place nothing on a node any more and drain what runs there; it stays so over restarts, until `uncordon`."""
    connect(state_dir).call("POST", "placer", f"/v1/nodes/{segment(node)}/drain")
    say(f"{node} drains: nothing is placed there until `glowplug uncordon {node}`")


def uncordon(node: NodeArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Place on a node again; one that is away comes back without its cordon."""
    connect(state_dir).call("POST", "placer", f"/v1/nodes/{segment(node)}/undrain")
    say(f"{node} takes instances again")


def env(
    service: Annotated[
        str, typer.Argument(metavar="[SERVICE]", help=f"Which service is started: {', '.join(SERVICES)}.")
    ] = READER,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Print addresses and TOKENS as shell exports, for a service started by hand: eval "$(glowplug env router)". Bus
    and store are then reached with the rights of that service; without SERVICE, to read only."""
    if service not in USERS:
        raise CliError(f"no service {service}; there are: {', '.join(SERVICES)}")
    fleet = connect(state_dir)
    own = fleet.document.get("servers", {}).get(service, {})
    values = {f"GLOWPLUG_{name.upper()}_URL": url for name, url in fleet.urls.items()}
    values |= {
        "GLOWPLUG_NATS_URL": own.get("nats_url") or fleet.nats_url,
        "GLOWPLUG_REDIS_URL": own.get("redis_url") or fleet.redis_url,
        "GLOWPLUG_ADMIN_TOKEN": fleet.admin_token,
        "GLOWPLUG_API_KEY": fleet.api_key,
        "GLOWPLUG_CONSOLE_KEY": fleet.console_key,
        "GLOWPLUG_ENGINE_SECRET": fleet.document.get("engine_secret") or os.environ.get("GLOWPLUG_ENGINE_SECRET", ""),
        "OTEL_EXPORTER_OTLP_ENDPOINT": os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or fleet.urls.get("console", ""),
    }
    for name, value in values.items():
        if value:
            say(f"export {name}={shlex.quote(value)}")
