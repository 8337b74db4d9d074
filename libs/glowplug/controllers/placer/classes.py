"""What the class of requests changes about a placement.

Ours (docs/adr/0025): seconds of waiting count by the class's factor (policies/worth.py). A start that only batch
requests wait for takes free memory, and what is less likely to be needed before it could be reloaded than the factor
of batch: no instance leaves for it that runs or expects other requests. The factor rises while they wait, and once it
is a standard request's the routers report the requests as standard ones, so that the start has its turn like any other.
"""

from collections.abc import Mapping

from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.placement import Placement
from glowplug.controllers.placer.victims import Victims
from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.worth import patience_s


def may_drop(placement: Placement, decision: PlaceDecision, holdings: Holdings, fleet: Fleet) -> bool:
    """Return whether the copies may go that a place for batch requests would drop."""
    factor, rows = placement.batch_factor(holdings.now_s), fleet.instances.by_id
    return all(holdings.of(rows[copy]).asked < factor for copy in decision.drops if copy in rows)


def weighted_wait_s(placement: Placement, victims: Victims, now_s: float) -> float:
    """Seconds that a placement has waited, times the factor of the most urgent class that waits for its model."""
    return max(0.0, now_s - placement.received_at) * victims.factor_of(placement.command.model)


def why_it_waits(
    placement: Placement, held: Mapping[str, str], now_s: float
) -> tuple[str, dict[str, float | int | str]]:
    """The reason why a start for batch requests waits, and the figures behind it. `held`: instances that serve where it
    could, and why each stays."""
    model, factor = placement.command.model, placement.batch_factor(now_s)
    left_s = max(0.0, patience_s(model.max_wait_s) - (now_s - placement.command.wanted_at))
    stays = "; ".join(f"{name}: {why}" for name, why in sorted(held.items()))
    reason = (
        f"batch requests wait for {model.name}: nothing may leave for them until memory is free, what lies there is "
        f"not expected to be needed, or they have waited {left_s:.0f} s more and count as standard requests"
    )
    return f"{reason} ({stays})" if stays else reason, {"class": "batch", "class_factor": round(factor, 2)}
