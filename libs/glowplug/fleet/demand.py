"""Report the routers' loads and add them up to the demand per model.

A report of up to `max_models` models is whole. Larger fleets report only models with news (load, or a changed one), and
all models in parts every `whole_every_s`: no message nears the bus's limit, and a lost one is soon made good.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from glowplug.domain.snapshot import ClassLoad, ModelLoad, Outlook
from glowplug.events.facts import RequestWaiting, RouterLoadReported

LOAD_STALE_S = 3.0  # then a silent router's load counts as nothing
DEMAND_KEPT_S = 10 * LOAD_STALE_S  # its requests may still run on instances
ARRIVALS_KEPT_S = 10.0
ONLY_CHANGES = 0  # `num_parts` of a partial report
MAX_ROUTERS = 1024  # whose reports are kept; ids may be invented
MAX_UNDEPLOYED = 64  # models of one router's


class LoadReporter:
    def __init__(self, router_id: str, *, max_models: int = 500, whole_every_s: float = 2.0) -> None:
        self._router_id, self._max_models, self._whole_every_s = router_id, max_models, whole_every_s
        self._sent: Mapping[str, ModelLoad] = {}
        self._whole_at = float("-inf")

    def reports(self, loads: Mapping[str, ModelLoad], now_s: float) -> list[RouterLoadReported]:
        """Return the reports to send now; one without news may name no model. `loads` has every model."""
        if len(loads) <= self._max_models:
            self._sent, self._whole_at = loads, now_s
            return [RouterLoadReported(router_id=self._router_id, loads=loads)]
        is_whole = now_s - self._whole_at >= self._whole_every_s
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
    """One router's reports. `seen`: models in the parts of the current whole report, None if one is missing."""

    reported_at: float = 0.0
    is_whole: bool = False
    seen: set[str] | None = None
    next_part: int = 0


class LoadReports:
    """Loads by router, complete after its first whole report. `deployed`: keys of models; None: all are taken."""

    def __init__(self, deployed: Container[str] | None = None) -> None:
        self.deployed = deployed
        self.loads: dict[str, dict[str, ModelLoad]] = {}  # router_id -> model_key -> load
        self._routers: dict[str, _Router] = {}

    def take(self, report: RouterLoadReported, now_s: float) -> Mapping[str, ModelLoad]:
        """Apply a report. Return the router's loads: the same mapping each time, updated in place; nothing of a router
        beyond MAX_ROUTERS."""
        if len(self.loads) >= MAX_ROUTERS and report.router_id not in self.loads:
            return {}
        loads = self.loads.setdefault(report.router_id, {})
        router = self._routers.setdefault(report.router_id, _Router())
        router.reported_at = now_s
        if (deployed := self.deployed) is not None:
            others = [key for key in report.loads if key not in loads and key not in deployed]
            room = max(0, MAX_UNDEPLOYED - sum(key not in deployed for key in loads)) if others else 0
            if dropped := {*others[room:]}:
                report = replace(report, loads={k: load for k, load in report.loads.items() if k not in dropped})
        if report.num_parts == 1:
            loads.clear()
        loads.update(report.loads)
        if report.num_parts != ONLY_CHANGES:
            _count_parts(router, loads, report)
        return loads

    def is_fresh(self, now_s: float) -> bool:
        return any(router.is_whole and now_s - router.reported_at <= LOAD_STALE_S for router in self._routers.values())

    def expire(self, now_s: float, lease_s: float = LOAD_STALE_S) -> list[str]:
        """Drop routers silent for longer than `lease_s`; return their ids."""
        silent = [key for key, router in self._routers.items() if now_s - router.reported_at > lease_s]
        for router_id in silent:
            del self._routers[router_id], self.loads[router_id]
        return silent


def _count_parts(router: _Router, loads: dict[str, ModelLoad], report: RouterLoadReported) -> None:
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
        by_class=_joined_classes(loads),
        num_batch_arrived=sum(load.num_batch_arrived for load in loads),
    )


def _joined_classes(loads: Sequence[ModelLoad]) -> dict[str, ClassLoad]:
    """Add up the classes other than standard; older routers report only standard."""
    found: dict[str, ClassLoad] = {}
    for priority in sorted({name for load in loads for name in load.by_class}):
        parts, running = [load.by_class.get(priority, ClassLoad()) for load in loads], dict[str, int]()
        for part in parts:
            for instance_id, count in part.in_flight_by_instance.items():
                running[instance_id] = running.get(instance_id, 0) + count
        last_at = max(load.last_active_at for load in loads)
        others_at = max(load.last_active_at - part.alone_s for load, part in zip(loads, parts, strict=True))
        found[priority] = ClassLoad(
            num_waiting=sum(part.num_waiting for part in parts),
            in_flight_by_instance=running,
            alone_s=last_at - others_at,
        )
    return found


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One `request.waiting` fact. `sent_at`: the router's clock; `received_at`: ours."""

    num_waiting: int
    deadline_at: float
    sent_at: float
    received_at: float
    by_class: Mapping[str, int]

    def load(self, reported: ModelLoad) -> ModelLoad:
        """Return the reported load, updated with the requests now waiting."""
        if self.num_waiting <= reported.num_waiting:
            return reported
        classes = {
            name: replace(reported.by_class.get(name, ClassLoad()), num_waiting=self.by_class.get(name, 0))
            for name in sorted(self.by_class.keys() | reported.by_class.keys())
        }
        return replace(reported, num_waiting=self.num_waiting, by_class=classes)


class Demand:
    """Demand per model, summed over the routers that have reported recently.

    A request.waiting counts until a newer report of that router, by its own clock. Routers repeat both several times
    within LOAD_STALE_S, after which a dead router's waiting requests no longer count.
    """

    def __init__(self, deployed: Container[str] | None = None) -> None:
        self._reports = LoadReports(deployed)
        self._waiting: dict[str, dict[str, _Waiting]] = {}  # model_key -> router_id -> fact
        self._sent_at: dict[str, float] = {}  # router_id -> time of its last report, by its clock
        self._last_active: dict[str, float] = {}
        self._counted: dict[tuple[str, str], tuple[int, int]] = {}  # (router_id, model_key) -> arrived, dispatched
        self._arrived: dict[str, deque[tuple[float, int]]] = {}  # model_key -> recent (time, number)
        self.bases: Mapping[str, str] = {}
        self._busy: dict[str, None] = {}  # adapters with requests, now or earlier
        self._arrived_at_adapters: dict[str, int] = {}
        self._dispatched: dict[str, int] = {}  # by model_key, since each router's first report

    def of_models(self, deployed: Container[str], bases: Mapping[str, str]) -> None:
        self._reports.deployed, self.bases = deployed, bases

    def apply(self, report: RouterLoadReported, now_s: float, sent_at: float = float("inf")) -> dict[str, bool]:
        """Apply a report. Return the models whose load has changed, with whether each has or had requests since the
        last."""
        known = dict(self._reports.loads.get(report.router_id, ()))
        loads = self._reports.take(report, now_s)
        if report.router_id not in self._reports.loads:
            return {}
        changed = dict.fromkeys(known.keys() - loads.keys(), False)
        self._sent_at[report.router_id] = sent_at
        self._replace_waiting(report, sent_at)
        deployed = self._reports.deployed
        for key, load in report.loads.items():
            if deployed is not None and key not in deployed and key not in self._last_active:
                continue
            is_active = load.num_waiting or load.num_in_flight
            if load.last_active_at > self._last_active.get(key, 0.0):
                self._last_active[key] = min(load.last_active_at, now_s)
                is_active = True
            self._count(report.router_id, key, load, now_s)
            if is_active and (base := self.bases.get(key)):
                self._busy[key] = None
                self._last_active[base] = max(self._last_active.get(base, 0.0), self._last_active.get(key, 0.0))
            if is_active or known.get(key) != load:
                changed[key] = bool(is_active)
        return changed

    def wait(self, fact: RequestWaiting, now_s: float, sent_at: float) -> bool:
        """Apply a fact sent between two reports. Return False if it is outdated: a newer report is known, or all its
        deadlines have passed."""
        if now_s > fact.deadline_at or sent_at < self._sent_at.get(fact.router_id, float("-inf")):
            return False
        by_router = self._waiting.setdefault(fact.model_key, {})
        if len(by_router) < MAX_ROUTERS or fact.router_id in by_router:
            by_router[fact.router_id] = _Waiting(fact.num_waiting, fact.deadline_at, sent_at, now_s, fact.by_class)
        if fact.model_key in self.bases:
            self._busy[fact.model_key] = None
        return True

    def _replace_waiting(self, report: RouterLoadReported, sent_at: float) -> None:
        """Drop the waiting facts superseded by a report: of the models it names, and unless it is a part, of all
        others."""
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
        """Requests dispatched; only its growth is meaningful."""
        return self._dispatched.get(model_key, 0)

    def _count(self, router_id: str, model_key: str, load: ModelLoad, now_s: float) -> None:
        """Add arrivals and dispatches since the router's last report; its first, also after a restart, adds nothing."""
        counts = load.num_arrived, load.num_dispatched
        before = self._counted.get((router_id, model_key))
        if before == counts:
            return
        self._counted[router_id, model_key] = counts
        if before is None:
            return
        if counts[0] > before[0] and (base := self.bases.get(model_key)):
            self._arrived_at_adapters[base] = self._arrived_at_adapters.get(base, 0) + counts[0] - before[0]
        if counts[0] > before[0]:
            arrived = self._arrived.setdefault(model_key, deque())
            arrived.append((now_s, counts[0] - before[0]))
            while arrived[0][0] < now_s - ARRIVALS_KEPT_S:
                arrived.popleft()
        if counts[1] > before[1]:
            self._dispatched[model_key] = self._dispatched.get(model_key, 0) + counts[1] - before[1]

    def touch(self, model_key: str, now_s: float) -> None:
        self._last_active[model_key] = max(now_s, self._last_active.get(model_key, 0.0))

    def forget(self, model_key: str) -> None:
        self._last_active.pop(model_key, None)
        self._busy.pop(model_key, None)
        self._arrived_at_adapters.pop(model_key, None)
        self._arrived.pop(model_key, None)
        self._waiting.pop(model_key, None)

    def is_fresh(self, now_s: float) -> bool:
        """Return whether any router has recently reported all its models; otherwise no model may be called idle."""
        return self._reports.is_fresh(now_s)

    def expire(self, now_s: float) -> bool:
        """Forget the demand of silent routers; return whether there were any."""
        for key, by_router in list(self._waiting.items()):
            for router_id, waiting in list(by_router.items()):
                if now_s - waiting.received_at > LOAD_STALE_S or now_s > waiting.deadline_at:
                    self._drop_waiting(key, router_id)
        silent = {*self._reports.expire(now_s, DEMAND_KEPT_S)}
        if silent:
            self._sent_at = {router_id: at for router_id, at in self._sent_at.items() if router_id not in silent}
            self._counted = {key: counts for key, counts in self._counted.items() if key[0] not in silent}
        return bool(silent)

    def busy_adapters(self, base_key: str) -> list[str]:
        found = [key for key in self._busy if self.bases.get(key) == base_key]
        for key in [key for key in found if not self._is_busy(key)]:
            del self._busy[key]
            found.remove(key)
        return found

    def _is_busy(self, model_key: str) -> bool:
        reported = (loads[model_key] for loads in self._reports.loads.values() if model_key in loads)
        return model_key in self._waiting or any(load.num_waiting or load.num_in_flight for load in reported)

    def arrived_at_adapters(self, base_key: str) -> int:
        """Arrivals for the adapters of a base since each router's first report."""
        return self._arrived_at_adapters.get(base_key, 0)

    def of(self, model_key: str) -> ModelLoad:
        waiting = self._waiting.get(model_key)
        if waiting is None:
            found = [loads[model_key] for loads in self._reports.loads.values() if model_key in loads]
        else:
            found = self._with_waiting(model_key, waiting)
        last_active_at = self._last_active.get(model_key, 0.0)
        load = joined(found)
        return load if load.last_active_at == last_active_at else replace(load, last_active_at=last_active_at)

    def _with_waiting(self, model_key: str, waiting: Mapping[str, _Waiting]) -> list[ModelLoad]:
        reported = self._reports.loads
        found = [
            waiting[router_id].load(loads.get(model_key, _NO_LOAD)) if router_id in waiting else loads[model_key]
            for router_id, loads in reported.items()
            if model_key in loads or router_id in waiting
        ]
        return found + [one.load(_NO_LOAD) for router_id, one in waiting.items() if router_id not in reported]


_NO_LOAD = ModelLoad()
