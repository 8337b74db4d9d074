"""Placements of adapters: the instance of the base that takes an adapter, and the adapter that leaves for it.

An adapter is loaded into a READY instance of its base, its host, where that engine has an adapter slot
(`Instance.adapter_slots`) and was started for its rank. It takes no GPU bytes. Each copy goes to the host with the
fewest requests, of the base and all of its adapters. Without a free slot, the idle adapter of least worth leaves
(policies/worth.py; slots are alike, so seconds count, not bytes); after `fair_wait_s` a busy one, the longest READY
first, once its requests have ended. An adapter that takes its host's last slot lets another leave at once where that
loses less than the next cold adapter would wait.

Without a READY instance of the base a placement waits: the autoscaler starts one for its requests, and the adapter's
weights are fetched there meanwhile. Where no READY one was started for such adapters, an idle one is stopped, and after
`fair_wait_s` a busy one: the next is started for all deployed adapters (`Fleet.for_adapters`).
"""

from collections.abc import Iterable, Mapping

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.placement import Placement, Sent, Waiting, start_commands, stop
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted
from glowplug.events.commands import FetchWeights
from glowplug.events.envelope import Event
from glowplug.fleet.status import is_coming, is_ready
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.expect import expect
from glowplug.policies.placement.links import has_weights
from glowplug.policies.placement.port import PlaceRequest
from glowplug.policies.worth import NEVER_S, STAY_S, Asking, asked

ABILITY = "adapters"
LEAVE_S = 0.5  # for an idle adapter to leave: routers learn of its drain, and its requests are counted


class AdapterPlacing:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.placements: dict[str, Placement] = {}
        self._asked_to_leave: dict[str, float] = {}  # by instance_id
        self._fetching: dict[str, str] = {}  # placement -> node
        self._last_cold_at: dict[str, float] = {}  # by base

    def ask(self, event: Event, now_s: float) -> list[Effect]:
        instance_id = event.data.instance_id
        placement = self.placements.get(instance_id)
        if placement is not None:
            placement.asked_at = now_s
        elif instance_id in self.fleet.instances.by_id:
            return []
        else:
            placement = self.placements[instance_id] = Placement(event, now_s, now_s)
        return self._try(placement, now_s)

    def drop(self, instance_id: str) -> Placement | None:
        self._fetching.pop(instance_id, None)
        return self.placements.pop(instance_id, None)

    def row_changed(self, row: Instance, now_s: float) -> list[Effect]:
        self.drop(row.instance_id)
        if row.state.is_gone:
            self._asked_to_leave.pop(row.instance_id, None)
        is_host = row.state is InstanceState.READY and row.adapter_slots
        return self.work(now_s) if self.placements and (is_host or (row.host_id and row.state.is_gone)) else []

    def work(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for placement in sorted(self.placements.values(), key=lambda one: one.urgency):
            effects += self._repeat(placement, placement.sent, now_s) if placement.sent else self._try(placement, now_s)
        return effects

    # a place

    def _try(self, placement: Placement, now_s: float) -> list[Effect]:
        if placement.sent:
            return []
        model = placement.command.model
        hosts = self._hosts(model, placement.command.node_id, now_s)
        if not hosts:
            return self._fetch_ahead(placement, now_s)
        fitting = [row for row in hosts if row.adapter_slots and model.adapter_rank <= (row.adapter_rank or 1 << 30)]
        load = self.fleet.load_of(model.base).in_flight_by_instance
        if not fitting:
            return self._restart_one(placement, hosts, load, now_s)
        mine = {row.host_id for row in self.fleet.instances.living(model.key).values()}
        open_to_it = [row for row in fitting if row.instance_id not in mine | self._promised(model.key)]
        free = [row for row in open_to_it if self._num_taken(row) < row.adapter_slots]
        if free:
            host = min(free, key=lambda r: (load.get(r.instance_id, 0), self._num_taken(r), r.instance_id))
            return self._start(placement, host, len(hosts), load, now_s)
        return self._make_space(placement, open_to_it, now_s)

    def _hosts(self, model: Model, node_id: str, now_s: float) -> list[Instance]:
        """Nodes that lately failed to get the weights are left out unless there are no others."""
        alive = self.fleet.alive(now_s)
        found = []
        for row in self.fleet.instances.living(model.base).values():
            node = alive.node(row.node_id)
            is_there = is_ready(row) and row.is_whole and node is not None and node_id in ("", row.node_id)
            if is_there and node is not None and not node.draining and node.can(row.engine, ABILITY):
                found.append(row)
        failed = self.fleet.failed_nodes.of(model, now_s)
        found = [row for row in found if row.instance_id not in self._asked_to_leave]
        return [row for row in found if row.node_id not in failed] or found

    def _riders(self, host: Instance) -> list[Instance]:
        return [row for row in self.fleet.on_node(host.node_id) if row.host_id == host.instance_id]

    def _num_taken(self, host: Instance) -> int:
        rows = self._riders(host)
        known = {row.instance_id for row in rows}
        sent = (p for p in self.placements.values() if p.sent is not None and p.sent.host_id == host.instance_id)
        return len(rows) + sum(placement.instance_id not in known for placement in sent)

    def _promised(self, model_key: str) -> set[str]:
        sent = (p.sent for p in self.placements.values() if p.command.model.key == model_key)
        return {one.host_id for one in sent if one is not None}

    def _start(
        self, placement: Placement, host: Instance, num_hosts: int, load: Mapping[str, int], now_s: float
    ) -> list[Effect]:
        model = placement.command.model
        gpu_ids = tuple(worker.gpu_id for worker in host.workers if worker.node_id == host.node_id)
        stage = StageDecision(node_id=host.node_id, gpu_ids=gpu_ids, bytes_per_gpu=0)
        decision = PlaceDecision(stages=(stage,), reason="an adapter goes to the host with the fewest requests")
        request = PlaceRequest(instance_id=placement.instance_id, model=model)
        expected = expect(decision, request, self.fleet.placement_view(now_s))
        sent = Sent((stage,), "", {}, placement.victims, now_s, now_s, expected=expected, host_id=host.instance_id)
        placement.state = sent
        self._fetching.pop(placement.instance_id, None)
        taken = self._num_taken(host)
        runs = counted(load.get(host.instance_id, 0), "request")
        of_those = f", the fewest of {num_hosts} hosts" if num_hosts > 1 else ""
        reason = (
            f"{model.name} is loaded into {host.instance_id} of its base, which runs {runs}{of_those}, "
            f"and takes number {taken} of its {host.adapter_slots} adapter slots"
        )
        figures: dict[str, float | int | str] = {
            "host_id": host.instance_id,
            "adapter_slots": host.adapter_slots,
            "slots_taken": taken,
        }
        decided = self.fleet.decided_on(placement, "place", reason, now_s, host.instance_id, figures=figures)
        sent.decision_id = decided.decision.decision_id
        return [decided, *self._orders(placement, sent), *self._free_next(placement, host, now_s)]

    def _free_next(self, placement: Placement, host: Instance, now_s: float) -> list[Effect]:
        """Free another slot of a full host where that pays: the next cold adapter would wait for it, and is the
        likelier the more recently one came to this base."""
        base = placement.command.model.base
        last_at, self._last_cold_at[base] = self._last_cold_at.get(base, -NEVER_S), now_s
        riders = self._riders(host)
        is_leaving = any(r.state is InstanceState.DRAINING or r.instance_id in self._asked_to_leave for r in riders)
        if self._num_taken(host) < host.adapter_slots or is_leaving or not self.fleet.loads.is_fresh(now_s):
            return []
        holdings, saved_s = Holdings(self.fleet, now_s), LEAVE_S * asked(Asking(idle_s=now_s - last_at), STAY_S)
        victim = self._least_worth(self._may_leave(riders), holdings)
        if victim is None or holdings.saves_s(victim) >= saved_s:
            return []
        text = (
            f"{victim.model_key} leaves its slot in {victim.host_id} to the next adapter that is asked for: "
            f"{saved_s:.4f} s of waiting saved, and {holdings.saves_s(victim):.4f} lost"
        )
        return self._leaves(placement, victim, text, now_s, "its slot is to be free for another adapter")

    def _orders(self, placement: Placement, sent: Sent) -> list[Effect]:
        commands = start_commands(placement, sent, (0,))
        return [Publish(self.fleet.completed(command), placement.event) for command in commands]

    def _repeat(self, placement: Placement, sent: Sent, now_s: float) -> list[Effect]:
        params, host = self.fleet.params, self.fleet.instances.by_id.get(sent.host_id)
        is_late = now_s - sent.started_at > params.give_up_s
        if is_late or host is None or not is_ready(host):
            node_id = placement.node_id
            why = "its agent did not answer" if is_late else f"{sent.host_id} no longer serves"
            text = f"{why}, and another host is chosen"
            decided = self.fleet.decided_on(placement, "place", text, now_s, "anew")
            placement.state = Waiting()
            gone = stop(node_id, placement.instance_id, why, 0.0)
            return [decided, Publish(gone), *self._try(placement, now_s)]
        if now_s - sent.sent_at >= params.repeat_s:
            sent.sent_at = now_s
            return self._orders(placement, sent)
        return []

    def _fetch_ahead(self, placement: Placement, now_s: float) -> list[Effect]:
        model = placement.command.model
        coming = [row for row in self.fleet.instances.living(model.base).values() if is_coming(row)]
        host = min(coming, key=lambda row: (row.created_at, row.instance_id), default=None)
        if host is None or not model.weights.uri or self._fetching.get(placement.instance_id) == host.node_id:
            return []
        node = self.fleet.nodes.by_id.get(host.node_id)
        if node is None or has_weights(node, model):
            return []
        self._fetching[placement.instance_id] = host.node_id
        fetch = FetchWeights(
            target=host.node_id,
            model_key=model.key,
            weights=model.weights,
            instance_id=placement.instance_id,
            priority=model.priority,
        )
        return [Publish(self.fleet.with_peers(fetch), placement.event)]

    # who leaves

    def _make_space(self, placement: Placement, hosts: list[Instance], now_s: float) -> list[Effect]:
        model, loads = placement.command.model, self.fleet.loads
        riders = [row for host in hosts for row in self._riders(host)]
        self._forget_old(now_s)
        leaving = sum(row.state is InstanceState.DRAINING or row.instance_id in self._asked_to_leave for row in riders)
        waiting = [p for p in self.placements.values() if p.command.model.base == model.base and not p.sent]
        if leaving >= len(waiting) or not (loads.is_fresh(now_s) and self.fleet.is_settled(now_s)):
            return []
        ready, holdings = self._may_leave(riders), Holdings(self.fleet, now_s)
        victim = self._least_worth(ready, holdings)
        if victim is not None:
            why = f"it is idle, and its loss costs the least: {holdings.saves_s(victim):.4f} s of waiting expected"
        elif ready and now_s - placement.received_at >= self.fleet.params.fair_wait_s:
            victim = min(ready, key=lambda row: (row.ready_at, row.instance_id))
            why = f"all are busy, and {model.name} has waited for {now_s - placement.received_at:.1f} s"
        else:
            return []
        return self._leaves(placement, victim, f"{victim.model_key} leaves its slot in {victim.host_id}: {why}", now_s)

    def _may_leave(self, riders: Iterable[Instance]) -> list[Instance]:
        asked_already, models = self._asked_to_leave, self.fleet.models
        pinned = {row.model_key for row in riders if (one := models.get(row.model_key)) is not None and one.pinned}
        return [r for r in riders if is_ready(r) and r.instance_id not in asked_already and r.model_key not in pinned]

    def _least_worth(self, ready: Iterable[Instance], holdings: Holdings) -> Instance | None:
        idle = [row for row in ready if not self._is_wanted(row)]
        return min(idle, key=lambda row: (holdings.saves_s(row), row.ready_at, row.instance_id), default=None)

    def _is_wanted(self, row: Instance) -> bool:
        load = self.fleet.loads.of(row.model_key)
        return bool(load.num_waiting or load.in_flight_by_instance.get(row.instance_id))

    def _restart_one(
        self, placement: Placement, hosts: list[Instance], load: Mapping[str, int], now_s: float
    ) -> list[Effect]:
        """Stop an instance of the base that was not started for such an adapter, so that the next one is."""
        self._forget_old(now_s)
        rows = self.fleet.instances.living(placement.command.model.base)
        if any(name in rows for name in self._asked_to_leave) or not self.fleet.loads.is_fresh(now_s):
            return []
        host = min(hosts, key=lambda row: (load.get(row.instance_id, 0), row.ready_at, row.instance_id))
        num, waited_s = load.get(host.instance_id, 0), now_s - placement.received_at
        if num and waited_s < self.fleet.params.fair_wait_s:
            return []
        model = placement.command.model
        has = f"{host.adapter_slots} slots for rank {host.adapter_rank}" if host.adapter_slots else "no adapter slots"
        text = f"{host.instance_id} leaves: it has {has}, and {model.name} of rank {model.adapter_rank} waits for one"
        return self._leaves(placement, host, text, now_s)

    def _leaves(self, placement: Placement, row: Instance, reason: str, now_s: float, why: str = "") -> list[Effect]:
        self._asked_to_leave[row.instance_id] = now_s
        decided = self.fleet.decided_on(placement, "evict", reason, now_s, row.instance_id)
        why = why or f"it makes way for the adapter {placement.command.model.name}"
        command = stop(row.node_id, row.instance_id, why, self.fleet.params.evict_grace_s)
        return [decided, Publish(command, placement.event)]

    def _forget_old(self, now_s: float) -> None:
        known, most_s = self.fleet.instances.by_id, self.fleet.params.give_up_s
        self._asked_to_leave = {
            name: at
            for name, at in self._asked_to_leave.items()
            if (row := known.get(name)) is not None
            and not row.state.is_gone
            and (row.state is InstanceState.DRAINING or now_s - at < most_s)
        }
