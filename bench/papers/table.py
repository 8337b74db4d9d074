"""docs/papers/results.md: one table of all rows, then each row with its set-up, figures, pictures and deviation."""

import re
from collections.abc import Sequence
from pathlib import Path

from bench.papers.cache import ROOT
from bench.papers.experiment import Experiment, Runs, Verdict

FOLDER = ROOT / "docs" / "papers"
Row = tuple[Experiment, tuple[Runs, Verdict] | None]

HEAD = """# The papers' figures, reproduced

Five papers, {num} rows. **Every figure on this page is simulated** (or computed from published traces by the same
policies), but for row P4, which is measured. Beside ours stands what the paper printed on its own hardware; what can be
compared is the ratio, so each row has a band for the ratio, and lies inside it or says why not, with the run that
shows the cause. Where the figures that are compared were put in, or constants were fitted to them, a row reads
"calibrated" instead of "inside": it shows that the fleet adds nothing to them, and nothing about the paper.

Written by `make bench-papers`; do not edit. "1.23 (1.20 to 1.26)" is the mean over seeds and their range; a seed draws
the arrivals, the lengths and the mappings. Traces come from `GLOWPLUG_DATA` (public traces, not part of this
repository; see `docs/configuration.md`).
"""


def _state(experiment: Experiment, verdict: Verdict) -> str:
    if verdict.passed:
        return "calibrated" if experiment.calibrated else "inside"
    return "outside, explained below" if verdict.deviation else "outside"


def _tuned(experiment: Experiment, runs: Runs) -> list[int]:
    return [seed for seed in runs.seeds if seed not in experiment.held_out]


def _seeds(experiment: Experiment, runs: Runs) -> str:
    """ "10", or "10 + 5" with those that were held out."""
    tuned = len(_tuned(experiment, runs))
    return f"{tuned} + {len(runs.seeds) - tuned}" if len(runs.seeds) > tuned else f"{tuned}"


def show(rows: Sequence[Row]) -> str:
    """The table of all rows, as Markdown."""
    lines = [
        "| row | experiment | paper | band | ours (simulated) | verdict | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for experiment, result in rows:
        cells = (
            ["not run", "", ""]
            if result is None
            else [result[1].ours, _state(experiment, result[1]), _seeds(experiment, result[0])]
        )
        name = experiment.id if result is None else f"[{experiment.id}](#{experiment.id.lower()})"
        lines.append("| " + " | ".join([name, experiment.title, experiment.paper, experiment.band, *cells]) + " |")
    return "\n".join(lines)


def _section(experiment: Experiment, runs: Runs, verdict: Verdict) -> list[str]:
    lines = [f"## {experiment.id}", "", f"**{experiment.title}.** {experiment.setup}", ""]
    command = f"python -m bench.papers --only {experiment.id} --seeds {len(_tuned(experiment, runs))}"
    printed = f"Paper: {experiment.paper}. " if experiment.paper else ""
    lines += [f"Simulated; `{command}`. {printed}Band: {experiment.band}.", ""]
    if verdict.findings:
        lines += ["| figure | ours (simulated) | paper |", "|---|---|---|"]
        lines += [f"| {f.what} | {f.ours} | {f.paper} |" for f in verdict.findings] + [""]
    for table in verdict.tables:
        lines += [table, ""]
    if verdict.deviation:
        lines += [f"**{'Note' if verdict.passed else 'Deviation'}.** {verdict.deviation}", ""]
    for name in verdict.plots:
        lines += [f"![{experiment.id}: {name}]({_picture(experiment, name)})", ""]
    return lines


def _picture(experiment: Experiment, name: str) -> str:
    return f"{experiment.id.lower()}-{name.replace(' ', '-')}.svg"


OLDER = """
Kept from a version of the code before this one, and not computed again for it: {rows}.
"""
PAGE = "results.md"


def written(folder: Path) -> dict[str, tuple[str, str]]:
    """Row -> (its line of the table, its section) of the page as it stands; empty where there is none."""
    page = folder / PAGE
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    heads = re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)
    lines = {line.partition("[")[2].partition("]")[0]: line for line in heads[0].splitlines() if line.startswith("| [")}
    sections = dict(zip(heads[1::2], heads[2::2], strict=True))
    return {name: (lines[name], f"## {name}\n{sections[name]}") for name in sections if name in lines}


def write(rows: Sequence[Row], older: Sequence[str] = (), folder: Path = FOLDER) -> list[Path]:
    """Write the page and its pictures, and remove pictures no row has any more. `older` names the rows whose outcomes
    are not all of this code. A row without an outcome here stays on the page as it stood, and is named among them.
    Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    before = written(folder)
    stays = [experiment.id for experiment, result in rows if result is None and experiment.id in before]
    late = [experiment.id for experiment, _ in rows if experiment.id in (*older, *stays)]
    head = HEAD.format(num=sum(len(e.id) == 2 and e.id != "P0" for e, _ in rows))
    told = show(rows).splitlines()
    told = [
        *told[:2],
        *(before[e.id][0] if e.id in stays else line for (e, _), line in zip(rows, told[2:], strict=True)),
    ]
    lines = [head, *([OLDER.lstrip().format(rows=", ".join(late))] if late else []), *told, ""]
    pictures: dict[str, str] = {}
    for experiment, result in rows:
        if result is not None:
            lines += _section(experiment, *result)
            pictures |= {_picture(experiment, name): plot.svg() for name, plot in result[1].plots.items()}
        elif experiment.id in stays:
            lines += [before[experiment.id][1].rstrip(), ""]
    for old in folder.glob("*.svg"):
        if old.name not in pictures and old.name.partition("-")[0] not in {name.lower() for name in stays}:
            old.unlink()
    files = {PAGE: "\n".join(lines).rstrip() + "\n"} | pictures
    for name, body in files.items():
        (folder / name).write_text(body, encoding="utf-8")
    return [folder / name for name in files]
