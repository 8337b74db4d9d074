"""GPU memory that requests take, in GPU-seconds: an instance that fills half of one GPU for a second takes 0.5.

Each moment of an instance is shared evenly among the requests that this router has there then. A running integral of
1/n by instance makes that a few additions a request. A start or wake is charged to the request that it was for: the
first one sent to the instance after it, which had arrived before it began; at most one at each router.
"""

import math
from collections.abc import Container

from glowplug.controllers.router.queue import Request
from glowplug.domain.instance import BEFORE_START, Instance

CLOCKS_APART_S = 2.0  # between a router and a node


class _Stay:
    """One instance: its requests of this router, and the integral of 1/n over time."""

    __slots__ = ("at", "instance", "integral_s", "num", "share", "started_at")

    def __init__(self) -> None:
        self.instance: Instance | None = None
        self.num, self.at, self.integral_s = 0, 0.0, 0.0
        self.share, self.started_at = math.nan, 0.0


class Stays:
    """The instances of one router, and what each of its requests has taken so far."""

    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}

    def sent(self, request: Request, instance: Instance, now_s: float) -> None:
        """Count a request at the instance that it is sent to."""
        stay = self._stays.get(instance.instance_id)
        if stay is None:
            stay = self._stays[instance.instance_id] = _Stay()
        if stay.num and now_s > stay.at:
            stay.integral_s += (now_s - stay.at) / stay.num
        if stay.instance is not instance:
            self._look(stay, request, instance)
        stay.at, stay.num = now_s, stay.num + 1
        request.stay_from_s = stay.integral_s

    def left(self, request: Request, now_s: float) -> None:
        """Stop counting a request at `request.instance_id`."""
        stay = self._stays[request.instance_id]
        if now_s > stay.at:
            stay.integral_s += (now_s - stay.at) / stay.num
        stay.at, stay.num = now_s, stay.num - 1
        request.gpu_s += (stay.integral_s - request.stay_from_s) * stay.share

    def taken(self, request: Request | None, now_s: float) -> float:
        """GPU-seconds that a request has taken until now; NaN where the bytes of an instance or of its GPUs, or the
        request, are not known."""
        if request is None:
            return math.nan
        if not request.instance_id:
            return request.gpu_s
        stay = self._stays[request.instance_id]
        since_s = (now_s - stay.at) / stay.num if now_s > stay.at else 0.0
        return request.gpu_s + (stay.integral_s + since_s - request.stay_from_s) * stay.share

    def forget(self, instances: Container[str]) -> None:
        """Drop what is known of others than these that run nothing."""
        for instance_id in [i for i, stay in self._stays.items() if not stay.num and i not in instances]:
            del self._stays[instance_id]

    def _look(self, stay: _Stay, request: Request, instance: Instance) -> None:
        stay.instance, stay.share = instance, instance.gpu_share
        if instance.ready_at == stay.started_at:
            return
        stay.started_at = instance.ready_at
        phases = (phase.started_at for phase in instance.phases if phase.name not in BEFORE_START)
        began_at = min(phases, default=instance.created_at)
        if instance.ready_at > began_at and request.arrived_at <= began_at + CLOCKS_APART_S:
            request.gpu_s += (instance.ready_at - began_at) * stay.share
