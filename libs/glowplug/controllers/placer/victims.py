"""Choose the GPUs where evicting instances for a start costs least."""

import math
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.domain.access import Priority
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted, doing
from glowplug.domain.snapshot import ModelLoad
from glowplug.domain.units import show_bytes
from glowplug.fleet.capacity import LEAVING
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.decisions import EvictDecision, StageDecision
from glowplug.policies.eviction.turns import BusyEngine, ModelDemand, Shares, TurnParams, goes_on
from glowplug.policies.placement.shape import bytes_per_gpu
from glowplug.policies.scaling.port import needed_by_pipeline
from glowplug.policies.worth import FACTORS, expected_factor, num_weighted

Evict = Callable[..., EvictDecision]


class Loss(NamedTuple):
    """Of an eviction, the least first (Victims.make)."""

    is_any: bool  # else drains under way suffice
    quanta_behind: int  # of requests: how far the victims' engines are ahead of the wanting model, negated
    saved_s: float  # waiting that the victims should have saved
    num_waiting: int  # for the longest queue among them
    used_at: float  # the latest
    gpu_id: str


class Found(NamedTuple):
    """GPUs that can be made free, and who leaves them."""

    loss: Loss
    stage: StageDecision
    eviction: EvictDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceWanted:
    """The inputs about a placement to the choice of victims: equal wants get equal answers."""

    engine: str
    num_gpus: int
    bytes_per_gpu: int
    priority: int
    wanting: int  # waiting requests that busy instances may be drained for; 0: none may
    given: int | None  # requests its model was given while memory is short; None: not counted
    runs_as: str  # its model where instances of that live: they stay; "": none live
    whole: bool  # all instances that serve there leave
    share_key: str = ""  # of its weights: bytes shared under this key need not be free
    batch: float = 0.0  # factor, where batch requests alone wait for it; 0: otherwise
    instead_of: str = ""  # outdated instance, which leaves first; idle others only if it does not suffice

    @property
    def kind(self) -> tuple[object, ...]:
        need = self.engine, self.num_gpus, self.bytes_per_gpu, self.share_key, self.whole
        return *need, self.priority, self.batch, bool(self.wanting), self.given is None

    def is_eased_from(self, other: "SpaceWanted") -> bool:
        """Return whether every instance that leaves for `other`, of the same kind, leaves for this one too."""
        is_no_richer = self.given is None or other.given is None or self.given <= other.given
        return self.wanting >= other.wanting and is_no_richer and self.runs_as in ("", other.runs_as)


class Victims:
    """Of one moment: loads and residents are looked up once."""

    def __init__(self, fleet: Fleet, holdings: Holdings, shares: Shares) -> None:
        params = fleet.params
        self.fleet, self.holdings, self.shares, self.now_s = fleet, holdings, shares, holdings.now_s
        self.nodes, self.capacity = fleet.alive(self.now_s), fleet.capacity
        self.models, self.loads = fleet.models, fleet.loads
        self.rule = params.victims
        self.turns = TurnParams(rule=params.turns, turn_s=params.fair_turn_s, fair_requests=params.fair_requests)
        self._loads: dict[str, ModelLoad] = {}
        self._residents: dict[tuple[str, int, int, int | None, float], tuple[list[Resident], int]] = {}
        self._tallies: dict[str, tuple[int, int, int, int]] = {}
        self._in_vain: dict[tuple[object, ...], list[SpaceWanted]] = {}

    def wanted(
        self, model: Model, *, wanting: int, whole: bool = False, is_there: bool = True, batch: float = 0.0
    ) -> SpaceWanted:
        return SpaceWanted(
            engine=model.engine,
            num_gpus=model.num_gpus,
            bytes_per_gpu=bytes_per_gpu(model),
            priority=model.priority,
            wanting=wanting,
            given=self.shares.given.get(model.key) if wanting else None,
            runs_as=model.key if is_there else "",
            whole=whole,
            share_key=model.share_key if self.capacity.is_shared(model.share_key) else "",
            batch=round(batch, 2),
        )

    def is_in_vain(self, wanted: SpaceWanted) -> bool:
        """Return whether a like want was in vain: of a thousand waiting models, few then look at every GPU."""
        return any(known.is_eased_from(wanted) for known in self._in_vain.get(wanted.kind, ()))

    def note_in_vain(self, wanted: SpaceWanted) -> None:
        self._in_vain.setdefault(wanted.kind, []).append(wanted)

    def make(self, wanted: SpaceWanted, evict: Evict, only: Collection[str] = ()) -> Found | None:
        """Return the GPUs (of `only`, when given) where the eviction costs least, and its victims; None when no
        instance may leave.

        Order: GPUs where drains under way suffice, then those whose engines are furthest ahead of the wanting model (by
        whole quanta of requests), then the measure of `rule` (turns.py), then id."""
        best: Found | None = None
        with closing(self._by_least_cost(wanted, only)) as nodes:
            for least, node_id in nodes:
                if best is not None and least > best.loss:
                    break
                node = self.nodes.node(node_id)
                if node is None or node.draining or wanted.engine not in node.engines:
                    continue
                found = self._on_node(node, wanted, _sketched(evict), only)
                if found is not None and (best is None or found.loss < best.loss):
                    best = found
        node = self.nodes.node(best.stage.node_id) if best is not None else None
        return self._on_node(node, wanted, evict, best.stage.gpu_ids) if node is not None and best is not None else None

    def _by_least_cost(
        self, wanted: SpaceWanted, only: Collection[str]
    ) -> Generator[tuple[Loss | tuple[bool] | tuple[bool, float], str], None, None]:
        """Yield nodes, each with a lower bound of its cost: first those where a drain may suffice, then the least
        recently used. Where shares count, every node has the same bound."""
        anything = (False,)
        if only:
            yield from ((anything, node_id) for node_id in sorted({gpu_id.rpartition("/")[0] for gpu_id in only}))
        elif wanted.wanting and self.turns.fair_requests and self.shares.given:
            yield from ((anything, node.node_id) for node in self.nodes)
        elif self.rule == "least_worth":
            yield from ((anything, node_id) for node_id in list(self.capacity.leaving))
            with closing(self.capacity.longest_unused.in_order(self._first_used_at)) as unused:
                for number, (_, prefix) in enumerate(unused):
                    yield anything if number < MOST_NODES else (True, math.inf), prefix[:-1]
        else:
            yield from ((anything, node_id) for node_id in list(self.capacity.leaving))
            with closing(self.capacity.longest_unused.in_order(self._first_used_at)) as unused:
                for at, prefix in unused:
                    yield Loss(True, 0, 0.0, 0, at, prefix), prefix[:-1]

    def _first_used_at(self, node_id: str) -> float | None:
        here = self.capacity.on_node.get(node_id, {}).values()
        return min((self._used_at(row) for row in here if row.state not in LEAVING), default=None)

    def waiting_for(self, model: Model) -> int:
        return self._load(model.key).num_urgent_waiting

    def weight_of(self, model: Model) -> float:
        load = self._load(model.key)
        return num_weighted(load.num_waiting, load)

    def factor_of(self, model: Model) -> float:
        is_interactive = self._load(model.key).of_class(Priority.INTERACTIVE).num_waiting
        return FACTORS[Priority.INTERACTIVE] if is_interactive else 1.0

    def is_batch_only(self, instance: Instance) -> bool:
        load = self._load(instance.model_key)
        num = load.in_flight_by_instance.get(instance.instance_id, 0)
        return bool(num) and not (load.urgent_on(instance.instance_id) or load.num_urgent_waiting)

    def demand(self, model_key: str) -> ModelDemand:
        load = self._load(model_key)
        return ModelDemand(
            num_dispatched=self.loads.dispatched(model_key), num_open=load.num_waiting + load.num_in_flight
        )

    def runs(self, model: Model) -> bool:
        return bool(self._load(model.key).num_in_flight)

    def gives_way(self, model: Model, waiting: Iterable[Model]) -> bool:
        quantum = self.turns.fair_requests
        given = self.shares.given.get(model.key)
        if not quantum or given is None or given - self.shares.least_given < quantum:
            return False
        return any(
            self.shares.ahead(model.key, of=other.key) >= quantum
            and (other.num_gpus, other.engine) == (model.num_gpus, model.engine)
            and other.priority >= model.priority
            and self.waiting_for(other)
            and not self.runs(other)
            for other in waiting
        )

    def serving(self, gpu_ids: Collection[str]) -> list[Instance]:
        rows = {i: row for gpu_id in gpu_ids for i, row in self.capacity.on_gpu.get(gpu_id, {}).items()}
        return [r for r in rows.values() if not (r.state in LEAVING or r.replica or r.state.is_dormant or r.host_id)]

    def may_come_free(self, gpu_ids: Collection[str], model: Model) -> bool:
        for row in self.serving(gpu_ids):
            owner = self.models.get(row.model_key)
            is_kept = owner is not None and (owner.pinned or owner.priority > model.priority)
            if is_kept or row.part_of or row.model_key == model.key:
                return False
        return True

    def still_hold(self, gpu_ids: Collection[str], victims: tuple[str, ...]) -> bool:
        for gpu_id in gpu_ids:
            here = self.capacity.on_gpu.get(gpu_id, {})
            for holder in self.capacity.granted(gpu_id):
                row = here.get(holder)
                if holder in victims or row is None or row.state in LEAVING:
                    return True
        return False

    def _on_node(self, node: Node, wanted: SpaceWanted, evict: Evict, only: Collection[str]) -> Found | None:
        options = []
        for gpu in node.gpus:
            if only and gpu.gpu_id not in only:
                continue
            decision = self._on(gpu, wanted, evict)
            if decision is not None:
                options.append((self._loss(gpu.gpu_id, wanted, decision), decision))
        if len(options) < wanted.num_gpus:
            return None
        options.sort(key=lambda option: option[0])
        chosen = options[: wanted.num_gpus]
        if all(decision.reason == _HAS_BYTES for _, decision in chosen):
            return None  # the policy lacks something other than bytes
        victims = tuple(dict.fromkeys(v for _, decision in chosen for v in decision.victims))
        first = chosen[0][1]
        if len(chosen) > 1:
            rivals = tuple(rival for _, decision in chosen for rival in decision.rivals)
            freed = sum(decision.freed_bytes for _, decision in chosen)
            reason = "; ".join(dict.fromkeys(decision.reason for _, decision in chosen if decision.victims))
            need = sum(decision.need_bytes for _, decision in chosen)
            first = EvictDecision(victims=victims, freed_bytes=freed, need_bytes=need, reason=reason, rivals=rivals)
        gpu_ids = tuple(sorted(loss.gpu_id for loss, _ in chosen))
        stage = StageDecision(node_id=node.node_id, gpu_ids=gpu_ids, bytes_per_gpu=wanted.bytes_per_gpu)
        going = {v: self.capacity.on_gpu[loss.gpu_id][v] for loss, decision in chosen for v in decision.victims}
        losses = [loss for loss, _ in chosen]
        whole = Loss(
            bool(going),
            max(loss.quanta_behind for loss in losses),
            self._saved_s(going.values()),
            max(loss.num_waiting for loss in losses),
            max(loss.used_at for loss in losses),
            gpu_ids[0],
        )
        return Found(whole, stage, first)

    def _loss(self, gpu_id: str, wanted: SpaceWanted, decision: EvictDecision) -> Loss:
        here = self.capacity.on_gpu.get(gpu_id, {})
        going = [here[v] for v in decision.victims if v in here]
        queues = (self._load(i.model_key).num_waiting for i in going)
        quantum = self.turns.fair_requests if wanted.wanting else 0
        least_ahead = min((self._ahead(i, wanted) for i in going), default=0)
        return Loss(
            bool(going),
            -(max(0, least_ahead) // quantum) if quantum else 0,
            self._saved_s(going),
            max(queues, default=0) if self.rule == "shortest_queue" else 0,
            max((self._used_at(i) for i in going), default=0.0),
            gpu_id,
        )

    def _saved_s(self, going: Collection[Instance]) -> float:
        return sum(map(self.holdings.saves_s, going)) if self.rule == "least_worth" else 0.0

    def _on(self, gpu: Gpu, wanted: SpaceWanted, evict: Evict) -> EvictDecision | None:
        if gpu.total_bytes < wanted.bytes_per_gpu:
            return None
        seen = gpu.seen_by(wanted.share_key) if gpu.shared and wanted.share_key else gpu
        leaving, dropped, serving = self._tally(seen)
        free = self.capacity.free_bytes(gpu.gpu_id) + gpu.used_bytes - seen.used_bytes
        lacking = wanted.bytes_per_gpu - free - leaving - dropped
        need = max(lacking, serving if wanted.whole else 0)
        if need <= 0:
            reason = DRAINS_SUFFICE if leaving else _HAS_BYTES
            return EvictDecision(reason=reason) if leaving or wanted.num_gpus > 1 else None
        everybody, most = self._residents_on(gpu.gpu_id, wanted)
        if most < need and not (seen.shared or wanted.instead_of):
            return None
        here = self.capacity.on_gpu.get(gpu.gpu_id, {})
        residents = [r for r in everybody if here[r.name].model_key != wanted.runs_as]
        going = self._going(seen)
        if wanted.instead_of:
            old = [replace(r, held="") for r in everybody if r.name == wanted.instead_of]
            decision = _chosen_with(old, residents, need, seen, going, evict)
        else:
            decision = _chosen(residents, need, seen, going, evict)
        return replace(decision, need_bytes=need) if decision.victims else None

    def _going(self, gpu: Gpu) -> frozenset[str]:
        here, taken = self.capacity.on_gpu.get(gpu.gpu_id, {}), self.capacity.taken
        return frozenset(i for i, row in here.items() if row.state in LEAVING or (_is_dropped(row) and i not in taken))

    def held(self, wanted: SpaceWanted, only: Collection[str] = ()) -> dict[str, str]:
        found: dict[str, str] = {}
        for node in self.nodes:
            for gpu in node.gpus if wanted.engine in node.engines and not node.draining else ():
                if gpu.total_bytes >= wanted.bytes_per_gpu and (not only or gpu.gpu_id in only):
                    residents, _ = self._residents_on(gpu.gpu_id, wanted)
                    found |= {resident.name: resident.held for resident in residents if resident.held}
        return found

    def residents(self, gpu_id: str) -> list[Resident]:
        most = max((model.priority for model in self.models.values()), default=0)
        wanted = SpaceWanted(
            engine="", num_gpus=1, bytes_per_gpu=0, priority=most, wanting=0, given=None, runs_as="", whole=False
        )
        return self._residents_on(gpu_id, wanted)[0]

    def _tally(self, gpu: Gpu) -> tuple[int, int, int]:
        """Return bytes of instances that leave anyway, of copies that may be dropped, and of those that serve."""
        gpu_id = gpu.gpu_id
        if gpu.shared:
            return self._tally_shared(gpu)
        known = self._tallies.get(gpu_id)
        if known is not None and known[0] == self.capacity.num_promises:
            return known[1:]
        here = self.capacity.on_gpu.get(gpu_id, {})
        leaving = dropped = serving = 0
        for holder, num_bytes in self.capacity.granted(gpu_id).items():
            row = here.get(holder)
            if row is None:  # a beat may show free bytes before the fact says which instance left
                continue
            if row.state in LEAVING:
                leaving += num_bytes
            elif _is_dropped(row):
                dropped += 0 if holder in self.capacity.taken else num_bytes
            else:
                serving += num_bytes
        self._tallies[gpu_id] = (self.capacity.num_promises, leaving, dropped, serving)
        return leaving, dropped, serving

    def _tally_shared(self, gpu: Gpu) -> tuple[int, int, int]:
        here, taken = self.capacity.on_gpu.get(gpu.gpu_id, {}), self.capacity.taken
        there = {grant.holder: row for grant in gpu.grants if (row := here.get(grant.holder)) is not None}
        leave = {i for i, row in there.items() if row.state in LEAVING}
        drop = {i for i, row in there.items() if i not in leave and _is_dropped(row) and i not in taken}
        serve = {i for i, row in there.items() if i not in leave and not _is_dropped(row)}
        leaving = gpu.freed_by(leave)
        dropped = gpu.freed_by(leave | drop) - leaving
        return leaving, dropped, gpu.freed_by(leave | drop | serve) - leaving - dropped

    def _residents_on(self, gpu_id: str, wanted: SpaceWanted) -> tuple[list[Resident], int]:
        key = (gpu_id, wanted.priority, wanted.wanting, wanted.given, wanted.batch)
        known = self._residents.get(key)
        if known is None:
            here = self.capacity.on_gpu.get(gpu_id, {}).values()
            residents = [
                self._resident(i, gpu_id, wanted)
                for i in here
                if not (i.state is InstanceState.DRAINING or i.replica or i.state.is_dormant or i.host_id)
            ]
            known = self._residents[key] = residents, sum(r.num_bytes for r in residents if not r.held)
        return known

    def _resident(self, instance: Instance, gpu_id: str, wanted: SpaceWanted) -> Resident:
        load = self._load(instance.model_key)
        return Resident(
            name=instance.instance_id,
            num_bytes=sum(w.num_bytes for w in instance.workers if w.gpu_id == gpu_id),
            last_used_at=self._used_at(instance) if expected_factor(load) >= 1 else self._urgent_at(load),
            priority=self._priority(instance),
            held=self._held(instance, load, wanted),
            num_waiting=load.num_waiting,
            saves_s=self.holdings.saves_s(instance) if self.rule == "least_worth" else 0.0,
        )

    def _held(self, instance: Instance, load: ModelLoad, wanted: SpaceWanted) -> str:
        owner = self.models.get(instance.model_key)
        if owner is not None and owner.pinned:
            return "it is pinned"
        if instance.part_of:
            return f"it is a stage of {instance.part_of}"
        if pipeline := needed_by_pipeline(instance.instance_id, self.capacity.rows):
            return f"{pipeline} still runs its layers"
        if instance.state is not InstanceState.READY:
            return f"it is {instance.state.word}"
        if self.now_s - instance.ready_at < (least_s := self.fleet.params.min_residency_s):
            return f"it has been ready for less than {least_s:g} s"
        if self._priority(instance) > wanted.priority:
            return f"its priority is {self._priority(instance)}, and the requesting model's {wanted.priority}"
        num = load.in_flight_by_instance.get(instance.instance_id, 0)
        if not wanted.batch and self.is_batch_only(instance) and self.loads.is_fresh(self.now_s):
            return ""
        if wanted.wanting:
            return goes_on(self._turn(instance, load, num, wanted), self.turns)
        if not self.loads.is_fresh(self.now_s):
            return "no router has reported its load lately"
        if num:
            return f"it has {counted(num, 'request')} in flight"
        num_waiting = load.num_waiting if wanted.batch else load.num_urgent_waiting
        if num_waiting:
            return f"{doing(num_waiting, 'request', 'waits')} for it"
        if wanted.batch and (asked := self.holdings.of(instance).asked) >= wanted.batch:
            return f"it is likelier to be needed soon ({asked:.2f}) than batch counts ({wanted.batch:g})"
        return ""

    def described(self, instance: Instance) -> str:
        owner, load = self.models.get(instance.model_key), self._load(instance.model_key)
        busy = load.in_flight_by_instance.get(instance.instance_id, 0)
        idle_s = max(0.0, self.now_s - self._used_at(instance))
        doing_what = f"{counted(busy, 'request')} in flight" if busy else f"idle {idle_s:.0f} s"
        num_bytes = sum(worker.num_bytes for worker in instance.workers)
        return f"{owner.name if owner else instance.model_key} ({show_bytes(num_bytes)}, {doing_what})"

    def _turn(self, instance: Instance, load: ModelLoad, num_in_flight: int, wanted: SpaceWanted) -> BusyEngine:
        return BusyEngine(
            served_s=self.now_s - instance.ready_at,
            start_s=max(0.0, instance.ready_at - instance.created_at),
            num_in_flight=num_in_flight,
            num_waiting=load.num_waiting,
            arriving_per_s=self.loads.arrived(instance.model_key, self.now_s - _LATELY_S) / _LATELY_S,
            num_wanting=wanted.wanting,
            ahead=self._ahead(instance, wanted),
        )

    def _ahead(self, instance: Instance, wanted: SpaceWanted) -> int:
        given = self.shares.given.get(instance.model_key)
        return 0 if given is None or wanted.given is None else given - wanted.given

    def _priority(self, instance: Instance) -> int:
        owner = self.models.get(instance.model_key)
        return owner.priority if owner is not None else 0

    def _used_at(self, instance: Instance) -> float:
        return max(instance.ready_at, self._load(instance.model_key).last_active_at)

    def _urgent_at(self, load: ModelLoad) -> float:
        return load.last_active_at - load.of_class(Priority.BATCH).alone_s

    def _load(self, model_key: str) -> ModelLoad:
        load = self._loads.get(model_key)
        if load is None:
            load = self._loads[model_key] = self.fleet.load_of(model_key)
        return load


def _is_dropped(row: Instance) -> bool:
    return row.replica or row.state.is_dormant


def _chosen(residents: Sequence[Resident], need: int, gpu: Gpu, going: frozenset[str], evict: Evict) -> EvictDecision:
    """Choose victims; none where all that may leave would not free enough. Those in `going` leave anyway."""
    if gpu.shared:
        return evict_sharing(residents, need, gpu, going, evict)
    is_enough = sum(r.num_bytes for r in residents if not r.held) >= need
    return evict(list(residents), need) if is_enough else EvictDecision()


def _chosen_with(
    first: Sequence[Resident],
    others: Sequence[Resident],
    need: int,
    gpu: Gpu,
    going: frozenset[str],
    evict: Evict,
) -> EvictDecision:
    """Choose all of `first`, and `others` only if those do not free enough."""
    decision = _chosen(first, need, gpu, going, evict)
    if decision.victims or not first:
        return decision
    names = tuple(resident.name for resident in first)
    freed = sum(resident.num_bytes for resident in first)
    if gpu.shared:
        freed = gpu.freed_by({*going, *names}) - gpu.freed_by(going)
    decision = _chosen(others, need - freed, gpu, going.union(names), evict)
    if not decision.victims:
        return decision
    return replace(decision, victims=(*names, *decision.victims), freed_bytes=freed + decision.freed_bytes)


def evict_sharing(
    residents: Sequence[Resident], need: int, gpu: Gpu, going: frozenset[str], evict: Evict
) -> EvictDecision:
    """Choose victims on a GPU where weights count once for several holders; those in `going` leave anyway. Weights come
    free only with all of their holders. Where single ones do not free enough, holders that share weights and may all
    leave count as one."""
    at_least = gpu.freed_by(going)

    def freed(names: Iterable[str]) -> int:
        return gpu.freed_by({*going, *names}) - at_least

    single = {r.name: replace(r, num_bytes=freed((r.name,))) for r in residents}
    decision = evict(list(single.values()), need)
    if decision.victims:
        return decision
    together, members = dict(single), dict[str, list[str]]()
    for weights in gpu.shared:
        names = [holder for holder in weights.holders if holder not in going]
        if len(names) > 1 and all(name in single and not single[name].held for name in names):
            group = [together.pop(name) for name in names]
            members[names[0]] = names
            together[names[0]] = replace(
                group[0],
                num_bytes=freed(names),
                last_used_at=max(r.last_used_at for r in group),
                priority=max(r.priority for r in group),
                num_waiting=sum(r.num_waiting for r in group),
                saves_s=sum(r.saves_s for r in group),
            )
    if not members:
        return decision
    decision = evict(list(together.values()), need)
    victims = [name for victim in decision.victims for name in members.get(victim, (victim,))]
    for name in list(victims):
        if freed([other for other in victims if other != name]) >= need:
            victims.remove(name)
    return replace(decision, victims=tuple(victims), freed_bytes=freed(victims))


def _sketched(evict: Evict) -> Evict:
    def sketch(residents: list[Resident], need: int) -> EvictDecision:
        may_go = [resident for resident in residents if not resident.held]
        if len(may_go) != 1 or may_go[0].num_bytes < need:
            return evict(residents, need)
        return EvictDecision(victims=(may_go[0].name,), freed_bytes=may_go[0].num_bytes)

    return sketch


DRAINS_SUFFICE = "instances that drain there already free enough"
_HAS_BYTES = "it has the free memory"
MOST_NODES = 64  # longest unused, looked at under "least_worth"; others follow if no instance may leave these
_LATELY_S = 2.0  # four reports of a router
