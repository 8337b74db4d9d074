"""Figures in Markdown: `<!-- figure: NAME.KEY -->text<!-- /figure -->`, and notes on the commit of each, in a block
that begins with `<!-- figure notes -->`. Both are written from the results; nothing is computed here."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from bench.figures.results import NOT_RECORDED, Result

FIGURE = re.compile(r"(<!-- figure: ([\w-]+)\.(\w+) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
NOTES = re.compile(r"(<!-- figure notes -->\n)(.*?)(<!-- /figure notes -->)", re.DOTALL)
CHANGED = ", older code"
UNKNOWN = ", which this clone does not know"


def named(text: str) -> list[str]:
    """The names of the benchmarks whose figures a page prints, in its order."""
    return list(dict.fromkeys(found[2] for found in FIGURE.finditer(text)))


def note(result: Result, changed: bool | None, by_hand: bool = False, usual: str = "") -> str:
    """One line: the commit of the figures, when they were measured, and the machine, if not the usual one."""
    state = UNKNOWN if changed is None else CHANGED if changed else ""
    load = f"load {result.load}"
    origin = load if result.machine == usual else f"{result.machine}, {load}"
    if result.taken_over:
        origin = "taken over from this page" + ("" if result.load == NOT_RECORDED else f", {load}")
    if by_hand:
        origin = f"measured by hand ({result.command}), {load}"
    return f"- {result.name}: of {result.commit}{state}; {result.date[:10]}, {origin}"


def _notes(
    known: Iterable[Result], changed: Callable[[Result], bool | None], by_hand: Collection[str], usual: str
) -> list[str]:
    """A line for all figures of one commit and day on the usual machine, and one for each other figure."""
    lines: list[str] = []
    alike: dict[str, list[str]] = {}
    for one in known:
        if one.machine != usual or one.taken_over or one.name in by_hand:
            lines.append(note(one, changed(one), one.name in by_hand, usual))
        else:
            state = {None: UNKNOWN, True: CHANGED, False: ""}[changed(one)]
            alike.setdefault(f"- of {one.commit}, {one.date[:10]}: ", []).append(f"{one.name} (load {one.load}{state})")
    return [*(head + ", ".join(found) for head, found in alike.items()), *lines]


def render(
    text: str,
    results: Mapping[str, Result],
    changed: Callable[[Result], bool | None],
    by_hand: Collection[str] = frozenset(),
) -> str:
    """The page with figures and notes from the results; `by_hand` names the benchmarks that a person measures. Raises
    KeyError for a figure that no result has."""

    def figure(found: re.Match[str]) -> str:
        result = results.get(found[2])
        if result is None or found[3] not in result.figures:
            raise KeyError(f"no result has the figure {found[2]}.{found[3]}")
        return found[1] + result.figures[found[3]] + found[5]

    known = [results[name] for name in named(text) if name in results]
    usual, times = Counter(one.machine for one in known).most_common(1)[0] if known else ("", 0)
    usual = usual if times > 1 else ""
    lines = f"Measured on {usual}, unless said otherwise.\n\n" if usual else ""
    lines += "".join(line + "\n" for line in _notes(known, changed, by_hand, usual))
    return NOTES.sub(lambda found: found[1] + lines + found[3], FIGURE.sub(figure, text))


def without_age(text: str) -> str:
    """The page without notes on changed code, so that a commit that changes code need not change the pages."""
    return NOTES.sub(lambda found: found[1] + found[2].replace(CHANGED, "").replace(UNKNOWN, "") + found[3], text)
