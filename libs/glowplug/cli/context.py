"""`glowplug context`: the fleet of commands in folders without `.glowplug`, and fleets elsewhere by address."""

from pathlib import Path
from typing import Annotated

import typer

from glowplug.cli import completion, contexts
from glowplug.cli.client import Row
from glowplug.cli.options import JsonOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, emit, say
from glowplug.runtime.supervisor.statedir import read_fleet

HEADERS = ("current", "context", "fleet", "state")
context = typer.Typer(rich_markup_mode=None)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.contexts)]


def _url(service: str, about: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(f"--{service}", metavar="URL", help=about)
    return option


@context.callback(invoke_without_command=True)
def list_all(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the fleets that commands know by name. The current one is used in every folder without `.glowplug`, unless
    --state-dir, GLOWPLUG_STATE_DIR or GLOWPLUG_*_URL names another. `glowplug up` without --state-dir adds its fleet
    and makes it current."""
    if ctx.invoked_subcommand is not None:
        return
    known = contexts.read()
    rows: list[Row] = [
        {
            "context": name,
            "current": name == known.current,
            "state_dir": one.state_dir,
            "urls": dict(one.urls),
            "env_file": one.env_file,
            "state": "elsewhere" if one.urls else "runs" if read_fleet(Path(one.state_dir)) else "stopped",
        }
        for name, one in sorted(known.named.items())
    ]
    cells = [
        ("*" if r["current"] else "", r["context"], r["state_dir"] or ", ".join(r["urls"].values()), r["state"])
        for r in rows
    ]
    emit(as_json, rows, HEADERS, cells, "no context is known: `glowplug up` and `glowplug context add` create one")


@context.command()
def use(name: NameArgument) -> None:
    """Make a context the current one."""
    known = contexts.read()
    contexts.write(known.with_context(known.get(name)))
    say(f"commands now use {name}")


@context.command()
def rm(name: NameArgument) -> None:
    """Forget a context. Its fleet and its files stay as they are."""
    contexts.write(contexts.read().without(name))
    say(f"context {name} is removed")


@context.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    autoscaler: Annotated[str, _url("autoscaler", "Models: list, load, sleep, pin.")] = "",
    placer: Annotated[str, _url("placer", "Nodes, instances and decisions.")] = "",
    router: Annotated[str, _url("router", "Requests, by its admin port.")] = "",
    predictor: Annotated[str, _url("predictor", "Forecasts.")] = "",
    console: Annotated[str, _url("console", "The console.")] = "",
    data: Annotated[str, _url("data", "The OpenAI API, without /v1.")] = "",
    env_file: Annotated[
        Path | None,
        typer.Option(
            "--env-file",
            exists=True,
            dir_okay=False,
            help="File of mode 0600 with GLOWPLUG_ADMIN_TOKEN and others, as `glowplug env` prints them. "
            "Without it tokens come from the environment.",
        ),
    ] = None,
) -> None:
    """Add a fleet that runs elsewhere, and make it current."""
    given = {
        "autoscaler": autoscaler, "placer": placer, "router": router,
        "predictor": predictor, "console": console, "data": data,
    }  # fmt: skip
    urls = {service: contexts.address(f"--{service}", url) for service, url in given.items() if url}
    if not urls:
        raise CliError(
            "no address is given: --autoscaler, --placer, --router, --predictor, --console or --data", WRONG_USAGE
        )
    known, file = contexts.read(), str(env_file.absolute()) if env_file else ""
    if name in known.named:
        raise CliError(f"there is a context {name} already: `glowplug context rm {name}` removes it")
    added = contexts.Context(name=contexts.checked_name(name), urls=urls, env_file=file)
    added.values()
    contexts.write(known.with_context(added))
    say(f"context {name} is added, and commands now use it")
