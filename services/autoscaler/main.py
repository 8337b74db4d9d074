"""Start the autoscaler."""

import asyncio
from functools import partial

from prometheus_client import REGISTRY

from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.autoscaler.reads import READS
from glowplug.policies.registry import choose
from glowplug.runtime.control import ControlService
from glowplug.runtime.service import World, run
from glowplug.weights.measure import ASK_S, measured
from services.autoscaler.app import make
from services.autoscaler.metrics import ModelCollector
from services.autoscaler.model_watch import ModelWatch
from services.autoscaler.settings import AutoscalerSettings


async def serve(stopping: asyncio.Event) -> None:
    settings = AutoscalerSettings()
    service = ControlService(World.open("autoscaler", settings), READS)
    REGISTRY.register(ModelCollector(lambda: service.controller(AutoscalerController) if service.shell else None))
    scale = choose("scaling", settings.policy_scaling)
    params = AutoscalerParams(stop_becomes=settings.stop_becomes, lead_s=settings.forecast_lead_s)
    options, ask_s = settings.source_options(), min(ASK_S, 0.8 * settings.models_read_s)
    measure = partial(measured, options=options, timeout_s=ask_s)
    watch = ModelWatch(settings.models_dir, settings.models_poll_s, settings.models_read_s, measure)

    def controller(epoch: int) -> AutoscalerController:
        return AutoscalerController(scale, settings.policy_scaling, epoch, params)

    await service.run(stopping, make(service, settings, watch), controller, background=watch.run)


def main() -> None:
    run(serve)
