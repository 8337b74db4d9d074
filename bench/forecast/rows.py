"""Absolute percentage errors for every load and horizon: the combination, each of its experts alone, CSP, the mLSTM.

Loads of one length are forecast side by side, each as a kind of load by itself (`Mixture`). The numbers equal those of
a `Combined` for each, except that a `Combined` begins at its load's first request, and these at the first window of the
trace.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from bench.forecast.loads import PER_DAY, WINDOW_S, Counts, Load, azure, servegen
from glowplug.policies.prediction.combined import NAMES, NUM_EXPERTS, Mixture
from glowplug.policies.prediction.learned import CombinedParams
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug_lab.policies.preserve_workload import PreserveWorkload

HORIZONS = (1, 2, 3, 6, 12)
LONGEST = max(HORIZONS)
COMBINED = "combined"
MLSTM = "mLSTM (PreServe)"
KNOWN = ("last", "day naive", "csp", MLSTM)  # the papers' and the baselines; other experts are variants of them
Forecasts = NDArray[np.float64]  # (windows, horizons); row t is made when window t has closed
Errors = dict[str, list[float]]  # name -> one for each of HORIZONS


def totals(counts: Counts) -> Iterable[WindowTotals]:
    """Windows of that many requests; the mLSTM forecasts tokens, so each request has one."""
    for at, value in enumerate(counts):
        yield WindowTotals(started_at=float(at * WINDOW_S), window_s=WINDOW_S, num_requests=value, prompt_tokens=value)


def of_all(loads: Sequence[Load]) -> list[tuple[dict[str, Forecasts], Forecasts, Forecasts]]:
    """For each load: forecasts by name (`combined` and every expert in it), and the two ends of its band. All loads
    have the same length."""
    counts = np.stack([load.counts for load in loads])
    mixture = Mixture(PER_DAY, CombinedParams(), np.ones(len(loads)))
    steps = np.array(HORIZONS) - 1
    ours = np.zeros((3, counts.shape[1], len(loads), len(HORIZONS)))  # expected, low, high
    alone = np.zeros((counts.shape[1], len(loads), len(HORIZONS), NUM_EXPERTS), np.float32)
    for at in range(counts.shape[1]):
        mixture.close(counts[:, at], None)
        alone[at] = mixture.latest[:, steps, :NUM_EXPERTS]
        for to, step in enumerate(steps):
            ours[:, at, :, to] = mixture.at(step)
    np.maximum(np.expm1(alone, out=alone), 0.0, out=alone)
    found = []
    for row in range(len(loads)):
        made = {COMBINED: ours[0, :, row]}
        made |= {name: alone[:, row, :, of].astype(float) for of, name in enumerate(NAMES)}
        found.append((made, ours[1, :, row], ours[2, :, row]))
    return found


def of_one(make: Callable[[], Forecaster], counts: Counts) -> Forecasts:
    """The forecasts of one forecaster, read as tokens."""
    forecaster, rows = make(), []
    for window in totals(counts):
        forecaster.closed(window)
        made = [one.prompt_tokens for one in forecaster.forecast(0.0, LONGEST)] or [np.nan] * LONGEST
        rows.append([made[step - 1] for step in HORIZONS])
    return np.array(rows)


def errors(load: Load, forecasts: Forecasts) -> list[float]:
    """Mean absolute percentage error over windows that had a request, by horizon."""
    found = []
    for to, step in enumerate(HORIZONS):
        targets = np.arange(load.first, load.until)
        came, expected = load.counts[targets], forecasts[targets - step, to]
        seen = (came > 0) & np.isfinite(expected)
        enough = seen.sum() >= 0.9 * (came > 0).sum()  # an expert that forecasts only part of the time gets no row
        found.append(float(100 * np.mean(np.abs(expected - came)[seen] / came[seen])) if enough else np.nan)
    return found


def coverage(load: Load, low: Forecasts, high: Forecasts) -> list[float]:
    """Share of windows inside the band, by horizon."""
    targets = np.arange(load.first, load.until)
    came = load.counts[targets]
    return [
        float(np.mean((came >= low[targets - step, to]) & (came <= high[targets - step, to])))
        for to, step in enumerate(HORIZONS)
    ]


def run(*, is_quick: bool, part: str, with_mlstm: bool) -> None:
    """Print the table of every load, then the summary."""
    loads = azure(part) + (servegen(part)[:6] if is_quick else servegen(part))
    made = [one for _, of in groupby(loads, key=lambda load: len(load.counts)) for one in of_all(list(of))]
    worst, to_known, to_csp, inside = [], [], [], []
    print(f"requests in windows of 600 s, {part} part", flush=True)
    for group in dict.fromkeys(load.group for load in loads):
        measured = [
            _measured(load, *of, with_mlstm) for load, of in zip(loads, made, strict=True) if load.group == group
        ]
        table = {name: _mean([of[name] for of, _ in measured]) for name in measured[0][0]}
        bands = np.mean([covered for _, covered in measured], axis=0)
        _print(f"{group} ({len(measured)} clients, geometric mean)" if len(measured) > 1 else group, table, bands)
        row = np.array(table[COMBINED])
        worst += list(row / np.nanmin([of for name, of in table.items() if name != COMBINED], axis=0))
        to_known += list(row / np.nanmin([table[name] for name in KNOWN if name in table], axis=0))
        to_csp += list(row / np.array(table["csp"]))
        inside += list(bands)
    print(f"\n{len(worst)} rows of load and horizon; combined over")
    _print_ratios(f"the best of {', '.join(KNOWN if with_mlstm else KNOWN[:-1])}", to_known)
    _print_ratios(f"the best of these and all {NUM_EXPERTS} experts, in hindsight", worst)
    print(f"- CSP: mean {np.mean(to_csp):.3f}, most {max(to_csp):.3f}")
    print(
        f"80 % band holds {np.mean(inside):.0%}, {min(inside):.0%} to {max(inside):.0%};",
        f"in 75 to 85 % on {sum(0.75 <= c <= 0.85 for c in inside)}",
    )


def _measured(
    load: Load, made: dict[str, Forecasts], low: Forecasts, high: Forecasts, with_mlstm: bool
) -> tuple[Errors, list[float]]:
    if with_mlstm:
        made[MLSTM] = of_one(lambda: PreserveWorkload(WINDOW_S), load.counts)
    return {name: errors(load, of) for name, of in made.items()}, coverage(load, low, high)


def _mean(rows: list[list[float]]) -> list[float]:
    """The errors of a single load; over clients, whose errors differ a hundredfold, the geometric mean."""
    found: list[float] = np.exp(np.log(np.maximum(rows, 1e-3)).mean(axis=0)).tolist()
    return found


def _print(title: str, table: Errors, bands: Iterable[float]) -> None:
    print(f"\n| {title}, % | {' | '.join(f'{h} ahead' for h in HORIZONS)} |\n|---|{'---|' * len(HORIZONS)}")
    shown = {name: row for name, row in table.items() if not np.isnan(row).all()}
    for name, row in sorted(shown.items(), key=lambda of: (of[0] != COMBINED, np.nanmean(of[1]))):
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} |")
    print(f"| 80 % band holds | {' | '.join(f'{100 * share:.0f}' for share in bands)} |", flush=True)


def _print_ratios(over: str, ratios: list[float]) -> None:
    within = sum(ratio <= 1.02 for ratio in ratios)
    print(f"- {over}: mean {np.mean(ratios):.3f}, most {max(ratios):.3f}; best or within 2 % on {within}")
