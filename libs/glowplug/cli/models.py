"""Commands that change models: deploy, undeploy, load, unload, pin, unpin, drain."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from glowplug.cli.client import connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, Format, OutputOption, StateDirOption
from glowplug.cli.show import emit
from glowplug.cli.terminal import say
from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime import model_files

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Name, alias or key of a model.")]


def deploy(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", exists=True, dir_okay=False)],
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create or change models from YAML files. Nothing is sent when any of them is wrong."""
    fleet = connect(state_dir)
    bodies = [body for file in files for body in _bodies(file)]
    shown = [fleet.call("PUT", "autoscaler", f"/v1/models/{segment(body['name'])}", json=body) for body in bodies]
    emit(output, shown, ("model", "engine", "state"), [(row["name"], row["engine"], row["state"]) for row in shown])


def _bodies(path: Path) -> list[dict[str, Any]]:
    """The documents of one file, checked here so that the message names the file; weight paths made absolute."""
    try:
        checked = model_files.load(path)
        documents = [d for d in yaml.safe_load_all(path.read_text("utf-8")) if d is not None]
    except InvalidModelFile as error:
        raise CliError(f"{path}: {error.message}") from error
    for document, model in zip(documents, checked, strict=True):
        if model.weights.uri:
            document["weights"] = {
                "uri": model.weights.uri,
                "sha256": model.weights.sha256,
                "num_bytes": model.weights.num_bytes,
            }
    return documents


def undeploy(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Remove a model; its instances finish what they have and stop."""
    connect(state_dir).call("DELETE", "autoscaler", f"/v1/models/{segment(model)}")
    say(f"{model} undeployed")


def _act(verb: str, model: str, state_dir: Path, done: str) -> None:
    row = connect(state_dir).call("POST", "autoscaler", f"/v1/models/{segment(model)}/{verb}")
    say(f"{row['name']}: {done} (now {row['state']})")


def load(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Start an instance now, and lift a drain."""
    _act("load", model, state_dir, "load asked for")


def unload(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Drain its instances now; the next request starts one again."""
    _act("unload", model, state_dir, "unload asked for")


def drain(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Drain its instances and start none until `glowplug load`."""
    _act("drain", model, state_dir, "drain asked for")


def pin(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Keep one instance for good: never evicted, never asleep."""
    _act("pin", model, state_dir, "pinned")


def unpin(model: ModelArgument, state_dir: StateDirOption = DEFAULT_STATE_DIR) -> None:
    """Let it sleep and be evicted again."""
    _act("unpin", model, state_dir, "unpinned")
