"""Forecasts of the predictor and price lists of the placer, for the page. Answers are not kept.

A forecast is a value for a window, with quantiles if its policy has them, its time, and its kind's recent error. A
price is the placer's worth of a holder of GPU memory; the first to leave come first."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from glowplug.controllers.placer.price_list import GpuPrices
from glowplug.domain.errors import GlowplugError, NotFound
from glowplug.services.console.records import json_response
from glowplug.services.console.upstream import Upstream, read_once


class WindowPoint(msgspec.Struct, frozen=True, kw_only=True):
    """`is_open`: counts will grow; `is_exact`: of token counts."""

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
    """`ahead`: 1 if forecast as the next window, 2 as the one after that, and so on.

    `quantiles`: (probability, value), rising. `error_ratio`: recent mean absolute error of this kind of forecast
    over the mean of actual values; 0 if unmeasured."""

    metric: str  # concurrency, requests, prompt_tokens or response_tokens
    target_at: float  # start of the target window
    window_s: float
    value: float
    ahead: int = 1
    quantiles: tuple[tuple[float, float], ...] = ()
    made_at: float = 0.0
    error_ratio: float = 0.0
    source: str = ""


class ForecastPage(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: why the predictor could not be asked; `why_empty`: why there is no forecast."""

    now: float
    model_key: str
    window_s: float = 60.0
    policy: str = ""
    windows: list[WindowPoint] = []
    forecasts: list[ForecastPoint] = []
    why_empty: str = ""
    problem: str = ""


class PricePage(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: why there are no prices."""

    now: float
    gpu_id: str
    prices: GpuPrices | None = None
    problem: str = ""


def routes(upstream: Upstream, clock: Callable[[], float]) -> APIRouter:
    router = APIRouter(prefix="/api/v1")

    @router.get("/forecasts", tags=["forecasts"])
    async def forecasts(model: str = Query(min_length=1, max_length=200)) -> Response:
        """Windows of one model, oldest first, and the forecasts of past and coming ones."""
        return json_response(await forecasts_of(upstream, model, clock()))

    @router.get("/gpus/{gpu_id:path}/worth", tags=["fleet"], responses={404: {"description": "no such GPU"}})
    async def worth(gpu_id: Annotated[str, Path(min_length=1, max_length=256)]) -> Response:
        """The worth of each holder of a GPU's memory; the first to leave come first."""
        return json_response(await prices_of(upstream, gpu_id, clock()))

    return router


async def forecasts_of(upstream: Upstream, model_key: str, now_s: float) -> ForecastPage:
    """Never raises for the predictor's failures: the page shows them."""
    query = f"?model={quote(model_key, safe='')}"
    try:
        answers = []
        for path in (f"/v1/windows{query}", f"/v1/forecasts{query}"):
            status, body = await read_once(upstream, "predictor", path)
            if status != 200:
                raise ValueError(f"status {status}")
            answers.append(msgspec.json.decode(body))
        return read_page(model_key, answers[0], answers[1], now_s)
    except GlowplugError as error:
        problem = str(error)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"the predictor answered with something that is not a forecast: {error}"
    return ForecastPage(now=now_s, model_key=model_key, problem=problem)


async def prices_of(upstream: Upstream, gpu_id: str, now_s: float) -> PricePage:
    """Raises NotFound for a GPU unknown to the placer; the page shows its other failures."""
    try:
        status, body = await read_once(upstream, "placer", f"/v1/gpus/{quote(gpu_id)}/worth")
        if status == 200:
            return PricePage(now=now_s, gpu_id=gpu_id, prices=msgspec.json.decode(body, type=GpuPrices))
        problem = f"the placer answered {status}"
    except GlowplugError as error:
        problem, status = str(error), 0
    except msgspec.MsgspecError as error:
        problem, status = f"the placer answered with something that is not a price list: {error}", 0
    if status == 404:
        raise NotFound(f"no GPU {gpu_id!r}", param="gpu")
    return PricePage(now=now_s, gpu_id=gpu_id, problem=problem)


def read_page(model_key: str, windows: Any, forecasts: Any, now_s: float) -> ForecastPage:
    """Merge answers of /v1/windows and /v1/forecasts. Raises KeyError, TypeError or ValueError."""
    window_s = float(windows["window_s"])
    policy = str(forecasts.get("policy") or "none")
    rows = [row for row in forecasts["data"] if row["model_key"] == model_key]
    points = msgspec.convert(rows, list[ForecastPoint])
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
        return "no forecasting policy is in force: past demand is recorded, none is forecast"
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
