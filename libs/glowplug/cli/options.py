"""Options that several commands share, and the errors they end with."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Format, typer.Option("--output", "-o", help="A table for people or JSON for programs.")]
StateDirOption = Annotated[
    Path, typer.Option("--state-dir", envvar="GLOWPLUG_STATE_DIR", help="Where the local fleet keeps its state.")
]
DEFAULT_STATE_DIR = Path(".glowplug")

FAILED, NO_FLEET, TAKEN = 1, 3, 4


class CliError(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NoFleet(CliError):
    def __init__(self, state_dir: Path) -> None:
        super().__init__(f"no fleet runs in {state_dir.absolute()}: start one with `glowplug up`", NO_FLEET)
