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
from glowplug.runtime.shell import Shell
from glowplug.services.autoscaler.access_watch import AccessWatch
from glowplug.services.autoscaler.app import make
from glowplug.services.autoscaler.file_watch import READ_S
from glowplug.services.autoscaler.metrics import ModelCollector
from glowplug.services.autoscaler.model_watch import ModelWatch
from glowplug.services.autoscaler.settings import AutoscalerSettings
from glowplug.weights.measure import ASK_S, measured


async def serve(stopping: asyncio.Event) -> None:
    settings = AutoscalerSettings()
    service = ControlService(World.open("autoscaler", settings), READS)
    REGISTRY.register(ModelCollector(lambda: service.controller(AutoscalerController) if service.shell else None))
    scale = choose("scaling", settings.policy_scaling)
    params = AutoscalerParams(stop_becomes=settings.stop_becomes, lead_s=settings.forecast_lead_s)
    options, ask_s = settings.source_options(), min(ASK_S, 0.8 * READ_S)
    measure = partial(measured, options=options, timeout_s=ask_s)
    watch, access_watch = ModelWatch(settings.models_dir, measure=measure), AccessWatch(settings.access_dir)

    def controller(epoch: int) -> AutoscalerController:
        return AutoscalerController(scale, settings.policy_scaling, epoch, params)

    async def follow(shell: Shell) -> None:
        await asyncio.gather(access_watch.run(shell), watch.run(shell))

    await service.run(stopping, make(service, settings, watch), controller, background=follow)


def main() -> None:
    run(serve)
