"""Plain numbers of one run, per model and in all: what the table, results.json and the report show. Seconds, bytes."""

import math
from itertools import pairwise
from typing import Any, Final

from glowplug.simulator.results import ModelResult, Quantiles, Results

SHARES: Final = (
    *(n / 200 for n in range(1, 198)),
    *(n / 1000 for n in range(990, 1000)),
    0.9995,
    1.0,
)
Row = dict[str, Any]


def row_of(name: str, one: ModelResult) -> Row:
    """One model's figures. Attainment counts every request that came for a model with an objective: refused and
    unfinished ones missed it. None where there is no objective."""
    refused = sum(one.num_refused.values())
    return {
        "model": name,
        "num_arrived": one.num_arrived,
        "num_finished": one.num_finished,
        "num_refused": refused,
        "refused_by": dict(sorted(one.num_refused.items())),
        "num_unfinished": one.num_arrived - one.num_finished - refused,
        "num_cold": one.num_cold,
        "warm_ratio": _ratio(one.num_finished - one.num_cold, one.num_finished),
        "ttft_attainment": _ratio(one.num_ttft_met, one.num_ttft_asked),
        "tpot_attainment": _ratio(one.num_tpot_met, one.num_tpot_asked),
        "num_preempted": one.num_preempted,
        "prompt_tokens": one.prompt_tokens,
        "response_tokens": one.response_tokens,
        **_quantiles("ttft_s", one.ttft),
        **_quantiles("tpot_s", one.tpot),
        **_quantiles("e2e_s", one.e2e),
        **_quantiles("normalised_s", one.normalised),
    }


def summary(results: Results) -> dict[str, Any]:
    """`total`, `models` by name, `fleet` with whatever the run counted as a whole, and `curves` of all requests."""
    total = results.total()
    return {
        "total": row_of("total", total),
        "models": [row_of(name, one) for name, one in sorted(results.by_model.items())],
        "fleet": fleet_of(results),
        "curves": {"ttft_s": curve(total.ttft), "tpot_s": curve(total.tpot), "e2e_s": curve(total.e2e)},
    }


def fleet_of(results: Results) -> Row:
    """Every plain number and every count by name that a run keeps, and its own ratios."""
    row: Row = {}
    for name in (
        *getattr(type(results), "__slots__", ()),
        "num_starts",
        "hit_ratio",
        "load_s_per_request",
        "normalised_peak_s",
    ):
        value = getattr(results, name, None)
        if isinstance(value, bool | int | float):
            row[name] = _finite(value)
        elif isinstance(value, dict) and all(isinstance(number, int | float) for number in value.values()):
            row[name] = dict(sorted(value.items()))
    peak = getattr(results, "normalised_peak", None)
    if peak is not None:
        row["normalised_s_peak"] = _finite(peak.highest)
    return row


def curve(values: Quantiles) -> list[tuple[float, float]]:
    """(value, share of all that do not exceed it), denser towards the tail; empty when there is none."""
    points = [(round(values.at(share), 6), share) for share in SHARES] if values.count else []
    return [one for one, after in pairwise(points) if one[0] != after[0]] + points[-1:]


def _quantiles(name: str, values: Quantiles) -> Row:
    return {
        f"{name}_p50": _finite(values.at(0.50)),
        f"{name}_p95": _finite(values.at(0.95)),
        f"{name}_p99": _finite(values.at(0.99)),
        f"{name}_mean": _finite(values.mean),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _finite(value: float) -> float | None:
    """JSON has no nan: where there is no figure there is null."""
    return value if math.isfinite(value) else None
