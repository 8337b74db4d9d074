"""Start the predictor."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.reads import READS
from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.policies.prediction.port import make_with
from glowplug.policies.registry import choose
from glowplug.runtime.clock import published
from glowplug.runtime.control import ControlService
from glowplug.runtime.rest import make_app
from glowplug.runtime.service import World, run
from glowplug.services.predictor.settings import PredictorSettings
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap


class ForecastCollector(Collector):
    """Read the predictor's controller at each scrape; `controller()` is None before the service connects."""

    def __init__(self, controller: Callable[[], PredictorController | None]) -> None:
        self._controller, self._cap = controller, LabelCap()

    def collect(self) -> Iterator[Metric]:
        load = GaugeMetricFamily(
            semconv.FORECAST_CONCURRENCY, "Concurrent requests expected in the open window", labels=["model", "stat"]
        )
        tokens = GaugeMetricFamily(
            semconv.FORECAST_TOKENS_PER_SECOND, "Tokens/s expected in the open window", labels=["model", "kind"]
        )
        error = GaugeMetricFamily(
            semconv.FORECAST_ERROR_RATIO, "Recent mean absolute error over the actual mean", labels=["model"]
        )
        made = GaugeMetricFamily(
            semconv.FORECAST_MADE_TIMESTAMP_SECONDS, "When the forecast was made", labels=["model"]
        )
        controller = self._controller()
        for key, (first, *_) in sorted(controller.forecasts.items()) if controller is not None else ():
            model = self._cap(key)
            load.add_metric([model, "mean"], first.concurrency_mean)
            load.add_metric([model, "peak"], first.concurrency_peak)
            tokens.add_metric([model, "prompt"], first.prompt_tokens / first.window_s)
            tokens.add_metric([model, "response"], first.response_tokens / first.window_s)
            error.add_metric([model], first.error_ratio)
            made.add_metric([model], published(first).made_at)
        yield from (load, tokens, error, made)


METRICS: Final[dict[str, Callable[[Forecast | Quantile], float]]] = {
    "concurrency": lambda f: f.concurrency_mean,
    "requests": lambda f: f.num_requests,
    "prompt_tokens": lambda f: f.prompt_tokens,
    "response_tokens": lambda f: f.response_tokens,
}


def make(service: ControlService, settings: PredictorSettings) -> FastAPI:
    app = make_app(
        "predictor",
        settings.service_id,
        ready=service.not_ready,
        policies=lambda: {"prediction": settings.policy_prediction},
        description="Forecasts demand: the observed windows, and the expected next ones.",
    )

    def controller() -> PredictorController:
        return service.controller(PredictorController)

    @app.get("/v1/forecasts", tags=["forecasts"])
    async def forecasts(model: str = "") -> dict[str, Any]:
        """Forecasts per model, one row for each metric and window: for windows to come and, if `model` is given, also
        the earlier forecasts of past windows, made so many windows `ahead`. Empty without a forecasting policy
        (`policy`). `horizons`: seconds that a start of a model takes, where forecasts reach that far."""
        known = sorted(controller().forecasts.items())
        rows = [row for key, latest in known if model in ("", key) for f in latest for row in _rows(key, f)]
        past = [row for f in controller().past_forecasts(model) for row in _rows(model, f)] if model else []
        horizons = {key: controller().horizon_s(key) for key, _ in known if model in ("", key)}
        answer = {"object": "list", "data": [*past, *rows], "policy": settings.policy_prediction}
        return answer | {"horizons": {key: seconds for key, seconds in horizons.items() if seconds}}

    @app.get("/v1/capacities", tags=["forecasts"])
    async def capacities() -> dict[str, Any]:
        """The capacity of one instance within its objectives (mu), by model, in tokens/s. `rates_from` tells whether it
        was `declared`, or `measured` in `num_windows` windows; an instance was lately in full use for `used_s`
        seconds."""
        known = ((key, controller().throughput(key)) for key in controller().model_keys)
        rows = [
            {
                "model_key": key,
                **asdict(one.capacity),
                "rates_from": one.source,
                "num_windows": one.num_windows,
                "used_s": one.used_s,
            }
            for key, one in known
        ]
        return {"object": "list", "data": rows}

    @app.get("/v1/windows", tags=["forecasts"])
    async def windows(model: str = "") -> dict[str, Any]:
        """The observed demand per model, one row a window (requests, tokens, concurrency), oldest first."""
        keys = [model] if model else controller().model_keys
        rows = {key: [asdict(w) for w in controller().windows(key)] for key in keys}
        return {"object": "list", "window_s": controller().window_s, "data": rows}

    return app


def _rows(model_key: str, forecast: Forecast) -> Iterator[dict[str, Any]]:
    """Yield one row per metric. The peak is the quantile 1 of concurrency."""
    for metric, value in METRICS.items():
        bands = [[quantile.share, value(quantile)] for quantile in forecast.quantiles]
        yield {
            "model_key": model_key,
            "metric": metric,
            "value": value(forecast),
            "quantiles": [*bands, *([[1.0, forecast.concurrency_peak]] if metric == "concurrency" else [])],
            "target_at": forecast.starts_at,
            "ahead": 1 + max(0, math.ceil((forecast.starts_at - forecast.made_at) / forecast.window_s)),
            "window_s": forecast.window_s,
            "made_at": forecast.made_at,
            "error_ratio": forecast.error_ratio if metric == "concurrency" else 0.0,
            "source": forecast.source,
            "anomaly": forecast.anomaly,
        }


async def serve(stopping: asyncio.Event) -> None:
    settings = PredictorSettings.read()
    service = ControlService(World.open("predictor", settings), READS)
    REGISTRY.register(ForecastCollector(lambda: service.controller(PredictorController) if service.shell else None))
    forecaster = choose("prediction", settings.policy_prediction)
    make_with(forecaster, settings.params.window_s or 60.0)  # raises if the forecaster cannot be made here
    await service.run(stopping, make(service, settings), lambda _: PredictorController(settings.params, forecaster))


def main() -> None:
    run(serve)
