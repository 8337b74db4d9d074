"""Ratios of measured runs, given only if the machine was equally busy for both, since load changes figures.

A benchmark notes the load average before each run (`Timed`), runs the two kinds in turns, and prints their ratio with
`compare`, which gives none if the loads differ much.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

APART_RATIO = 1.5
"""Median loads further apart than this are not alike: at load 10 a process has half of the cores it has at load 5."""
APART_CORES = 0.5
"""... unless they differ by less than so much of all cores: 0.1 and 0.6 are both an idle machine."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One figure, and the machine's one-minute load average before it was taken."""

    figure: float
    load: float


def load_now() -> float:
    return os.getloadavg()[0]


def differ(loads: Sequence[float], others: Sequence[float], num_cores: int | None = None) -> str:
    """The reason why runs at these loads cannot be compared; "" if they can. Compares medians, which outliers do not
    move."""
    if not loads or not others:
        return "one of them was not run"
    low, high = sorted((statistics.median(loads), statistics.median(others)))
    cores = num_cores or os.cpu_count() or 1
    if high - low <= APART_CORES * cores or high <= APART_RATIO * low:
        return ""
    return f"the load averages differ, {statistics.median(loads):.1f} and {statistics.median(others):.1f}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of medians of two kinds of runs, with the lowest and highest ratio of consecutive pairs. There is no
    ratio if `why_not` gives a reason."""

    middle: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    load: tuple[float, float] = (0.0, 0.0)  # lowest, highest
    why_not: str = ""

    def data(self) -> dict[str, float] | None:
        """The figures as data; None without a ratio."""
        return None if self.why_not else {"middle": self.middle, "low": self.low, "high": self.high}

    def show(self, form: str = ".2f") -> str:
        """Format as "3.20x (3.05x to 3.41x), load 0.4 to 1.1", or as the reason why there is no ratio."""
        if self.why_not:
            return f"no ratio: {self.why_not}"
        middle, low, high = (f"{value:{form}}x" for value in (self.middle, self.low, self.high))
        return f"{middle} ({low} to {high}), load {self.load[0]:.1f} to {self.load[1]:.1f}"


def compare(of: Sequence[Timed], to: Sequence[Timed], num_cores: int | None = None) -> Ratio:
    """The ratio of `of` over `to`, both in the order in which they took turns."""
    loads = [one.load for one in (*of, *to)]
    if why := differ([one.load for one in of], [one.load for one in to], num_cores):
        return Ratio(why_not=why)
    pairs = [a.figure / b.figure for a, b in zip(of, to, strict=False)]
    middle = statistics.median(one.figure for one in of) / statistics.median(one.figure for one in to)
    return Ratio(middle, min(pairs), max(pairs), (min(loads), max(loads)))
