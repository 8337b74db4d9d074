"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

MAX_JOBS = 64


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Name, alias or key of a model.")]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="Id of a node, see `glowplug nodes`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="GLOWPLUG_STATE_DIR",
        help="The folder of a local fleet. Without it: .glowplug here, else the current context.",
    ),
]
RunOption = Annotated[Path | None, typer.Option("--run", help="Read the folder of a simulated run instead of a fleet.")]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="Engine of the sample models: llamacpp, vllm or emulated.")
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", min=1, max=64, help="How many nodes, each an agent and a prefetcher.")
]
PortOption = Annotated[
    int | None,
    typer.Option("--port-base", min=0, max=65000, help="First port, that of the data API; 0 looks for a free block."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set a field of the scenario; may be repeated."),
]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", min=1, max=MAX_JOBS, help="How many runs at a time.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder for the run [default: runs/<name>].")]
CheckOption = Annotated[bool, typer.Option("--check", help="Check the invariants after every event (slow).")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a run that is already in the folder.")]
