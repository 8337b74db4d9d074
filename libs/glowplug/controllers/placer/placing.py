"""The placements that wait for room: tried the most urgent first, and again only when something may have changed.

A placement asks its policy when it is new, when bytes came free or a node joined since it was told no (`version` of the
books), and each `retry_s`; who may be evicted for it is looked at with each tick and each word of an instance. What
several of them need alike is asked once in a pass: a pass over hundreds that find no room costs little more than one.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from glowplug.controllers.effects import Effect, Publish, Record
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.orders import Placement, makes_room, record, refused, start_commands, stop
from glowplug.controllers.placer.victims import Room
from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.hardware import Node
from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceFailed
from glowplug.policies.decisions import EvictDecision, PlaceDecision, StageDecision
from glowplug.policies.eviction.shares import Shares, account
from glowplug.policies.eviction.turns import TurnParams
from glowplug.policies.placement.dormant import with_drops
from glowplug.policies.placement.expect import expect, stage_seconds
from glowplug.policies.placement.links import gpu_kind_of
from glowplug.policies.placement.port import PlaceRequest
from glowplug.policies.start_times import StartKind

Place = Callable[..., PlaceDecision]
Evict = Callable[..., EvictDecision]


class Look:
    """One pass: the fleet as it is now, and what has been answered in this pass."""

    def __init__(self, fleet: Fleet, now_s: float, shares: Shares) -> None:
        self.now_s = now_s
        self.nodes: list[Node] = fleet.view(now_s)
        self.view = fleet.placement_view(now_s, self.nodes)
        params = fleet.params
        self.room = Room(
            now_s=now_s,
            nodes=self.nodes,
            books=fleet.books,
            models=fleet.models,
            loads=fleet.loads,
            min_residency_s=params.min_residency_s,
            turns=TurnParams(rule=params.turns, turn_s=params.fair_turn_s, fair_requests=params.fair_requests),
            victims=params.victims,
            shares=shares,
        )
        self.no_room: dict[Any, PlaceDecision] = {}  # of those alike in size
        self.too_late: dict[Any, tuple[float, PlaceDecision]] = {}  # ... in time too -> seconds waited by who was told
        self.no_victims: set[Any] = set()
        self.models_with_copies = {row.model_key for rows in fleet.books.dormant.values() for row in rows}


class Placing:
    """`placements` by instance_id: those that wait, and those whose start has been sent and not yet been heard of."""

    def __init__(self, fleet: Fleet, place: Place, evict: Evict) -> None:
        self.fleet, self._place, self._evict = fleet, place, evict
        self.placements: dict[str, Placement] = {}
        self._waiting: list[tuple[tuple[int, float, str], Placement]] = []
        self._shares = Shares()

    # who waits

    def add(self, placement: Placement) -> None:
        self.placements[placement.instance_id] = placement
        insort(self._waiting, (placement.urgency, placement), key=lambda entry: entry[0])

    def drop(self, instance_id: str, *, keep_claims: bool = False) -> Placement | None:
        """No placement any more. Its promises end with it unless a row stands for them now."""
        placement = self.placements.pop(instance_id, None)
        if placement is not None:
            self._wait_no_more(placement)
            if not keep_claims:
                self._release(placement)
        return placement

    def shift(self, by_s: float) -> None:
        """Move every wait by a jump of the clock."""
        for placement in self.placements.values():
            placement.shift(by_s)
        self._waiting = [(p.urgency, p) for _, p in self._waiting]

    def _wait_no_more(self, placement: Placement) -> None:
        at = bisect_left(self._waiting, placement.urgency, key=lambda entry: entry[0])
        if at < len(self._waiting) and self._waiting[at][1] is placement:
            del self._waiting[at]

    def _release(self, placement: Placement) -> None:
        books = self.fleet.books
        for number in range(max(1, len(placement.stages))):
            if placement.stage_id(number) not in self.fleet.instances.by_id:
                books.claim(placement.stage_id(number), {})
                self.fleet.network.forget(placement.stage_id(number))
        for dormant in (placement.source, *(d for drops in placement.drops.values() for d in drops)):
            if dormant and books.taken.get(dormant) == placement.instance_id:
                books.give_back(dormant)

    def _promise(self, placement: Placement) -> None:
        """Put what it was given on the books: less what its source and those that give way hold there."""
        books = self.fleet.books
        for number, stage in enumerate(placement.stages):
            given_up = (placement.source, *placement.drops.get(stage.node_id, ()))
            wanted = {g: stage.bytes_per_gpu - books.held_bytes(g, given_up) for g in stage.gpu_ids}
            books.claim(placement.stage_id(number), {g: max(0, n) for g, n in wanted.items()})
        for dormant in (placement.source, *(d for drops in placement.drops.values() for d in drops)):
            if dormant:
                books.take(dormant, placement.instance_id)

    # placing

    def work(self, now_s: float) -> list[Effect]:
        """Try whoever waits, most urgent first."""
        if not self._waiting:
            return []
        look = Look(self.fleet, now_s, self._shares)
        if self.fleet.params.turns == "balanced" and self.fleet.params.fair_requests:
            self._shares = self._account(look)
            look.room = replace(look.room, shares=self._shares)
        return [e for placement in self._in_turn(look) for e in self._try(placement, look)]

    def _in_turn(self, look: Look) -> list[Placement]:
        """Who waits, most urgent first. Where turns are balanced that is, of equal priority, the model that is furthest
        behind another one that waits (by fair_requests at least), then the queue that has waited longest in all its
        requests together."""
        waiting = [placement for _, placement in self._waiting]
        if self.fleet.params.turns == "balanced" and len(waiting) > 1:
            keys, quantum = {p.command.model.key for p in waiting}, self.fleet.params.fair_requests

            def behind(placement: Placement) -> int:
                num = look.room.shares.behind(placement.command.model.key, keys)
                return num if quantum and num >= quantum else 0

            def waited_s(placement: Placement) -> float:
                command = placement.command
                return look.room.waiting_for(command.model) * max(0.0, look.now_s - command.wanted_at)

            waiting.sort(key=lambda p: (p.urgency[0], not p.stages, -behind(p), -waited_s(p), p.urgency))
        return waiting

    def try_one(self, placement: Placement, now_s: float) -> list[Effect]:
        """One that has just been asked for; nothing has changed for the others."""
        return [] if placement.sent_at else self._try(placement, Look(self.fleet, now_s, self._shares))

    def _account(self, look: Look) -> Shares:
        """What those that wait and those that serve have been given, now."""
        waiting = {placement.command.model.key for _, placement in self._waiting}
        there = {row.model_key for here in self.fleet.books.by_node.values() for row in here.values() if row.serves}
        demands = {key: look.room.demand(key) for key in sorted(waiting | there)}
        return account(self._shares, demands, waiting, look.now_s, look.room.turns.most_s)

    def _try(self, placement: Placement, look: Look) -> list[Effect]:
        now_s, params = look.now_s, self.fleet.params
        if not placement.stages and self._gives_way(placement, look):
            placement.lacked_at = placement.lacked_at or now_s
            return []
        decision = self._decide(placement, look)
        has_home = placement.command.model.key in look.models_with_copies and bool(self._sleeps_at(placement))
        if decision.stages and (decision.source or not has_home):
            return self._start(placement, decision, look)
        placement.lacked_at = placement.lacked_at or now_s
        waited = now_s - placement.received_at
        settled = self.fleet.is_settled(now_s)
        if not decision.possible:
            patient = waited < params.impossible_s or not settled
            return [] if patient else self._refuse(placement, decision, now_s)
        asked_lately = now_s - placement.asked_victims_at < params.evict_grace_s
        gpu_ids = [gpu_id for stage in placement.stages for gpu_id in stage.gpu_ids]
        if asked_lately and look.room.is_being_made(gpu_ids, placement.victims):
            return []
        if not settled and not self.fleet.loads.is_fresh(now_s):
            return []
        wanting = 0 if decision.stages else self._wanting(placement, look)
        chosen = self._make_room(placement, look, decision, wanting)
        if chosen is not None:
            return self._evict_for(placement, *chosen, look)
        return self._start(placement, decision, look) if decision.stages else []

    def _gives_way(self, placement: Placement, look: Look) -> bool:
        """Whether others wait first, though there may be bytes for it; not for longer than the longest turn."""
        is_patient = look.now_s - placement.received_at < look.room.turns.most_s
        others = (one.command.model for _, one in self._waiting)
        return is_patient and look.room.gives_way(placement.command.model, others)

    def _decide(self, placement: Placement, look: Look) -> PlaceDecision:
        """What its policy says, or said when nothing has changed since."""
        books, now_s = self.fleet.books, look.now_s
        if placement.tried_version == books.version and now_s - placement.tried_at < self.fleet.params.retry_s:
            return placement.answer
        decision = self._told_alike(placement, look) if not placement.stages else None
        if decision is None:
            claims = books.set_aside(placement.instance_id) if placement.stages else {}
            decision = self._ask(placement, look)
            if claims:
                books.put_back(placement.instance_id, claims)
        if not decision.stages:
            self._tell_alike(placement, look, decision)
            placement.tried_version, placement.tried_at, placement.answer = books.version, now_s, decision
        return decision

    def _ask(self, placement: Placement, look: Look) -> PlaceDecision:
        view = look.view
        heard = [n for n in look.nodes if n.node_id not in placement.silent] if placement.silent else look.nodes
        request = _request(placement, look.now_s)
        asked_of = replace(view, nodes=heard) if heard and placement.silent else view
        decision = self._place(request, asked_of)
        if decision.stages or not self.fleet.books.dormant:
            return decision
        if self._sleeps_at(placement):
            return decision  # it wakes where it sleeps, once there is room
        return with_drops(request, asked_of) or decision

    def _told_alike(self, placement: Placement, look: Look) -> PlaceDecision | None:
        """A "no room" of this pass that does for it: of one of its size where bytes were lacking; where time was, of
        one whose objectives and measured seconds are its own and that had waited no longer."""
        told = look.no_room.get(self._size(placement, look))
        if told is None and look.too_late:
            waited_s, late = look.too_late.get(self._size_and_time(placement, look), (0.0, None))
            told = late if look.now_s - placement.command.wanted_at >= waited_s else None
        return told

    def _tell_alike(self, placement: Placement, look: Look, decision: PlaceDecision) -> None:
        if decision.is_late:
            waited_s = look.now_s - placement.command.wanted_at
            look.too_late[self._size_and_time(placement, look)] = (waited_s, decision)
        else:
            look.no_room[self._size(placement, look)] = decision

    def _size(self, placement: Placement, look: Look) -> tuple[Any, ...]:
        """What is alike of two placements neither of which has the bytes."""
        model = placement.command.model
        whose = model.key if model.key in look.models_with_copies else ""
        return (model.weights_bytes, model.kv_bytes, model.num_gpus, model.engine, whose, placement.silent)

    def _size_and_time(self, placement: Placement, look: Look) -> tuple[Any, ...]:
        """... and neither of which would be in time: what HydraServe's layout is made from (its section 4.1)."""
        command, model = placement.command, placement.command.model
        view, gpu_kinds = look.view, sorted({gpu_kind_of(node) for node in look.nodes})
        seconds = tuple(stage_seconds(model, gpu_kind, view, StartKind.COLD) for gpu_kind in gpu_kinds)
        return (self._size(placement, look), model.slo, command.num_required, seconds)

    def _sleeps_at(self, placement: Placement) -> frozenset[str]:
        """GPUs where an engine of its model sleeps: waking it there beats a start anywhere (SwapServeLLM section 4)."""
        key, dormant = placement.command.model.key, self.fleet.books.dormant
        return frozenset(
            worker.gpu_id
            for rows in dormant.values()
            for row in rows
            if row.model_key == key and row.state is InstanceState.SWAPPED_OUT
            for worker in row.workers
        )

    def _wanting(self, placement: Placement, look: Look) -> int:
        """Its requests for which busy instances may be drained: none while some of its model run, or it just came."""
        model, params = placement.command.model, self.fleet.params
        if look.room.runs(model) or look.now_s - placement.received_at < params.fair_wait_s:
            return 0
        return look.room.waiting_for(model) if params.turns == "balanced" else 1

    def _make_room(
        self, placement: Placement, look: Look, decision: PlaceDecision, wanting: int
    ) -> tuple[StageDecision, EvictDecision] | None:
        """GPUs where others leave for it: those where an engine of its model sleeps before any."""
        model = placement.command.model
        home = self._sleeps_at(placement) if model.key in look.models_with_copies else frozenset()
        if home and (found := look.room.make(model, self._evict, wanting=wanting, only=home)):
            return found
        if decision.stages:
            return None
        runs_it = bool(self.fleet.instances.living(model.key))
        whose = model.key if runs_it else ""  # its own instances do not leave for it, but may for another model
        is_ahead = not look.room.waiting_for(model)
        given = look.room.shares.given.get(model.key, 0) if wanting else 0
        key = (model.memory_bytes, model.num_gpus, model.engine, model.priority, wanting, is_ahead, whose, given)
        if key in look.no_victims and not placement.stages:
            return None
        claims = self.fleet.books.set_aside(placement.instance_id) if placement.stages else {}
        found = look.room.make(model, self._evict, wanting=wanting, whole=decision.whole_gpus)
        if claims:
            self.fleet.books.put_back(placement.instance_id, claims)
        if found is None:
            look.no_victims.add(key)
        return found

    def _evict_for(
        self, placement: Placement, stage: StageDecision, eviction: EvictDecision, look: Look
    ) -> list[Effect]:
        now_s = look.now_s
        placement.stages, placement.victims, placement.asked_victims_at = (stage,), eviction.victims, now_s
        self._promise(placement)
        chosen = ", ".join(eviction.victims) or "wait for a drain under way"
        params, rows = self.fleet.params, self.fleet.instances.by_id
        leaving = [look.room.described(rows[victim]) for victim in eviction.victims]
        reason = makes_room(placement, eviction, leaving)
        figures = {"lacking_bytes": eviction.need_bytes, "freed_bytes": eviction.freed_bytes}
        decided = self._record(placement, "evict", reason, eviction.rivals, now_s, chosen, figures)
        why = f"it gives its memory to {placement.command.model.name}"
        stops = [
            stop(rows[victim].node_id, victim, why, params.evict_grace_s, params.evict_becomes)
            for victim in eviction.victims
        ]
        return [Record(decided, placement.event), *(Publish(s, placement.event) for s in stops)]

    def _start(self, placement: Placement, decision: PlaceDecision, look: Look) -> list[Effect]:
        now_s = look.now_s
        self._wait_no_more(placement)
        self._release(placement)
        rows, drops = self.fleet.instances.by_id, dict[str, tuple[str, ...]]()
        for replica_id in decision.drops:
            node_id = rows[replica_id].node_id if replica_id in rows else decision.node_id
            drops[node_id] = (*drops.get(node_id, ()), replica_id)
        placement.stages, placement.source, placement.drops = decision.stages, decision.source, drops
        placement.started_at = placement.sent_at = now_s
        placement.expected = expect(decision, _request(placement, now_s), look.view)
        self._promise(placement)
        self.fleet.network.ordered(placement, self.fleet.nodes.by_id, now_s)
        reason = f"{placement.command.model.name} starts on {_chosen(decision)}: {decision.reason}"
        decided = self._record(placement, "place", reason, decision.rivals, now_s, _chosen(decision))
        placement.decision_id = decided.decision_id
        return [Record(decided, placement.event), *self.orders(placement)]

    def orders(self, placement: Placement) -> list[Effect]:
        """Its starts, for those stages that nobody has spoken of."""
        known = self.fleet.instances.by_id
        return [
            Publish(command, placement.event)
            for number in range(len(placement.stages))
            if placement.stage_id(number) not in known
            for command in start_commands(placement, range(number, number + 1))
        ]

    # starts that have been sent

    def chase(self, now_s: float) -> list[Effect]:
        """Starts of which their agents have not spoken yet: ask again, in the end somewhere else."""
        return [e for p in list(self.placements.values()) if p.sent_at for e in self._chase(p, now_s)]

    def _chase(self, placement: Placement, now_s: float) -> list[Effect]:
        params, known = self.fleet.params, self.fleet.instances.by_id
        silent = [n for n in range(len(placement.stages)) if placement.stage_id(n) not in known]
        if not silent:
            return []  # all have been heard of: the row itself ends the placement
        gone = next((n for n in silent if not self.fleet.nodes.is_alive(placement.stages[n].node_id, now_s)), None)
        if gone is not None or now_s - placement.started_at > params.give_up_s:
            number = gone if gone is not None else silent[0]
            return self._give_up(placement, placement.stages[number].node_id, gone is not None, now_s)
        if now_s - placement.sent_at >= params.repeat_s:
            placement.sent_at = now_s
            return self.orders(placement)
        return []

    def _give_up(self, placement: Placement, node_id: str, has_left: bool, now_s: float) -> list[Effect]:
        late = f"{node_id} did not answer its start for {now_s - placement.started_at:.1f} s"
        why = f"{node_id} has left before it took the start" if has_left else late
        ids = [placement.stage_id(n) for n in range(len(placement.stages))]
        stops = [
            Publish(stop(stage.node_id, ids[n], "it is placed anew", 0.0)) for n, stage in enumerate(placement.stages)
        ]
        if len(ids) > 1:  # its other stages may have begun: the whole has failed, and is asked for under another name
            self.drop(placement.instance_id)
            decided = self._record(placement, "place", f"{why}, and the start is given up", (), now_s, "failed")
            failed = refused(placement, why, decided.decision_id, now_s)
            is_heard = placement.instance_id in self.fleet.instances.by_id
            told = [] if is_heard else [Publish(InstanceFailed(instance=failed, code="no_answer"), placement.event)]
            return [Record(decided, placement.event), *stops, *told]
        decided = self._record(placement, "place", f"{why}, and another place is looked for", (), now_s, "anew")
        self._release(placement)
        placement.start_over()
        insort(self._waiting, (placement.urgency, placement), key=lambda entry: entry[0])
        return [Record(decided, placement.event), *stops]

    def _refuse(self, placement: Placement, decision: PlaceDecision, now_s: float) -> list[Effect]:
        """No GPU could ever hold it: say so as a failed start."""
        self.drop(placement.instance_id)
        reason = f"{placement.command.model.name} cannot start anywhere: {decision.reason}"
        decided = self._record(placement, "refuse", reason, decision.rivals, now_s)
        failed = refused(placement, reason, decided.decision_id, now_s)
        fact = InstanceFailed(instance=failed, code="no_capacity")
        return [Record(decided, placement.event), Publish(fact, placement.event)]

    def _record(
        self,
        placement: Placement,
        kind: str,
        reason: str,
        rivals: tuple[Rival, ...],
        now_s: float,
        chosen: str = "",
        figures: Mapping[str, int] | None = None,
    ) -> DecisionRecord:
        policy = self.fleet.policies["eviction" if kind == "evict" else "placement"]
        decision_id = self.fleet.ids.next("d-p")
        return record(
            placement, decision_id, kind, policy, reason, now_s, rivals=rivals, chosen=chosen, figures=figures
        )


def _request(placement: Placement, now_s: float) -> PlaceRequest:
    command = placement.command
    return PlaceRequest(
        instance_id=command.instance_id,
        model=command.model,
        waited_s=max(0.0, now_s - command.wanted_at),
        num_required=command.num_required,
    )


def _chosen(decision: PlaceDecision) -> str:
    return ", ".join(gpu_id for stage in decision.stages for gpu_id in stage.gpu_ids)
