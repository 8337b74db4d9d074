"""docs/papers/results.md: one table of all rows, then each row with its set-up, figures, pictures and deviation."""

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
shows the cause.

Written by `make bench-papers`; do not edit. "1.23 (1.20 to 1.26)" is the mean over seeds and their range; a seed draws
the arrivals, the lengths and the mappings. Traces come from `GLOWPLUG_DATA` (public traces, not part of this
repository; see `docs/configuration.md`).
"""


def _state(verdict: Verdict) -> str:
    if verdict.passed:
        return "inside"
    return "outside, explained below" if verdict.deviation else "outside"


def show(rows: Sequence[Row]) -> str:
    """The table of all rows, as Markdown."""
    lines = [
        "| row | experiment | paper | band | ours (simulated) | verdict | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for experiment, result in rows:
        cells = (
            ["not run", "", ""] if result is None else [result[1].ours, _state(result[1]), str(len(result[0].seeds))]
        )
        name = experiment.id if result is None else f"[{experiment.id}](#{experiment.id.lower()})"
        lines.append("| " + " | ".join([name, experiment.title, experiment.paper, experiment.band, *cells]) + " |")
    return "\n".join(lines)


def _section(experiment: Experiment, runs: Runs, verdict: Verdict) -> list[str]:
    lines = [f"## {experiment.id}", "", f"**{experiment.title}.** {experiment.setup}", ""]
    command = f"python -m bench.papers --only {experiment.id} --seeds {len(runs.seeds)}"
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


def write(rows: Sequence[Row], older: Sequence[str] = ()) -> list[Path]:
    """Write the page and its pictures, and remove pictures no row has any more. `older` names the rows whose outcomes
    are not all of this code. Returns what was written."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    head = HEAD.format(num=sum(len(e.id) == 2 and e.id != "P0" for e, _ in rows))
    lines = [head, *([OLDER.lstrip().format(rows=", ".join(older))] if older else []), show(rows), ""]
    pictures: dict[str, str] = {}
    for experiment, result in rows:
        if result is not None:
            lines += _section(experiment, *result)
            pictures |= {_picture(experiment, name): plot.svg() for name, plot in result[1].plots.items()}
    for old in FOLDER.glob("*.svg"):
        if old.name not in pictures:
            old.unlink()
    files = {"results.md": "\n".join(lines).rstrip() + "\n"} | pictures
    for name, body in files.items():
        (FOLDER / name).write_text(body, encoding="utf-8")
    return [FOLDER / name for name in files]
