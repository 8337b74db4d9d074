"""Options that several commands have."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_STATE_DIR = Path(".glowplug")
MAX_JOBS = 64


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Format, typer.Option("--output", "-o", help="A table for people or JSON for programs.")]
StateDirOption = Annotated[
    Path, typer.Option("--state-dir", envvar="GLOWPLUG_STATE_DIR", help="Where the local fleet keeps its state.")
]
RunOption = Annotated[Path | None, typer.Option("--run", help="A simulated run's folder instead of a fleet.")]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="Engine of the sample models: llamacpp, vllm or emulated.")
]
NodesOption = Annotated[int | None, typer.Option("--nodes", min=1, max=64, help="Nodes (an agent and a prefetcher).")]
PortOption = Annotated[
    int | None, typer.Option("--port-base", min=0, max=65000, help="First port (data API); 0 finds a free block.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="A field of the scenario; repeat it.")
]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=1, max=MAX_JOBS, help="Runs at a time.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for the run; runs/<name> when it is left out.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Watch the invariants after every event (slow).")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an earlier run in that folder.")]
