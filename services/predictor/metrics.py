"""Metrics of the predictor: forecasts of the open window, with their age and recent error."""

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.predictor.controller import PredictorController
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap


class ForecastCollector(Collector):
    """A collector that reads the predictor's controller at each scrape; `controller()` is None while the service
    connects."""

    def __init__(self, controller: Callable[[], PredictorController | None]) -> None:
        self._controller, self._cap = controller, LabelCap()

    def collect(self) -> Iterator[Metric]:
        load = GaugeMetricFamily(
            semconv.FORECAST_CONCURRENCY, "Requests at once expected of the open window", labels=["model", "stat"]
        )
        tokens = GaugeMetricFamily(
            semconv.FORECAST_TOKENS_PER_SECOND, "Tokens a second expected of the open window", labels=["model", "kind"]
        )
        error = GaugeMetricFamily(
            semconv.FORECAST_ERROR_RATIO, "Mean absolute error of late over the mean of what came", labels=["model"]
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
            made.add_metric([model], first.made_at)
        yield from (load, tokens, error, made)
