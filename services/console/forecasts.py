"""What the predictor expects of a model against what came: its windows and forecasts, as the page draws them.

The console keeps nothing of it. A forecast is a value for a window to come (or gone by, so that it can be held against
what came), with quantiles where its policy gives them, when it was made, and how far its kind was off lately.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from glowplug.domain.errors import GlowplugError
from services.console.records import FRESH_S, KEPT, Newest, json_response
from services.console.upstream import Upstream, read_once

METRICS: Final = ("concurrency", "requests", "prompt_tokens", "response_tokens")


class WindowPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One window as it came. `is_open`: it goes on, its counts will grow. Token counts are exact when `is_exact`."""

    started_at: float
    is_open: bool
    requests: int
    cold: int
    prompt_tokens: int
    response_tokens: int
    is_exact: bool
    concurrency: float  # time-weighted mean
    concurrency_peak: int


class ForecastPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What was expected of one window when it was the next one to come (`ahead` 1), the one after that (2), and so on.
    `quantiles` are (probability, value) pairs, rising; empty where there are none.

    `error_ratio`: mean absolute error of this kind of forecast lately over the mean of what came; 0 when not measured.
    """

    metric: str  # one of METRICS
    target_at: float  # start of the window it is about
    window_s: float
    value: float
    ahead: int = 1
    quantiles: tuple[tuple[float, float], ...] = ()
    made_at: float = 0.0
    error_ratio: float = 0.0
    source: str = ""


class ForecastPage(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `problem`: why the predictor could not be asked; `why_empty`: why there is no forecast."""

    now: float
    model_key: str
    window_s: float = 60.0
    policy: str = ""
    windows: list[WindowPoint] = []
    forecasts: list[ForecastPoint] = []
    why_empty: str = ""
    problem: str = ""


class Forecasts:
    """Asks the predictor, at most once in `FRESH_S` for each model."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream, self._clock = upstream, clock
        self._known: Newest[str, ForecastPage] = Newest(KEPT)

    async def of(self, model_key: str) -> ForecastPage:
        """Never raises for what the predictor does: the page says what it is."""
        known = self._known.get(model_key)
        if known is not None and 0 <= self._clock() - known.now < FRESH_S:
            return known
        try:
            query = f"?model={quote(model_key, safe='')}"
            windows = await self._ask(f"/v1/windows{query}")
            forecasts = await self._ask(f"/v1/forecasts{query}")
            page = read_page(model_key, windows, forecasts, self._clock())
        except GlowplugError as error:
            page = ForecastPage(now=self._clock(), model_key=model_key, problem=str(error))
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"the predictor said something else than forecasts: {error}"
            page = ForecastPage(now=self._clock(), model_key=model_key, problem=problem)
        self._known.put(model_key, page)
        return page

    async def _ask(self, path: str) -> Any:
        status, body = await read_once(self._upstream, "predictor", path)
        if status != 200:
            raise ValueError(f"status {status}")
        return msgspec.json.decode(body)


def routes(forecasts: Forecasts) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["forecasts"])

    @router.get("/forecasts")
    async def one(model: str = Query(min_length=1, max_length=200)) -> Response:
        """Windows of one model as they came, oldest first, and what was expected of them and of those to come."""
        return json_response(await forecasts.of(model))

    return router


def read_page(model_key: str, windows: Any, forecasts: Any, now_s: float) -> ForecastPage:
    """The predictor's answers to /v1/windows and /v1/forecasts. Raises KeyError, TypeError or ValueError."""
    window_s = float(windows["window_s"])
    policy = str(forecasts.get("policy") or "none")
    rows = [row for row in forecasts["data"] if row["model_key"] == model_key]
    points = [point for row in rows for point in _points(row)]
    return ForecastPage(
        now=now_s,
        model_key=model_key,
        window_s=window_s,
        policy=policy,
        windows=[_window(row, window_s, now_s) for row in windows["data"].get(model_key, ())],
        forecasts=sorted(points, key=lambda point: (point.metric, point.target_at, point.made_at)),
        why_empty="" if points else _why_empty(policy),
    )


def _why_empty(policy: str) -> str:
    if policy == "none":
        return "no forecasting policy is in force: the past is kept, nothing is expected yet"
    return f"the policy {policy} has not forecast this model yet"


def _window(row: Mapping[str, Any], window_s: float, now_s: float) -> WindowPoint:
    started_at = float(row["started_at"])
    lasted_s = min(window_s, max(now_s - started_at, 1e-9))
    return WindowPoint(
        started_at=started_at,
        is_open=now_s < started_at + window_s,
        requests=int(row["num_requests"]),
        cold=int(row["num_cold"]),
        prompt_tokens=int(row["prompt_tokens"]),
        response_tokens=int(row["response_tokens"]),
        is_exact=row["num_tokens_exact"] == row["num_requests"],
        concurrency=round(float(row["concurrency_seconds"]) / lasted_s, 4),
        concurrency_peak=int(row["concurrency_peak"]),
    )


def _points(row: Mapping[str, Any]) -> Iterator[ForecastPoint]:
    """A row names its metric with a value and quantiles, or it is about concurrency: the mean, with the peak above."""
    made_at, window_s = float(row["made_at"]), float(row["window_s"])
    shared: dict[str, Any] = {
        "target_at": float(row.get("target_at") or made_at),
        "window_s": window_s,
        "ahead": int(row.get("ahead") or 1),
        "made_at": made_at,
        "error_ratio": float(row.get("error_ratio") or 0.0),
        "source": str(row.get("source") or ""),
    }
    if "metric" in row:
        quantiles = tuple(sorted((float(p), float(v)) for p, v in row.get("quantiles") or ()))
        yield ForecastPoint(metric=str(row["metric"]), value=float(row["value"]), quantiles=quantiles, **shared)
    else:
        peak = ((1.0, float(row["concurrency_peak"])),)
        yield ForecastPoint(metric="concurrency", value=float(row["concurrency_mean"]), quantiles=peak, **shared)
