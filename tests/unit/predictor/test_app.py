"""Forecasts in REST and metrics."""

import httpx
import pytest
from prometheus_client import CollectorRegistry

from glowplug.controllers.effects import Tick
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.domain.snapshot import ModelLoad
from glowplug.policies.registry import choose
from glowplug.runtime.control import ControlService
from glowplug.services.console.asked import read_page
from glowplug.services.predictor.main import ForecastCollector, make
from glowplug.services.predictor.settings import PredictorSettings
from tests.fleet_builder import load_report


class FakeService:
    not_ready = staticmethod(lambda: "")

    def __init__(self, controller: PredictorController) -> None:
        self._controller = controller

    def controller(self, _: type) -> PredictorController:
        return self._controller


@pytest.fixture
def controller() -> PredictorController:
    made = PredictorController(PredictorParams(window_s=60), choose("prediction", "last_window"))
    for number, concurrency in enumerate((4, 2)):
        made.handle(load_report(m=ModelLoad(num_in_flight=concurrency)), number * 60.0)
        made.handle(Tick(), number * 60.0 + 60.0)
    return made


async def test_what_was_and_what_is_expected_reach_the_console(controller: PredictorController) -> None:
    settings = PredictorSettings(service_id="predictor-1", policy_prediction="last_window")
    service: ControlService = FakeService(controller)  # type: ignore[assignment]
    transport = httpx.ASGITransport(make(service, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://predictor") as client:
        assert (await client.get("/policies")).json() == {"prediction": "last_window"}
        forecasts = (await client.get("/v1/forecasts?model=m")).json()
        windows = (await client.get("/v1/windows?model=m")).json()
        everybody = (await client.get("/v1/forecasts")).json()["data"]
    assert windows["window_s"] == 60.0, "the policy's own, unless it is told another"
    assert {row["target_at"] for row in everybody} == {120.0, 180.0}, "of all models only what is to come"
    page = read_page("m", windows, forecasts, 130.0)
    assert (page.policy, page.why_empty, page.problem) == ("last_window", "", "")
    points = [p for p in page.forecasts if p.metric == "concurrency"]
    assert [(p.target_at, round(p.value, 6)) for p in points] == [(60.0, 4.0), (120.0, 2.0), (180.0, 2.0)]
    assert [p.ahead for p in points] == [1, 1, 2]
    assert points[1].quantiles == ((1.0, 4.0),) and points[1].error_ratio == 1.0 and points[1].made_at == 120.0
    assert {p.metric for p in page.forecasts} == {"concurrency", "requests", "prompt_tokens", "response_tokens"}


def test_what_an_instance_takes_may_be_known_from_a_profile() -> None:
    """PreServe section 4.1's offline phase: known before any window shows it."""
    per_s = {"prompt": 1560, "response": 285, "total": 1845}
    settings = PredictorSettings.of({f"capacity_{name}_per_s": rate for name, rate in per_s.items()})
    made = PredictorController(settings.params, choose("prediction", "last_window"))
    made.handle(load_report(m=ModelLoad(num_in_flight=1)), 0.0)
    made.handle(Tick(), 60.0)
    (forecast, *_) = made.forecasts["m"]
    assert (forecast.prompt_per_s, forecast.response_per_s, forecast.total_per_s) == (1560, 285, 1845)


def test_metrics_are_of_the_open_window(controller: PredictorController) -> None:
    registry = CollectorRegistry()
    registry.register(ForecastCollector(lambda: controller))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m"} | labels)

    assert value("glowplug_forecast_concurrency", stat="mean") == pytest.approx(2.0)
    assert value("glowplug_forecast_concurrency", stat="peak") == 4.0
    assert value("glowplug_forecast_error_ratio") == pytest.approx(1.0)
    assert value("glowplug_forecast_made_timestamp_seconds") == 120.0
    assert value("glowplug_forecast_tokens_per_second", kind="prompt") == 0.0


def test_no_forecast_is_no_series() -> None:
    registry = CollectorRegistry()
    registry.register(ForecastCollector(lambda: None))
    assert [s for metric in registry.collect() for s in metric.samples] == []
