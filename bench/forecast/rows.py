"""Absolute percentage errors for every load and horizon: the combination, each of its experts alone, CSP, the mLSTM."""

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from bench.forecast.loads import WINDOW_S, Counts, Load, azure, servegen
from glowplug.policies.prediction.combined import Combined
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug.policies.prediction.preserve_workload import PreserveWorkload

HORIZONS = (1, 2, 3, 6, 12)
LONGEST = max(HORIZONS)
MLSTM = "mLSTM (PreServe)"
Forecasts = NDArray[np.float64]  # (windows, horizons up to LONGEST); row t is made when window t has closed
Errors = dict[str, list[float]]  # name -> one for each of HORIZONS


def totals(counts: Counts) -> Iterable[WindowTotals]:
    """Windows of so many requests; the mLSTM forecasts tokens, so each request has one."""
    for at, value in enumerate(counts):
        yield WindowTotals(started_at=float(at * WINDOW_S), window_s=WINDOW_S, num_requests=value, prompt_tokens=value)


def of_all(load: Load) -> tuple[dict[str, Forecasts], Forecasts, Forecasts]:
    """Forecasts by name, `combined` and every expert that it weighs; and its band."""
    forecaster = Combined(WINDOW_S)
    shape = (len(load.counts), LONGEST)
    found: dict[str, Forecasts] = defaultdict(lambda: np.full(shape, np.nan))
    low, high = np.full(shape, np.nan), np.full(shape, np.nan)
    for at, window in enumerate(totals(load.counts)):
        forecaster.closed(window)
        for step, one in enumerate(forecaster.forecast(0.0, LONGEST)):
            found["combined"][at, step] = one.num_requests
            if one.quantiles:
                low[at, step], high[at, step] = (quantile.num_requests for quantile in one.quantiles)
        for name, said in forecaster.experts().items():
            found[name][at] = [value for value, _ in said[:LONGEST]]
    return dict(found), low, high


def of_one(make: Callable[[], Forecaster], counts: Counts) -> Forecasts:
    """Of any forecaster, read as tokens."""
    forecaster, rows = make(), []
    for window in totals(counts):
        forecaster.closed(window)
        rows.append([one.prompt_tokens for one in forecaster.forecast(0.0, LONGEST)] or [np.nan] * LONGEST)
    return np.array(rows)


def errors(load: Load, forecasts: Forecasts) -> list[float]:
    """Mean absolute percentage error over windows that had a request, by horizon."""
    found = []
    for step in HORIZONS:
        targets = np.arange(load.first, load.until)
        came, expected = load.counts[targets], forecasts[targets - step, step - 1]
        seen = (came > 0) & np.isfinite(expected)
        enough = seen.sum() >= 0.9 * (came > 0).sum()  # an expert that knows a part of the time is no row
        found.append(float(100 * np.mean(np.abs(expected - came)[seen] / came[seen])) if enough else np.nan)
    return found


def coverage(load: Load, low: Forecasts, high: Forecasts) -> list[float]:
    """Share of windows inside the band, by horizon."""
    targets = np.arange(load.first, load.until)
    return [
        float(
            np.mean(
                (load.counts[targets] >= low[targets - h, h - 1]) & (load.counts[targets] <= high[targets - h, h - 1])
            )
        )
        for h in HORIZONS
    ]


def run(*, is_quick: bool, part: str, with_mlstm: bool) -> None:
    """Print the table of every load, then what came of it."""
    loads = azure(part) + (servegen(part)[:6] if is_quick else servegen(part))
    worst, to_csp, inside = [], [], []
    print(f"requests in windows of 600 s, {part} part", flush=True)
    for group in dict.fromkeys(load.group for load in loads):
        measured = [_measured(load, with_mlstm) for load in loads if load.group == group]
        table = {name: _mean([of[name] for of, _ in measured]) for name in measured[0][0]}
        bands = np.mean([covered for _, covered in measured], axis=0)
        _print(f"{group} ({len(measured)} clients, geometric mean)" if len(measured) > 1 else group, table, bands)
        alone = np.nanmin([row for name, row in table.items() if name != "combined"], axis=0)
        worst += list(np.array(table["combined"]) / alone)
        to_csp += list(np.array(table["combined"]) / np.array(table["csp"]))
        inside += list(bands)
    print(f"\n{len(worst)} rows of load and horizon")
    print(f"combined over the best single one of each row: mean {np.mean(worst):.3f}, most {max(worst):.3f};", end=" ")
    print(f"best or within 2 % on {sum(ratio <= 1.02 for ratio in worst)}")
    print(f"combined over CSP: mean {np.mean(to_csp):.3f}, most {max(to_csp):.3f}")
    print(
        f"80 % band holds {np.mean(inside):.0%}, {min(inside):.0%} to {max(inside):.0%};",
        f"in 75 to 85 % on {sum(0.75 <= c <= 0.85 for c in inside)}",
    )


def _measured(load: Load, with_mlstm: bool) -> tuple[Errors, list[float]]:
    made, low, high = of_all(load)
    if with_mlstm and load.group != "ServeGen":
        made[MLSTM] = of_one(lambda: PreserveWorkload(WINDOW_S), load.counts)
    return {name: errors(load, of) for name, of in made.items()}, coverage(load, low, high)


def _mean(rows: list[list[float]]) -> list[float]:
    """Of one load itself; of clients, whose errors differ a hundredfold, the geometric mean."""
    found: list[float] = np.exp(np.log(np.maximum(rows, 1e-3)).mean(axis=0)).tolist()
    return found


def _print(title: str, table: Errors, bands: Iterable[float]) -> None:
    print(f"\n| {title}, % | {' | '.join(f'{h} ahead' for h in HORIZONS)} |\n|---|{'---|' * len(HORIZONS)}")
    for name, row in sorted(table.items(), key=lambda of: (of[0] != "combined", np.nanmean(of[1]))):
        if not np.isnan(row).all():
            print(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} |")
    print(f"| 80 % band holds | {' | '.join(f'{100 * share:.0f}' for share in bands)} |", flush=True)
