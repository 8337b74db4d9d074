"""Start the placer."""

import asyncio
import time

from prometheus_client import REGISTRY

from glowplug.controllers.placer.controller import PlacerController, PlacerParams
from glowplug.controllers.placer.reads import reads_of
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.registry import choose
from glowplug.runtime.control import ControlService
from glowplug.runtime.service import World, run
from glowplug.services.placer.app import make
from glowplug.services.placer.metrics import FleetCollector
from glowplug.services.placer.settings import PlacerSettings
from glowplug.telemetry.metrics import FailureCounter

HOLE_GRACE_S = 3.0  # in which an engine notices the loss of a stage at its next step, and its agent reports it


def params_of(settings: PlacerSettings) -> PlacerParams:
    """The controller's parameters from the settings of the same names, and the stages of a start."""
    return settings.filled(
        PlacerParams,
        follows_parts=True,
        hole_grace_s=HOLE_GRACE_S,
        start_stages=StageSeconds(
            container_s=settings.start_container_s,
            cuda_s=settings.start_cuda_s,
            library_s=settings.start_library_s,
            hop_s=settings.stage_hop_s,
            prefill_s=settings.prefill_s,
            decode_s=settings.decode_s,
        ),
    )


async def serve(stopping: asyncio.Event) -> None:
    settings = PlacerSettings()
    policies = {
        "placement": settings.policy_placement,
        "eviction": settings.policy_eviction,
        "prewarming": settings.policy_prewarming,
    }
    place, evict, prewarm = (choose(kind, name) for kind, name in policies.items())
    service = ControlService(World.open("placer", settings), reads_of(place, prewarm))
    collector = FleetCollector(lambda: service.controller(PlacerController) if service.shell else None, time.time)
    service.world.metrics.observers += [collector.saw, FailureCounter().saw]
    REGISTRY.register(collector)
    params = params_of(settings)

    def controller(epoch: int) -> PlacerController:
        return PlacerController(place, evict, policies, epoch, params, prewarm=prewarm)

    await service.run(stopping, make(service, settings, policies), controller)


def main() -> None:
    run(serve)
