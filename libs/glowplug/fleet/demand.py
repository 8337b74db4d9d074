"""What routers report of their load, and the demand per model that it adds up to.

A report of up to `max_models` models is whole each time. Past that a report names the models that have news (load, or
another one than reported last), and the whole comes in parts every `whole_every_s`: with thousands of models no message
is near the bus's limit, and a reader that missed one is right again soon.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.events.facts import RequestWaiting, RouterLoadReported

LOAD_STALE_S = 3.0  # a router silent for longer holds and runs nothing, as far as is known
DEMAND_KEPT_S = 10 * LOAD_STALE_S  # what an instance runs for a silent router may still be running
ARRIVALS_KEPT_S = 10.0
ONLY_CHANGES = 0  # num_parts of a report that is no part of a whole


class LoadReporter:
    """One router's reports."""

    def __init__(self, router_id: str, *, max_models: int = 500, whole_every_s: float = 2.0) -> None:
        self._router_id, self._max_models, self._whole_every_s = router_id, max_models, whole_every_s
        self._sent: Mapping[str, ModelLoad] = {}
        self._whole_at = float("-inf")

    def reports(self, loads: Mapping[str, ModelLoad], now_s: float) -> list[RouterLoadReported]:
        """What to send now of `loads`, which is whole; nothing when there is no news."""
        if len(loads) <= self._max_models:
            self._sent, self._whole_at = loads, now_s
            return [RouterLoadReported(router_id=self._router_id, loads=loads)]
        is_whole = not 0 <= now_s - self._whole_at < self._whole_every_s
        named = loads if is_whole else {k: load for k, load in loads.items() if self._has_news(k, load)}
        if is_whole:
            self._whole_at = now_s
        self._sent = loads
        keys = list(named)
        slices = [keys[i : i + self._max_models] for i in range(0, len(keys), self._max_models)] or [[]]
        return [
            RouterLoadReported(
                router_id=self._router_id,
                loads={key: named[key] for key in part},
                part=number if is_whole else 0,
                num_parts=len(slices) if is_whole else ONLY_CHANGES,
            )
            for number, part in enumerate(slices)
        ]

    def _has_news(self, key: str, load: ModelLoad) -> bool:
        return bool(load.num_waiting or load.num_in_flight) or self._sent.get(key) != load


@dataclass(slots=True)
class _Router:
    """How one router reports. `seen`: models of the parts of a whole so far, while they come without a gap."""

    reported_at: float = 0.0
    is_whole: bool = False
    seen: set[str] | None = None
    next_part: int = 0


class LoadReports:
    """The loads of each router by its reports: complete once one whole report of it has come."""

    def __init__(self) -> None:
        self.loads: dict[str, dict[str, ModelLoad]] = {}  # router_id -> model_key -> load
        self._routers: dict[str, _Router] = {}

    def take(self, report: RouterLoadReported, now_s: float) -> Mapping[str, ModelLoad]:
        """The router's loads as known now. The same mapping each time; it changes with the next report."""
        loads = self.loads.setdefault(report.router_id, {})
        router = self._routers.setdefault(report.router_id, _Router())
        router.reported_at = now_s
        if report.num_parts == 1:
            loads.clear()
        loads.update(report.loads)
        if report.num_parts != ONLY_CHANGES:
            _count_parts(router, loads, report)
        return loads

    def is_fresh(self, now_s: float) -> bool:
        """Whether any router has reported lately, and all its models."""
        return any(router.is_whole and now_s - router.reported_at <= LOAD_STALE_S for router in self._routers.values())

    def expire(self, now_s: float, lease_s: float = LOAD_STALE_S) -> list[str]:
        """Forget the routers that have been silent for longer than `lease_s`, or reported in the future of a clock that
        was set back; returns their ids."""
        silent = [key for key, router in self._routers.items() if not 0 <= now_s - router.reported_at <= lease_s]
        for router_id in silent:
            del self._routers[router_id], self.loads[router_id]
        return silent


def _count_parts(router: _Router, loads: dict[str, ModelLoad], report: RouterLoadReported) -> None:
    """Of a whole without a gap, models in none of its parts are gone."""
    if report.part == 0:
        router.seen = set()
    elif report.part != router.next_part:
        router.seen = None
    router.next_part = report.part + 1
    if router.seen is None:
        return
    router.seen |= report.loads.keys()
    if router.next_part == report.num_parts:
        for key in [key for key in loads if key not in router.seen]:
            del loads[key]
        router.is_whole, router.seen = True, None


def joined(loads: Sequence[ModelLoad]) -> ModelLoad:
    """The loads of one model at several routers, in one."""
    if len(loads) == 1:
        return loads[0]
    running: dict[str, int] = {}
    outlooks: dict[str, Outlook] = {}
    for load in loads:
        for instance_id, count in load.in_flight_by_instance.items():
            running[instance_id] = running.get(instance_id, 0) + count
        for instance_id, outlook in load.outlook_by_instance.items():
            known = outlooks.get(instance_id)
            outlooks[instance_id] = outlook if known is None else known.joined(outlook)
    return ModelLoad(
        num_waiting=sum(load.num_waiting for load in loads),
        num_in_flight=sum(load.num_in_flight for load in loads),
        last_active_at=max((load.last_active_at for load in loads), default=0.0),
        in_flight_by_instance=running,
        outlook_by_instance=outlooks,
        num_arrived=sum(load.num_arrived for load in loads),
        num_dispatched=sum(load.num_dispatched for load in loads),
        slots_per_instance=max((load.slots_per_instance for load in loads), default=0),
    )


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One request.waiting. `sent_at` is the router's clock, `received_at` ours."""

    num_waiting: int
    deadline_at: float
    sent_at: float
    received_at: float


class Demand:
    """Demand per model, summed over the routers that have reported lately.

    A router's request.waiting counts until a newer report of that router has replaced it; the router's own clock tells
    which of the two is newer. A router repeats both several times within LOAD_STALE_S, so that what waited at a router
    that died counts no longer than that.
    """

    def __init__(self) -> None:
        self._reports = LoadReports()
        self._waiting: dict[str, dict[str, _Waiting]] = {}  # model_key -> router_id -> newer than its last report
        self._sent_at: dict[str, float] = {}  # router_id -> when it sent its last report, by its clock
        self._last_active: dict[str, float] = {}
        self._counted: dict[tuple[str, str], tuple[int, int]] = {}  # (router_id, model_key) -> arrived, dispatched
        self._arrived: dict[str, deque[tuple[float, int]]] = {}  # model_key -> (when reported, how many), of late
        self._dispatched: dict[str, int] = {}  # model_key -> how many since each router's first report

    def apply(self, report: RouterLoadReported, now_s: float, sent_at: float = float("inf")) -> dict[str, bool]:
        """Returns the models whose load has changed, and of each whether it holds or runs something, or did since the
        last report."""
        known = dict(self._reports.loads.get(report.router_id, ()))
        loads = self._reports.take(report, now_s)
        changed = dict.fromkeys(known.keys() - loads.keys(), False)
        self._sent_at[report.router_id] = sent_at
        self._replace_waiting(report, sent_at)
        for key, load in report.loads.items():
            is_active = load.num_waiting or load.num_in_flight
            if load.last_active_at > self._last_active.get(key, 0.0):
                self._last_active[key] = min(load.last_active_at, now_s)
                is_active = True
            self._count(report.router_id, key, load, now_s)
            if is_active or known.get(key) != load:
                changed[key] = bool(is_active)
        return changed

    def wait(self, fact: RequestWaiting, now_s: float, sent_at: float) -> bool:
        """Take what a router publishes between two reports. False when it is out of date: a newer report of that router
        is known, or every request that it counts has waited for as long as it may."""
        if now_s > fact.deadline_at or sent_at < self._sent_at.get(fact.router_id, float("-inf")):
            return False
        waiting = _Waiting(fact.num_waiting, fact.deadline_at, sent_at, now_s)
        self._waiting.setdefault(fact.model_key, {})[fact.router_id] = waiting
        return True

    def _replace_waiting(self, report: RouterLoadReported, sent_at: float) -> None:
        """A report replaces what waits for the models it names; unless it is a part of a whole, for all others too."""
        if not self._waiting:
            return
        is_part = report.num_parts not in (1, ONLY_CHANGES)
        for key in list(self._waiting):
            known = self._waiting[key].get(report.router_id)
            if known and known.sent_at <= sent_at and (key in report.loads or not is_part):
                self._drop_waiting(key, report.router_id)

    def _drop_waiting(self, model_key: str, router_id: str) -> None:
        del self._waiting[model_key][router_id]
        if not self._waiting[model_key]:
            del self._waiting[model_key]

    def arrived(self, model_key: str, since: float) -> int:
        """Requests reported after `since`, at most ARRIVALS_KEPT_S ago."""
        return sum(num for at, num in self._arrived.get(model_key, ()) if at > since)

    def dispatched(self, model_key: str) -> int:
        """Requests that have been sent to instances of the model; only its growth means something."""
        return self._dispatched.get(model_key, 0)

    def _count(self, router_id: str, model_key: str, load: ModelLoad, now_s: float) -> None:
        """Add what has arrived and been dispatched since the router's last report. Its first one adds nothing, nor does
        that of a router that began anew."""
        counts = load.num_arrived, load.num_dispatched
        before = self._counted.get((router_id, model_key))
        if before == counts:
            return
        self._counted[router_id, model_key] = counts
        if before is None:
            return
        if counts[0] > before[0]:
            arrived = self._arrived.setdefault(model_key, deque())
            arrived.append((now_s, counts[0] - before[0]))
            while arrived[0][0] < now_s - ARRIVALS_KEPT_S:
                arrived.popleft()
        if counts[1] > before[1]:
            self._dispatched[model_key] = self._dispatched.get(model_key, 0) + counts[1] - before[1]

    def touch(self, model_key: str, now_s: float) -> None:
        """Count something else than a request as activity."""
        self._last_active[model_key] = max(now_s, self._last_active.get(model_key, 0.0))

    def forget(self, model_key: str) -> None:
        """Drop what is kept of a model that is no more."""
        self._last_active.pop(model_key, None)
        self._arrived.pop(model_key, None)
        self._waiting.pop(model_key, None)

    def is_fresh(self, now_s: float) -> bool:
        """Whether any router has reported lately, and all its models; else no model may be called idle."""
        return self._reports.is_fresh(now_s)

    def expire(self, now_s: float) -> bool:
        """Forget the demand of silent routers (their requests are gone with them). Whether there was one."""
        for key, by_router in list(self._waiting.items()):
            for router_id, waiting in list(by_router.items()):
                if now_s - waiting.received_at > LOAD_STALE_S or now_s > waiting.deadline_at:
                    self._drop_waiting(key, router_id)
        silent = self._reports.expire(now_s, DEMAND_KEPT_S)
        for router_id in silent:
            self._sent_at.pop(router_id, None)
            self._counted = {k: counts for k, counts in self._counted.items() if k[0] != router_id}
        return bool(silent)

    def of(self, model_key: str) -> ModelLoad:
        """The load of the model at every router that has reported lately, in one."""
        waiting = self._waiting.get(model_key)
        if waiting is None:
            found = [loads[model_key] for loads in self._reports.loads.values() if model_key in loads]
        else:
            found = self._with_waiting(model_key, waiting)
        last_active_at = self._last_active.get(model_key, 0.0)
        load = joined(found)
        return load if load.last_active_at == last_active_at else replace(load, last_active_at=last_active_at)

    def _with_waiting(self, model_key: str, waiting: Mapping[str, _Waiting]) -> list[ModelLoad]:
        """The load at each router, with the requests that have begun to wait since its last report."""
        reported = self._reports.loads
        found = [
            _at_least(loads.get(model_key, _NO_LOAD), waiting[router_id].num_waiting if router_id in waiting else 0)
            for router_id, loads in reported.items()
            if model_key in loads or router_id in waiting
        ]
        silent = (one.num_waiting for router_id, one in waiting.items() if router_id not in reported)
        return found + [replace(_NO_LOAD, num_waiting=num) for num in silent]


_NO_LOAD = ModelLoad()


def _at_least(load: ModelLoad, num_waiting: int) -> ModelLoad:
    return replace(load, num_waiting=num_waiting) if num_waiting > load.num_waiting else load
