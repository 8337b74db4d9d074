"""Start the predictor."""

import asyncio

from prometheus_client import REGISTRY

from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.reads import READS
from glowplug.policies.prediction.port import make_with
from glowplug.policies.registry import choose
from glowplug.runtime.control import ControlService
from glowplug.runtime.service import World, run
from glowplug.services.predictor.app import make
from glowplug.services.predictor.metrics import ForecastCollector
from glowplug.services.predictor.settings import PredictorSettings


async def serve(stopping: asyncio.Event) -> None:
    settings = PredictorSettings()
    service = ControlService(World.open("predictor", settings), READS)
    REGISTRY.register(ForecastCollector(lambda: service.controller(PredictorController) if service.shell else None))
    forecaster = choose("prediction", settings.policy_prediction)
    make_with(forecaster, settings.window_s or 60.0)  # raises now if the forecaster cannot be made here
    params = settings.params()
    await service.run(stopping, make(service, settings), lambda _: PredictorController(params, forecaster))


def main() -> None:
    run(serve)
