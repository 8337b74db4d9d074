"""The results of a row as data, bench/papers/results/<row>.json: a run writes it, and the page is rendered from it
alone.

run.py        cases and seeds -> outcomes, kept under build/papers (one file each, so that a run can resume)
results.py    outcomes, judged -> bench/papers/results/<row>.json, which is part of the repository
table.py      these files -> docs/papers/results.md and its pictures (`python -m bench.papers --page`: no run)

commit        of the code that made the outcomes, 12 digits; the oldest, if they have several; "-dirty" if files had
              been changed
date          of the last outcome
machine       cores, processor, Python
load          the load average while they were made, lowest and highest
command       to make them again
digest        of the code and scenarios that the row reads (cache.py): it differs today if they have changed
row, title, paper, band, setup, seeds, held_out, ours, verdict ("inside", "calibrated", "outside"), deviation
rows          the row's own table: what, ours, paper
tables        Markdown
plots         name -> data for plots.py
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.papers import plots as pictures
from bench.papers.cache import HERE, Kept
from bench.papers.experiment import Experiment, Finding, Plot, Runs, Verdict

FOLDER = HERE / "results"
CALIBRATED, INSIDE, OUTSIDE = "calibrated", "inside", "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The content of one file."""

    row: str
    commit: str
    date: str
    machine: str
    load: str
    command: str
    digest: str
    title: str
    paper: str
    band: str
    setup: str
    seeds: Sequence[int]
    held_out: Sequence[int]
    ours: str
    verdict: str
    deviation: str = ""
    rows: Sequence[Finding] = ()
    tables: Sequence[str] = ()
    plots: Mapping[str, Plot] = field(default_factory=dict)


def state(experiment: Experiment, verdict: Verdict) -> str:
    if not verdict.passed:
        return OUTSIDE
    return CALIBRATED if experiment.calibrated else INSIDE


def judged(experiment: Experiment, runs: Runs, made: Sequence[Kept]) -> Result:
    """Judge a row. `made`: every outcome that the result uses."""
    verdict = experiment.judge(runs)
    tuned = [seed for seed in runs.seeds if seed not in experiment.held_out]
    loads = [kept.load for kept in made if kept.load >= 0]
    return Result(
        row=experiment.id,
        commit=oldest(made),
        date=max(kept.date for kept in made),
        machine=max(made, key=lambda kept: kept.date).machine,
        load=f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown",
        command=f"python -m bench.papers --only {experiment.id} --seeds {len(tuned)}",
        digest=min(made, key=lambda kept: kept.date).digest,
        title=experiment.title,
        paper=experiment.paper,
        band=experiment.band,
        setup=experiment.setup,
        seeds=tuned,
        held_out=[seed for seed in runs.seeds if seed in experiment.held_out],
        ours=verdict.ours,
        verdict=state(experiment, verdict),
        deviation=verdict.deviation,
        rows=verdict.findings,
        tables=verdict.tables,
        plots=verdict.plots,
    )


def oldest(made: Sequence[Kept]) -> str:
    """The commit of the outcome that was made first, which stands for the whole row."""
    return min(made, key=lambda kept: kept.date).commit


def dump(result: Result) -> str:
    """Format as JSON, one entry of a list per line, so that a change of one figure changes one line."""
    data = asdict(result)
    data["plots"] = {name: {"kind": type(plot).__name__} | asdict(plot) for name, plot in result.plots.items()}
    return json.dumps(_plain(data), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """Replace values that JSON lacks, and round numbers to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def read(text: str) -> Result:
    """Parse a result file. Raises ValueError if a field is missing or unknown."""
    data = json.loads(text)
    unknown = set(data) ^ {one.name for one in fields(Result)}
    if unknown:
        raise ValueError(f"missing or unknown: {', '.join(sorted(unknown))}")
    data["rows"] = [Finding(**one) for one in data["rows"]]
    data["plots"] = {name: pictures.read(one) for name, one in data["plots"].items()}
    return Result(**data)


def save(result: Result, folder: Path = FOLDER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.row}.json"
    path.write_text(dump(result), encoding="utf-8")
    return path


def saved(experiments: Sequence[Experiment], folder: Path = FOLDER) -> Iterator[Result]:
    """The saved results, in the order of the rows."""
    for experiment in experiments:
        path = folder / f"{experiment.id}.json"
        if path.exists():
            yield read(path.read_text(encoding="utf-8"))
