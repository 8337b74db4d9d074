"""The control plane in virtual time: the services' controllers, a bus and a store.

It decides nothing: effects become events for their readers (declared in each reads.py), rows, or work for nodes and
traffic. `Calm` delivers each event once, in order; `Chaos` loses, doubles, delays and reorders events by its seed, and
tests may kill services, replace leaders or empty the store. Services recover by rereading the tables.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from glowplug.controllers import operator
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.reads import READS as AGENT
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.reads import READS as AUTOSCALER
from glowplug.controllers.effects import Publish, Record, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.reads import reads_of
from glowplug.controllers.port import Controller
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.predictor.reads import READS as PREDICTOR
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import IMPORTANCE
from glowplug.controllers.prefetcher.reads import READS as PREFETCHER
from glowplug.controllers.prefetcher.reads import reads_of as prefetcher_reads
from glowplug.controllers.reads import Reads
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.reads import READS as ROUTER
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.envelope import COMMANDS
from glowplug.events.facts import DecisionMade, RequestFinished, RouterLoadReported, RouterRequestsFinished
from glowplug.fleet.demand import ONLY_CHANGES
from glowplug.policies.prediction.port import WindowTotals
from glowplug.policies.registry import choose
from glowplug_lab.simulator.clocks import Apart
from glowplug_lab.simulator.kernel import Kernel, Timer
from glowplug_lab.simulator.setup import Params, PolicyNames

Make = Callable[[int], Any]  # epoch -> controller


class Delivery(Protocol):
    is_sure: bool  # loses no event

    def delays_s(self) -> Sequence[float]:
        """One per copy; empty when lost."""
        ...

    def phase_s(self, period_s: float) -> float:
        """First occurrence, in [0, period_s)."""
        ...


class Calm:
    is_sure = True

    def __init__(self, bus_s: float) -> None:
        self._delays_s = (bus_s,)

    def delays_s(self) -> Sequence[float]:
        return self._delays_s

    def phase_s(self, period_s: float) -> float:
        return 0.0


@dataclass
class Chaos:
    """Services also tick out of step, all by the seed."""

    seed: int
    lose: float = 0.05
    double: float = 0.05
    delay_s: tuple[float, float] = (0.001, 0.05)
    is_sure: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def delays_s(self) -> Sequence[float]:
        num = 2 if self.random.random() < self.double else 1
        return [self.random.uniform(*self.delay_s) for _ in range(num) if self.random.random() >= self.lose]

    def phase_s(self, period_s: float) -> float:
        return period_s * self.random.random()


class Executor(Protocol):
    """For effects that are neither events nor rows."""

    @property
    def executes(self) -> Collection[type[Any]]: ...

    def execute(self, effect: Any) -> None: ...

    def restarted(self, name: str) -> None: ...


class ControlPlane:
    """`models` are deployed at the start; `history`: the predictor's earlier windows, by model_key."""

    def __init__(
        self,
        policies: PolicyNames,
        params: Params,
        kernel: Kernel,
        *,
        models: Iterable[Model] = (),
        history: Mapping[str, Sequence[WindowTotals]] | None = None,
        delivery: Delivery | None = None,
        clocks: Apart | None = None,
    ) -> None:
        self.params, self.kernel, self._apart = params, kernel, clocks
        self.delivery: Delivery = delivery or Calm(params.bus_s)
        self.services: dict[str, Any] = {}
        self.tables: dict[str, dict[str, Any]] = {"models": {}, "nodes": {}, "instances": {}}
        self.on_event: list[Callable[[Event], None]] = []
        self.on_decision: list[Callable[[DecisionRecord], None]] = []
        self.on_save: list[Callable[[str, Any, float], None]] = []
        self.down: set[str] = set()
        self.active: dict[str, None] = {}  # may differ from the last report
        self._executors: dict[str, Executor] = {}
        self._makers: dict[str, Make] = {}
        self._reads: dict[str, Reads] = {}
        self._readers: dict[type[Any], list[str]] = {}  # payload class -> singleton services
        self._epochs: dict[str, int] = {}
        self._num_events = 0
        self._ticking: dict[str, bool] = {}  # by node_id: ticks fast, since something starts, drains or moves
        self._has_reported = False
        self._reported_at = -math.inf
        self._report_due: Timer | None = None
        self._models = tuple(models)
        self._prefetcher = prefetcher_reads(policies.caching, IMPORTANCE)
        self._add_services(policies, history or {})
        if clocks is not None:
            clocks.begin(kernel)

    def _add_services(self, policies: PolicyNames, history: Mapping[str, Sequence[WindowTotals]]) -> None:
        params = self.params
        place, prewarm = choose("placement", policies.placement), choose("prewarming", policies.prewarming)
        evict, scale = choose("eviction", policies.eviction), choose("scaling", policies.scaling)
        names = {kind: getattr(policies, kind) for kind in ("placement", "eviction", "prewarming")}
        route, forecast = choose("routing", policies.routing), choose("prediction", policies.prediction)
        is_forecast = policies.prediction != "none"
        fairness = choose("fairness", policies.fairness)
        # The only router learns nothing from its own report.
        self._add(
            "router",
            lambda _: RouterController(params.router, route, fairness, priors={}),
            replace(ROUTER, telemetry=()),
        )
        self._add(
            "autoscaler",
            lambda epoch: AutoscalerController(scale, policies.scaling, epoch, params.autoscaler),
            AUTOSCALER,
        )
        self._add(
            "placer",
            # Start times come from the scenario and the run.
            lambda epoch: PlacerController(place, evict, names, epoch, params.placer, prewarm=prewarm, priors={}),
            reads_of(place, prewarm),
        )
        self._add(
            "predictor",
            lambda _: PredictorController(params.predictor, forecast, history=history),
            PREDICTOR if is_forecast else Reads(service="predictor"),  # without a policy its counts are useless
        )

    def _add(self, name: str, make: Make, reads: Reads) -> None:
        self._makers[name], self._reads[name], self._epochs[name] = make, reads, 1
        self.services[name] = make(1)
        if name == reads.service:
            for payload in reads.payloads:
                self._readers.setdefault(payload, []).append(name)

    def add_router(self, executor: Executor) -> None:
        """Raises MissingExecutor."""
        self._execute_by("router", executor)

    def add_node(self, node_id: str, make_agent: Make, make_prefetcher: Make, executor: Executor) -> None:
        """Raises MissingExecutor."""
        self._add(node_id, make_agent, AGENT)
        self._add(f"prefetcher-{node_id}", make_prefetcher, self._prefetcher)
        for name in (node_id, f"prefetcher-{node_id}"):
            self._execute_by(name, executor)
        self._ticking[node_id] = False

    def _execute_by(self, name: str, executor: Executor) -> None:
        self._reads[name].check_executors(executor.executes)
        self._executors[name] = executor

    @property
    def router(self) -> RouterController:
        found: RouterController = self.services["router"]
        return found

    @property
    def placer(self) -> PlacerController:
        found: PlacerController = self.services["placer"]
        return found

    @property
    def reads_ends(self) -> bool:
        return RouterRequestsFinished in self._readers

    def start(self) -> None:
        self._deploy()
        params = self.params
        self._begin(params.router_tick_s, "router")
        for name in ("autoscaler", "placer"):
            self._begin(params.tick_s, name)
        self._close_window()
        for node_id in self._ticking:
            self._begin(params.idle_tick_s, f"prefetcher-{node_id}")
            self._begin(params.idle_tick_s, node_id)
        self._report_load()
        if not math.isinf(params.resync_s):
            for name in self.services:
                self.kernel.after(self.delivery.phase_s(params.resync_s), self._resync, name)

    def _deploy(self) -> None:
        for model in sorted(self._models, key=lambda one: bool(one.base)):
            self.give("autoscaler", operator.Deploy(model=model))

    def _begin(self, period_s: float, name: str) -> None:
        phase_s = self.delivery.phase_s(period_s)
        if phase_s:
            self.kernel.after(phase_s, self._every, period_s, name)
        else:
            self._every(period_s, name)

    def _every(self, period_s: float, name: str) -> None:
        self.give(name, Tick())
        self.kernel.after(period_s, self._every, period_s, name)

    def _resync(self, name: str) -> None:
        is_paused = self._apart is not None and self._apart.holds(name, Tick())
        if not (name in self.down or is_paused):
            self._restore(name)
        self.kernel.after(self.params.resync_s, self._resync, name)

    def _restore(self, name: str) -> None:
        controller: Controller = self.services[name]
        for table in self._reads[name].tables:
            rows = dict(self.tables.get(table, {}))
            if self._apart is not None:
                rows = self._apart.rows(name, table, rows)
            self.execute(name, controller.restore(table, rows, self._now_s(name)), None)

    def _now_s(self, name: str) -> float:
        return self.kernel.now_s if self._apart is None else self._apart.now_s(name)

    def _close_window(self) -> None:
        """The predictor has nothing to do except at the end of a window."""
        self.give("predictor", Tick())
        predictor: PredictorController = self.services["predictor"]
        width = predictor.window_s
        self.kernel.at((self.kernel.now_s // width + 1) * width, self._close_window)

    def _tick_node(self, node_id: str) -> None:
        agent: AgentController = self.services[node_id]
        prefetcher: PrefetcherController = self.services[f"prefetcher-{node_id}"]
        if not (prefetcher.jobs or any(_moves(one) for one in agent.instances)):
            self._ticking[node_id] = False
            return
        self.give(f"prefetcher-{node_id}", Tick())
        self.give(node_id, Tick())
        self.kernel.after(self.params.agent_tick_s, self._tick_node, node_id)

    def _wake(self, node_id: str) -> None:
        if not self._ticking.get(node_id, True):
            self._ticking[node_id] = True
            self.kernel.after(self.params.agent_tick_s, self._tick_node, node_id)

    def load_changed(self, model_key: str) -> None:
        """Report now, or as soon as `load_soonest_s` allows."""
        self.active[model_key] = None
        due_s = max(self.kernel.now_s, self._reported_at + self.params.load_soonest_s)
        if self._report_due is None or due_s < self._report_due.at_s:
            self._report_at(due_s)

    def _report_at(self, at_s: float) -> None:
        if self._report_due is not None:
            self._report_due.cancel()
        self._report_due = self.kernel.at(at_s, self._report_load)

    def _report_load(self) -> None:
        """All models at first or on a lossy bus; else those with present or recent requests."""
        is_whole = not (self._has_reported and self.delivery.is_sure)
        self._has_reported = True
        loads = self.router.loads() if is_whole else {key: self.router.load(key) for key in self.active}
        self.active = {key: None for key, load in loads.items() if load.num_waiting or load.num_in_flight}
        report = RouterLoadReported(router_id="router-1", loads=loads, num_parts=1 if is_whole else ONLY_CHANGES)
        self.publish("router", report, None)
        self._reported_at, self._report_due = self.kernel.now_s, None
        self._report_at(self.kernel.now_s + self.params.load_every_s)

    def restart(self, name: str) -> None:
        """Kill (as with kill -9) and restart; the store and an agent's memory survive."""
        self.services[name] = self._makers[name](self._next_epoch(name))
        if self._apart is not None:
            self._apart.restarted(name)
        self._restore(name)
        if name in self._executors:
            self._executors[name].restarted(name)
        if name == "autoscaler":
            self._deploy()

    def resume(self, name: str) -> None:
        """Let a paused process go on, with what came meanwhile."""
        assert self._apart is not None
        for stimulus in self._apart.resume(name):
            self.give(name, stimulus)

    def elect(self, name: str, *, lingers: bool = False) -> None:
        """Elect a process that has followed the old leader. `lingers`: the old leader goes on at its old epoch."""
        earlier, epoch = self.services[name], self._next_epoch(name)
        if lingers:
            self._go_on(f"{name}-0", name, epoch - 1)
            earlier = copy.deepcopy(earlier)
        self.services[name] = later = self._makers[name](epoch)
        later.inherit(earlier, self._now_s(name))
        self._restore(name)
        row = Leader(service=name, service_id=f"{name}-1", url="", epoch=epoch, since=self._now_s(name))
        self.execute(name, [Save(LEADERS, name, row)], None)

    def _go_on(self, alias: str, name: str, epoch: int) -> None:
        self.services[alias], self._reads[alias], self._epochs[alias] = self.services[name], self._reads[name], epoch
        for payload in self._reads[name].payloads:
            self._readers[payload].append(alias)
        self._begin(self.params.tick_s, alias)
        if not math.isinf(self.params.resync_s):
            self.kernel.after(self.params.resync_s, self._resync, alias)

    def empty_store(self) -> None:
        for rows in self.tables.values():
            rows.clear()

    def _next_epoch(self, name: str) -> int:
        self._epochs[name] += 1
        return self._epochs[name]

    def give(self, name: str, stimulus: Any) -> None:
        """Drop stale commands."""
        if name in self.down:
            return
        now_s, given = self.kernel.now_s, stimulus
        if self._apart is not None:
            if self._apart.holds(name, stimulus):
                return
            given, now_s = self._apart.laid(name, stimulus)
        try:
            effects = self.services[name].handle(given, now_s)
        except StaleEpoch:
            return
        if effects:
            self.execute(name, effects, stimulus if isinstance(stimulus, Event) else None)

    def execute(self, name: str, effects: list[Any], cause: Event | None) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.publish(name, effect.payload, effect.cause or cause)
            elif isinstance(effect, Save):
                self.tables.setdefault(effect.table, {})[effect.key] = effect.value
                for saved in self.on_save:
                    saved(effect.table, effect.value, self.kernel.now_s)
                if effect.table == "instances" and _moves(effect.value):
                    self._wake(effect.value.node_id)
            elif isinstance(effect, Remove):
                self.tables.setdefault(effect.table, {}).pop(effect.key, None)
            elif isinstance(effect, Record):
                for listener in self.on_decision:
                    listener(effect.decision)
                if self.on_event:
                    self.publish(name, DecisionMade(decision=effect.decision), effect.cause or cause)
            else:
                self._executors[name].execute(effect)

    def publish(self, name: str, payload: Any, cause: Event | None) -> None:
        event = self._told(name, payload, cause)
        if isinstance(payload, PREFETCHER.commands):
            self._wake(payload.target)
        self._deliver(event)

    def ended(self, request: RequestFinished) -> None:
        event = self._told("router", request if self._apart is None else self._apart.by("router", request), None)
        report = RouterRequestsFinished(router_id=request.router_id, requests=(request,))
        self._deliver(replace(event, type=report.TYPE, data=report))

    def _told(self, name: str, payload: Any, cause: Event | None) -> Event:
        event = self.event(name, payload, cause)
        for listener in self.on_event:
            listener(event)
        return event

    def _deliver(self, event: Event) -> None:
        readers = self.readers_of(event.data)
        # lossy delivery delays each reader separately
        groups = [readers] if readers and self.delivery.is_sure else [[reader] for reader in readers]
        for group in groups:
            for delay_s in self.delivery.delays_s():
                self.kernel.after(delay_s, self._give_each, group, event)

    def _give_each(self, readers: Sequence[str], event: Event) -> None:
        for reader in readers:
            self.give(reader, event)

    def event(self, name: str, payload: Any, cause: Event | None) -> Event:
        self._num_events += 1
        return Event(
            event_id=f"e{self._num_events}",
            type=payload.TYPE,
            occurred_at=self.kernel.now_s if self._apart is None else self._apart.now_s(name),
            issuer=name if name[-1].isdigit() else f"{name}-1",
            data=payload,
            cause_id=cause.event_id if cause else "",
            epoch=self._epochs[name] if payload.TYPE in COMMANDS else 0,
        )

    def readers_of(self, payload: Any) -> Sequence[str]:
        """Services on every node get payloads of their own node, or of none."""
        one_each = self._readers.get(type(payload), [])
        if isinstance(payload, AGENT.commands):
            return [payload.target]
        if isinstance(payload, PREFETCHER.commands):
            return [f"prefetcher-{payload.target}"]
        if not isinstance(payload, (*self._prefetcher.facts, *self._prefetcher.telemetry)):
            return one_each
        instance = getattr(payload, "instance", None)
        nodes = self._ticking if instance is None else [instance.node_id] if instance.node_id in self._ticking else []
        return [*one_each, *(f"prefetcher-{node_id}" for node_id in nodes)]


def _moves(instance: Instance) -> bool:
    state = instance.state
    return not (state is InstanceState.READY or state.is_dormant or state.is_gone)
