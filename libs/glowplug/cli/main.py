"""`glowplug`: one command per verb, one line per error."""

import sys
from importlib import import_module

import typer

from glowplug import __version__
from glowplug.cli.terminal import CliError, say
from glowplug.runtime.entry import importing
from glowplug.runtime.supervisor.errors import FleetError

_PANELS: dict[str, tuple[str, ...]] = {  # panel of the help -> modules of this package, each with the verb it has
    "Local fleet": ("up.up", "up.down", "up.status", "demo.demo"),
    "Models": (
        "operate.deploy",
        "operate.undeploy",
        "pull.pull",
        "verbs.load",
        "verbs.unload",
        "verbs.wake",
        "verbs.sleep",
        "verbs.pin",
        "verbs.unpin",
        "verbs.drain",
    ),
    "Looking": (
        "views.models",
        "views.ps",
        "views.nodes",
        "views.top",
        "logs.logs",
        "tap.tap",
        "why.why",
        "forecast.forecast",
        "doctor.command.doctor",
    ),
    "What if (simulated)": ("simulate.simulate", "what_if.plan", "what_if.replay", "tap.record"),
    "Keeping": ("backup.backup", "backup.restore", "operate.cordon", "operate.uncordon", "operate.env"),
    "Talking": ("talk.run", "talk.chat"),
}


def app_of(verb: str = "") -> typer.Typer:
    """The command with all of its verbs; for one that is given, with that alone: the modules of all take most of a
    second to import."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Multi-LLM serving with fast cold starts. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no fleet runs, "
        "4 already running or port taken, 130 stopped by Ctrl-C.",
    )
    paths = [(panel, *path.rsplit(".", 1)) for panel, group in _PANELS.items() for path in group]
    is_known = any(name == verb for _, _, name in paths)
    for panel, module, name in paths:
        if name == verb or not is_known:
            app.command(rich_help_panel=panel)(getattr(import_module(f"glowplug.cli.{module}"), name))
    app.command()(version)
    return app


def version() -> None:
    """The version of this command."""
    say(__version__)


def main() -> None:
    """The console script."""
    try:
        with importing():
            app = app_of(sys.argv[1] if len(sys.argv) > 1 else "")
        app()
    except (CliError, FleetError) as error:
        say(f"glowplug: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone: `glowplug tap | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
