"""Seconds that waking a model's sleeping engine is predicted to save against a start elsewhere.

Ours: SwapServeLLM (section 4) knows one node, where an engine sleeps on its own GPU. Here another instance may be busy
on that GPU while others are available. A start waits for the sleeping engine as long as the wake should save, times
`sleeper_patience`, and then goes elsewhere: it never takes much longer than twice the better of both (rent or buy). It
does not wait past the moment at which a start elsewhere would still meet `max_wait_s`. A quicker start elsewhere is
made at once.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.victims import Victims
from glowplug.domain.instance import Becomes, Instance, InstanceState
from glowplug.fleet.status import lacks_one_asleep
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import copies_of
from glowplug.policies.placement.expect import expect
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu

LEAVE_S: Final = 0.1  # of an idle engine, before any was measured


class Saving(NamedTuple):
    """Seconds to the first token: saved by the quickest wake, and taken by the start elsewhere."""

    saved_s: float
    elsewhere_s: float


def saving(
    fleet: Fleet,
    view: PlacementView,
    victims: Victims,
    request: PlaceRequest,
    elsewhere: PlaceDecision,
    leaving: Iterable[Instance],
) -> Saving:
    """Compare the quickest wake with a start at `elsewhere`, for which `leaving` leave first. `saved_s` is 0 or less
    where a wake saves nothing, or the instances serving there will not leave."""
    model, started = request.model, expect(elsewhere, request, view)
    if started is None:
        return Saving(0.0, 0.0)
    wakes = []
    for row in copies_of(request, view):
        gpu_ids = tuple(worker.gpu_id for worker in row.workers)
        if row.state is not InstanceState.SWAPPED_OUT or not victims.may_come_free(gpu_ids, model):
            continue
        stage = StageDecision(node_id=row.node_id, gpu_ids=gpu_ids, bytes_per_gpu=bytes_per_gpu(model))
        woken = expect(PlaceDecision(stages=(stage,), source=row.instance_id), request, view)
        if woken is not None:
            wakes.append(woken.ttft_s + leave_s(fleet, victims.serving(gpu_ids)))
    elsewhere_s = started.ttft_s + leave_s(fleet, leaving)
    return Saving(elsewhere_s - min(wakes) if wakes else 0.0, elsewhere_s)


def leave_s(fleet: Fleet, leaving: Iterable[Instance]) -> float:
    return max((_leaves_s(fleet, row) for row in leaving), default=0.0)


def _leaves_s(fleet: Fleet, row: Instance) -> float:
    model = fleet.models.get(row.model_key)
    took = fleet.network.leave_s(model, becomes_of(fleet, row)) if model else None
    return took[0] if took else LEAVE_S


def becomes_of(fleet: Fleet, victim: Instance) -> Becomes:
    """Return an instance's state after its eviction: asleep where its model lacks a sleeping copy."""
    if victim.host_id:
        return "stopped"  # its host serves on
    owner = fleet.models.get(victim.model_key)
    rows = fleet.instances.living(victim.model_key).values()
    is_lacking = owner is not None and lacks_one_asleep(owner, rows)
    return "swapped_out" if is_lacking else fleet.params.evict_becomes
