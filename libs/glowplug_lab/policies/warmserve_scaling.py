"""Scale by the recent average load against the instances' slots.

Paper: WarmServe section 3 (the autoscaler periodically checks load and stops underused instances, which finish their
requests in a grace period) with the constants of its authors' code: every 0.5 s, with L the requests held or running
averaged over 5 s, n instances and B requests each,

    L > 0.8 n B:  n = ceil(L / 0.8 / B)        L < 0.5 n B:  n = ceil(L / 0.5 / B)

An instance is protected for its first 5 s; the least loaded goes first.

Departures:
- A request without a slot starts an instance at once, unless one is coming (as the paper's router does, section 6);
  otherwise a burst would wait for the mean to rise.
- A draining instance is taken back when load returns. In the paper it must "no longer receive additional requests"
  (section 4.1) and stops: `take_back=False`, as in `one_way`.
- The last instance goes by the model's keep-alive; in the paper, at L = 0 (`keep_alive_s: 0`).
- While one instance is that young none is drained: no busy old one stops for a protected new one.
- Capacity is the reported slots, so a pipeline counts for its stages.
"""

import math
from dataclasses import dataclass, field

from glowplug.domain.bounds import Positive
from glowplug.domain.phrasing import counted, doing
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveParams:
    up_ratio: Positive = 0.8
    down_ratio: Positive = 0.5
    average_s: Positive = 5.0
    every_s: Positive = 0.5
    protect_s: Positive = 5.0  # age below which an instance protects all
    take_back: bool = True  # False: never, as in the paper


@dataclass(frozen=True, slots=True)
class Level:
    """Constant between looks. `marks` are (when, integral so far), oldest first, `grain_s` apart."""

    value: float = 0.0
    marks: tuple[tuple[float, float], ...] = ()

    def seen(self, now_s: float, value: float, span_s: float, grain_s: float) -> "Level":
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
        """Mean over the known part of the last `span_s`."""
        at, total = self.marks[-1]
        total += self.value * max(0.0, now_s - at)
        begin = max(now_s - span_s, self.marks[0][0])
        if now_s - begin <= 0:
            return self.value
        return (total - self._integral(begin)) / (now_s - begin)

    def _integral(self, at_s: float) -> float:
        before = self.marks[0]
        for mark in self.marks:
            if mark[0] >= at_s:
                width = mark[0] - before[0]
                return before[1] + (mark[1] - before[1]) * ((at_s - before[0]) / width if width > 0 else 0.0)
            before = mark
        return before[1] + self.value * (at_s - before[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveState:
    load: Level = field(default_factory=Level)
    looked_at: float = float("-inf")
    num_wanted: int = 0
    reason: str = ""


def scale(
    view: ScalingView, state: WarmserveState | None = None, params: WarmserveParams = WarmserveParams()
) -> tuple[ScaleDecision, WarmserveState]:
    """Decide the number of instances by average load."""
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
    """Scale without taking back draining instances (section 4.1, to the letter)."""
    return scale(view, state, WarmserveParams(take_back=False))


def watch(view: ScalingView, state: WarmserveState | None, params: WarmserveParams) -> tuple[WarmserveState, float]:
    """Update the state; also return the average load."""
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
    return any(view.now_s - i.created_at < params.protect_s for i in view.running)


def is_full(view: ScalingView) -> bool:
    if not view.load.num_waiting or view.num_pending:
        return False
    if len(view.ready) < len(view.running):
        return False
    return all(view.in_flight(i) >= i.max_concurrency for i in view.running)
