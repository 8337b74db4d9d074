"""Figures of simulated runs as tables: one row a model, or one row a variant over its seeds."""

from collections.abc import Callable, Sequence
from typing import Any

from glowplug.simulator.jobs import Outcome
from glowplug.simulator.report.page_data import variants_over_seeds

Table = tuple[tuple[str, ...], list[tuple[object, ...]]]
MAX_MODELS = 40
_MODEL_HEADERS = ("model", "requests", "ttft p50", "p95", "p99", "tpot p50", "p99", "in time", "warm", "unanswered")
_FLEET_HEADERS = ("gpu-s", "starts", "hit", "fetched", "loaded")


def per_model(outcome: Outcome) -> Table:
    """Every model, the busiest first, and all of them together; past 40 the quiet ones are one row of dots."""
    rows = sorted(outcome.numbers["models"], key=lambda row: (-row["num_arrived"], row["model"]))
    shown = [_model_row(row["model"], row) for row in rows[:MAX_MODELS]]
    if len(rows) > MAX_MODELS:
        rest = rows[MAX_MODELS:]
        shown.append((f"... {len(rest)} more", sum(row["num_arrived"] for row in rest), *["-"] * 8))
    return _MODEL_HEADERS, [*shown, _model_row("all", outcome.numbers["total"])]


def comparison(outcomes: Sequence[Outcome]) -> Table:
    """Every variant: means over its seeds, with half the range, in percent, where seeds differ."""
    rows: list[tuple[object, ...]] = []
    for variant in variants_over_seeds(outcomes):
        total, fleet = variant["total"], variant["fleet"]
        left = _sum(total["num_refused"], total["num_unfinished"])
        figures = [
            _span(total["num_arrived"], _count),
            *(_span(total[f"ttft_s_{p}"], _seconds) for p in ("p50", "p95", "p99")),
            *(_span(total[f"tpot_s_{p}"], _seconds) for p in ("p50", "p99")),
            *(_span(total[name], _share) for name in ("ttft_attainment", "warm_ratio")),
            _span(left, _count),
            _span(fleet["gpu_seconds"], _count),
            _span(fleet["num_starts"], _count),
            _span(fleet.get("hit_ratio"), _share),
            *(_span(fleet[name], _bytes) for name in ("bytes_fetched", "bytes_loaded")),
        ]
        rows.append((variant["label"], *figures))
    return ("variant", *_MODEL_HEADERS[1:], *_FLEET_HEADERS), rows


def _model_row(name: str, row: dict[str, Any]) -> tuple[object, ...]:
    return (
        name,
        row["num_arrived"],
        *(_seconds(row[f"ttft_s_{p}"]) for p in ("p50", "p95", "p99")),
        *(_seconds(row[f"tpot_s_{p}"]) for p in ("p50", "p99")),
        _share(row["ttft_attainment"]),
        _share(row["warm_ratio"]),
        row["num_refused"] + row["num_unfinished"],
    )


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {name: a[name] + b[name] for name in a}
    return a + b


def _span(value: Any, show: Callable[[float | None], str]) -> str:
    if not isinstance(value, dict):
        return show(value)
    half, mean = (value["max"] - value["min"]) / 2, value["mean"]
    spread = f" ±{half / mean * 100:.0f}%" if mean and half / mean >= 0.005 else ""
    return f"{show(mean)}{spread}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e12:.2f} TB" if value >= 1e12 else f"{value / 1e9:.0f} GB"
