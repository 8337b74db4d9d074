"""Start the placer."""

import asyncio
import time
from dataclasses import replace

from prometheus_client import REGISTRY

from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.placer.controller import CORDONS, Cordon, PlacerController, PlacerParams
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.events.subjects import commands_to, entity_facts, facts_of
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.port import wants_seconds
from glowplug.policies.prewarming.port import reads_profile
from glowplug.policies.registry import choose
from glowplug.policies.start_times import START_TIMES, StartRow
from glowplug.runtime.control import ControlService, Wiring
from glowplug.runtime.service import World, run
from glowplug.telemetry.metrics import FailureCounter
from services.placer.app import make
from services.placer.metrics import FleetCollector
from services.placer.settings import PlacerSettings

WIRING = Wiring(
    tables={
        "models": Model,
        "nodes": Node,
        "instances": Instance,
        CORDONS: Cordon,
        LEADERS: Leader,
        START_TIMES: StartRow,
    },
    facts=[
        entity_facts("instance"),
        entity_facts("node"),
        *(facts_of(name) for name in ("model.deployed", "weights.fetched", "weights.fetch_failed", "forecast.made")),
    ],
    telemetry=[facts_of("router.load_reported"), facts_of("node.beat")],
    commands=[commands_to("placer")],
)


def wiring_of(settings: PlacerSettings) -> Wiring:
    """What it listens to: each request's end only for policies that learn from it."""
    prewarm = choose("prewarming", settings.policy_prewarming)
    if not (wants_seconds(choose("placement", settings.policy_placement)) or reads_profile(prewarm)):
        return WIRING
    return replace(WIRING, telemetry=[*WIRING.telemetry, facts_of("request.finished")])


def params_of(settings: PlacerSettings) -> PlacerParams:
    """The controller's bounds as configured."""
    return PlacerParams(
        node_lease_s=settings.node_lease_s,
        min_residency_s=settings.min_residency_s,
        fair_wait_s=settings.fair_wait_s,
        evict_grace_s=settings.evict_grace_s,
        turns=settings.turns,
        victims=settings.victims,
        fair_requests=settings.fair_requests,
        evict_becomes=settings.evict_becomes,
        prewarm_every_s=settings.prewarm_every_s,
        network_bytes_per_s=settings.network_bytes_per_s,
        pcie_bytes_per_s=settings.pcie_bytes_per_s,
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
    service = ControlService(World.open("placer", settings))
    collector = FleetCollector(lambda: service.controller(PlacerController) if service.shell else None, time.time)
    service.world.metrics.observers += [collector.saw, FailureCounter().saw]
    REGISTRY.register(collector)
    policies = {
        "placement": settings.policy_placement,
        "eviction": settings.policy_eviction,
        "prewarming": settings.policy_prewarming,
    }
    place, evict, prewarm = (choose(room, name) for room, name in policies.items())
    params = params_of(settings)

    def controller(epoch: int) -> PlacerController:
        return PlacerController(place, evict, policies, epoch, params, prewarm=prewarm)

    await service.run(stopping, make(service, settings, policies), controller, wiring_of(settings))


def main() -> None:
    run(serve)
