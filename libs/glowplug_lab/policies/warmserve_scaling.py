"""Scaling by the average load of the last seconds against the instances' slots.

Paper: WarmServe section 3 (the autoscaler checks load and instances periodically and stops instances of a model that is
used too little; they finish their requests in a grace period) with the constants of its authors' code: every 0.5 s,
with L the number of requests held or running averaged over 5 s, n instances and B requests each,

    L > 0.8 n B:  n = ceil(L / 0.8 / B)        L < 0.5 n B:  n = ceil(L / 0.5 / B)

An instance is protected for its first 5 s; the least loaded goes first.

Departures:
- A request that finds no slot starts an instance at once, unless one is coming (the paper's router does so, section 6):
  averaged over 5 s a burst would otherwise wait for the mean to rise.
- A draining instance is taken back when the load returns. In the paper it must "no longer receive additional requests"
  (section 4.1) and stops: `take_back=False`, as in `one_way`.
- The last instance goes by the model's own keep-alive; in the paper L = 0 ends it. `keep_alive_s: 0` in the model is
  the paper's.
- While one instance is that young none is drained: a busy old one is not stopped for a new one that is protected.
- Capacity is the slots that the instances report, so that a pipeline counts for its stages.
"""

import math
from dataclasses import dataclass, field

from glowplug.domain.phrasing import counted, doing
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveParams:
    up_ratio: float = 0.8
    down_ratio: float = 0.5
    average_s: float = 5.0
    every_s: float = 0.5
    protect_s: float = 5.0  # age before which a new instance protects all
    take_back: bool = True  # resume draining instances; False: never, as in the paper


@dataclass(frozen=True, slots=True)
class Level:
    """A level that is known at each look, and constant in between. `marks` are (when, integral so far), oldest first,
    `grain_s` apart; at the last one `value` began to count."""

    value: float = 0.0
    marks: tuple[tuple[float, float], ...] = ()

    def seen(self, now_s: float, value: float, span_s: float, grain_s: float) -> "Level":
        """Set the level to `value` from `now_s` on, and forget what is older than `span_s`."""
        if not self.marks:
            return Level(value, ((now_s, 0.0),))
        at, total = self.marks[-1]
        here = (now_s, total + self.value * max(0.0, now_s - at))
        kept = self.marks
        if len(kept) > 1 and now_s - kept[-2][0] < grain_s:
            kept = kept[:-1]
        first = 0
        while first + 1 < len(kept) and kept[first + 1][0] <= now_s - span_s:
            first += 1
        return Level(value, (*kept[first:], here))

    def mean(self, now_s: float, span_s: float) -> float:
        """Mean over the last `span_s`, or over the known part of them; the level itself over no time at all."""
        at, total = self.marks[-1]
        total += self.value * max(0.0, now_s - at)
        begin = max(now_s - span_s, self.marks[0][0])
        if now_s - begin <= 0:
            return self.value
        return (total - self._integral(begin)) / (now_s - begin)

    def _integral(self, at_s: float) -> float:
        """The integral up to `at_s`, interpolated between marks."""
        before = self.marks[0]
        for mark in self.marks:
            if mark[0] >= at_s:
                width = mark[0] - before[0]
                return before[1] + (mark[1] - before[1]) * ((at_s - before[0]) / width if width > 0 else 0.0)
            before = mark
        return before[1] + self.value * (at_s - before[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveState:
    """The recent load, and the number wanted at the last look."""

    load: Level = field(default_factory=Level)
    looked_at: float = float("-inf")
    num_wanted: int = 0
    reason: str = ""


def scale(
    view: ScalingView, state: WarmserveState | None = None, params: WarmserveParams = WarmserveParams()
) -> tuple[ScaleDecision, WarmserveState]:
    """Decide by the average load how many instances `model` should have, and which to drain or to take back."""
    state, average = watch(view, state, params)
    decision = settle(
        view,
        state.num_wanted,
        state.reason,
        may_go=lambda _: not is_growing(view, params),
        inputs={"load_average": round(average, 3)},
        take_back=params.take_back,
    )
    return decision, state


def one_way(view: ScalingView, state: WarmserveState | None = None) -> tuple[ScaleDecision, WarmserveState]:
    """Scale as `scale` does, but never take back a draining instance (section 4.1, to the letter)."""
    return scale(view, state, WarmserveParams(take_back=False))


def watch(view: ScalingView, state: WarmserveState | None, params: WarmserveParams) -> tuple[WarmserveState, float]:
    """Count the requests that wait or run; returns the state, with the number wanted, and their average."""
    state = state or WarmserveState()
    seen = state.load.seen(view.now_s, view.demand, params.average_s, params.every_s / 2)
    average = seen.mean(view.now_s, params.average_s)
    wanted, reason, looked_at = state.num_wanted, state.reason, state.looked_at
    if view.now_s - looked_at >= params.every_s - 1e-9:
        wanted, reason = target(view, average, params)
        looked_at = view.now_s
    if is_full(view) and wanted <= view.num_running:
        wanted, reason = (
            view.num_running + 1,
            f"{doing(view.load.num_waiting, 'request', 'waits')}, and no instance has a slot",
        )
    return WarmserveState(load=seen, looked_at=looked_at, num_wanted=wanted, reason=reason), average


def target(view: ScalingView, average: float, params: WarmserveParams) -> tuple[int, str]:
    """The number of instances wanted for that average load, and why."""
    capacity = sum(i.max_concurrency for i in view.running) + view.num_pending * view.per_instance
    there = view.num_coming_or_there
    instances = counted(there, "instance")
    said = f"it has had {average:.2f} requests at once on average over {params.average_s:g} s"
    if average > params.up_ratio * capacity:
        wanted = math.ceil(average / params.up_ratio / view.per_instance - 1e-9)
        return max(wanted, there), f"{said}, more than {params.up_ratio:.0%} of what {instances} may run"
    if average < params.down_ratio * capacity:
        wanted = math.ceil(average / params.down_ratio / view.per_instance - 1e-9)
        return min(wanted, there), f"{said}, less than {params.down_ratio:.0%} of what {instances} may run"
    return there, f"{said}, {params.down_ratio:.0%} to {params.up_ratio:.0%} of what {instances} may run"


def is_growing(view: ScalingView, params: WarmserveParams) -> bool:
    """Return whether an instance is in its first seconds."""
    return any(view.now_s - i.created_at < params.protect_s for i in view.running)


def is_full(view: ScalingView) -> bool:
    """Return whether requests wait while no instance is starting and no running one has a free slot."""
    if not view.load.num_waiting or view.num_pending:
        return False
    if len(view.ready) < len(view.running):
        return False
    return all(view.in_flight(i) >= i.max_concurrency for i in view.running)
