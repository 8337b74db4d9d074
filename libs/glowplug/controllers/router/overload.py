"""Estimate waits: which held requests cannot be sent on in time, and when a refused client may ask again.

A queue's work is the time its model's slots need to serve it. With memory for all models, a request waits for the rest
of a start and for the work before it, over the slots that its model may grow to. While memory is short (requests wait
and no instance of the model runs or starts), each other model has as much work done meanwhile as this one, or all its
work, as under fair sharing. The pace of all models, starts and drains included, is measured.

No request is refused on a guessed answer time, except a stream at its last chance while memory is short, which needs
some reserve. By Retry-After, waiting and earlier refused requests will have been served.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.errors import Contended
from glowplug.domain.instance import Instance, slots_per_instance
from glowplug.domain.model import Model
from glowplug.fleet.status import StartEstimates
from glowplug.fleet.tables import FleetTables

_WITHOUT_S = 1.0  # a request waiting this long with no start under way lacks memory: starts show in milliseconds
_PACE_OVER_S = 20.0  # averaging time of the pace; it begins as if only models with memory answered
_LAST_CHANCE = 2 / 3  # factor on `ratio` while memory is short: the pace starts too high, without starts and drains
_LEAST_PACE = 0.1  # assumed of an idle fleet: it may only be paused
_MAX_ASKED_BACK = 10_000  # refused requests remembered per model
_LONGEST_S = 600  # bound of every Retry-After


def retry_after_s(seconds: float) -> float:
    return float(min(max(math.ceil(seconds), 1), _LONGEST_S))


@dataclass(slots=True)
class Estimates:
    """Predicted start seconds (`starts`) and mean answer seconds (exponentially weighted), per model_key."""

    starts: StartEstimates = field(default_factory=StartEstimates)
    default_service_s: float = 3.0
    weight: float = 0.3  # of the newest sample
    least_samples: int = 5  # answers of a model before its mean is a measurement
    steady_weight: float = 0.05  # least weight of the newest sample in a mean that supports refusals
    service_s: dict[str, float] = field(default_factory=dict)
    _steady_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # model_key -> samples, mean

    def learn_service(self, model_key: str, took_s: float) -> None:
        if took_s > 0:
            old = self.service_s.get(model_key)
            self.service_s[model_key] = took_s if old is None else old + self.weight * (took_s - old)
            num, mean = self._steady_s.get(model_key, (0, 0.0))
            weight = max(1 / (num + 1), self.steady_weight)
            self._steady_s[model_key] = (num + 1, mean + weight * (took_s - mean))

    def measured_service_s(self, model_key: str) -> float | None:
        """Return mean seconds of the last twenty or so answers; None before `least_samples`."""
        num, mean = self._steady_s.get(model_key, (0, 0.0))
        return mean if num >= self.least_samples else None

    def queue_s(self, model_key: str, num_ahead: int, num_slots: int) -> float:
        service_s = self.service_s.get(model_key, self.default_service_s)
        return math.ceil(num_ahead / max(num_slots, 1)) * service_s

    def forget(self, model_key: str) -> None:
        self.starts.times.forget(lambda key: key == model_key)
        self.service_s.pop(model_key, None)
        self._steady_s.pop(model_key, None)


class _Works:
    def __init__(self, works: Mapping[str, float] | None = None) -> None:
        self._works = works or {}
        self._sorted = sorted(self._works.values())
        self._sums = [0.0, *accumulate(self._sorted)]

    def beside(self, model_key: str, work_s: float) -> float:
        at = bisect_left(self._sorted, work_s)
        own_s = min(work_s, self._works.get(model_key, 0.0))
        return self._sums[at] + (len(self._sorted) - at) * work_s - own_s


@dataclass(slots=True)
class Overload:
    """Detection of memory shortages and late requests. `ratio`: refuse a request whose estimated wait exceeds its
    remaining time by this factor; 0: never."""

    fleet: FleetTables
    estimates: Estimates
    ratio: float
    is_short: bool = False  # models wait for memory
    _held: _Works = field(default_factory=_Works)  # waiting requests
    _owed: _Works = field(default_factory=_Works)  # ... and those asked to come back
    pace: float = 1.0  # work done per second by all models together, while memory is short
    _best: float = 0.0  # highest pace of this shortage
    _sustained: float = 0.0  # highest pace of the last shortage; 0: unknown
    _short_at: float = 0.0
    _dispatched: dict[str, int] = field(default_factory=dict)
    _looked_at: float = 0.0

    def look(self, queues: Iterable[tuple[str, ModelQueue]], now_s: float) -> None:
        num_there = num_without = 0
        done_s, held, owed = 0.0, dict[str, float](), dict[str, float]()
        for key, queue in queues:
            num_new = queue.num_dispatched - self._dispatched.get(key, 0)
            while queue.asked_back and queue.asked_back[0] <= now_s:
                queue.asked_back.popleft()
            is_owed = queue.waiting or queue.asked_back
            unit_s = self._unit_s(key) if num_new or is_owed else 0.0
            done_s += unit_s * num_new
            self._dispatched[key] = queue.num_dispatched
            if not queue.waiting and not queue.num_running:
                continue
            if is_owed:
                held[key] = unit_s * len(queue.waiting)
                owed[key] = unit_s * (len(queue.waiting) + len(queue.asked_back))
            oldest = queue.oldest()
            if self._has_memory(key):
                num_there += 1
            elif oldest is not None and now_s - oldest.waits_since >= _WITHOUT_S:
                num_without += 1
        if self.is_short:
            self.pace += (done_s - self.pace * (now_s - self._looked_at)) / _PACE_OVER_S
            if now_s - self._short_at >= _PACE_OVER_S:
                self._best = max(self._best, self.pace)
        elif num_without:
            self._sustained = self._best or self._sustained
            self.pace = min(float(max(1, num_there)), self._sustained or math.inf)
            self._best, self._short_at = 0.0, now_s
        self._held, self._owed, self._looked_at = _Works(held), _Works(owed), now_s
        self.is_short = num_without > 0

    def forget(self, model_key: str) -> None:
        self._dispatched.pop(model_key, None)

    def _has_memory(self, model_key: str) -> bool:
        if any(i.serves for i in self.fleet.of(model_key).values()):
            return True
        model = self.fleet.models.get(model_key)
        return model is not None and bool(model.base) and self._has_memory(model.base)

    def _unit_s(self, model_key: str) -> float:
        service_s = self.estimates.service_s.get(model_key, 0.0)
        return service_s / self._num_slots(model_key) if service_s else 0.0

    def _num_slots(self, model_key: str) -> int:
        ready = self.fleet.ready(model_key) or self.fleet.coming(model_key)
        model = self.fleet.models.get(model_key)
        return sum(i.max_concurrency for i in ready) or (model.max_concurrency if model else 1)

    def _shared_s(self, model_key: str, work_s: float, works: _Works) -> float:
        return max(work_s, (work_s + works.beside(model_key, work_s)) / max(self.pace, _LEAST_PACE))

    def wait_s(self, model: Model, num_ahead: int, now_s: float, *, guess: bool = False) -> float | None:
        """Return the least wait in seconds behind `num_ahead` requests; None where no answer time is measured. `guess`:
        while memory is short, take the default answer time instead of None."""
        service_s = self.estimates.measured_service_s(model.key)
        if service_s is None and guess and self.is_short:
            service_s = self.estimates.default_service_s
        if service_s is None:
            return None
        num_slots = self._num_slots(model.key)
        if not self.is_short:
            each = slots_per_instance(self.fleet.ready(model.key), model.max_concurrency)
            num_slots = max(num_slots, model.max_instances * each)
            return self.start_left_s(model.key, now_s) + num_ahead * service_s / num_slots
        work_s = num_ahead * service_s / num_slots
        return max(self.start_left_s(model.key, now_s), self._shared_s(model.key, work_s, self._held))

    def start_left_s(self, model_key: str, now_s: float) -> float:
        """Return seconds until an instance is ready: 0 when one is. An adapter's start begins once its base is
        ready."""
        rows, model = self.fleet.of(model_key).values(), self.fleet.models.get(model_key)
        left_s = self.estimates.starts.left_s(model, rows, now_s)
        if model is not None and model.base and not any(row.serves for row in rows):
            left_s += self.start_left_s(model.base, now_s)
        return left_s

    def is_late(
        self, model: Model, num_ahead: int, waited_s: float, now_s: float, *, last_chance: bool = False
    ) -> bool:
        """Return whether to refuse a request after `waited_s` with `num_ahead` before it. `last_chance`: it cannot be
        refused later."""
        if not self.ratio:
            return False
        wait_s = self.wait_s(model, num_ahead, now_s, guess=last_chance)
        ratio = self.ratio * (_LAST_CHANCE if last_chance and self.is_short else 1.0)
        return wait_s is not None and wait_s > ratio * max(0.0, model.max_wait_s - waited_s)

    def late(self, model: Model, queue: ModelQueue, now_s: float) -> list[Request]:
        """Return the held requests to refuse now. Those that gave way, or whose client has a 200, stay."""
        oldest = queue.oldest()
        if oldest is None or not self.is_late(model, len(queue.waiting) - 1, now_s - oldest.waits_since, now_s):
            return []  # even the last request would not be late with the least time left
        found: list[Request] = []
        num_ahead = 0
        for request in queue.in_turn(now_s):
            stays = request.head_sent or request.gave_way_at
            if stays or not self.is_late(model, num_ahead, now_s - request.arrived_at, now_s):
                num_ahead += 1
            else:
                found.append(request)
        return found

    def error(self, model: Model, queue: ModelQueue, now_s: float) -> Contended:
        text = (
            f"`{model.name}` is overloaded: the request could not be taken within {model.max_wait_s:g} s. "
            f"{len(queue.waiting)} wait before it."
        )
        error = Contended(text, retry_after_s=self.ask_back_s(model, queue, now_s))
        error.code = "wait_too_long"
        return error

    def ask_back_s(self, model: Model, queue: ModelQueue, now_s: float) -> float:
        """Return a Retry-After and note it: by then the requests that wait or were asked back before will have been
        served."""
        back = queue.asked_back
        while back and back[0] <= now_s:
            back.popleft()
        work_s = self.estimates.queue_s(model.key, len(queue.waiting) + len(back), self._num_slots(model.key))
        queue_s = self._shared_s(model.key, work_s, self._owed) if self.is_short else work_s
        after_s = retry_after_s(self.start_left_s(model.key, now_s) + queue_s)
        if len(back) < _MAX_ASKED_BACK:
            back.append(max(now_s + after_s, back[-1] if back else 0.0))
        return after_s

    def eta_s(self, model_key: str, queue: ModelQueue | None, taken: Callable[[Instance], int], now_s: float) -> float:
        """Return seconds until the model serves a new request: 0 when it is hot and has a free slot. `taken`: taken
        slots of an instance."""
        ready = self.fleet.ready(model_key)
        num_ahead = len(queue.waiting) if queue else 0
        if not ready:
            return self.start_left_s(model_key, now_s)
        num_slots = sum(i.max_concurrency for i in ready)
        has_slot = sum(taken(i) for i in ready) < num_slots and not num_ahead  # else the waiting requests lack KV cache
        return 0.0 if has_slot else self.estimates.queue_s(model_key, num_ahead + 1, num_slots)
