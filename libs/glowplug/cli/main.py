"""`glowplug`: one command per verb, one line per error.

Other packages add verbs as entry points of `glowplug.commands` (domain/extensions.py); the first line of the
function's docstring is listed."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from glowplug import __version__
from glowplug.cli.terminal import WRONG_USAGE, CliError, say
from glowplug.domain import extensions
from glowplug.domain.errors import BadRequest
from glowplug.runtime.entry import importing
from glowplug.runtime.errors import CannotStart

_VERBS: dict[str, str] = {
    "up.up": "Start the local fleet.",
    "up.down": "Stop the local fleet and wait until all of it has ended.",
    "up.status": "Show the processes of the local fleet: ready, restarts, memory.",
    "demo.demo": "Run a tour on a fresh fleet, and show where the time goes.",
    "operate.deploy": "Create or change models from YAML files.",
    "operate.undeploy": "Remove a model; its instances finish their requests and stop.",
    "pull.pull": "Fetch weights to where engines read them.",
    "verbs.load": "Start an instance now, or bring the model closer to that.",
    "verbs.unload": "Drain a model's instances; the next request starts one.",
    "verbs.wake": "Wake a sleeping instance, or start one if none sleeps.",
    "verbs.sleep": "Put a model's engines to sleep once they are idle.",
    "verbs.pin": "Keep a model ready, asleep or in host memory for good.",
    "verbs.unpin": "Allow a pinned model to sleep and to be evicted again.",
    "verbs.drain": "Drain a model's instances; start none until `glowplug load`.",
    "views.models": "List the deployed models and their states.",
    "views.ps": "List the running instances, and how long each took to start.",
    "views.nodes": "List the nodes, their GPUs and the holders of their memory.",
    "views.top": "Watch the fleet until Ctrl-C.",
    "requests.requests": "List requests: held, running, recently ended, refused.",
    "usage.usage": "Sum up the usage of tenants, keys and models.",
    "batches.batches": "Have a file of requests answered later, on idle capacity.",
    "logs.logs": "Show the last log lines of the fleet, a service or an engine.",
    "tap.tap": "Watch the facts and commands on the bus.",
    "why.why": "Explain the decisions about a request, model, GPU or node.",
    "forecast.forecast": "Compare the forecasts for a model with its requests.",
    "doctor.command.doctor": "Check this machine and the fleet, and name the repairs.",
    "tap.record": "Write all facts, commands and telemetry to a file.",
    "backup.backup": "Save models, pins, drains, tenants and keys in one file.",
    "backup.restore": "Restore a backup.",
    "operate.cordon": "Drain a node; nothing is placed there until `uncordon`.",
    "operate.uncordon": "Place instances on a node again.",
    "access.tenants": "Create, list and remove tenants: who may use the fleet.",
    "access.keys": "Create, list, revoke and rotate the keys of tenants.",
    "node.node": "Run one node of a fleet here: its agent and prefetcher.",
    "operate.env": "Print addresses and TOKENS as shell exports.",
    "context.context": "List and choose the fleets that commands know by name.",
    "talk.run": "Ask a model once, and stream the answer.",
    "talk.chat": "Talk with a model until an empty line or Ctrl-D.",
}


class Verb(TyperCommand):
    """A command that accepts `-o json` of earlier versions for `--json`, and words errors plainly."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any("--json" in option.opts for option in self.params):
            args = without_output(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def without_output(args: Sequence[str]) -> list[str]:
    """Replace `-o json` by --json, drop `-o table`; words after `--` stay."""
    end = args.index("--") if "--" in args else len(args)
    line = "".join(f"{word}\0" for word in args[:end])
    line = _OUTPUT.sub(lambda match: "--json\0" if match[1] == "json" else "", line)
    return [*line.split("\0")[:-1], *args[end:]]


_OUTPUT = re.compile(r"(?<![^\0])(?:-o|--output)[\0=]?(json|table)\0")


def _own() -> dict[str, str]:
    return {path.rpartition(".")[2]: path.rpartition(".")[0] for path in _VERBS}


def _added() -> list[str]:
    return [name for name in extensions.names("commands") if name not in _own()]


def _function(verb: str) -> Any:
    if module := _own().get(verb):
        return getattr(import_module(f"glowplug.cli.{module}"), verb)
    try:
        return extensions.load("commands", verb)
    except BadRequest as error:
        raise CliError(error.message) from error


def _text(verb: str) -> str:
    module = _own().get(verb)
    return _VERBS[f"{module}.{verb}"] if module else extensions.about("commands", verb)


def _app(commands: Mapping[str, Any], **settings: Any) -> typer.Typer:
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_options)
    for name, found in commands.items():
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, short_help=_text(name))
        else:
            app.command(name, short_help=_text(name), cls=Verb, context_settings=settings)(found)
    app.command()(version)
    return app


def app_of(verb: str = "") -> typer.Typer:
    """Return the command with one verb, or with all, whose modules take more than a second to import."""
    every = [*_own(), *_added()]
    return _app({name: _function(name) for name in ([verb] if verb in every else every)})


def listing() -> typer.Typer:
    return _app(dict.fromkeys([*_own(), *_added()], _nothing))


def _nothing() -> None:
    """A verb in the listing."""


def _asked_for(arguments: Sequence[str]) -> str:
    """Return the verb to run; "" for an unknown one, or an option before it: --help, --version or a wrong one."""
    first = next((word for word in arguments if word != "--"), "")
    return first if first and not first.startswith("-") and (first in _own() or first in _added()) else ""


def _completing(line: str) -> typer.Typer:
    """Return as much of the command as completion of this line needs."""
    words = line.split()[1:]
    verb = _asked_for(words)
    if verb and (line[-1].isspace() or not words[-1].startswith("-")):
        from glowplug.cli import completion

        if verb in completion.WORDS:
            return _app({verb: completion.stand_in(verb)}, ignore_unknown_options=True)
    return app_of(verb) if verb else listing()


def _say_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
]


def _options(asked: Version = False) -> None:
    """Multi-LLM serving with fast cold starts. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no fleet runs, 4 already
    running or port taken, 130 stopped by Ctrl-C."""


def version() -> None:
    """Print the version."""
    say(__version__)


def main() -> None:
    try:
        with importing():
            if "_GLOWPLUG_COMPLETE" in os.environ:
                app = _completing(os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", ""))
            else:
                verb = _asked_for(sys.argv[1:])
                app = app_of(verb) if verb else listing()
                if not verb and sys.argv[1:] and not sys.argv[1].startswith("-") and (hint := extensions.hint()):
                    raise CliError(f"there is no command {sys.argv[1]!r}{hint}", WRONG_USAGE)
        app(prog_name="glowplug")
    except (CliError, CannotStart) as error:
        say(f"glowplug: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output is gone: `glowplug tap | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
