"""A whole fleet in virtual time: the very controllers of the services around a heap, with a bus that loses, doubles
and reorders, and services that are killed and restarted. Invariants are checked after every step.

Durations are made up (this is no cost model); what is tested is that the brains agree with one another.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Publish, Record, Remove, Save, Tick
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.controllers.router import messages as rw
from glowplug.controllers.router.controller import RouterController
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.commands import CancelPlacement, PlaceInstance, StartInstance, StopInstance
from glowplug.events.envelope import COMMANDS
from glowplug.events.facts import DecisionMade, RouterLoadReported
from glowplug.memory.discovery import host_gpus
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.eviction.lru import evict
from glowplug.policies.placement.first_fit import place
from glowplug.policies.scaling.baselines import reactive as scale
from glowplug.weights.region import region_digest
from tests.simulation.node import SimulatedNode

TICK_S, RESYNC_S = 0.5, 2.0


@dataclass
class Chances:
    """What the bus does to an event."""

    lose: float = 0.05
    double: float = 0.05
    delay_s: tuple[float, float] = (0.001, 0.05)


@dataclass
class World:
    seed: int
    models: list[Model]
    num_nodes: int = 2
    gpus: tuple[str, ...] = ("300MiB",)
    chances: Chances = field(default_factory=Chances)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 1_000_000.0
        self.started_at = self.now
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._epochs: Counter[str] = Counter()
        self._event_ids = itertools.count(1)
        self.tables: dict[str, dict[str, Any]] = {"models": {}, "nodes": {}, "instances": {}, "start_times": {}}
        self.nodes = {f"node-{i}": SimulatedNode(self, f"node-{i}") for i in range(1, self.num_nodes + 1)}
        self.services: dict[str, Any] = {}
        self._generation: Counter[str] = Counter()
        self.outcome: dict[int, str] = {}  # ticket -> how it ended
        self.running: dict[int, str] = {}  # ticket -> instance_id, inside an engine
        self.tickets = itertools.count(1)
        self.decisions: list[Any] = []
        self.decided: set[str] = set()  # instance_ids that some decision names
        for name in ("router", "autoscaler", "placer", *self.nodes, *(f"prefetcher-{n}" for n in self.nodes)):
            self.start(name)

    # time

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), action))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            self.check()
        self.now = end

    # services

    def start(self, name: str) -> None:
        """Start or restart (kill -9: only the store, and an agent's written memory, survive)."""
        epoch = self._next_epoch(name)
        self._generation[name] += 1
        if name == "router":
            self._lose_clients()
            self.services[name] = RouterController()
        elif name == "autoscaler":
            self.services[name] = AutoscalerController(scale, "reactive", epoch)
        elif name == "placer":
            policies = {"placement": "first_fit", "eviction": "lru"}
            self.services[name] = PlacerController(place, evict, policies, epoch)
        elif name.startswith("prefetcher"):
            params = PrefetcherParams(capacity_bytes=10**9)
            node_id = name.removeprefix("prefetcher-")
            self.services[name] = PrefetcherController(node_id, params, digest_of=region_digest)
        else:
            node = self.nodes[name]
            ledger = ByteLedger(host_gpus(name, self.gpus).gpus)
            self.services[name] = AgentController(name, ledger, node.kinds, memory=node.memory)
        self._epochs[name + ".now"] = epoch
        for table, rows in self.tables.items():
            self._restore(name, table, dict(rows))
        if name in self.nodes:
            self.give(name, self.nodes[name].recalled())
        elif name.startswith("prefetcher"):
            self.give(name, self.nodes[name.removeprefix("prefetcher-")].found())
        if name == "autoscaler":
            for model in self.models:
                self.give(name, operator.Deploy(model=model))
        generation = self._generation[name]
        self.at(TICK_S * self.random.random(), lambda: self._tick(name, generation))
        self.at(RESYNC_S * self.random.random(), lambda: self._resync(name, generation))

    def _next_epoch(self, name: str) -> int:
        self._epochs[name] += 1
        return self._epochs[name]

    def _tick(self, name: str, generation: int) -> None:
        if generation == self._generation[name]:
            self.give(name, Tick())
            if name == "router":
                self.publish(name, RouterLoadReported(router_id="router-1", loads=self.services[name].loads()), None)
            self.at(TICK_S, lambda: self._tick(name, generation))

    def _resync(self, name: str, generation: int) -> None:
        if generation == self._generation[name]:
            for table, rows in self.tables.items():
                self._restore(name, table, dict(rows))
            self.at(RESYNC_S, lambda: self._resync(name, generation))

    def _restore(self, name: str, table: str, rows: dict[str, Any]) -> None:
        reads = {
            "router": ("models", "instances", "start_times"),
            "autoscaler": ("models", "instances"),
            "predictor": ("models", "nodes", "instances"),
        }.get(name)
        if name in self.nodes:
            reads = ("nodes", "instances")
        elif name.startswith("prefetcher"):
            reads = ("models", "instances")
        if reads is None or table in reads:
            self.execute(name, self.services[name].restore(table, rows, self.now), None)

    def give(self, name: str, stimulus: Any) -> None:
        try:
            effects = self.services[name].handle(stimulus, self.now)
        except StaleEpoch:
            return
        self.execute(name, effects, stimulus if isinstance(stimulus, Event) else None)

    def execute(self, name: str, effects: list[Any], event: Event | None) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.publish(name, effect.payload, effect.cause or event)
            elif isinstance(effect, Save):
                self.tables[effect.table][effect.key] = effect.value
            elif isinstance(effect, Remove):
                self.tables[effect.table].pop(effect.key, None)
            elif isinstance(effect, Record):
                self.decisions.append(effect.decision)
                self.decided |= {effect.decision.instance_id, *effect.decision.chosen.split(", ")}
                self.publish(name, DecisionMade(decision=effect.decision), event)
            elif name == "router":
                self._route(effect)
            else:
                self.nodes[name.removeprefix("prefetcher-")].execute(effect)

    # bus

    def publish(self, name: str, payload: Any, cause: Event | None) -> None:
        if isinstance(payload, PlaceInstance | CancelPlacement | StartInstance | StopInstance):
            assert payload.instance_id in self.decided, f"nothing was decided about it: {payload}"
        event = Event(
            event_id=f"e{next(self._event_ids)}",
            type=payload.TYPE,
            occurred_at=self.now,
            issuer=name if name[-1].isdigit() else f"{name}-1",
            data=payload,
            cause_id=cause.event_id if cause else "",
            epoch=self._epochs[name + ".now"] if payload.TYPE in COMMANDS else 0,
        )
        for reader in self._readers(payload):
            for _ in range(2 if self.random.random() < self.chances.double else 1):
                if self.random.random() >= self.chances.lose:
                    self.at(self.random.uniform(*self.chances.delay_s), lambda r=reader: self.give(r, event))

    def _readers(self, payload: Any) -> list[str]:
        service = payload.TYPE.partition(".")[0]
        if payload.TYPE in COMMANDS:
            return (
                {"placer": ["placer"], "agent": [payload.target]}.get(service, [f"prefetcher-{payload.target}"])
                if service != "placer"
                else ["placer"]
            )
        readers = {
            "instance": ["router", "autoscaler", "placer", *(f"prefetcher-{n}" for n in self.nodes)],
            "model": ["router", "placer", *(f"prefetcher-{n}" for n in self.nodes)],
            "request": ["autoscaler"] if payload.TYPE == "request.waiting" else [],
            "router": ["autoscaler", "placer"],
            "node": ["placer"],
            "weights": ["router"] if payload.TYPE == "weights.fetch_failed" else [],
        }
        return readers.get(service, [])

    # clients and engines

    def arrive(self, name: str) -> int:
        ticket = next(self.tickets)
        self.outcome[ticket] = "open"
        self.give("router", rw.RequestArrived(ticket, name, f"r-{ticket}"))
        return ticket

    def leave(self, ticket: int) -> None:
        if self.outcome[ticket] == "open":
            self.end(ticket, "left")
            self.give("router", rw.ClientLeft(ticket))

    def end(self, ticket: int, how: str) -> None:
        assert self.outcome[ticket] == "open", f"ticket {ticket} ended twice: {self.outcome[ticket]}, then {how}"
        self.outcome[ticket] = how
        self.running.pop(ticket, None)

    def _lose_clients(self) -> None:
        for ticket in [t for t, how in self.outcome.items() if how == "open"]:
            self.end(ticket, "connection lost")

    def _route(self, effect: Any) -> None:
        if isinstance(effect, rw.Reject):
            self.end(effect.ticket, f"{effect.status} {effect.code}")
        elif isinstance(effect, rw.Dispatch):
            self._dispatch(effect.ticket, effect.instance)

    def _dispatch(self, ticket: int, instance: Any) -> None:
        engine = self.nodes[instance.node_id].engines.get(instance.instance_id)
        router = self.services["router"]
        if engine is None or not engine.serving:
            failed = rw.DispatchFailed(ticket, False, "connection refused")
            self.at(0.001, lambda: self.services["router"] is router and self.give("router", failed))
            return
        self.running[ticket] = instance.instance_id
        self.at(self.random.expovariate(1 / 0.4), lambda: self._finish(ticket, instance.instance_id, router))

    def _finish(self, ticket: int, instance_id: str, router: Any) -> None:
        if self.running.get(ticket) == instance_id:
            self.end(ticket, "200")
            if self.services["router"] is router:
                self.give("router", rw.RequestEnded(ticket, 0.4))

    def engine_died(self, instance_id: str) -> None:
        """Every stream of it breaks: the router says so to each client."""
        for ticket in [t for t, i in self.running.items() if i == instance_id]:
            self.end(ticket, "engine died")
            self.give("router", rw.RequestEnded(ticket))

    # invariants

    def check(self) -> None:
        for node_id, node in self.nodes.items():
            agent: AgentController = self.services[node_id]
            for gpu in agent.ledger.gpus:
                assert 0 <= gpu.used_bytes <= gpu.total_bytes, f"{gpu.gpu_id} oversubscribed"
                alive = sum(e.num_bytes for e in node.engines.values() if e.gpu_id == gpu.gpu_id)
                assert alive <= gpu.total_bytes, f"engines on {gpu.gpu_id} hold {alive} of {gpu.total_bytes}"
            for instance_id in node.engines:
                assert instance_id in agent.ledger.holders, f"engine {instance_id} runs without a grant"
        router: RouterController = self.services["router"]
        for instance_id, count in router.in_flight.items():
            known = router.fleet.instances.get(instance_id)
            assert known is None or count <= known.max_concurrency, f"{instance_id} runs {count}"

    def settled(self) -> None:
        """After the last request and every keep-alive: nothing runs, nothing is owed, the tables say so."""
        left = {t: how for t, how in self.outcome.items() if how == "open"}
        assert not left, f"requests without an answer: {left}"
        for node_id, node in self.nodes.items():
            assert node.engines == {}, f"{node_id} still runs {list(node.engines)}"
            assert self.services[node_id].ledger.holders == frozenset(), f"{node_id} still grants bytes"
        alive = [i for i in self.tables["instances"].values() if not i.state.is_gone]
        assert alive == [], f"the table still shows {[i.instance_id for i in alive]}"
