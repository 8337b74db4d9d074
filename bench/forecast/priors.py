"""The prior of each expert: its loss over the best one's, on the tuned part."""

import warnings
from itertools import groupby

import numpy as np

from bench.forecast.loads import Load, azure, servegen, sums
from bench.forecast.rows import HORIZONS, of_all
from glowplug.policies.prediction.combined import NAMES, PRIOR, Array


def run() -> None:
    """Print the table in the form of `combined.py`. Each set of loads has the same weight; an entry without loads
    (`peers`) keeps its value."""
    loads = [*azure("tuned"), *sums("tuned"), *servegen("tuned")]
    made = [one for _, of in groupby(loads, key=lambda load: len(load.counts)) for one in of_all(list(of))]
    warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing: no load has `peers`
    by_set: dict[str, list[Array]] = {}
    for load, (forecasts, _, _) in zip(loads, made, strict=True):
        by_set.setdefault(load.set, []).append(_over_the_best(load, forecasts))
    found = np.exp(np.nanmean([np.nanmean(of, axis=0) for of in by_set.values()], axis=0))
    found /= np.nanmin(found, axis=0)
    for name, row in zip(NAMES, found, strict=True):
        near, far = PRIOR[name] if np.isnan(row).any() else (row[0], row[-1])
        print(f'    "{name}": ({max(1.0, near):.2f}, {max(1.0, far):.2f}),')


def _over_the_best(load: Load, forecasts: dict[str, Array]) -> Array:
    """(N, horizons) of logarithms."""
    targets = np.arange(load.first, load.until)
    came = load.counts[targets]
    least = np.maximum(came, 0.1 * load.counts.mean())
    rows = [
        [np.nanmean(np.minimum(np.abs(forecasts[name][targets - h, to] - came) / least, 3.0)) for name in NAMES]
        for to, h in enumerate(HORIZONS)
    ]
    losses = np.log(np.array(rows).T)
    found: Array = losses - np.nanmin(losses, axis=0)
    return found
