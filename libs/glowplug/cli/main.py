"""`glowplug`: one command per verb, one line per error."""

import sys
from collections.abc import Callable

import typer

from glowplug import __version__
from glowplug.cli import (
    backup,
    demo,
    forecast,
    logs,
    operate,
    pull,
    simulate,
    talk,
    tap,
    up,
    verbs,
    views,
    what_if,
    why,
)
from glowplug.cli.doctor.command import doctor
from glowplug.cli.terminal import CliError, say
from glowplug.runtime.supervisor.settings import FleetError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Multi-LLM serving with fast cold starts. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no fleet runs, "
    "4 already running or port taken, 130 stopped by Ctrl-C.",
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Local fleet": (up.up, up.down, up.status, demo.demo),
    "Models": (
        operate.deploy,
        operate.undeploy,
        pull.pull,
        verbs.load,
        verbs.unload,
        verbs.wake,
        verbs.sleep,
        verbs.pin,
        verbs.unpin,
        verbs.drain,
    ),
    "Looking": (views.models, views.ps, views.nodes, views.top, logs.logs, tap.tap, why.why, forecast.forecast, doctor),
    "What if (simulated)": (simulate.simulate, what_if.plan, what_if.replay, tap.record),
    "Keeping": (backup.backup, backup.restore, operate.cordon, operate.uncordon, operate.env),
    "Talking": (talk.run, talk.chat),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


@app.command()
def version() -> None:
    """The version of this command."""
    say(__version__)


def main() -> None:
    """The console script."""
    try:
        app()
    except (CliError, FleetError) as error:
        say(f"glowplug: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone: `glowplug tap | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
