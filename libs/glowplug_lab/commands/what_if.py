"""`glowplug plan` and `glowplug replay`: size a fleet, and rerun a recording under other policies."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from glowplug.cli.options import CheckOption, ForceOption, JobsOption, JsonOption, OutOption, SetOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, say, say_json, table
from glowplug_lab.commands.simulate import (
    REPORT,
    again,
    check,
    errors_in_one_line,
    free_folder,
    progress,
    run_in,
    show,
    whole_folder,
    write_report,
)
from glowplug_lab.simulator.jobs import Outcome, run_cases
from glowplug_lab.simulator.recording.read import read_recording
from glowplug_lab.simulator.recording.scenario import ARRIVALS, scenario_of, write_arrivals
from glowplug_lab.simulator.run_files import read_json
from glowplug_lab.simulator.scenario.load import Scenario, ScenarioError, load, load_tree
from glowplug_lab.simulator.scenario.tree import Tree, override
from glowplug_lab.simulator.sweep import (
    Case,
    Objective,
    Search,
    all_met,
    cases,
    check_objectives,
    parse_objective,
    parse_range,
    parse_seeds,
    variants,
    with_gpus,
)

RECORDED = "recorded"
NO_HOST_MEMORY = "replayed: weights lie in host memory from the start, for the recording saw none brought there"


@dataclass(slots=True)
class _Sweep:
    scenario: Scenario
    objectives: tuple[Objective, ...]
    seeds: tuple[int, ...]
    server: str
    jobs: int
    check: bool
    again: Callable[[int, Case], Case]  # adds the command for this case alone
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    impossible: dict[int, str] = field(default_factory=dict)

    def cases(self, num_gpus: int) -> list[Case]:
        tree = with_gpus(dict(self.scenario.tree), num_gpus, self.server)
        label = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}"
        some = [Case(label, seed, {**tree, "seed": seed}, self.scenario.beside, self.check) for seed in self.seeds]
        return [self.again(num_gpus, case) for case in some]

    def try_all(self, numbers: Sequence[int]) -> Mapping[int, bool]:
        todo: list[tuple[int, Case]] = []
        for number in numbers:
            some = self.cases(number)
            try:
                load_tree(some[0].tree, some[0].beside)
            except ScenarioError as error:
                self.impossible[number] = str(error)
            else:
                todo += [(number, case) for case in some]
        with progress(len(todo)) as report:
            found = run_cases([case for _, case in todo], [None] * len(todo), self.jobs, report)
        for (number, _), outcome in zip(todo, found, strict=True):
            self.outcomes.setdefault(number, []).append(outcome)
        return {number: self.met(number) for number in numbers}

    def met(self, number: int) -> bool:
        some = self.outcomes.get(number, [])
        return bool(some) and all(all_met(self.objectives, one.numbers["total"]) for one in some)

    def points(self) -> list[dict[str, Any]]:
        rows = []
        first = self.objectives[0]
        for number in sorted({*self.outcomes, *self.impossible}):
            some = [one.numbers for one in self.outcomes.get(number, [])]
            values = [value for one in some if (value := first.value(one["total"])) is not None]
            worst = (min if first.name.endswith(("attainment", "ratio")) else max)(values, default=None)
            rows.append(
                {
                    "gpus": number,
                    "value": worst,
                    "met": self.met(number),
                    "ttft_attainment": min((one["total"]["ttft_attainment"] or 0.0 for one in some), default=None),
                    "gpu_seconds": max((one["fleet"]["gpu_seconds"] for one in some), default=None),
                    "lost": max((_lost(one["total"]) for one in some), default=None),
                    "missed": [one.words for one in self.objectives if not all(one.met(run["total"]) for run in some)],
                    "impossible": self.impossible.get(number, ""),
                }
            )
        return rows


def _why_not(point: Mapping[str, Any]) -> str:
    if point["impossible"] or point["met"]:
        return str(point["impossible"]) or "-"
    lost = [f"{point['lost']} not answered"] if point["lost"] else []
    return "; ".join([*lost, *(f"misses {words}" for words in point["missed"])]) or "-"


def _lost(total: Mapping[str, Any]) -> int:
    num: int = total["num_refused"] + total["num_unfinished"]
    return num


def plan(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A file like scenarios/small.yaml.")],
    slo: Annotated[
        list[str],
        typer.Option(
            "--slo", metavar="NAME=LIMIT", help="An objective such as ttft_p99=1.0; all that are given must hold."
        ),
    ],
    gpus: Annotated[str, typer.Option("--gpus", metavar="N..M", help="The range to search.")] = "1..16",
    server: Annotated[
        str, typer.Option("--server", help="The kind of server whose number varies [default: the first].")
    ] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds such as 0..4 or 1,2,5; the worst of them counts.")] = "",
    settings: SetOption = None,
    out: OutOption = None,
    force: ForceOption = False,
    jobs: JobsOption = 1,
    watch: CheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the fewest GPUs that meet the objectives, by simulation.

    Writes a report of all that was tried."""
    with errors_in_one_line():
        objectives = tuple(parse_objective(text) for text in slo)
        low, high = parse_range(gpus)
        whole = load(scenario, settings or ())
        check_objectives(objectives, whole.setup)
        for note in whole.notes:
            say(f"glowplug: {note}", err=True)
        chosen = parse_seeds(seeds) if seeds else (whole.seed,)
        folder = free_folder(out or Path("runs") / f"{whole.name or 'scenario'}-plan", force)

        def alone(num_gpus: int, case: Case) -> Case:
            wanted = [word for one in slo for word in ("--slo", one)] + (["--server", server] if server else [])
            wanted += ["--gpus", f"{num_gpus}..{num_gpus}", "--seeds", str(case.seed)]
            return again("plan", scenario, case, settings, wanted)

        sweep = _Sweep(whole, objectives, chosen, server, jobs, watch, alone)
        answer, notes = Search(low, high).run(sweep.try_all)
        if not sweep.outcomes:
            raise CliError(f"--gpus: {next(iter(sweep.impossible.values()))}", WRONG_USAGE)
        _report(sweep, answer, notes, folder)
    _show(sweep, answer, notes, folder, as_json)


def _goal(objectives: Sequence[Objective]) -> str:
    return " and ".join(one.words for one in objectives)


def _report(sweep: _Sweep, answer: int | None, notes: list[str], folder: Path) -> None:
    todo = sweep.cases(max(sweep.outcomes) if answer is None else answer)[:1]
    outcomes = [one for number in sorted(sweep.outcomes) for one in sweep.outcomes[number]]
    first = sweep.objectives[0]
    plan = {
        "answer": answer,
        "goal": _goal(sweep.objectives),
        "metric": first.name,
        "kind": "share" if first.is_share else "seconds",
        "limit": first.limit,
        "seeds": len(sweep.seeds),
        "points": sweep.points(),
    }
    with whole_folder(folder) as partial:
        run_in(partial, todo, 1)
        write_report(partial, sweep.scenario, todo, outcomes, notes=notes, plan=plan)


def _show(sweep: _Sweep, answer: int | None, notes: list[str], folder: Path, as_json: bool) -> None:
    points = sweep.points()
    if as_json:
        value = {"answer": answer, "goal": _goal(sweep.objectives), "simulated": True, "points": points, "notes": notes}
        say_json({**value, "folder": str(folder)})
        return
    first = sweep.objectives[0]
    rows = [
        (
            point["gpus"],
            _figure(point["value"], first),
            "yes" if point["met"] else "no",
            _why_not(point),
        )
        for point in points
    ]
    say(f"simulated: {sweep.scenario.words.title or sweep.scenario.name}\n")
    say(table(("gpus", first.name, "meets it", "why not"), rows))
    for note in notes:
        say(f"note: {note}")
    goal = _goal(sweep.objectives)
    if answer is None:
        say(f"\nno number in this range meets {goal}")
    else:
        say(f"\n{answer} GPU{'s meet' if answer > 1 else ' meets'} {goal}")
    say(f"report  {folder / REPORT}")


def _figure(value: float | None, objective: Objective) -> str:
    return "-" if value is None else f"{value * 100:.2f} %" if objective.is_share else f"{value:.3f} s"


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A file of `glowplug record`, or the folder of a run.")],
    settings: SetOption = None,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="KEY=A,B", help="Replay each value; given twice, all pairs."),
    ] = None,
    out: OutOption = None,
    force: ForceOption = False,
    jobs: JobsOption = 1,
    watch: CheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replay recorded requests in the simulator.

    They run on the recorded fleet, and both are shown side by side."""
    with tempfile.TemporaryDirectory(prefix="glowplug-replay-") as scratch, errors_in_one_line():
        tree, beside, recorded = _simulated(run) if run.is_dir() else _live(run, Path(scratch))
        some = variants(compare or ())
        tree = override(tree, settings or ())
        todo = [
            again("replay", run, replace(case, check=watch), settings)
            for case in cases(tree, beside, some, (recorded.seed,))
        ]
        if len(some) == 1:
            todo = [replace(case, variant="replayed") for case in todo]
        whole = check(todo)
        folder = free_folder(out or Path("runs") / f"{whole.name}-replay", force)
        if not run.is_dir():
            todo = [replace(case, kept=folder) for case in todo]
        with whole_folder(folder) as partial:
            outcomes = [recorded, *run_in(partial, todo, jobs)]
            write_report(partial, whole, todo, outcomes, notes=recorded.notes)
            if not run.is_dir():
                shutil.copyfile(beside / ARRIVALS, partial / ARRIVALS)
                text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
                (partial / "scenario.yaml").write_text(text, encoding="utf-8")
        for note in recorded.notes:
            say(f"glowplug: {note}", err=True)
        show(outcomes, whole, folder, as_json)


def _simulated(run: Path) -> tuple[Tree, Path, Outcome]:
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
