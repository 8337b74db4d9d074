"""Commands for those who run nodes: cordon, uncordon, and what a service started by hand needs to join."""

import os
import shlex
from typing import Annotated

import typer

from glowplug.cli.client import connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, StateDirOption
from glowplug.cli.terminal import say

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id of a node: `glowplug nodes`.")]


def cordon(node: NodeArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Place nothing on a node any more and drain what runs there; it stays so over restarts, until `uncordon`."""
    connect(state_dir).call("POST", "placer", f"/v1/nodes/{segment(node)}/drain")
    say(f"{node} drains: nothing is placed there until `glowplug uncordon {node}`")


def uncordon(node: NodeArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Place on a node again; one that is away comes back without its cordon."""
    connect(state_dir).call("POST", "placer", f"/v1/nodes/{segment(node)}/undrain")
    say(f"{node} takes instances again")


def env(state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Print addresses and TOKENS as shell exports, for services started by hand: eval "$(glowplug env)"."""
    fleet = connect(state_dir)
    values = {f"GLOWPLUG_{name.upper()}_URL": url for name, url in fleet.urls.items()}
    values |= {
        "GLOWPLUG_NATS_URL": fleet.nats_url,
        "GLOWPLUG_REDIS_URL": fleet.document.get("redis_url") or os.environ.get("GLOWPLUG_REDIS_URL", ""),
        "GLOWPLUG_ADMIN_TOKEN": fleet.admin_token,
        "GLOWPLUG_API_KEY": fleet.api_key,
        "OTEL_EXPORTER_OTLP_ENDPOINT": os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or fleet.urls.get("console", ""),
    }
    for name, value in values.items():
        if value:
            say(f"export {name}={shlex.quote(value)}")
