"""Try waiting placements, the most urgent first, and again only when something may have changed.

A placement asks its policy when it is new, when bytes came free or a node joined since its refusal (`version` of the
capacity), and each `retry_s`.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.placer.failed_nodes import others
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.host_memory import HostMemory
from glowplug.controllers.placer.placement import (
    Fetching,
    MakingSpace,
    Placement,
    Refusal,
    Sent,
    Waiting,
    refused,
    start_commands,
    stop,
    why_they_leave,
)
from glowplug.controllers.placer.sleepers import Sleepers
from glowplug.controllers.placer.victims import Found, SpaceWanted, Victims
from glowplug.domain.address import rendezvous
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Becomes, Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.phrasing import OUTDATED, listed
from glowplug.domain.units import show_bytes
from glowplug.events.commands import StopInstance, as_if_asked
from glowplug.events.envelope import Event
from glowplug.events.facts import InstanceFailed
from glowplug.fleet.node_index import NodeIndex
from glowplug.fleet.start_times import StartKind
from glowplug.policies.decisions import EvictDecision, PlaceDecision, StageDecision
from glowplug.policies.eviction.turns import Shares, account
from glowplug.policies.placement.dormant import copies_of, with_drops
from glowplug.policies.placement.expect import Expected, expect
from glowplug.policies.placement.links import found_at
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu
from glowplug.policies.worth import patience_s

# Effects of the request class on a placement.
#
# Ours (docs/adr/0025): seconds of waiting count by the class's factor (policies/worth.py). A start for batch requests
# alone takes free memory, and drops only copies less likely to be needed before a reload than the factor of batch. The
# factor rises as they wait; at a standard request's, routers report them as standard.


PlacePolicy = Callable[..., PlaceDecision]
EvictPolicy = Callable[..., EvictDecision]


class Pass:
    def __init__(self, fleet: Fleet, now_s: float, shares: Shares) -> None:
        self.now_s = now_s
        self.view = fleet.placement_view(now_s)
        self.holdings = Holdings(fleet, now_s)
        self.victims = Victims(fleet, self.holdings, shares)
        self.batch: list[Placement] | None = None  # waiting for batch requests alone; None: not computed yet


class Saving(NamedTuple):
    """Seconds to the first token: saved by waking a sleeping engine of the model rather than starting elsewhere (0 or
    less: none, or those that serve there will not leave), and taken by that start.

    Ours: SwapServeLLM (section 4) knows one node, where an engine sleeps on its own GPU. Here another instance may be
    busy there while other GPUs are free. A start waits for the sleeper as long as the wake should save, times
    `sleeper_patience`, so that it never takes much longer than twice the better of both (rent or buy), and not past the
    moment at which a start elsewhere would still meet `max_wait_s`."""

    saved_s: float
    elsewhere_s: float


@dataclass(frozen=True, slots=True)
class Preview:
    """The place that a placement would get now. `expected` None: it would have to wait."""

    decision: PlaceDecision
    expected: Expected | None
    victims: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)  # instance_id -> why it stays


class Placing:
    """Placements by instance_id: waiting, or sent and not yet reported by an agent."""

    def __init__(
        self, fleet: Fleet, place: PlacePolicy, evict: EvictPolicy, host_memory: HostMemory, sleepers: Sleepers
    ) -> None:
        self.fleet, self._place, self._evict, self._host = fleet, place, evict, host_memory
        self._sleepers = sleepers
        self.placements: dict[str, Placement] = {}
        self._waiting: list[tuple[tuple[int, float], Placement]] = []
        self._shares = Shares()

    # waiting placements

    def add(self, placement: Placement) -> None:
        self.placements[placement.instance_id] = placement
        insort(self._waiting, (placement.urgency, placement), key=lambda entry: entry[0])

    def drop(self, instance_id: str, *, keep_claims: bool = False) -> Placement | None:
        """End a placement, and release its claims and promises unless `keep_claims` (a row stands for them now)."""
        placement = self.placements.pop(instance_id, None)
        if placement is not None:
            self._wait_no_more(placement)
            if not keep_claims:
                self._release(placement)
        return placement

    def _wait_no_more(self, placement: Placement) -> None:
        for at in range(bisect_left(self._waiting, placement.urgency, key=lambda entry: entry[0]), len(self._waiting)):
            urgency, waiting = self._waiting[at]
            if waiting is placement:
                del self._waiting[at]
            if waiting is placement or urgency != placement.urgency:
                return

    def _release(self, placement: Placement) -> None:
        capacity = self.fleet.capacity
        for number in range(max(1, len(placement.stages))):
            if placement.stage_id(number) not in self.fleet.instances.by_id:
                capacity.claim(placement.stage_id(number), {})
                self.fleet.network.forget(placement.stage_id(number))
        for dormant in placement.sent.promised if placement.sent else ():
            if capacity.taken.get(dormant) == placement.instance_id:
                capacity.give_back(dormant)

    def _promise(self, placement: Placement) -> None:
        capacity, sent = self.fleet.capacity, placement.sent
        for number, stage in enumerate(placement.stages):
            given_up = (sent.source, *sent.drops.get(stage.node_id, ())) if sent else ()
            key = placement.command.model.share_key if len(placement.stages) == 1 else ""
            claims = {g: max(0, stage.bytes_per_gpu - capacity.bytes_of(g, given_up, key)) for g in stage.gpu_ids}
            capacity.claim(placement.stage_id(number), claims, key)
        for dormant in sent.promised if sent else ():
            capacity.take(dormant, placement.instance_id)

    # placing

    def work(self, now_s: float) -> list[Effect]:
        if not self._waiting:
            return []
        now = Pass(self.fleet, now_s, self._shares)
        if self.fleet.params.turns == "balanced" and self.fleet.params.fair_requests:
            self._shares = now.victims.shares = self._account(now)
        return [e for placement in self._most_urgent_first(now) for e in self._try(placement, now)]

    def _most_urgent_first(self, now: Pass) -> list[Placement]:
        """Sort waiting placements. With balanced turns, those of equal priority go by how far their model is behind
        another waiting one (if by `fair_requests` or more), then by the total waiting time of their queue."""
        waiting = [placement for _, placement in self._waiting]
        if self.fleet.params.turns == "balanced" and len(waiting) > 1:
            quantum, behind = self.fleet.params.fair_requests, now.victims.shares.behind(self._keys_waiting())
            far = Counter({key: num for key, num in behind.items() if 0 < quantum <= num})

            def waited_s(placement: Placement) -> float:
                command = placement.command
                return now.victims.weight_of(command.model) * max(0.0, now.now_s - command.wanted_at)

            waiting.sort(key=lambda p: (p.urgency[0], not p.stages, -far[p.command.model.key], -waited_s(p), p.urgency))
        elif any(now.victims.factor_of(placement.command.model) > 1 for placement in waiting):

            def weighted_s(placement: Placement) -> float:
                waited_s = max(0.0, now.now_s - placement.received_at)
                return waited_s * now.victims.factor_of(placement.command.model)

            waiting.sort(key=lambda p: (p.urgency[0], -weighted_s(p), p.urgency))
        return waiting

    def try_one(self, placement: Placement, now_s: float) -> list[Effect]:
        return [] if placement.sent else self._try(placement, Pass(self.fleet, now_s, self._shares))

    def _keys_waiting(self) -> set[str]:
        return {p.command.model.key for _, p in self._waiting if not (p.command.waits or p.command.is_batch)}

    def _account(self, now: Pass) -> Shares:
        waiting = self._keys_waiting()
        there = {row.model_key for here in self.fleet.capacity.on_node.values() for row in here.values() if row.serves}
        demands = {key: now.victims.demand(key) for key in sorted(waiting | there)}
        return account(self._shares, demands, waiting, now.now_s, now.victims.turns.most_s)

    def _try(self, placement: Placement, now: Pass) -> list[Effect]:
        """Take the first that applies:

        1. A model that has had more than its share lets the others go first.
        2. There is room: start, unless an engine of the model sleeps elsewhere (6, 7).
        3. No node could ever take it: refuse, once nodes have had time to join.
        4. It waits for free memory: nothing leaves for it but the instance that it replaces, and idle ones beside that.
        5. Instances were asked to leave (again where no agent answers), or nobody knows yet who is idle: wait.
        6. To wait for the sleeper's GPU saves nothing: start in the room there is.
        7. The sleeper's GPU is soon free: wait for it rather than start or evict elsewhere.
        8. Those whose loss costs least leave, if the start is worth that.
        9. Start in the room there is, or say why it waits.
        """
        now_s, params = now.now_s, self.fleet.params
        if not placement.stages and self._gives_way(placement, now):  # 1
            placement.lacked_at = placement.lacked_at or now_s
            return []
        decision = self._decide(placement, now)
        if not decision.stages and self._batch_lets_go(placement, now):
            decision = self._decide(placement, now)
        if placement.command.is_batch and not self._may_drop(placement, decision, now):
            decision = PlaceDecision(reason="copies of models that are likelier to be needed would be dropped for it")
        if decision.stages and (decision.source or not _sleeps_at(placement.command.model, now.view)):  # 2
            return self._start(placement, decision, now)
        placement.lacked_at = placement.lacked_at or now_s
        settled = self.fleet.is_settled(now_s)
        if not decision.possible:  # 3
            is_early = now_s - placement.received_at < params.impossible_s or not settled
            return [] if is_early else self._refuse(placement, decision, now_s)
        if placement.command.waits:  # 4
            return self._start(placement, decision, now) if decision.stages else self._exchange(placement, now)
        if self._is_making_space(placement, now):  # 5
            return self._ask_again(placement, now)
        if not (settled or self.fleet.loads.is_fresh(now_s)):
            return []
        if decision.stages and params.sleeper_patience and self._saving(placement, now, decision).saved_s <= 0:  # 6
            return self._start(placement, decision, now)
        wanting = 0 if decision.stages else self._wanting(placement, now)
        chosen = self._make_space(placement, now, decision, wanting)
        chosen = chosen if chosen and self._is_worth_it(placement, chosen, now) else None
        placement.is_patient = self._waits_for_sleeper(placement, now, decision, chosen)
        if placement.is_patient:  # 7
            return []
        if chosen is not None:  # 8
            return self._evict_for(placement, chosen, now)
        return self._start(placement, decision, now) if decision.stages else self._say_why(placement, now)  # 9

    def _batch_lets_go(self, placement: Placement, now: Pass) -> bool:
        if placement.command.is_batch or placement.command.waits:
            return False
        if now.batch is None:
            now.batch = [p for _, p in self._waiting if p.command.is_batch]
        found = [p for p in now.batch if p.stages and not p.sent]
        for one in found:
            self._release(one)
            one.state = Waiting()
        return bool(found)

    def _may_drop(self, placement: Placement, decision: PlaceDecision, now: Pass) -> bool:
        factor, rows = placement.batch_factor(now.now_s), self.fleet.instances.by_id
        return all(now.holdings.of(rows[copy]).asked < factor for copy in decision.drops if copy in rows)

    def _say_why(self, placement: Placement, now: Pass) -> list[Effect]:
        if not placement.command.is_batch or placement.said_why:
            return []
        placement.said_why = True
        model, held = placement.command.model, now.victims.held(self._wanted(placement, now, 0))
        left_s = max(0.0, patience_s(model.max_wait_s) - (now.now_s - placement.command.wanted_at))
        stays = "; ".join(f"{name}: {why}" for name, why in sorted(held.items()))
        reason = (
            f"batch requests wait for {model.name}: nothing may leave for them until memory is free, what lies there "
            f"is not expected to be needed, or they have waited {left_s:.0f} s more and count as standard requests"
        )
        reason = f"{reason} ({stays})" if stays else reason
        figures: dict[str, float | int | str] = {
            "class": "batch",
            "class_factor": round(placement.batch_factor(now.now_s), 2),
        }
        return [self.fleet.decided_on(placement, "place", reason, now.now_s, "waits", figures=figures)]

    def _wanted(self, placement: Placement, now: Pass, wanting: int, *, whole: bool = False) -> SpaceWanted:
        model = placement.command.model
        is_there, batch = bool(self.fleet.instances.living(model.key)), placement.batch_factor(now.now_s)
        return now.victims.wanted(model, wanting=wanting, whole=whole, is_there=is_there, batch=batch)

    @property
    def is_patient(self) -> bool:
        return any(placement.is_patient for _, placement in self._waiting)

    def _waits_for_sleeper(
        self,
        placement: Placement,
        now: Pass,
        decision: PlaceDecision,
        chosen: Found | None,
    ) -> bool:
        patience, home = self.fleet.params.sleeper_patience, _sleeps_at(placement.command.model, now.view)
        if not patience or not home or placement.command.node_id:
            return False
        leaving: tuple[str, ...] = ()
        if chosen is not None:
            if home.issuperset(chosen.stage.gpu_ids):
                return False
            decision, leaving = PlaceDecision(stages=(chosen.stage,)), chosen.eviction.victims
        if not decision.stages:
            return False
        found = self._saving(placement, now, decision, leaving)
        left_s = placement.command.wanted_at + placement.command.model.max_wait_s - now.now_s
        return now.now_s - placement.lacked_at < patience * found.saved_s and found.elsewhere_s < left_s

    def _saving(
        self, placement: Placement, now: Pass, elsewhere: PlaceDecision, leaving: tuple[str, ...] = ()
    ) -> Saving:
        """Compare the quickest wake with a start `elsewhere`, for which `leaving` leave first."""
        request, victims = _request(placement, now.now_s), now.victims
        started = expect(elsewhere, request, now.view)
        if started is None:
            return Saving(0.0, 0.0)
        wakes = []
        for row in copies_of(request, now.view):
            gpu_ids = tuple(worker.gpu_id for worker in row.workers)
            if row.state is not InstanceState.SWAPPED_OUT or not victims.may_come_free(gpu_ids, request.model):
                continue
            need = bytes_per_gpu(request.model)
            stage = StageDecision(node_id=row.node_id, gpu_ids=gpu_ids, bytes_per_gpu=need)
            woken = expect(PlaceDecision(stages=(stage,), source=row.instance_id), request, now.view)
            if woken is not None:
                wakes.append(woken.ttft_s + self.fleet.leave_s(victims.serving(gpu_ids)))
        elsewhere_s = started.ttft_s + self.fleet.leave_s(self.fleet.instances.by_id[name] for name in leaving)
        return Saving(elsewhere_s - min(wakes) if wakes else 0.0, elsewhere_s)

    def _is_making_space(self, placement: Placement, now: Pass) -> bool:
        match placement.state:
            case MakingSpace(stage=stage, victims=victims, asked_at=asked_at):
                is_lately = now.now_s - asked_at < self.fleet.params.evict_grace_s
                return is_lately and now.victims.still_hold(stage.gpu_ids, victims)
        return False

    def _gives_way(self, placement: Placement, now: Pass) -> bool:
        is_patient = now.now_s - placement.received_at < now.victims.turns.most_s
        others = (one.command.model for _, one in self._waiting if not one.command.is_batch)
        return is_patient and now.victims.gives_way(placement.command.model, others)

    def _decide(self, placement: Placement, now: Pass) -> PlaceDecision:
        capacity, now_s, known = self.fleet.capacity, now.now_s, placement.refusal
        if known and known.version == capacity.version and now_s - known.at < self.fleet.params.retry_s:
            return known.answer
        with (
            capacity.without(placement.instance_id) if placement.stages else nullcontext(),
            capacity.seen_by(placement.command.model.share_key),
        ):
            decision = _place(self._place, _request(placement, now_s), self._view(placement, now))
        if not decision.stages:
            placement.refusal = Refusal(capacity.version, now_s, decision)
        return decision

    def _view(self, placement: Placement, now: Pass) -> PlacementView:
        if only := placement.command.node_id:
            return _narrowed(now.view, [n for n in now.view.nodes if n.node_id == only])
        nodes = self._elsewhere(placement, now)
        if placement.silent:
            answering = [n for n in nodes or now.view.nodes if n.node_id not in placement.silent]
            nodes = answering or nodes
        return _narrowed(now.view, nodes) if nodes else now.view

    def _elsewhere(self, placement: Placement, now: Pass) -> list[Node]:
        """The nodes left when some lately failed to get the weights, and those with a dormant copy; empty where none
        failed, or none is left."""
        model = placement.command.model
        failed = self.fleet.failed_nodes.of(model, now.now_s)
        if not failed or not (left := list(others(model, now.view.nodes, failed))):
            return []
        dormant = {row.node_id for row in now.view.fleet.copies(model)} & failed.keys()
        known = {node.node_id for node in left}
        return [*left, *(n for n in now.view.nodes if n.node_id in dormant - known)]

    def _wanting(self, placement: Placement, now: Pass) -> int:
        """Requests that busy instances may be drained for; `fair_wait_s` is shorter for interactive ones."""
        model, params = placement.command.model, self.fleet.params
        waited_s = (now.now_s - placement.received_at) * now.victims.factor_of(model)
        if placement.command.is_batch or now.victims.runs(model) or waited_s < params.fair_wait_s:
            return 0
        return now.victims.waiting_for(model) if params.turns == "balanced" else 1

    def _make_space(self, placement: Placement, now: Pass, decision: PlaceDecision, wanting: int) -> Found | None:
        model = placement.command.model
        home, only = _sleeps_at(model, now.view), self._gpus_asked(placement, now)
        home = home & only if only else home
        batch = placement.batch_factor(now.now_s)
        at_home = now.victims.wanted(model, wanting=wanting, batch=batch)
        if home and (found := now.victims.make(at_home, self._evict, home)):
            return found
        if decision.stages:
            return None
        wanted = self._wanted(placement, now, wanting, whole=decision.whole_gpus)
        if not placement.stages and not only and now.victims.is_in_vain(wanted):
            return None
        with self.fleet.capacity.without(placement.instance_id) if placement.stages else nullcontext():
            found = now.victims.make(wanted, self._evict, only)
        if found is None and not only:
            now.victims.note_in_vain(wanted)
        return found

    def _is_worth_it(self, placement: Placement, chosen: Found, now: Pass) -> bool:
        """A start that no request awaits, or only batch, has to save more than the victims' loss costs: else two
        models' plans would take the same memory from each other in turns."""
        model, fleet, victims = placement.command.model, self.fleet, chosen.eviction.victims
        node = fleet.nodes.by_id.get(chosen.stage.node_id)
        is_kept = model.pinned or fleet.capacity.num_active.get(model.key, 0) < model.min_instances
        is_batch = placement.command.is_batch
        is_due = not is_batch and (placement.command.is_awaited or now.victims.waiting_for(model) or is_kept)
        if is_due or not victims:
            return not is_batch  # batch claims no bytes of a drain: others may need them sooner
        costs_s = sum(now.holdings.saves_s(fleet.instances.by_id[victim]) for victim in victims)
        if is_batch and node is not None:
            return placement.batch_factor(now.now_s) * now.holdings.start_s(model, node) > costs_s
        return (
            fleet.params.victims != "least_worth" or node is None or now.holdings.another_saves_s(model, node) > costs_s
        )

    def _gpus_asked(self, placement: Placement, now: Pass) -> frozenset[str]:
        node = self.fleet.nodes.by_id.get(placement.command.node_id)
        nodes = [node] if node else self._elsewhere(placement, now)
        return frozenset(gpu.gpu_id for node in nodes for gpu in node.gpus)

    def _evict_for(self, placement: Placement, chosen: Found, now: Pass) -> list[Effect]:
        now_s, (_, stage, eviction) = now.now_s, chosen
        placement.state = MakingSpace(stage, eviction.victims, now_s, now_s)
        self._promise(placement)
        who = ", ".join(eviction.victims) or "wait for a drain under way"
        rows = self.fleet.instances.by_id
        leaving = [now.victims.described(rows[victim]) for victim in eviction.victims]
        reason = why_they_leave(placement, eviction, leaving)
        figures = {"lacking_bytes": eviction.need_bytes, "freed_bytes": eviction.freed_bytes}
        decided = self.fleet.decided_on(placement, "evict", reason, now_s, who, eviction.rivals, figures)
        return [decided, *self._stops(placement, [rows[victim] for victim in eviction.victims], now)]

    def _exchange(self, placement: Placement, now: Pass) -> list[Effect]:
        """Let the instance that it replaces leave, if that frees the memory, once the weights are on its node or cannot
        be brought there."""
        if self._is_making_space(placement, now):
            return self._ask_again(placement, now)
        if not self.fleet.is_settled(now.now_s):
            return []
        old = self.fleet.instances.by_id.get(placement.command.replaces)
        if old is None or old.state is not InstanceState.READY or not old.is_whole:
            return []
        effects: list[Effect] = []
        wanted = replace(self._wanted(placement, now, 0), instead_of=old.instance_id)
        with self.fleet.capacity.without(placement.instance_id) if placement.stages else nullcontext():
            chosen = now.victims.make(wanted, self._evict, frozenset(worker.gpu_id for worker in old.workers))
        if chosen is None:
            return []
        model, here = placement.command.model, chosen.stage.node_id
        if placement.state != Fetching(here):
            placement.state = Fetching(here)
            effects = self._host.bring_ahead(model, here, now.now_s)
        if self._host.is_coming(model, here):
            return effects
        return self._evict_for(placement, chosen, now)

    def _ask_again(self, placement: Placement, now: Pass) -> list[Effect]:
        making, rows = placement.state, self.fleet.instances.by_id
        if not isinstance(making, MakingSpace) or now.now_s - making.sent_at < self.fleet.params.repeat_s:
            return []
        placement.state = replace(making, sent_at=now.now_s)
        there = [rows[victim] for victim in making.victims if victim in rows]
        return self._stops(placement, [row for row in there if row.state is InstanceState.READY], now)

    def _stops(self, placement: Placement, leaving: Iterable[Instance], now: Pass) -> list[Effect]:
        why = f"it gives its memory to {placement.command.model.name}"
        effects: list[Effect] = []
        for victim in leaving:
            leave = self._sleepers.leave(victim, now.holdings, now.now_s)
            stopped = self._stop(victim, why, now.victims, leave.becomes)
            effects += [*leave.ends, Publish(stopped, placement.event)]
        return effects

    def _stop(self, victim: Instance, why: str, victims: Victims, becomes: Becomes) -> StopInstance:
        owner = self.fleet.models.get(victim.model_key)
        expected_s = self.fleet.network.sleep_s(owner, becomes) if owner is not None else 0.0
        params = self.fleet.params
        grace_s = params.batch_grace_s if victims.is_batch_only(victim) else params.evict_grace_s
        if owner is not None and victim.is_outdated(owner):
            why = OUTDATED
            grace_s = min(grace_s, owner.max_wait_s / 2)  # the start has as long before those who wait are refused
        return stop(victim.node_id, victim.instance_id, why, grace_s, becomes, expected_s)

    def preview(self, model: Model, now_s: float, *, node_id: str = "", waits: bool = False) -> Preview:
        """Return the place that an instance would get now, and its victims. Changes nothing."""
        command = as_if_asked(model, now_s, waits=waits, node_id=node_id)
        event = Event(event_id="", type=command.TYPE, occurred_at=now_s, issuer="", data=command)
        placement, now = Placement(event, now_s, now_s), Pass(self.fleet, now_s, self._shares)
        decision, request = self._decide(placement, now), _request(placement, now_s)
        if decision.stages and (decision.source or waits or not _sleeps_at(model, now.view)):
            return Preview(decision, expect(decision, request, now.view))
        chosen = None if waits else self._make_space(placement, now, decision, 0)
        if chosen is None and not decision.stages:
            wanted = now.victims.wanted(model, wanting=0)
            return Preview(decision, None, held=now.victims.held(wanted, self._gpus_asked(placement, now)))
        if chosen is None:
            return Preview(decision, expect(decision, request, now.view))
        _, stage, eviction = chosen
        asleep = (row for row in now.view.fleet.copies(model) if row.state is InstanceState.SWAPPED_OUT)
        source = next((row.instance_id for row in asleep if {w.gpu_id for w in row.workers} <= {*stage.gpu_ids}), "")
        then = PlaceDecision(stages=(stage,), source=source, reason=eviction.reason)
        return Preview(then, expect(then, request, now.view), eviction.victims)

    def leaving_order(self, gpu_id: str, now_s: float) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return a GPU's serving instances in their leaving order for a start that no request awaits, and why the
        others stay. Changes nothing."""
        residents = Pass(self.fleet, now_s, self._shares).victims.residents(gpu_id)
        may_go = [resident for resident in residents if not resident.held]
        decision = self._evict(may_go, sum(resident.num_bytes for resident in may_go))
        priority = {resident.name: resident.priority for resident in may_go}
        order = sorted(decision.victims, key=priority.__getitem__)  # a policy need not name victims in order
        return tuple(order), {resident.name: resident.held for resident in residents if resident.held}

    def _start(self, placement: Placement, decision: PlaceDecision, now: Pass) -> list[Effect]:
        now_s = now.now_s
        self._wait_no_more(placement)
        self._release(placement)
        rows, drops = self.fleet.instances.by_id, dict[str, tuple[str, ...]]()
        for replica_id in decision.drops:
            node_id = rows[replica_id].node_id if replica_id in rows else decision.node_id
            drops[node_id] = (*drops.get(node_id, ()), replica_id)
        sent = Sent(decision.stages, decision.source, drops, placement.victims, started_at=now_s, sent_at=now_s)
        if len(decision.stages) > 1 and (first := self.fleet.nodes.by_id.get(decision.node_id)) is not None:
            sent.rendezvous = rendezvous(first.stages_at, placement.instance_id)
        sent.expected = expect(decision, _request(placement, now_s), now.view)
        model, failed_nodes = placement.command.model, self.fleet.failed_nodes
        failed = failed_nodes.of(model, now_s)
        if not placement.command.node_id:
            begins_on = {stage.node_id for stage in decision.stages}
            sent.tries_left = failed_nodes.tries_left(model, failed, begins_on, now.view.nodes)
        placement.state = sent
        self._promise(placement)
        self.fleet.network.ordered(placement, self.fleet.nodes.by_id, now_s)
        where = _chosen(decision)
        reason = f"{model.name} starts on {where}: {decision.reason}"
        reason += failed_nodes.said(failed, sent.tries_left)
        figures: dict[str, float | int | str] = {}
        if failed:
            figures |= {"failed_on": ", ".join(sorted(failed)), "tries_left": sent.tries_left}
        if parts := [stage.part_bytes for stage in decision.stages if stage.part_bytes]:
            figures["parts"] = ", ".join(map(show_bytes, parts))
        if disks := self._read_from_disk(model, decision):
            figures["read_from_disk"] = ", ".join(disks)
            if rate := min(disks.values()):
                figures["disk_bytes_per_s"] = rate
            reason += f"; its weights are read from the disk of {listed(list(disks))}"
        if shared := self.shared_bytes(model, decision):
            figures["shared_bytes"] = shared
            reason += f"; {show_bytes(shared)} of its weights are read there by others, and count once"
        decided = self.fleet.decided_on(placement, "place", reason, now_s, where, decision.rivals, figures)
        sent.decision_id = decided.decision.decision_id
        return [decided, *self._orders(placement, sent)]

    def _read_from_disk(self, model: Model, decision: PlaceDecision) -> dict[str, float]:
        if decision.source:
            return {}
        nodes = [self.fleet.nodes.by_id.get(stage.node_id) for stage in decision.stages]
        return {n.node_id: n.disk_bytes_per_s for n in nodes if n and found_at(n, model) is StartKind.DISK}

    def shared_bytes(self, model: Model, decision: PlaceDecision) -> int:
        if len(decision.stages) != 1 or len(decision.stages[0].gpu_ids) != 1:
            return 0
        known = self.fleet.capacity.shared(decision.stages[0].gpu_ids[0], model.share_key)
        gone = (decision.source, *decision.drops)
        return known.num_bytes if known and any(holder not in gone for holder in known.holders) else 0

    def _orders(self, placement: Placement, sent: Sent) -> list[Effect]:
        known = self.fleet.instances.by_id
        numbers = [number for number in range(len(sent.stages)) if placement.stage_id(number) not in known]
        commands = start_commands(placement, sent, numbers)
        return [Publish(self.fleet.completed(command), placement.event) for command in commands]

    # starts that have been sent

    def repeat(self, now_s: float) -> list[Effect]:
        return [e for p in list(self.placements.values()) if p.sent for e in self._repeat(p, p.sent, now_s)]

    def _repeat(self, placement: Placement, sent: Sent, now_s: float) -> list[Effect]:
        params, known = self.fleet.params, self.fleet.instances.by_id
        silent = [n for n in range(len(sent.stages)) if placement.stage_id(n) not in known]
        if not silent:
            return []  # the row itself ends the placement
        gone = next((n for n in silent if not self.fleet.nodes.is_alive(sent.stages[n].node_id, now_s)), None)
        if gone is not None or now_s - sent.started_at > params.give_up_s:
            number = gone if gone is not None else silent[0]
            return self._give_up(placement, sent, sent.stages[number].node_id, gone is not None, now_s)
        if now_s - sent.sent_at >= params.repeat_s:
            sent.sent_at = now_s
            return self._orders(placement, sent)
        return []

    def _give_up(self, placement: Placement, sent: Sent, node_id: str, has_left: bool, now_s: float) -> list[Effect]:
        late = f"{node_id} did not answer its start for {now_s - sent.started_at:.1f} s"
        why = f"{node_id} has left before it took the start" if has_left else late
        ids = [placement.stage_id(n) for n in range(len(sent.stages))]
        stops = [Publish(stop(stage.node_id, ids[n], "it is placed anew", 0.0)) for n, stage in enumerate(sent.stages)]
        if len(ids) > 1:  # other stages may have begun: fail the whole; it is asked for anew under another id
            self.drop(placement.instance_id)
            decided = self.fleet.decided_on(placement, "place", f"{why}, and the start is given up", now_s, "failed")
            failed = refused(placement, why, decided.decision.decision_id, now_s)
            is_reported = placement.instance_id in self.fleet.instances.by_id
            facts = [] if is_reported else [Publish(InstanceFailed(instance=failed, code="no_answer"), placement.event)]
            return [decided, *stops, *facts]
        decided = self.fleet.decided_on(placement, "place", f"{why}, and the instance is placed again", now_s, "anew")
        self._release(placement)
        placement.start_over()
        insort(self._waiting, (placement.urgency, placement), key=lambda entry: entry[0])
        return [decided, *stops]

    def begun_by_half(self, placement: Placement, parts: Iterable[Instance], now_s: float) -> list[Effect]:
        """Fail a placement whose later stages, started without the first by an earlier placer, have ended. The
        autoscaler asks for it anew under another id."""
        if any(not part.state.is_gone for part in parts):
            return []
        why = "its later stages were begun by an earlier placer, and its first one was not"
        decided = self.fleet.decided_on(placement, "place", f"{why}: the start is given up", now_s, "failed")
        failed = refused(placement, why, decided.decision.decision_id, now_s)
        return [decided, Publish(InstanceFailed(instance=failed, code="no_answer"), placement.event)]

    def _refuse(self, placement: Placement, decision: PlaceDecision, now_s: float) -> list[Effect]:
        self.drop(placement.instance_id)
        reason = f"{placement.command.model.name} cannot start anywhere: {decision.reason}"
        decided = self.fleet.decided_on(placement, "refuse", reason, now_s, rivals=decision.rivals)
        failed = refused(placement, reason, decided.decision.decision_id, now_s)
        return [decided, Publish(InstanceFailed(instance=failed, code="no_capacity"), placement.event)]


def _request(placement: Placement, now_s: float) -> PlaceRequest:
    command = placement.command
    return PlaceRequest(
        instance_id=command.instance_id,
        model=command.model,
        waited_s=max(0.0, now_s - command.wanted_at),
        num_required=command.num_required,
        is_to_sleep=command.waits and not command.replaces,
        is_awaited=command.is_awaited,
    )


def _narrowed(view: PlacementView, nodes: list[Node]) -> PlacementView:
    fleet, dormant = view.fleet, {node.node_id: view.fleet.dormant.get(node.node_id, ()) for node in nodes}
    there = {node_id: rows for node_id, rows in dormant.items() if rows}
    return replace(view, nodes=NodeIndex(nodes, fleet.reserved, there, fleet.scores))


def _chosen(decision: PlaceDecision) -> str:
    return ", ".join(gpu_id for stage in decision.stages for gpu_id in stage.gpu_ids)


def _place(place: PlacePolicy, request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    decision = place(request, view)
    if decision.stages or not view.fleet.dormant or _sleeps_at(request.model, view):
        return decision
    return with_drops(request, view) or decision


def _sleeps_at(model: Model, view: PlacementView) -> frozenset[str]:
    """Return GPUs where an engine of the model sleeps: its wake beats a start anywhere (SwapServeLLM section 4)."""
    asleep = (row for row in view.fleet.copies(model) if row.state is InstanceState.SWAPPED_OUT)
    return frozenset(worker.gpu_id for row in asleep for worker in row.workers)
