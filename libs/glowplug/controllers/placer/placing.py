"""The placements that wait for space: tried the most urgent first, and again only when something may have changed.

A placement asks its policy when it is new, when bytes came free or a node joined since it was refused (`version` of the
capacity), and each `retry_s`. Who may be evicted for it is looked at with each tick and whenever an instance changes;
for several that want the same this is answered once in a pass.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from glowplug.controllers.effects import Effect, Publish, Record
from glowplug.controllers.placer.failed_nodes import others
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.peers import with_peers
from glowplug.controllers.placer.placement import (
    MakingSpace,
    Placement,
    Refusal,
    Sent,
    refused,
    start_commands,
    stop,
    why_they_leave,
)
from glowplug.controllers.placer.sleepers import Saving, becomes_of, saving
from glowplug.controllers.placer.victims import Victims, Wanted
from glowplug.domain.address import rendezvous
from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.phrasing import listed
from glowplug.domain.units import show_bytes
from glowplug.events.commands import FetchWeights, StopInstance, as_if_asked
from glowplug.events.envelope import Event
from glowplug.events.facts import InstanceFailed
from glowplug.policies.decisions import EvictDecision, PlaceDecision, StageDecision
from glowplug.policies.eviction.shares import Shares, account
from glowplug.policies.eviction.turns import TurnParams
from glowplug.policies.placement.dormant import with_drops
from glowplug.policies.placement.expect import Expected, expect
from glowplug.policies.placement.links import found_at
from glowplug.policies.placement.node_index import NodeIndex
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.start_times import StartKind

Place = Callable[..., PlaceDecision]
Evict = Callable[..., EvictDecision]


class Pass:
    """The fleet as it is now, and what has been answered while those that wait are gone through once."""

    def __init__(self, fleet: Fleet, now_s: float, shares: Shares) -> None:
        self.now_s = now_s
        self.view = fleet.placement_view(now_s)
        params = fleet.params
        self.holdings = Holdings(fleet, now_s)
        self.victims = Victims(
            now_s=now_s,
            nodes=self.view.fleet,
            capacity=fleet.capacity,
            models=fleet.models,
            loads=fleet.loads,
            min_residency_s=params.min_residency_s,
            turns=TurnParams(rule=params.turns, turn_s=params.fair_turn_s, fair_requests=params.fair_requests),
            rule=params.victims,
            shares=shares,
            saves_s=self.holdings.saves_s,
        )
        self.no_victims: set[Wanted] = set()  # those for which nobody may leave


@dataclass(frozen=True, slots=True)
class Preview:
    """What a placement would come to now. `expected` None where it would have to wait."""

    decision: PlaceDecision
    expected: Expected | None
    victims: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)  # instance_id -> why it stays, of those who serve there


class Placing:
    """`placements` by instance_id: those that wait, and those whose start was sent and that no agent has reported."""

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
        capacity = self.fleet.capacity
        for number in range(max(1, len(placement.stages))):
            if placement.stage_id(number) not in self.fleet.instances.by_id:
                capacity.claim(placement.stage_id(number), {})
                self.fleet.network.forget(placement.stage_id(number))
        for dormant in placement.sent.promised if placement.sent else ():
            if capacity.taken.get(dormant) == placement.instance_id:
                capacity.give_back(dormant)

    def _promise(self, placement: Placement) -> None:
        """Claim what it was given: less what its source and those that give way hold there."""
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
        """Try whoever waits, most urgent first."""
        if not self._waiting:
            return []
        now = Pass(self.fleet, now_s, self._shares)
        if self.fleet.params.turns == "balanced" and self.fleet.params.fair_requests:
            self._shares = self._account(now)
            now.victims = replace(now.victims, shares=self._shares)
        return [e for placement in self._most_urgent_first(now) for e in self._try(placement, now)]

    def _most_urgent_first(self, now: Pass) -> list[Placement]:
        """Who waits, most urgent first. Where turns are balanced that is, of equal priority, the model that is furthest
        behind another one that waits (by fair_requests at least), then the queue that has waited longest in all its
        requests together."""
        waiting = [placement for _, placement in self._waiting]
        if self.fleet.params.turns == "balanced" and len(waiting) > 1:
            keys, quantum = self._keys_waiting(), self.fleet.params.fair_requests

            def behind(placement: Placement) -> int:
                num = now.victims.shares.behind(placement.command.model.key, keys)
                return num if quantum and num >= quantum else 0

            def waited_s(placement: Placement) -> float:
                command = placement.command
                return now.victims.waiting_for(command.model) * max(0.0, now.now_s - command.wanted_at)

            waiting.sort(key=lambda p: (p.urgency[0], not p.stages, -behind(p), -waited_s(p), p.urgency))
        return waiting

    def try_one(self, placement: Placement, now_s: float) -> list[Effect]:
        """One that has just been asked for; nothing has changed for the others."""
        return [] if placement.sent else self._try(placement, Pass(self.fleet, now_s, self._shares))

    def _keys_waiting(self) -> set[str]:
        """Models that lack memory: a start that waits for free memory takes none from anybody, and lacks none."""
        return {placement.command.model.key for _, placement in self._waiting if not placement.command.waits}

    def _account(self, now: Pass) -> Shares:
        """What those that wait and those that serve have been given, now."""
        waiting = self._keys_waiting()
        there = {row.model_key for here in self.fleet.capacity.on_node.values() for row in here.values() if row.serves}
        demands = {key: now.victims.demand(key) for key in sorted(waiting | there)}
        return account(self._shares, demands, waiting, now.now_s, now.victims.turns.most_s)

    def _try(self, placement: Placement, now: Pass) -> list[Effect]:
        now_s, params = now.now_s, self.fleet.params
        if not placement.stages and self._gives_way(placement, now):
            placement.lacked_at = placement.lacked_at or now_s
            return []
        decision = self._decide(placement, now)
        if decision.stages and (decision.source or not _sleeps_at(placement.command.model, now.view)):
            return self._start(placement, decision, now)
        placement.lacked_at = placement.lacked_at or now_s
        waited = now_s - placement.received_at
        settled = self.fleet.is_settled(now_s)
        if not decision.possible:
            patient = waited < params.impossible_s or not settled
            return [] if patient else self._refuse(placement, decision, now_s)
        if placement.command.waits:
            return self._start(placement, decision, now) if decision.stages else []
        if self._is_making_space(placement, now):
            return []
        if not settled and not self.fleet.loads.is_fresh(now_s):
            return []
        if decision.stages and params.sleeper_patience and self._saving(placement, now, decision).saved_s <= 0:
            return self._start(placement, decision, now)
        wanting = 0 if decision.stages else self._wanting(placement, now)
        chosen = self._make_space(placement, now, decision, wanting)
        chosen = chosen if chosen and self._is_worth_it(placement, *chosen, now) else None
        placement.is_patient = self._waits_for_sleeper(placement, now, decision, chosen)
        if placement.is_patient:
            return []
        if chosen is not None:
            return self._evict_for(placement, *chosen, now)
        return self._start(placement, decision, now) if decision.stages else []

    @property
    def is_patient(self) -> bool:
        """Whether somebody waits for what the routers' loads alone tell: that an engine runs nothing any more."""
        return any(placement.is_patient for _, placement in self._waiting)

    def _waits_for_sleeper(
        self,
        placement: Placement,
        now: Pass,
        decision: PlaceDecision,
        chosen: tuple[StageDecision, EvictDecision] | None,
    ) -> bool:
        """Whether it goes nowhere yet, since nobody may leave where an engine of its model sleeps: see sleepers.py."""
        patience, home = self.fleet.params.sleeper_patience, _sleeps_at(placement.command.model, now.view)
        if not patience or not home or placement.command.node_id:
            return False
        leaving: tuple[str, ...] = ()
        if chosen is not None:
            stage, eviction = chosen
            if home.issuperset(stage.gpu_ids):
                return False
            decision, leaving = PlaceDecision(stages=(stage,)), eviction.victims
        if not decision.stages:
            return False
        found = self._saving(placement, now, decision, leaving)
        left_s = placement.command.wanted_at + placement.command.model.max_wait_s - now.now_s
        return now.now_s - placement.lacked_at < patience * found.saved_s and found.elsewhere_s < left_s

    def _saving(
        self, placement: Placement, now: Pass, elsewhere: PlaceDecision, leaving: tuple[str, ...] = ()
    ) -> Saving:
        rows = [self.fleet.instances.by_id[name] for name in leaving]
        return saving(self.fleet, now.view, now.victims, _request(placement, now.now_s), elsewhere, rows)

    def _is_making_space(self, placement: Placement, now: Pass) -> bool:
        """Whether somebody was asked to leave for it lately and has not gone yet."""
        match placement.state:
            case MakingSpace(stage=stage, victims=victims, asked_at=asked_at):
                is_lately = now.now_s - asked_at < self.fleet.params.evict_grace_s
                return is_lately and now.victims.still_hold(stage.gpu_ids, victims)
        return False

    def _gives_way(self, placement: Placement, now: Pass) -> bool:
        """Whether others wait first, though there may be bytes for it; not for longer than the longest turn."""
        is_patient = now.now_s - placement.received_at < now.victims.turns.most_s
        others = (one.command.model for _, one in self._waiting)
        return is_patient and now.victims.gives_way(placement.command.model, others)

    def _decide(self, placement: Placement, now: Pass) -> PlaceDecision:
        """What its policy says, or said when no bytes have come free since."""
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
        """Without the nodes whose agents did not answer it, and those where its weights could not be had lately, unless
        they are all there are; or only the node that it is asked for."""
        if only := placement.command.node_id:
            return _narrowed(now.view, [n for n in now.view.nodes if n.node_id == only])
        nodes = self._elsewhere(placement, now)
        if placement.silent:
            answering = [n for n in nodes or now.view.nodes if n.node_id not in placement.silent]
            nodes = answering or nodes
        return _narrowed(now.view, nodes) if nodes else now.view

    def _elsewhere(self, placement: Placement, now: Pass) -> list[Node]:
        """Where its model could run, where its weights could not be had on some nodes lately: all but these, and where
        a copy of it lies dormant. None where they could be had, or nothing else is left."""
        model = placement.command.model
        failed = self.fleet.failed_nodes.of(model, now.now_s)
        if not failed or not (left := list(others(model, now.view.nodes, failed))):
            return []
        dormant = {row.node_id for row in now.view.fleet.copies(model)} & failed.keys()
        known = {node.node_id for node in left}
        return [*left, *(n for n in now.view.nodes if n.node_id in dormant - known)]

    def _wanting(self, placement: Placement, now: Pass) -> int:
        """Its requests for which busy instances may be drained: none while some of its model run, or it just came."""
        model, params = placement.command.model, self.fleet.params
        if now.victims.runs(model) or now.now_s - placement.received_at < params.fair_wait_s:
            return 0
        return now.victims.waiting_for(model) if params.turns == "balanced" else 1

    def _make_space(
        self, placement: Placement, now: Pass, decision: PlaceDecision, wanting: int
    ) -> tuple[StageDecision, EvictDecision] | None:
        """GPUs where others leave for it: those where an engine of its model sleeps before any."""
        model = placement.command.model
        home, only = _sleeps_at(model, now.view), self._gpus_asked(placement, now)
        home = home & only if only else home
        if home and (found := now.victims.make(now.victims.wanted(model, wanting=wanting), self._evict, home)):
            return found
        if decision.stages:
            return None
        is_there = bool(self.fleet.instances.living(model.key))
        wanted = now.victims.wanted(model, wanting=wanting, whole=decision.whole_gpus, is_there=is_there)
        if wanted in now.no_victims and not placement.stages and not only:
            return None
        with self.fleet.capacity.without(placement.instance_id) if placement.stages else nullcontext():
            found = now.victims.make(wanted, self._evict, only)
        if found is None and not only:
            now.no_victims.add(wanted)
        return found

    def _is_worth_it(self, placement: Placement, stage: StageDecision, eviction: EvictDecision, now: Pass) -> bool:
        """Whether they leave for it. A start that nobody waits for has to save more than their going costs: else the
        plans of two models would take the same memory from each other in turns."""
        model, node, fleet = placement.command.model, self.fleet.nodes.by_id.get(stage.node_id), self.fleet
        is_kept = model.pinned or fleet.capacity.num_active.get(model.key, 0) < model.min_instances
        if placement.command.is_awaited or now.victims.waiting_for(model) or is_kept or not eviction.victims:
            return True
        costs_s = sum(now.holdings.saves_s(fleet.instances.by_id[victim]) for victim in eviction.victims)
        return (
            fleet.params.victims != "least_worth" or node is None or now.holdings.another_saves_s(model, node) > costs_s
        )

    def _gpus_asked(self, placement: Placement, now: Pass) -> frozenset[str]:
        """Those of the one node that it is asked for, or of those that are left to it; none where any will do."""
        node = self.fleet.nodes.by_id.get(placement.command.node_id)
        nodes = [node] if node else self._elsewhere(placement, now)
        return frozenset(gpu.gpu_id for node in nodes for gpu in node.gpus)

    def _evict_for(
        self, placement: Placement, stage: StageDecision, eviction: EvictDecision, now: Pass
    ) -> list[Effect]:
        now_s = now.now_s
        placement.state = MakingSpace(stage, eviction.victims, now_s)
        self._promise(placement)
        chosen = ", ".join(eviction.victims) or "wait for a drain under way"
        rows = self.fleet.instances.by_id
        leaving = [now.victims.described(rows[victim]) for victim in eviction.victims]
        reason = why_they_leave(placement, eviction, leaving)
        figures = {"lacking_bytes": eviction.need_bytes, "freed_bytes": eviction.freed_bytes}
        decided = self._record(placement, "evict", reason, eviction.rivals, now_s, chosen, figures)
        why = f"it gives its memory to {placement.command.model.name}"
        stops = [self._stop(rows[victim], why) for victim in eviction.victims]
        return [Record(decided, placement.event), *(Publish(s, placement.event) for s in stops)]

    def _stop(self, victim: Instance, why: str) -> StopInstance:
        becomes, owner = becomes_of(self.fleet, victim), self.fleet.models.get(victim.model_key)
        expected_s = self.fleet.network.sleep_s(owner, becomes) if owner is not None else 0.0
        grace_s = self.fleet.params.evict_grace_s
        return stop(victim.node_id, victim.instance_id, why, grace_s, becomes, expected_s)

    def preview(self, model: Model, now_s: float, *, node_id: str = "", waits: bool = False) -> Preview:
        """Where an instance would go if it were asked for now, and who would leave for it. Changes nothing."""
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
        stage, eviction = chosen
        asleep = (row for row in now.view.fleet.copies(model) if row.state is InstanceState.SWAPPED_OUT)
        source = next((row.instance_id for row in asleep if {w.gpu_id for w in row.workers} <= {*stage.gpu_ids}), "")
        then = PlaceDecision(stages=(stage,), source=source, reason=eviction.reason)
        return Preview(then, expect(then, request, now.view), eviction.victims)

    def leaving_order(self, gpu_id: str, now_s: float) -> tuple[tuple[str, ...], dict[str, str]]:
        """The instances that serve on a GPU in the order in which they would leave it for a start that nobody waits
        for, and why each of the others stays. Changes nothing."""
        residents = Pass(self.fleet, now_s, self._shares).victims.residents(gpu_id)
        may_go = [resident for resident in residents if not resident.held]
        decision = self._evict(may_go, sum(resident.num_bytes for resident in may_go))
        priority = {resident.name: resident.priority for resident in may_go}
        order = sorted(decision.victims, key=priority.__getitem__)  # asked for all, a policy may not say who goes first
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
        reason = f"{model.name} starts on {_chosen(decision)}: {decision.reason}"
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
        decided = self._record(placement, "place", reason, decision.rivals, now_s, _chosen(decision), figures)
        sent.decision_id = decided.decision_id
        return [Record(decided, placement.event), *self._orders(placement, sent)]

    def _read_from_disk(self, model: Model, decision: PlaceDecision) -> dict[str, float]:
        """Nodes that read weights for it from their own disks, with what their prefetchers have measured of these."""
        if decision.source:
            return {}
        nodes = [self.fleet.nodes.by_id.get(stage.node_id) for stage in decision.stages]
        return {n.node_id: n.disk_bytes_per_s for n in nodes if n and found_at(n, model) is StartKind.DISK}

    def shared_bytes(self, model: Model, decision: PlaceDecision) -> int:
        """Of what a start takes by that decision, the bytes of weights that others read there already, and go on to."""
        if len(decision.stages) != 1 or len(decision.stages[0].gpu_ids) != 1:
            return 0
        known = self.fleet.capacity.shared(decision.stages[0].gpu_ids[0], model.share_key)
        gone = (decision.source, *decision.drops)
        return known.num_bytes if known and any(holder not in gone for holder in known.holders) else 0

    def _orders(self, placement: Placement, sent: Sent) -> list[Effect]:
        """Its starts, for those stages that no agent has reported."""
        known = self.fleet.instances.by_id
        numbers = [number for number in range(len(sent.stages)) if placement.stage_id(number) not in known]
        commands = start_commands(placement, sent, numbers)
        ordered = [with_peers(one, self.fleet) if isinstance(one, FetchWeights) else one for one in commands]
        return [Publish(command, placement.event) for command in ordered]

    # starts that have been sent

    def repeat(self, now_s: float) -> list[Effect]:
        """Starts that their agents have not reported yet are sent again, in the end somewhere else."""
        return [e for p in list(self.placements.values()) if p.sent for e in self._repeat(p, p.sent, now_s)]

    def _repeat(self, placement: Placement, sent: Sent, now_s: float) -> list[Effect]:
        params, known = self.fleet.params, self.fleet.instances.by_id
        silent = [n for n in range(len(sent.stages)) if placement.stage_id(n) not in known]
        if not silent:
            return []  # all have been reported: the row itself ends the placement
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
        if len(ids) > 1:  # its other stages may have begun: the whole has failed, and is asked for under another name
            self.drop(placement.instance_id)
            decided = self._record(placement, "place", f"{why}, and the start is given up", (), now_s, "failed")
            failed = refused(placement, why, decided.decision_id, now_s)
            is_reported = placement.instance_id in self.fleet.instances.by_id
            facts = [] if is_reported else [Publish(InstanceFailed(instance=failed, code="no_answer"), placement.event)]
            return [Record(decided, placement.event), *stops, *facts]
        decided = self._record(placement, "place", f"{why}, and another place is looked for", (), now_s, "anew")
        self._release(placement)
        placement.start_over()
        insort(self._waiting, (placement.urgency, placement), key=lambda entry: entry[0])
        return [Record(decided, placement.event), *stops]

    def begun_by_half(self, placement: Placement, parts: Iterable[Instance], now_s: float) -> list[Effect]:
        """An earlier placer has started later stages of it, and no agent knows its first one. They end (stages.py);
        then the whole has failed, and is asked for under another name."""
        if any(not part.state.is_gone for part in parts):
            return []
        why = "its later stages were begun by an earlier placer, and its first one was not"
        decided = self._record(placement, "place", f"{why}: the start is given up", (), now_s, "failed")
        failed = InstanceFailed(instance=refused(placement, why, decided.decision_id, now_s), code="no_answer")
        return [Record(decided, placement.event), Publish(failed, placement.event)]

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
        figures: Mapping[str, float | int | str] | None = None,
    ) -> DecisionRecord:
        """The decision as `why` prints it, at the GPU the placement has now. `figures`: more inputs."""
        command, expected = placement.command, placement.sent.expected if placement.sent else None
        inputs: dict[str, float | int | str] = {
            "need_bytes": command.model.memory_bytes,
            "waited_s": round(now_s - command.wanted_at, 4),
            "engine": command.model.engine,
            "asked_because": command.reason,
            **(figures or {}),
        }
        if expected is not None:
            inputs["start_kind"] = expected.kind.value
            inputs["predicted_start_s"] = round(expected.start_s, 4)
            inputs["predicted_ttft_s"] = round(expected.ttft_s, 4)
        return DecisionRecord(
            decision_id=self.fleet.ids.next("d-p"),
            kind=kind,
            policy=self.fleet.policies["eviction" if kind == "evict" else "placement"],
            service="placer",
            reason=reason,
            made_at=now_s,
            model_key=command.model.key,
            instance_id=command.instance_id,
            node_id=placement.node_id,
            gpu_id=placement.gpu_id,
            chosen=chosen,
            inputs=inputs,
            rivals=rivals,
            cause_id=placement.event.event_id,
            traceparent=placement.event.traceparent,
        )


def _request(placement: Placement, now_s: float) -> PlaceRequest:
    command = placement.command
    return PlaceRequest(
        instance_id=command.instance_id,
        model=command.model,
        waited_s=max(0.0, now_s - command.wanted_at),
        num_required=command.num_required,
        is_to_sleep=command.waits,
        is_awaited=command.is_awaited,
    )


def _narrowed(view: PlacementView, nodes: list[Node]) -> PlacementView:
    """The fleet as if it had those nodes alone: with what is promised and what lies dormant there."""
    fleet, dormant = view.fleet, {node.node_id: view.fleet.dormant.get(node.node_id, ()) for node in nodes}
    there = {node_id: rows for node_id, rows in dormant.items() if rows}
    return replace(view, nodes=NodeIndex(nodes, fleet.reserved, there, fleet.scores))


def _chosen(decision: PlaceDecision) -> str:
    return ", ".join(gpu_id for stage in decision.stages for gpu_id in stage.gpu_ids)


def _place(place: Place, request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """What the policy says; where it says no, replicas give way, but not for one that wakes where it sleeps."""
    decision = place(request, view)
    if decision.stages or not view.fleet.dormant or _sleeps_at(request.model, view):
        return decision
    return with_drops(request, view) or decision


def _sleeps_at(model: Model, view: PlacementView) -> frozenset[str]:
    """GPUs where an engine of the model sleeps: waking it there beats a start anywhere (SwapServeLLM section 4)."""
    asleep = (row for row in view.fleet.copies(model) if row.state is InstanceState.SWAPPED_OUT)
    return frozenset(worker.gpu_id for row in asleep for worker in row.workers)
