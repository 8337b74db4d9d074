"""The control plane in virtual time: the controllers of the services, a bus that delivers, a store that keeps.

Nothing here decides. A stimulus goes into a controller; its effects become events for whoever reads them, rows of a
table, or work for a node or for the traffic.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

from glowplug.controllers import operator
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Publish, Record, Remove, Save, Tick
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.controllers.router.controller import RouterController
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events import Event
from glowplug.events.envelope import COMMANDS
from glowplug.events.facts import DecisionMade, RouterLoadReported
from glowplug.fleet.demand import ONLY_CHANGES
from glowplug.policies.registry import choose
from glowplug.simulator.kernel import Kernel, Timer
from glowplug.simulator.setup import Setup

EPOCH = 1


class Hands(Protocol):
    """Whoever carries out the effects of one service that are neither events nor rows."""

    def execute(self, effect: Any) -> None: ...


class Fleet:
    """Every service of one run. `hands` are registered by service name before anything happens."""

    def __init__(self, setup: Setup, kernel: Kernel) -> None:
        self.setup, self.kernel = setup, kernel
        self.services: dict[str, Any] = {}
        self.hands: dict[str, Hands] = {}
        self.tables: dict[str, dict[str, Any]] = {"models": {}, "nodes": {}, "instances": {}}
        self.on_event: list[Callable[[Event], None]] = []
        self.on_decision: list[Callable[[DecisionRecord], None]] = []
        self.on_save: list[Callable[[str, Any, float], None]] = []
        self._num_events = 0
        policies, params = setup.policies, setup.params
        self.router = RouterController(params.router, choose("routing", policies.routing), priors={})
        self.autoscaler = AutoscalerController(
            choose("scaling", policies.scaling), policies.scaling, EPOCH, params.autoscaler
        )
        self.placer = PlacerController(
            choose("placement", policies.placement),
            choose("eviction", policies.eviction),
            {kind: getattr(policies, kind) for kind in ("placement", "eviction", "prewarming")},
            EPOCH,
            params.placer,
            prewarm=choose("prewarming", policies.prewarming),
            priors={},  # what a simulated engine takes is its scenario's, and is learned as it goes
        )
        make = choose("prediction", policies.prediction)
        self.predictor = PredictorController(params.predictor, make, history=setup.history)
        self.services |= {
            "router": self.router,
            "autoscaler": self.autoscaler,
            "placer": self.placer,
            "predictor": self.predictor,
        }
        ends = {"predictor": policies.prediction != "none", "placer": self.placer.reads_ends}
        self._readers_of = {**_READERS, "request.finished": [name for name, reads in ends.items() if reads]}
        self.reads_ends = any(ends.values())  # whether anybody wants to know how requests end
        self._node_readers: list[str] = []
        self._ticking: dict[str, bool] = {}  # node_id -> whether it ticks fast: something starts, drains or moves
        self.active: dict[str, None] = {}  # models whose load may have changed since the router last told
        self._has_reported = False
        self._reported_at = -math.inf
        self._report_due: Timer | None = None
        self.down: set[str] = set()  # services that are gone

    def add_node(self, node_id: str, agent: AgentController, prefetcher: PrefetcherController, hands: Hands) -> None:
        """A node with its two services; their effects go to `hands`."""
        for name, service in ((node_id, agent), (f"prefetcher-{node_id}", prefetcher)):
            self.services[name] = service
            self.hands[name] = hands
        self._node_readers.append(f"prefetcher-{node_id}")
        self._ticking[node_id] = False

    def start(self) -> None:
        """Deploy the models and let time pass for everybody."""
        for one in self.setup.models:
            self.give("autoscaler", operator.Deploy(model=one.model))
        params = self.setup.params
        self._every(params.router_tick_s, "router")
        for name in ("autoscaler", "placer"):
            self._every(params.tick_s, name)
        self._close_window()
        for node_id in self._ticking:
            self._every(params.idle_tick_s, f"prefetcher-{node_id}")
            self._every(params.idle_tick_s, node_id)
        self._report_load()

    def _every(self, period_s: float, name: str) -> None:
        self.give(name, Tick())
        self.kernel.after(period_s, self._every, period_s, name)

    def _close_window(self) -> None:
        """Time passes for the predictor when a window closes, and has nothing to do between."""
        self.give("predictor", Tick())
        width = self.predictor.window_s
        self.kernel.at((self.kernel.now_s // width + 1) * width, self._close_window)

    def _tick_node(self, node_id: str) -> None:
        """Ticks at `agent_tick_s` while anything is under way there; `idle_tick_s` are enough for the rest."""
        agent: AgentController = self.services[node_id]
        prefetcher: PrefetcherController = self.services[f"prefetcher-{node_id}"]
        if not (prefetcher.jobs or any(_moves(one) for one in agent.instances)):
            self._ticking[node_id] = False
            return
        self.give(f"prefetcher-{node_id}", Tick())
        self.give(node_id, Tick())
        self.kernel.after(self.setup.params.agent_tick_s, self._tick_node, node_id)

    def _wake(self, node_id: str) -> None:
        if not self._ticking.get(node_id, True):
            self._ticking[node_id] = True
            self.kernel.after(self.setup.params.agent_tick_s, self._tick_node, node_id)

    def load_changed(self, model_key: str) -> None:
        """The router holds or runs something else than it reported: it says so now, or as soon as it may again."""
        self.active[model_key] = None
        due_s = max(self.kernel.now_s, self._reported_at + self.setup.params.load_soonest_s)
        if self._report_due is None or due_s < self._report_due.at_s:
            self._report_at(due_s)

    def _report_at(self, at_s: float) -> None:
        if self._report_due is not None:
            self._report_due.cancel()
        self._report_due = self.kernel.at(at_s, self._report_load)

    def _report_load(self) -> None:
        """The first report is whole, the others tell of models that hold or run something, or did when last told: no
        sooner than `load_soonest_s` after the one before, and at least every `load_every_s`."""
        is_first, self._has_reported = not self._has_reported, True
        loads = self.router.loads() if is_first else {key: self.router.load(key) for key in self.active}
        self.active = {key: None for key, load in loads.items() if load.num_waiting or load.num_in_flight}
        report = RouterLoadReported(router_id="router-1", loads=loads, num_parts=1 if is_first else ONLY_CHANGES)
        self.publish("router", report, None)
        self._reported_at, self._report_due = self.kernel.now_s, None
        self._report_at(self.kernel.now_s + self.setup.params.load_every_s)

    def give(self, name: str, stimulus: Any) -> None:
        """One stimulus for one service; its effects are carried out at once."""
        if name in self.down:
            return
        try:
            effects = self.services[name].handle(stimulus, self.kernel.now_s)
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
                self.hands[name].execute(effect)

    def publish(self, name: str, payload: Any, cause: Event | None) -> None:
        """One event to everybody who reads its kind, `bus_s` later."""
        self._num_events += 1
        event = Event(
            event_id=f"e{self._num_events}",
            type=payload.TYPE,
            occurred_at=self.kernel.now_s,
            issuer=name if name[-1].isdigit() else f"{name}-1",
            data=payload,
            cause_id=cause.event_id if cause else "",
            epoch=EPOCH if payload.TYPE in COMMANDS else 0,
        )
        for listener in self.on_event:
            listener(event)
        for reader in self._readers(payload):
            self.kernel.after(self.setup.params.bus_s, self.give, reader, event)

    def _readers(self, payload: Any) -> list[str]:
        kind = payload.TYPE
        if kind in COMMANDS:
            service = kind.partition(".")[0]
            target = getattr(payload, "target", "")
            if kind == "prefetcher.fetch":
                self._wake(target)
            return [{"agent": target, "prefetcher": f"prefetcher-{target}"}.get(service, service)]
        entity = kind.partition(".")[0]
        if entity == "instance":
            mine = f"prefetcher-{payload.instance.node_id}"
            return ["router", "autoscaler", "placer", *([mine] if mine in self.services else [])]
        if entity == "model":
            return ["router", "placer", "predictor", *self._node_readers]
        return self._readers_of.get(kind, [])


def _moves(instance: Instance) -> bool:
    """Whether its agent has to look after it as time goes by."""
    state = instance.state
    return not (state is InstanceState.READY or state.is_dormant or state.is_gone)


_READERS = {
    "request.waiting": ["autoscaler"],
    "router.load_reported": ["autoscaler", "placer", "predictor"],
    "node.beat": ["placer"],
    "node.joined": ["placer"],
    "node.left": ["placer", "router", "autoscaler"],
    "forecast.made": ["autoscaler", "placer"],
    "weights.fetched": ["placer"],
    "weights.fetch_failed": ["router", "placer"],
}


def make_prefetcher(node_id: str, capacity_bytes: int, caching: str, digest_of: Callable[..., str]) -> Any:
    """The prefetcher of one simulated node."""
    params = PrefetcherParams(
        capacity_bytes=capacity_bytes, caching=caching, heal_s=math.inf
    )  # no command is lost here
    return PrefetcherController(node_id, params, digest_of=digest_of)
