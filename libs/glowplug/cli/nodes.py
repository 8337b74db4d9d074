"""Commands for those who run nodes: cordon, uncordon, and what a service started by hand needs to join."""

import os
import shlex
from typing import Annotated

import typer

from glowplug.cli.client import connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, StateDirOption
from glowplug.cli.terminal import say
from glowplug.runtime.privileges import READER, USERS

SERVICES = tuple(user for user in USERS if user != READER)
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id of a node: `glowplug nodes`.")]


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
        "GLOWPLUG_REDIS_URL": own.get("redis_url")
        or fleet.document.get("redis_url")
        or os.environ.get("GLOWPLUG_REDIS_URL", ""),
        "GLOWPLUG_ADMIN_TOKEN": fleet.admin_token,
        "GLOWPLUG_API_KEY": fleet.api_key,
        "GLOWPLUG_CONSOLE_KEY": fleet.console_key,
        "GLOWPLUG_ENGINE_SECRET": fleet.document.get("engine_secret") or os.environ.get("GLOWPLUG_ENGINE_SECRET", ""),
        "OTEL_EXPORTER_OTLP_ENDPOINT": os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or fleet.urls.get("console", ""),
    }
    for name, value in values.items():
        if value:
            say(f"export {name}={shlex.quote(value)}")
