"""`glowplug backup` and `restore`: what a fleet cannot make again by itself, in one file."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from glowplug.cli import backup_archive
from glowplug.cli.backup_archive import Backup
from glowplug.cli.backup_plan import Plan, plan
from glowplug.cli.client import FleetClient, connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, CliError, StateDirOption
from glowplug.cli.show import age
from glowplug.cli.terminal import say
from glowplug.controllers.placer.controller import CORDONS, Cordon
from glowplug.domain.model import Model
from glowplug.state.redis_store import PREFIX, table_row
from glowplug.state.rows import read_rows, shown

ANSWER_S = 5.0
IN_FORCE_S = 30.0  # until the autoscaler has read the files: it looks every second
POLL_S = 0.2


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to: models.tar.gz", dir_okay=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace the file when it is there.")] = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Keep models, model files, pins and drains of a running fleet in one file; weights and tokens are not in it."""
    if file.exists() and not force:
        raise CliError(f"{file} is there already: choose another name, or --force")
    fleet = connect(state_dir)
    models, cordons, left_out = _tables(fleet)
    taken = Backup(made_at=time.time(), models=models, cordons=cordons, files=_model_files(fleet) or {})
    backup_archive.write(file, backup_archive.pack(taken))
    for line in left_out:
        say(f"left out: {line}", err=True)
    say(f"{file}: {_told(taken)}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite what is there and differs.")] = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Bring back what a backup holds, pins and drains as they were then. Where a model or a file is there and differs,
    nothing is done without --replace."""
    kept = backup_archive.read(file)
    fleet = connect(state_dir)
    files = _model_files(fleet)
    rows = {row["key"]: row for row in fleet.get("autoscaler", "/v1/models")["data"]}
    nodes = fleet.get("placer", "/v1/nodes")["data"]
    draining = frozenset(node["node_id"] for node in nodes if node["draining"])
    todo = plan(kept, rows, files, draining)
    say(f"{file}: {_told(kept)}, made {age(time.time() - kept.made_at)} ago by glowplug {kept.made_by}")
    if todo.conflicts and not replace:
        for line in todo.conflicts:
            say(f"  {line}", err=True)
        raise CliError("nothing was restored: --replace overwrites what differs")
    for line in _steps(todo):
        say(f"  {line}")
    if not dry_run:
        _carry_out(fleet, todo, kept, frozenset(node["node_id"] for node in nodes))


def _tables(fleet: FleetClient) -> tuple[dict[str, Model], tuple[str, ...], list[str]]:
    """Models and cordons, read in one transaction, and a line for each row that cannot be read. Raises CliError."""
    url = fleet.document.get("redis_url") or os.environ.get("GLOWPLUG_REDIS_URL", "")
    if not url:
        raise CliError("this fleet has no address of its store: set GLOWPLUG_REDIS_URL")
    try:
        with Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S) as client:
            pipe = client.pipeline(transaction=True)
            pipe.hgetall(f"{PREFIX}:models")
            pipe.hgetall(f"{PREFIX}:{CORDONS}")
            models, cordons = pipe.execute()
    except ResponseError as error:
        raise CliError(f"what the store holds are no tables of a fleet: {error}") from error
    except (RedisError, OSError, ValueError) as error:
        raise CliError(f"the store does not answer: {error}") from error
    kept, bad_models = read_rows("models", dict(table_row(key, row) for key, row in models.items()), Model)
    asked, bad_cordons = read_rows(CORDONS, dict(table_row(key, row) for key, row in cordons.items()), Cordon)
    left_out = [f"models/{shown(key)}: {problem}" for key, problem in bad_models.items()]
    left_out += [f"{CORDONS}/{shown(key)}: {problem}" for key, problem in bad_cordons.items()]
    return kept, tuple(cordon.node_id for cordon in asked.values() if cordon.cordoned), left_out


def _model_files(fleet: FleetClient) -> dict[str, str] | None:
    """The model files of a fleet of this machine, by name; None for one elsewhere."""
    if not fleet.document:
        return None
    folder = Path(fleet.document["models_dir"])
    try:
        return {
            path.name: path.read_text("utf-8") for path in sorted(folder.iterdir()) if path.suffix in (".yaml", ".yml")
        }
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read the model files of {folder}: {error}") from error


def _told(kept: Backup) -> str:
    return f"{len(kept.models)} model(s), {len(kept.files)} model file(s), {len(kept.cordons)} drained node(s)"


def _steps(todo: Plan) -> list[str]:
    """One line per thing that is (or would be) done."""
    lines = [f"file {name}" for name in todo.files]
    lines += [f"deploy {body['name']}" for body in todo.deploy]
    lines += [f"{verb} {name}" for verb, name in todo.verbs]
    lines += [f"drain node {node_id}" for node_id in todo.cordons]
    if todo.unchanged:
        lines.append(f"as they are: {', '.join(todo.unchanged)}")
    return lines if not todo.is_nothing else [*lines, "nothing to do"]


def _carry_out(fleet: FleetClient, todo: Plan, kept: Backup, nodes: frozenset[str]) -> None:
    """Files first, models, what operators had asked for, nodes. Every step may be done again."""
    for name, text in todo.files.items():
        backup_archive.write(Path(fleet.document["models_dir"]) / name, text.encode())
    for body in todo.deploy:
        fleet.call("PUT", "autoscaler", f"/v1/models/{segment(body['name'])}", json=dict(body))
    _wait(fleet, frozenset(kept.models))
    for verb, name in todo.verbs:
        fleet.call("POST", "autoscaler", f"/v1/models/{segment(name)}/{verb}")
    for node_id in todo.cordons:
        if node_id in nodes:
            fleet.call("POST", "placer", f"/v1/nodes/{segment(node_id)}/drain")
        else:
            say(f"  node {node_id} was drained and is not there: nothing to do", err=True)
    say("restored")


def _wait(fleet: FleetClient, keys: frozenset[str]) -> None:
    """Until every model is deployed. Raises CliError naming what is missing, with the reason the autoscaler gives."""
    deadline = time.monotonic() + IN_FORCE_S
    while True:
        answer: dict[str, Any] = fleet.get("autoscaler", "/v1/models")
        missing = sorted(keys - {row["key"] for row in answer["data"]})
        if not missing:
            return
        if time.monotonic() > deadline:
            why = next(iter(answer.get("errors", {}).values()), "no reason given: glowplug logs autoscaler-1")
            raise CliError(f"{', '.join(missing)} did not come back: {why}")
        time.sleep(POLL_S)
