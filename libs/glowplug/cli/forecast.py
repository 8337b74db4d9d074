"""`glowplug forecast`: a model's forecasts against actual load, and those of windows to come."""

import math
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from glowplug.cli.client import Row, connect
from glowplug.cli.options import JsonOption, ModelArgument, StateDirOption
from glowplug.cli.terminal import CliError, age, clock, pairs, say, say_json, table

HEADERS = ("window", "state", "came", "expected", "80 % band", "off")
Cells = tuple[object, ...]
METRICS: Final = ("requests", "concurrency", "prompt_tokens", "response_tokens")


def forecast(
    model: ModelArgument,
    metric: Annotated[str, typer.Option("--metric", "-m", help=f"One of {', '.join(METRICS)}.")] = "requests",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many closed windows to show.")] = 6,
    ahead: Annotated[
        int,
        typer.Option(
            "--ahead", "-a", min=1, help="Compare closed windows with the forecast made this many windows earlier."
        ),
    ] = 1,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the latest windows of a model beside their forecasts, and the forecasts of the next ones."""
    if metric not in METRICS:
        raise CliError(f"there is no metric {metric!r} (there are: {', '.join(METRICS)})")
    fleet = connect(state_dir)
    key = fleet.key_of(model)
    expected = fleet.get("predictor", "/v1/forecasts", model=key)
    came = fleet.get("predictor", "/v1/windows", model=key)
    takes = next((row for row in fleet.get("predictor", "/v1/capacities")["data"] if row["model_key"] == key), None)
    if as_json:
        say_json({"forecasts": expected, "windows": came, "capacity": takes})
        return
    points = [row for row in expected["data"] if row["metric"] == metric]
    made = horizons(points, came["window_s"], time.time())
    if made and ahead not in made:
        raise CliError(f"no forecast is made {ahead} windows ahead (there are: {', '.join(map(str, made))})")
    windows = came["data"].get(key, [])
    if not windows and not points:
        raise CliError(f"no request for {model!r} has been counted yet")
    say(f"{pairs(summary(key, expected, points, came['window_s'], time.time()) | capacity(takes))}\n")
    say(table(HEADERS, rows(points, windows, came["window_s"], metric, limit, time.time(), ahead)))


def horizons(points: Iterable[Row], window_s: float, now_s: float) -> list[int]:
    return sorted({row.get("ahead", 1) for row in points if row["target_at"] + window_s <= now_s})


def summary(key: str, answer: Row, points: list[Row], window_s: float, now_s: float) -> dict[str, object]:
    found: dict[str, object] = {"model": key, "policy": answer["policy"], "window": f"{window_s:g} s"}
    horizon_s = answer.get("horizons", {}).get(key, 0.0)
    if horizon_s:
        found["a start takes"] = f"{horizon_s:.1f} s"
    if not points:
        return found | {"forecast": "none yet"}
    newest = points[-1]
    found["made"] = f"{age(now_s - newest['made_at'])} ago"
    rated = [row["error_ratio"] for row in answer["data"] if row["error_ratio"]]
    if rated:
        found["recent error"] = f"{rated[-1]:.0%} of the actual concurrency"
    anomaly = newest.get("anomaly", "")
    if anomaly:
        found["last window"] = {"missing": "missing: it counts as expected", "spike": "a spike: it was cut"}[anomaly]
    return found


def capacity(takes: Row | None) -> dict[str, object]:
    if takes is None or not takes["rates_from"]:
        return {"one instance takes": "not known yet: no instance has been busy for long enough"}
    rates = f"{takes['prompt_per_s']:.0f} prompt and {takes['response_per_s']:.0f} response tokens/s"
    how = f"measured in {takes['num_windows']} windows" if takes["rates_from"] == "measured" else "as declared"
    return {"one instance takes": f"{rates}, {how}"}


def rows(
    points: Iterable[Row], windows: list[Row], window_s: float, metric: str, limit: int, now_s: float, ahead: int = 1
) -> list[Cells]:
    """Return closed windows with forecasts made `ahead` windows before, the open one so far, and later ones with their
    newest forecast; oldest first."""
    here, expected = math.floor(now_s / window_s), dict[int, Row]()
    for row in points:
        number = round(row["target_at"] / window_s)
        if number >= here or row.get("ahead", 1) == ahead:
            expected[number] = row
    came = {round(row["started_at"] / window_s): row for row in windows}
    closed = [number for number in sorted({*came, *expected}) if number < here][-limit:]
    return [
        _row(number, came.get(number), expected.get(number), window_s, metric, number - here)
        for number in [*closed, *sorted({here, *(number for number in expected if number > here)})]
    ]


def _row(number: int, came: Row | None, expected: Row | None, window_s: float, metric: str, ahead: int) -> Cells:
    state = "open, so far" if ahead == 0 else "closed" if ahead < 0 else f"in {ahead}"
    value = None if came is None or ahead > 0 else _measured(came, window_s, metric)
    if expected is None:
        return clock(number * window_s), state, _shown(value), "-", "-", "-"
    band = [at for share, at in expected["quantiles"] if 0 < share < 1]
    off = abs(expected["value"] - value) / value if value and ahead < 0 else None
    return (
        clock(number * window_s),
        state,
        _shown(value),
        _shown(expected["value"]),
        f"{_shown(band[0])} to {_shown(band[-1])}" if len(band) > 1 else "-",
        "-" if off is None else f"{off:.0%}",
    )


def _measured(window: Row, window_s: float, metric: str) -> float:
    if metric == "concurrency":
        return float(window["concurrency_seconds"]) / window_s
    return float(window["num_requests" if metric == "requests" else metric])


def _shown(value: Any) -> str:
    """Three digits, or all before the point."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
