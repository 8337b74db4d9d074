"""Start the predictor."""

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI

from glowplug.controllers.predictor import PredictorController, PredictorParams
from glowplug.domain.model import Model
from glowplug.events.subjects import facts_of
from glowplug.runtime.control import ControlService, Wiring
from glowplug.runtime.rest import make_app
from glowplug.runtime.service import World, run
from services.predictor.settings import PredictorSettings

WIRING = Wiring(tables={"models": Model}, telemetry=[facts_of("router.load_reported"), facts_of("request.finished")])


def make(service: ControlService, settings: PredictorSettings) -> FastAPI:
    app = make_app(
        "predictor",
        settings.service_id,
        ready=service.not_ready,
        policies=lambda: {"prediction": "none"},
        description="Demand to come. No forecasting policy is in force yet; the past is kept.",
    )

    def controller() -> PredictorController:
        return service.controller(PredictorController)

    @app.get("/v1/forecasts", tags=["forecasts"])
    async def forecasts(model: str = "") -> dict[str, Any]:
        """Forecasts per model; empty while no forecasting policy is in force, and `policy` says so."""
        known = sorted(controller().forecasts.items())
        rows = [{"model_key": key} | asdict(f) for key, f in known if model in ("", key)]
        return {"object": "list", "data": rows, "policy": "none"}

    @app.get("/v1/windows", tags=["forecasts"])
    async def windows(model: str = "") -> dict[str, Any]:
        """What was observed: per model, one row a window (requests, tokens, concurrency), oldest first."""
        keys = [model] if model else controller().model_keys
        rows = {key: [asdict(w) for w in controller().windows(key)] for key in keys}
        return {"object": "list", "window_s": settings.window_s, "data": rows}

    return app


async def serve(stopping: asyncio.Event) -> None:
    settings = PredictorSettings()
    service = ControlService(World.open("predictor", settings))
    params = PredictorParams(window_s=settings.window_s, num_windows=settings.num_windows)
    await service.run(stopping, make(service, settings), lambda _: PredictorController(params), WIRING)


def main() -> None:
    run(serve)
