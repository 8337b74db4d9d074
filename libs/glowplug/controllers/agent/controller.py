"""The agent's controller: the single writer of a node's GPUs, its instances and its row among the nodes.

Commands arrive at least once, late and in any order: a start is idempotent by instance_id, a start that a stop has
overtaken ends STOPPED, and a command of a replaced controller is refused (StaleEpoch). See agent_lifecycle.py for the
life of one instance, agent_words.py for the stimuli and effects.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from glowplug.controllers.agent.dormant import Dormancy
from glowplug.controllers.agent.grants import Ledger
from glowplug.controllers.agent.lifecycle import Lifecycle
from glowplug.controllers.agent.messages import (
    AgentMemory,
    AgentParams,
    CheckHealth,
    ConsolidationFailed,
    CountInFlight,
    EngineAsleep,
    EngineConsolidated,
    EngineExited,
    EngineGone,
    EngineKind,
    EngineLaunched,
    EngineOverLimit,
    EnginePrewarmed,
    EngineReady,
    EngineStartFailed,
    ForgetEngine,
    HealthSeen,
    Holding,
    InFlight,
    NodeStopping,
    Recalled,
    Remember,
    StopAsked,
    Surroundings,
    WeightsComplete,
    WeightsFailed,
)
from glowplug.controllers.agent.reservation import Reservation
from glowplug.controllers.agent.stages import Stages
from glowplug.controllers.agent.starts import Starts
from glowplug.controllers.agent.transaction import INSTANCES, Turn, fact_of
from glowplug.controllers.effects import Effect, Publish, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS, Fence
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events import Event
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance
from glowplug.events.facts import NodeBeat

NODES = "nodes"


class AgentController:
    """Pure. `memory` is what a predecessor wrote down; the first stimulus then is Recalled."""

    def __init__(
        self,
        node_id: str,
        ledger: Ledger,
        engines: Mapping[str, EngineKind],
        *,
        agent_url: str = "",
        params: AgentParams | None = None,
        memory: AgentMemory | None = None,
    ) -> None:
        memory = memory or AgentMemory()
        self.node_id, self.ledger, self.engines, self.agent_url = node_id, ledger, engines, agent_url
        self.params = params or AgentParams()
        there = sorted(name for name, kind in engines.items() if not kind.unavailable)
        self._available = tuple(there)
        self._abilities = tuple(f"{name}:{ability}" for name in there for ability in sorted(engines[name].abilities))
        self._life = Lifecycle(node_id, ledger, self.params)
        self._dormant = Dormancy(self._life, engines, self.params)
        self._reservation = Reservation(self._life, self.params)
        self._stages = Stages(self._life)
        self._starts = Starts(self._life, self._dormant, engines, self.params)
        self._fence = Fence(dict(memory.fence))
        self.holdings: dict[str, Holding] = self._life.regrant(memory.holdings)
        self._surroundings = Surroundings()
        self._stopping = ""
        self._beat_at, self._node_revision = 0.0, 0
        self._ticked_at = 0.0

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Every instance known, those that ended lately included."""
        return tuple(holding.instance for holding in self.holdings.values())

    @property
    def num_living(self) -> int:
        """Instances that are not over, or whose process is not yet known to be gone."""
        return sum(not h.instance.state.is_gone or h.is_stopping for h in self.holdings.values())

    @property
    def is_stopping(self) -> bool:
        """The node has been asked to end."""
        return bool(self._stopping)

    def memory(self) -> AgentMemory:
        return AgentMemory(holdings=tuple(self.holdings.values()), fence=dict(self._fence.seen))

    def node(self, now_s: float) -> Node:
        """This node as the fleet sees it."""
        around = self._surroundings
        return Node(
            node_id=self.node_id,
            gpus=self.ledger.gpus,
            engines=self._available,
            abilities=self._abilities,
            agent_url=self.agent_url,
            prefetcher_url=around.prefetcher_url,
            host_cache_bytes=around.host_cache_bytes,
            links=around.links,
            cached=around.cached,
            draining=bool(self._stopping),
            heartbeat_at=now_s,
            revision=self._node_revision,
        )

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """One stimulus; raises StaleEpoch for a command of a controller that has been replaced."""
        turn = Turn(now_s, self.holdings, stimulus if isinstance(stimulus, Event) else None)
        grants_before = self.ledger.gpus
        match stimulus:
            case Event():
                self._command(turn, stimulus)
            case Tick():
                self._tick(turn)
            case Recalled(living):
                self._recall(turn, living)
            case Surroundings():
                self._surroundings = stimulus
            case NodeStopping(reason, grace_s):
                self._stopping = reason
                for holding in list(self.holdings.values()):
                    self._life.drain(turn, holding, reason, grace_s)
            case _:
                if (known := self._addressee(stimulus.instance_id)) is not None:
                    self._outcome(turn, known, stimulus)
        if self.ledger.gpus != grants_before or now_s - self._beat_at >= self.params.beat_s or now_s < self._beat_at:
            self._beat(turn)
        remember = [Remember(self.memory())] if turn.is_dirty else []
        return [*remember, *turn.in_order()]

    def _command(self, turn: Turn, event: Event) -> None:
        if getattr(event.data, "target", self.node_id) != self.node_id:
            return
        seen = dict(self._fence.seen)
        self._fence.admit(event)
        turn.is_dirty = seen != self._fence.seen
        match event.data:
            case StartInstance():
                self._starts.start(turn, event, event.data, self._stopping)
            case StopInstance(instance_id=instance_id, reason=reason, grace_s=grace_s, becomes=becomes):
                holding = self.holdings.get(instance_id)
                if holding is None:
                    self._starts.overtaken[instance_id] = (turn.now_s, reason)
                else:
                    self._dormant.stop(turn, holding, reason, grace_s, becomes)
            case JoinStages(instance_id=instance_id) if instance_id in self.holdings:
                self._stages.join(turn, self.holdings[instance_id])
            case ConsolidateInstance(instance_id=instance_id, reason=reason) if instance_id in self.holdings:
                self._stages.consolidate(turn, self.holdings[instance_id], reason)
            case ResumeInstance(instance_id=instance_id, reason=reason) if instance_id in self.holdings:
                if not self._stopping:
                    self._life.resume(turn, self.holdings[instance_id], reason)

    def _addressee(self, instance_id: str) -> Holding | None:
        """Whose outcome it is: of the instance itself, or of the one that has taken over its start."""
        holding = self.holdings.get(instance_id)
        if holding is None or holding.instance.state.is_gone:
            return next((h for h in self.holdings.values() if h.engine_id == instance_id), holding)
        return holding

    def _outcome(self, turn: Turn, holding: Holding, stimulus: Any) -> None:
        """What became of something this controller had asked for. Outcomes that come too late change nothing."""
        match stimulus:
            case EngineLaunched():
                self._life.launched(turn, holding)
            case WeightsComplete(path=path, cached=cached):
                self._life.fetched(turn, holding, path, cached=cached)
            case WeightsFailed(code=code, message=message):
                if holding.instance.state.is_coming and not holding.is_stopping:
                    self._life.fail(turn, holding, code, message)
            case EngineReady():
                self._stages.ready(turn, holding, stimulus)
            case EnginePrewarmed():
                self._dormant.prewarmed(turn, holding)
            case EngineAsleep():
                self._dormant.asleep(turn, holding)
            case EngineConsolidated():
                self._stages.consolidated(turn, holding, stimulus)
            case ConsolidationFailed():
                self._stages.unconsolidated(turn, holding, stimulus)
            case EngineStartFailed(code=code, reason=reason):
                if holding.instance.state.is_coming and not holding.is_stopping:
                    self._life.fail(turn, holding, code, reason)
            case EngineExited(reason=reason) | EngineOverLimit(reason=reason):
                if not holding.is_stopping:
                    self._life.fail(turn, holding, "engine_failed", reason)
            case EngineGone(clean=clean):
                self._life.gone(turn, holding, clean=clean)
            case HealthSeen():
                self._health(turn, holding, stimulus)
            case InFlight(num_in_flight=num_in_flight):
                self._life.counted(turn, holding, num_in_flight)
                if self._dormant.can(holding.instance.engine, "prewarm"):
                    self._reservation.reserve(turn, self.holdings[holding.instance.instance_id], stimulus)
            case StopAsked(reason=reason, grace_s=grace_s):
                self._life.drain(turn, holding, reason, grace_s)
            case _:
                raise TypeError(f"not a stimulus of an agent: {stimulus!r}")

    def _health(self, turn: Turn, holding: Holding, seen: HealthSeen) -> None:
        if holding.is_stopping or holding.instance.state.is_gone:
            return
        if seen.alive and (holding.is_sleeping or holding.instance.state.is_dormant):
            return
        if not seen.alive:
            self._life.fail(turn, holding, "engine_failed", seen.reason or "its engine process is gone")
            return
        num_misses = 0 if seen.ok else holding.num_misses + 1
        self.holdings[seen.instance_id] = replace(holding, num_misses=num_misses)
        if num_misses >= self.params.health_misses:
            self._life.fail(
                turn, holding, "engine_failed", f"its engine hangs ({num_misses} health checks failed): {seen.reason}"
            )

    def _recall(self, turn: Turn, living: frozenset[str]) -> None:
        for instance_id, holding in list(self.holdings.items()):
            if holding.instance.state.is_coming:
                holding = replace(holding, deadline_at=turn.now_s + self.params.start_deadline_s)
            if instance_id in living:
                holding = self._stages.recall(turn, holding)
            self._life.recall(turn, holding, is_living=instance_id in living)

    def _tick(self, turn: Turn) -> None:
        gap_s, self._ticked_at = turn.now_s - (self._ticked_at or turn.now_s), turn.now_s
        if not 0 <= gap_s <= self.params.max_tick_gap_s:
            for holding in list(self.holdings.values()):
                self._life.shift(turn, holding, gap_s)
        for instance_id, holding in list(self.holdings.items()):
            state = holding.instance.state
            if holding.is_stopping:
                self._life.stop_again(turn, holding)
            elif state.is_gone:
                self._forget(turn, holding)
            elif state.is_coming and turn.now_s >= holding.deadline_at:
                self._life.fail(turn, holding, *self._overdue(holding))
            elif state in (InstanceState.READY, InstanceState.DRAINING):
                is_due = not holding.is_sleeping
                if is_due and turn.now_s - holding.health_asked_at >= self.params.health_every_s:
                    self.holdings[instance_id] = holding = replace(holding, health_asked_at=turn.now_s)
                    turn.ask(CheckHealth(instance_id))
                self._stages.overdue(turn, holding)
                if state is InstanceState.DRAINING:
                    self._drain_on(turn, self.holdings[instance_id])
        for instance_id, (when, _) in list(self._starts.overtaken.items()):
            if turn.now_s - when >= self.params.keep_gone_s:
                del self._starts.overtaken[instance_id]

    def _drain_on(self, turn: Turn, holding: Holding) -> None:
        if turn.now_s >= holding.deadline_at:
            self._life.expire_drain(turn, holding)
        elif turn.now_s >= holding.quiet_until and not holding.is_sleeping:
            turn.ask(CountInFlight(holding.instance.instance_id))

    def _overdue(self, holding: Holding) -> tuple[str, str]:
        seconds = self.params.start_deadline_s
        if holding.weights_path is None:
            return "weights_unavailable", f"its weights were not in host memory after {seconds:g} s"
        return "start_timeout", f"its engine was not ready after {seconds:g} s"

    def _forget(self, turn: Turn, holding: Holding) -> None:
        if turn.now_s - holding.instance.changed_at >= self.params.keep_gone_s and not holding.is_granted:
            instance_id = holding.instance.instance_id
            del self.holdings[instance_id]
            turn.is_dirty = True
            if not any(instance_id in h.past_ids for h in self.holdings.values()):  # else its engine lives on
                turn.ask(*(ForgetEngine(past_id) for past_id in (instance_id, *holding.past_ids)))
            if not holding.is_lost:
                turn.ask(Remove(INSTANCES, instance_id))

    def _beat(self, turn: Turn) -> None:
        self._beat_at, self._node_revision = turn.now_s, max(self._node_revision + 1, int(turn.now_s * 1000))
        node = self.node(turn.now_s)
        turn.ask(Publish(NodeBeat(node=node)), Save(NODES, self.node_id, node))

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Hold the store's tables against the truth, which is here: heal rows that are missing or behind."""
        if table == LEADERS:
            self._fence.raise_to(rows)
            return []
        if table == NODES:
            own = rows.get(self.node_id)
            self._node_revision = max(self._node_revision, own.revision if own is not None else 0)
            return []
        turn = Turn(now_s, self.holdings)
        for instance_id, holding in list(self.holdings.items()):
            if not holding.is_lost:
                self._compare(turn, holding, rows.get(instance_id))
        for instance_id, row in rows.items():
            if instance_id not in self.holdings and row.workers and row.node_id == self.node_id:
                self._disown(turn, row)
        remember = [Remember(self.memory())] if turn.is_dirty else []
        return [*remember, *turn.in_order()]

    def _compare(self, turn: Turn, holding: Holding, row: Instance | None) -> None:
        """Heal one row. A row that says otherwise at our revision or above (a placer gave us up) is overtaken."""
        mine = holding.instance
        if row is None:
            turn.ask(Save(INSTANCES, mine.instance_id, mine))
            return
        is_theirs = row.node_id != self.node_id
        if is_theirs and row.created_at > mine.created_at:
            self._life.lose(turn, holding)
        elif is_theirs or row.revision > mine.revision or (row.revision == mine.revision and row.state != mine.state):
            ahead = replace(mine, revision=max(row.revision, mine.revision))
            turn.tell(replace(holding, instance=ahead), reason=f"the store knows it as {row.state}")
        elif row.revision < mine.revision:
            turn.ask(Save(INSTANCES, mine.instance_id, mine))

    def _disown(self, turn: Turn, row: Instance) -> None:
        """End a row of this node that its agent knows nothing of (its memory was lost); remove it in time."""
        if not row.state.is_gone:
            row = replace(
                row,
                state=InstanceState.FAILED,
                reason=f"the agent of {self.node_id} does not know this instance",
                changed_at=turn.now_s,
                revision=row.revision + 1,
            )
            turn.ask(Publish(fact_of(row)), Save(INSTANCES, row.instance_id, row))
        elif turn.now_s - row.changed_at >= self.params.keep_gone_s:
            turn.ask(Remove(INSTANCES, row.instance_id))
