"""How soon forecasts follow what no past shows: windows until the error of the next one is small again."""

from collections.abc import Callable

import numpy as np

from bench.forecast.loads import PER_DAY, WINDOW_S, Counts
from bench.forecast.rows import totals
from glowplug.policies.prediction.combined import Combined

AT = 5 * PER_DAY + 60  # the change, on the sixth day
SMALL = 0.2  # error of the next window that counts as recovered


def day_and_night(seed: int = 1, num_days: int = 7) -> Counts:
    """Poisson counts that swing between 120 and 600 a window."""
    at = np.arange(num_days * PER_DAY)
    return np.random.default_rng(seed).poisson(360 - 240 * np.cos(2 * np.pi * at / PER_DAY)).astype(float)


def launched(counts: Counts) -> Counts:
    """Five times the load from the change on."""
    found = counts.copy()
    found[AT:] *= 5
    return found


def gone(counts: Counts) -> Counts:
    """A third of the load from the change on, as on a weekend."""
    found = counts.copy()
    found[AT:] = np.round(found[AT:] / 3)
    return found


def out(counts: Counts) -> Counts:
    """An outage of two hours; the change is its end."""
    found = counts.copy()
    found[AT - 12 : AT] = 0
    return found


def spike(counts: Counts) -> Counts:
    """One window of a hundred times the load."""
    found = counts.copy()
    found[AT - 1] *= 100
    return found


def missing(counts: Counts) -> Counts:
    """Two hours that nobody counted (NaN); the change is their end."""
    found = counts.copy()
    found[AT - 12 : AT] = np.nan
    return found


CASES: dict[str, Callable[[Counts], Counts]] = {
    "launch: five times the load": launched,
    "weekend: a third of the load": gone,
    "end of an outage of two hours": out,
    "after one window of a hundred times": spike,
    "after two hours that are missing": missing,
}


def run() -> None:
    """Print one row for each change."""
    columns = "windows until one ahead is off by 20 % at most | error of the hour after | of the same day before"
    print(f"| change | {columns} | anomaly |")
    print("|---|---|---|---|---|")
    for name, change in CASES.items():
        counts = change(day_and_night())
        forecaster, off, said = Combined(WINDOW_S), [], []
        for window, came in zip(totals(counts), counts, strict=True):
            made = forecaster.forecast(0.0, 1)
            off.append(abs(made[0].num_requests - came) / max(came, 1.0) if made else 1.0)
            forecaster.closed(window)
            said.append(forecaster.forecast(0.0, 1)[0].anomaly)
        num = next(n for n in range(PER_DAY) if all(error <= SMALL for error in off[AT + n : AT + n + 3]))
        hour, before = np.mean(off[AT + num : AT + num + 6]), np.mean(off[AT - PER_DAY : AT - PER_DAY + 6])
        seen = ", ".join(sorted({one for one in said[AT - 12 : AT + 2] if one})) or "none"
        print(f"| {name} | {num} | {hour:.0%} | {before:.0%} | {seen} |")
