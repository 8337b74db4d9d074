"""`glowplug replay`: what was recorded, again, under another policy."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from glowplug.cli.simulate import (
    CheckOption,
    ForceOption,
    JobsOption,
    OutOption,
    SetOption,
    carry_out,
    check,
    command,
    free_folder,
    show,
    told_apart,
)
from glowplug.cli.terminal import Format, OutputOption, say
from glowplug.simulator.jobs import Outcome
from glowplug.simulator.recording.read import read_recording
from glowplug.simulator.recording.scenario import ARRIVALS, scenario_of, write_arrivals
from glowplug.simulator.run_folder import read_json
from glowplug.simulator.scenario.tree import Tree, override
from glowplug.simulator.sweep import cases, variants

RECORDED = "recorded"
NO_HOST_MEMORY = "replayed: weights lie in host memory from the start, for the recording saw none brought there"


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="What `glowplug record` wrote, or a run's folder.")],
    settings: SetOption = None,
    compare: Annotated[
        list[str] | None, typer.Option("--compare", metavar="KEY=A,B", help="Replay each value, and all pairs.")
    ] = None,
    out: OutOption = None,
    force: ForceOption = False,
    jobs: JobsOption = 1,
    watch: CheckOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Replay recorded requests on the recorded fleet in the simulator, and show both side by side."""
    with tempfile.TemporaryDirectory(prefix="glowplug-replay-") as scratch, told_apart():
        tree, beside, recorded = _simulated(run) if run.is_dir() else _live(run, Path(scratch))
        some = variants(compare or ())
        tree = override(tree, settings or ())
        todo = cases(tree, beside, some, (recorded.seed,))
        if len(some) == 1:
            todo = [replace(case, variant="replayed") for case in todo]
        todo = [replace(case, check=watch) for case in todo]
        todo = [replace(case, again=command("replay", run, case, settings or (), ())) for case in todo]
        whole = check(todo)
        folder = free_folder(out or Path("runs") / f"{whole.name}-replay", force)
        files = {}
        if not run.is_dir():
            todo = [replace(case, kept=folder) for case in todo]
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
            files = {ARRIVALS: (beside / ARRIVALS).read_text(encoding="utf-8"), "scenario.yaml": text}

        def around(outcomes: list[Outcome]) -> tuple[list[Outcome], dict[str, Any]]:
            return [recorded, *outcomes], {"notes": recorded.notes}

        outcomes = carry_out(whole, todo, folder, jobs, around=around, files=files)
        for note in recorded.notes:
            say(f"glowplug: {note}", err=True)
        show([recorded, *outcomes], whole, folder, output)


def _simulated(run: Path) -> tuple[Tree, Path, Outcome]:
    """A simulated run has its scenario with it: the replay draws the very same requests."""
    about, results = read_json(run, "setup.json"), read_json(run, "results.json")
    tree = {**about["scenario"], "seed": about["seed"]}
    return tree, run / about["beside"], Outcome(RECORDED, about["seed"], results, ("recorded: a simulated run",))


def _live(run: Path, scratch: Path) -> tuple[Tree, Path, Outcome]:
    recording = read_recording(run)
    write_arrivals(recording, scratch / ARRIVALS)
    emulated = any(row.get("emulated") for row in recording.finished)
    engines = "emulated engines, no model ran" if emulated else "live engines"
    note = f"recorded: {engines}; replayed: simulated, with costs read off the recording"
    at_once = sum(row["e2e_s"] <= row["ttft_s"] * 1.01 for row in recording.finished)
    unknown = sum(not row["prompt_tokens"] for row in recording.finished)
    estimated = sum(bool(row["prompt_tokens"]) and not row["tokens_exact"] for row in recording.finished)
    held, num_gpus = recording.held_at_first
    notes = [
        note,
        f"replayed: from empty GPUs; {held} of {num_gpus} held something when the recording began",
        *([NO_HOST_MEMORY] if not recording.rates else ()),
        *([f"recorded: {at_once} requests did not stream, so their first token is their last"] if at_once else ()),
        *([f"recorded: {unknown} requests without the length of their prompt, taken as typical"] if unknown else ()),
        *([f"recorded: {estimated} prompts whose length the router estimated"] if estimated else ()),
    ]
    return scenario_of(recording), scratch, Outcome(RECORDED, 0, recording.numbers(), tuple(notes))
