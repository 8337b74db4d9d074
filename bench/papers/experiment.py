"""Define a row of the papers' tables: cases to run, seeds to run them with, and a band for its figures.

A *case* is one simulation (or one computation) with one seed; its outcome is plain numbers and lists, so that it can be
kept. A *judge* reads the outcomes of all cases and seeds and compares their figures with the paper's.
"""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.papers.plots import Bars, Lines

Plot = Bars | Lines
Outcome = dict[str, Any]  # name -> number, or list of numbers or pairs


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over all seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def low(self) -> float:
        return min(self.values, default=math.nan)

    @property
    def high(self) -> float:
        return max(self.values, default=math.nan)

    def show(self, form: str = ".2f", unit: str = "") -> str:
        """ "1.23 (1.20-1.26)": the mean, and the range over seeds when it has one."""
        if not self.values:
            return "none"
        mean, low, high = (f"{value:{form}}{unit}" for value in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} ({low} to {high})"

    def __truediv__(self, other: "Spread") -> "Spread":
        """Divide seed by seed, so that the ratio has its own spread."""
        return Spread(tuple(_ratio(a, b) for a, b in zip(self.values, other.values, strict=True)))

    def __sub__(self, other: "Spread") -> "Spread":
        return Spread(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf if a > 0 else math.nan


class Runs:
    """The outcomes of one experiment: case -> seed -> outcome."""

    def __init__(self, outcomes: Mapping[str, Mapping[int, Outcome]]) -> None:
        self._outcomes = outcomes

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for by_seed in self._outcomes.values() for seed in by_seed})

    @property
    def cases(self) -> list[str]:
        return list(self._outcomes)

    def among(self, seeds: Collection[int]) -> "Runs":
        """The outcomes of these seeds alone."""
        return Runs({case: {s: found[s] for s in found if s in seeds} for case, found in self._outcomes.items()})

    def of(self, case: str, name: str) -> Spread:
        """One figure of one case over its seeds, in order of the seeds."""
        by_seed = self._outcomes[case]
        return Spread(tuple(float(by_seed[seed][name]) for seed in sorted(by_seed)))

    def first(self, case: str) -> Outcome:
        """The outcome of the lowest seed, for plots."""
        by_seed = self._outcomes[case]
        return by_seed[min(by_seed)]

    def has(self, case: str) -> bool:
        return bool(self._outcomes.get(case))


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a row's own table."""

    what: str
    ours: str
    paper: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result. `deviation` says why a band is missed, with the figures that show it; "" if there is none."""

    ours: str
    passed: bool
    findings: Sequence[Finding] = ()
    deviation: str = ""
    plots: Mapping[str, Plot] = field(default_factory=dict)  # name -> picture
    tables: Sequence[str] = ()  # Markdown, below the findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One row. `reads` are the files and folders that decide the outcome: a change there makes kept outcomes stale."""

    id: str
    title: str
    paper: str
    band: str
    setup: str
    cases: Callable[[bool], Sequence[str]]  # of a quick run, or a whole one
    run: Callable[[str, int, bool], Outcome]  # case, seed, quick
    judge: Callable[[Runs], Verdict]
    reads: Sequence[str]
    max_seeds: int = 10
    calibrated: bool = False  # the compared figures were put in, or constants fitted to them
    held_out: Sequence[int] = ()  # further seeds, not used in tuning: a whole run takes all
    kept_with: str = ""  # another row whose outcomes it shares: same cases, same run

    def seeds(self, num: int) -> list[int]:
        """The seeds of a run of `num`: 1 to `num`, at most `max_seeds`, and one held-out seed for every two of them."""
        num = min(num, self.max_seeds)
        return [*range(1, 1 + num), *self.held_out[: num // 2]]

    @property
    def kept_as(self) -> str:
        return self.kept_with or self.id


def prose(text: str, **figures: str) -> str:
    """Join a paragraph that is written over several lines, and insert its figures."""
    return " ".join(text.split()).format(**figures)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Format the least and the largest ratio as "1.23x to 1.26x"."""
    found = sorted(values)
    return f"{found[0]:{form}}x to {found[-1]:{form}}x"


def ttft_cdf(title: str, runs: Runs, cases: Mapping[str, str]) -> Lines:
    """The distribution of times to the first token, of the lowest seed. `cases`: name of a curve -> its case."""
    curves = {name: [(float(x), float(y)) for x, y in runs.first(case)["ttft_cdf"]] for name, case in cases.items()}
    return Lines(title=title, x_label="TTFT, seconds", y_label="share of requests", series=curves, log_x=True)
