"""docs/papers/results.md from the rows' results: one table of all rows, then for each row its set-up in a sentence, the
reason of a deviation, and pictures. Nothing is computed here; the row's file has every figure."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from bench.papers.cache import ROOT
from bench.papers.results import CALIBRATED, INSIDE, OUTSIDE, Result

FOLDER = ROOT / "docs" / "papers"
PAGE = "results.md"

HEAD = """# The papers' figures, reproduced

Five papers, {num} rows: {verdicts}. **Every figure is simulated** (or computed from published traces by the same
policies), except row P4, which is measured. The paper's figure is from its own hardware, so bands are of ratios.

- **inside**: the ratio is in the band. **outside**: it is not; the row says why, with the run that shows the cause.
- **calibrated**: the compared figures were put in, or constants fitted to them: the row shows that the fleet adds
  nothing.

"1.23 (1.20 to 1.26)" is the mean over seeds and their range. "10 + 5" seeds: five were held out. W3s, H1, H3, H4, S1
and S2 draw nothing. A system has the same policies in all rows.

`make bench-papers` writes this page from `bench/papers/results`, where each row's file has its whole set-up, every case
and table, and the machine and its load. `python -m bench.papers --only ROW --seeds N` runs a row again.
"""
CHANGED = ", older code"


def _seeds(result: Result) -> str:
    """Format as "10", or "10 + 5" with held-out seeds."""
    return f"{len(result.seeds)}" + (f" + {len(result.held_out)}" if result.held_out else "")


def _made(results: Sequence[Result], changed: Collection[str]) -> list[str]:
    """A line for each commit, with the rows that its code made."""
    rows: dict[str, list[str]] = {}
    for one in results:
        rows.setdefault(one.commit + (CHANGED if one.row in changed else ""), []).append(one.row)
    return [f"- {', '.join(found)}: of {commit}" for commit, found in rows.items()]


def show(results: Sequence[Result], changed: Collection[str] = ()) -> str:
    """The table of all rows, as Markdown."""
    columns = ("row", "experiment", "paper", "band", "ours (simulated)", "verdict", "seeds")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for one in results:
        name = f"[{one.row}](#{one.row.lower()})"
        cells = [name, one.title, one.paper, one.band, one.ours, one.verdict, _seeds(one)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_made(results, changed)])


def _section(result: Result) -> list[str]:
    lines = [f"## {result.row}", "", _first_sentence(result.setup), ""]
    if result.deviation and result.verdict == OUTSIDE:
        lines += [f"**Deviation.** {result.deviation}", ""]
    for name in result.plots:
        lines += [f"![{result.row}: {name}]({_picture(result, name)})", ""]
    return lines


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) (?=[A-Z`])|; ", text, maxsplit=1)[0].removesuffix(".") + "."


def _picture(result: Result, name: str) -> str:
    return f"{result.row.lower()}-{name.replace(' ', '-')}.svg"


def page(results: Sequence[Result], changed: Collection[str] = ()) -> str:
    """The whole page. `changed`: rows whose code has changed since."""
    count = Counter(one.verdict for one in results)
    verdicts = ", ".join(f"{count[word]} {word}" for word in (INSIDE, CALIBRATED, OUTSIDE) if count[word])
    lines = [HEAD.format(num=len(results), verdicts=verdicts), show(results, changed), ""]
    for one in results:
        lines += _section(one)
    return "\n".join(lines).rstrip() + "\n"


def pictures(results: Sequence[Result]) -> Mapping[str, str]:
    """File name -> SVG."""
    return {_picture(one, name): plot.svg() for one in results for name, plot in one.plots.items()}


def write(results: Sequence[Result], changed: Collection[str] = (), folder: Path = FOLDER) -> list[Path]:
    """Write the page and its pictures, and remove pictures no row has any more. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {PAGE: page(results, changed), **pictures(results)}
    for old in folder.glob("*.svg"):
        if old.name not in files:
            old.unlink()
    for name, body in files.items():
        (folder / name).write_text(body, encoding="utf-8")
    return [folder / name for name in files]
