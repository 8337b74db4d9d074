"""`glowplug simulate`: run a trace against a simulated fleet under a policy."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from glowplug.cli.options import CheckOption, ForceOption, JobsOption, JsonOption, OutOption, SetOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, say, say_json, table
from glowplug_lab.simulator.jobs import Outcome, run_cases
from glowplug_lab.simulator.report.page_data import detail_of_run, html, page_data, variants_over_seeds
from glowplug_lab.simulator.scenario.load import Scenario, ScenarioError, load, load_tree
from glowplug_lab.simulator.scenario.trace import fleet_for, is_path
from glowplug_lab.simulator.scenario.tree import SOURCE, override, with_default_system
from glowplug_lab.simulator.sweep import Case, cases, parse_seeds, variants

DATA = "GLOWPLUG_DATA"
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
Column = tuple[str, str, Callable[[float | None], str]]
MAX_MODELS = 40
UNANSWERED = "unanswered"
REPORT = "report.html"
ENDS = (signal.SIGTERM, signal.SIGHUP)

TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Take the requests from a CSV file with t_s, prompt_tokens, ..."),
]


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[SCENARIO]", help="A file like scenarios/small.yaml; optional with --trace."),
    ] = None,
    trace: TraceOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Use this seed instead of that of the scenario.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Run several seeds: 0..9 or 1,2,5.")] = "",
    settings: SetOption = None,
    compare: Annotated[
        list[str] | None, typer.Option("--compare", metavar="KEY=A,B", help="Run each value; given twice, all pairs.")
    ] = None,
    out: OutOption = None,
    force: ForceOption = False,
    jobs: JobsOption = 1,
    no_record: Annotated[bool, typer.Option("--no-record", help="Keep figures and report, but no events.")] = False,
    watch: CheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario in the simulator, with a report.

    Prints a table, and writes a folder with the report, to be opened in a browser."""
    if seed is not None and seeds:
        raise CliError("--seed and --seeds exclude each other", WRONG_USAGE)
    with errors_in_one_line():
        whole = load_with(scenario, trace, settings or ())
        chosen = parse_seeds(seeds) if seeds else (whole.seed if seed is None else seed,)
        traced = () if trace is None else ("--trace", str(trace))
        todo = [
            again("simulate", scenario, replace(case, check=watch), settings, (*traced, "--seed", str(case.seed)))
            for case in cases(dict(whole.tree), whole.beside, variants(compare or ()), chosen)
        ]
        whole = check(todo)
        folder = free_folder(out or Path("runs") / (whole.name or "scenario"), force)
        with whole_folder(folder) as partial:
            outcomes = run_in(partial, todo, jobs, record=not no_record)
            write_report(partial, whole, todo, outcomes)
            if no_record:  # the report needed the first case's
                for file in place(partial, todo, todo[0]).glob("*.jsonl"):
                    file.unlink()
    show(outcomes, whole, folder, as_json)


def load_with(scenario: Path | None, trace: Path | None, settings: Sequence[str]) -> Scenario:
    """Load the scenario with the requests of `trace`, or a small fleet for the trace alone. Raises ScenarioError;
    CliError without either."""
    if trace is None:
        if scenario is None:
            raise CliError("give a SCENARIO, or requests with --trace FILE", WRONG_USAGE)
        return load(scenario, settings)
    if not trace.exists():
        raise CliError(f"--trace: there is no file {trace}", WRONG_USAGE)
    if scenario is not None:
        return load(scenario, [f"{SOURCE}={trace.resolve()}", *settings])
    source = str(trace) if is_path(str(trace)) else f"./{trace}"
    return load_tree(override(with_default_system(fleet_for(trace, source)), settings, Path()), Path())


def check(todo: Sequence[Case]) -> Scenario:
    """Load every variant before the first case runs. Raises ScenarioError."""
    firsts = {case.variant: case for case in reversed(todo)}
    scenarios = {name: load_tree(case.tree, case.beside) for name, case in firsts.items()}
    scenario = scenarios[todo[0].variant]
    for note in scenario.notes:
        say(f"glowplug: {note}", err=True)
    return scenario


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a partial folder that replaces `folder` only on success. Raises CliError."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    above = [parent for parent in partial.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        _take_away(above)
        raise CliError(f"--out: {folder}: {error.strerror}", WRONG_USAGE) from error
    try:
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.exists():
            _take_away(above)


def run_in(partial: Path, todo: Sequence[Case], jobs: int, *, record: bool = True) -> list[Outcome]:
    """Without `record`, record only the first case."""
    places = [place(partial, todo, case) if record or case is todo[0] else None for case in todo]
    with progress(len(todo)) as tick:
        return run_cases(todo, places, jobs, tick)


def write_report(
    partial: Path, scenario: Scenario, todo: Sequence[Case], outcomes: Sequence[Outcome], **parts: Any
) -> None:
    """`parts`: see `page_data`."""
    detail = detail_of_run(place(partial, todo, todo[0]), load_tree(todo[0].tree, todo[0].beside).setup)
    (partial / REPORT).write_text(html(page_data(scenario, outcomes, detail, **parts)), encoding="utf-8")


def _take_away(folders: Iterable[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def place(folder: Path, todo: Sequence[Case], case: Case) -> Path:
    if len(todo) == 1:
        return folder
    slug = "".join(c if c.isalnum() or c in "-_=." else "_" for c in case.variant)
    return folder / slug / f"seed-{case.seed}" if len({c.variant for c in todo}) > 1 else folder / f"seed-{case.seed}"


def free_folder(folder: Path, force: bool) -> Path:
    """Raises CliError if `folder` holds anything but a replaceable run: one in the default place, or with --force."""
    if not folder.exists():
        return folder
    ours = (folder / REPORT).is_file()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        return folder
    if not ours:
        raise CliError(f"--out: {folder} exists and does not hold a run, so it is left alone", WRONG_USAGE)
    if not force and folder.parent != Path("runs"):
        raise CliError(f"--out: {folder} holds a run already (--force replaces it)", WRONG_USAGE)
    return folder


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    before = {number: signal.signal(number, _ended) for number in ENDS}
    try:
        yield
    except ScenarioError as error:
        raise CliError(str(error), WRONG_USAGE) from error
    except AssertionError as error:
        raise CliError(f"an invariant of the simulation is broken: {error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def progress(num: int) -> Iterator[Callable[[Sequence[float]], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=float(num))
        yield lambda done: bar.update(task, completed=sum(done))


def show(outcomes: Sequence[Outcome], scenario: Scenario, folder: Path, as_json: bool) -> None:
    if as_json:
        value = [{"variant": o.variant, "seed": o.seed, "simulated": True, **o.numbers} for o in outcomes]
        say_json({"runs": value, "notes": list(scenario.notes), "folder": str(folder)})
        return
    title = scenario.words.title or scenario.name
    say(f"simulated: {title}\n")
    if len(outcomes) == 1:
        say(table(*per_model(outcomes[0])))
        say()
        if "tenants" in outcomes[0].numbers:
            say(table(*per_tenant(outcomes[0])))
            say()
    say(table(*comparison(outcomes)))
    say(f"\nreport  {folder / REPORT}")


def again(
    verb: str, target: Path | None, case: Case, settings: Sequence[str] | None, options: Iterable[str] = ()
) -> Case:
    """Add the shell command that runs `case` alone, with the data folder if the environment names one."""
    argv = ["glowplug", verb, *([str(target)] if target is not None else [])]
    for setting in (*(settings or ()), *case.settings):
        argv += ["--set", setting]
    argv += [*options, *(["--check"] if case.check else [])]
    data_folder = os.environ.get(DATA, "")
    line = (f"{DATA}={shlex.quote(data_folder)} " if data_folder else "") + shlex.join(argv)
    return replace(case, again=line)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e12:.2f} TB" if value >= 1e12 else f"{value / 1e9:.0f} GB"


# Header, field and format of each column: requests, then fleet.
_OF_REQUESTS: tuple[Column, ...] = (
    ("requests", "num_arrived", _count),
    ("ttft p50", "ttft_s_p50", _seconds),
    ("p95", "ttft_s_p95", _seconds),
    ("p99", "ttft_s_p99", _seconds),
    ("tpot p50", "tpot_s_p50", _seconds),
    ("p99", "tpot_s_p99", _seconds),
    ("in time", "ttft_attainment", _share),
    ("warm", "warm_ratio", _share),
    ("unanswered", UNANSWERED, _count),
)
_OF_FLEET: tuple[Column, ...] = (
    ("gpu-s", "gpu_seconds", _count),
    ("starts", "num_starts", _count),
    ("hit", "hit_ratio", _share),
    ("fetched", "bytes_fetched", _bytes),
    ("loaded", "bytes_loaded", _bytes),
)


def per_model(outcome: Outcome) -> Table:
    """Past 40 models the quiet ones become one row of dots."""
    rows = sorted(outcome.numbers["models"], key=lambda row: (-row["num_arrived"], row["model"]))
    shown = [(row["model"], *_figures(_OF_REQUESTS, row)) for row in rows[:MAX_MODELS]]
    if rest := rows[MAX_MODELS:]:
        num_arrived = sum(row["num_arrived"] for row in rest)
        shown.append((f"... {len(rest)} more", str(num_arrived), *["-"] * (len(_OF_REQUESTS) - 1)))
    shown.append(("all", *_figures(_OF_REQUESTS, outcome.numbers["total"])))
    return ("model", *(header for header, _, _ in _OF_REQUESTS)), shown


def per_tenant(outcome: Outcome) -> Table:
    rows = sorted(outcome.numbers.get("tenants", ()), key=lambda row: (-row["num_arrived"], row["tenant"]))
    shown = [(row["tenant"], *_figures(_OF_REQUESTS, row), _count(_tokens(row))) for row in rows[:MAX_MODELS]]
    return ("tenant", *(header for header, _, _ in _OF_REQUESTS), "tokens"), shown


def _tokens(row: Mapping[str, Any]) -> int:
    return int(row["prompt_tokens"] + row["response_tokens"])


def comparison(outcomes: Sequence[Outcome]) -> Table:
    """Means over seeds, with half the range in percent."""
    rows = [
        (variant["label"], *_figures(_OF_REQUESTS, variant["total"]), *_figures(_OF_FLEET, variant["fleet"]))
        for variant in variants_over_seeds(outcomes)
    ]
    return ("variant", *(header for header, _, _ in (*_OF_REQUESTS, *_OF_FLEET))), rows


def _figures(columns: Sequence[Column], row: Mapping[str, Any]) -> list[str]:
    return [_span(_unanswered(row) if name == UNANSWERED else row.get(name), show) for _, name, show in columns]


def _unanswered(row: Mapping[str, Any]) -> Any:
    refused, unfinished = row["num_refused"], row["num_unfinished"]
    return (
        {key: refused[key] + unfinished[key] for key in refused} if isinstance(refused, dict) else refused + unfinished
    )


def _span(value: Any, show: Callable[[float | None], str]) -> str:
    if not isinstance(value, dict):
        return show(value)
    half, mean = (value["max"] - value["min"]) / 2, value["mean"]
    spread = f" ±{half / mean * 100:.0f}%" if mean and half / mean >= 0.005 else ""
    return f"{show(mean)}{spread}"
