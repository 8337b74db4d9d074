"""The agent's controller: the single writer of a node's GPUs, its instances, and its row among the nodes.

It receives commands (reads.py), at least once, late and in any order; outcomes of its effects and other stimuli
(messages.py), Recalled first after a restart; and tables.

It asks for engine effects (messages.py, EFFECTS), for its memory to be stored first (Remember), and for facts and rows
of its instances and node.

It promises
- bytes are granted before a process starts, and freed only when it is known to be gone; a GPU is never overbooked, and
  the ledger agrees with the records: weights seen in the same pages count once (sharing.py), and a replica whose engine
  cannot hold the first layers alone has all of its weights granted;
- every start ends READY, PREWARMED, STOPPED or FAILED within its deadline, and every launched process is stopped or
  belongs to an instance, over a restart too;
- a start is idempotent by instance_id; one overtaken by a stop ends STOPPED; a command of a replaced controller is
  refused (StaleEpoch); a late outcome changes nothing; a nonsensical one is refused (InvalidTransition).

It never decides on placement, touches a clock, a process or a socket, or takes an engine's silence for an answer.

A new state needs a line in `State` and `RULES` (record.py), and rows in table.py (docs/instance_states.py prints
it); a new action a function `on_...` named by its row; a new effect a class in EFFECTS, with executors in
services/agent/executor.py and the simulator's node.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from glowplug.controllers.agent import adapters, starts
from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.drains import promised
from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.controllers.agent.record import Holding, State
from glowplug.controllers.agent.table import STIMULI, TABLE, wrong
from glowplug.controllers.agent.transaction import INSTANCES, Ledger, Step, Transaction, fact_of
from glowplug.controllers.effects import Effect, Publish, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS, Fence
from glowplug.controllers.port import Handler, dispatch
from glowplug.domain.hardware import WEIGHT_OWNERS, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Rung
from glowplug.events import Event
from glowplug.events.facts import NodeBeat

NODES = "nodes"
STEPS_KEPT = 500


def _leaves_first(holding: Holding) -> tuple[bool, float, str]:
    is_kept = holding.model.pinned_at is Rung.ASLEEP
    return is_kept, holding.instance.changed_at, holding.instance.instance_id


def _rates(around: msg.Surroundings) -> dict[str, float]:
    return {link.link_id: link.bytes_per_s for link in around.links}


class AgentController:
    """State machine of one agent. With a predecessor's `memory` the first stimulus is Recalled."""

    def __init__(
        self,
        node_id: str,
        ledger: Ledger,
        engines: Mapping[str, EngineKind],
        *,
        agent_url: str = "",
        stages_at: str = "",
        params: AgentParams | None = None,
        memory: msg.AgentMemory | None = None,
    ) -> None:
        memory = memory or msg.AgentMemory()
        self.node_id, self.ledger, self.engines, self.agent_url = node_id, ledger, engines, agent_url
        self.stages_at = stages_at
        self.params = params or AgentParams()
        there = sorted(name for name, kind in engines.items() if not kind.unavailable)
        self._available = tuple(there)
        self._abilities = tuple(f"{name}:{ability}" for name in there for ability in sorted(engines[name].abilities))
        self._fence = Fence(dict(memory.fence))
        self._node_stops = ""
        self._overtaken: dict[str, tuple[float, str]] = {}  # early stops: id -> when, why
        self._shared_seen: dict[str, int] = {}  # measured again after a restart
        self.holdings: dict[str, Holding] = {}
        self._doubts = starts.remembered(self._transaction(0.0), memory.holdings)
        commands = [kind for kind in STIMULI if hasattr(kind, "TYPE")]  # payloads of events
        outcomes = [kind for kind in STIMULI if issubclass(kind, msg.Outcome)]
        actions: dict[type[Any], Callable[[Transaction, Any], None]] = {
            **dict.fromkeys(commands, self._command),
            Tick: self._tick,
            msg.Recalled: self._recall,
            msg.Surroundings: self._look,
            msg.NodeStopping: self._node_stopping,
            **dict.fromkeys(outcomes, self._outcome),
        }
        self.handlers: dict[type[Any], Handler] = {kind: partial(self._do, do) for kind, do in actions.items()}
        self._surroundings = msg.Surroundings()
        self._beat_at, self._node_revision = 0.0, 0
        self.steps: deque[Step] = deque(maxlen=STEPS_KEPT)
        self._is_checked = True

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(holding.instance for holding in self.holdings.values())

    @property
    def num_living(self) -> int:
        """Instances not ended, or with a process not known to be gone."""
        return sum(not holding.is_over for holding in self.holdings.values())

    @property
    def is_quiet(self) -> bool:
        """Whether ticks may be rare: nothing starts, ends or moves."""
        return not self._node_stops and all(holding.is_quiet for holding in self.holdings.values())

    @property
    def is_stopping(self) -> bool:
        return bool(self._node_stops)

    def memory(self) -> msg.AgentMemory:
        return msg.AgentMemory(holdings=tuple(self.holdings.values()), fence=dict(self._fence.seen))

    def node(self, now_s: float) -> Node:
        around = self._surroundings
        return Node(
            node_id=self.node_id,
            gpus=self.ledger.gpus,
            engines=self._available,
            abilities=self._abilities,
            agent_url=self.agent_url,
            stages_at=self.stages_at,
            prefetcher_url=around.prefetcher_url,
            host_cache_bytes=around.host_cache_bytes,
            links=around.links,
            cached=around.cached,
            on_disk=around.on_disk,
            disk_bytes_per_s=around.disk_bytes_per_s,
            num_cores=around.num_cores,
            num_runnable=around.num_runnable,
            swap_host_bytes=-1 if self.params.swap_host_bytes is None else self.params.swap_host_bytes,
            draining=self.is_stopping,
            heartbeat_at=now_s,
            revision=self._node_revision,
        )

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Handle one stimulus. Raises StaleEpoch for a command of a replaced controller, InvalidTransition for a
        nonsensical outcome, TypeError for any other object."""
        return dispatch(self.handlers, stimulus, now_s)

    def _do(self, action: Callable[[Transaction, Any], None], stimulus: Any, now_s: float) -> list[Effect]:
        transaction = self._transaction(now_s)
        grants_before = self.ledger.gpus
        action(transaction, stimulus)
        adapters.follow_hosts(transaction)
        self._make_way(transaction)
        if self.ledger.gpus != grants_before or now_s - self._beat_at >= self.params.beat_s:
            self._beat(transaction)
        return self._effects(transaction)

    def _make_way(self, transaction: Transaction) -> None:
        """Drop sleepers from GPUs granted to others, the longest asleep first, models pinned asleep last."""
        for gpu_id in [gpu.gpu_id for gpu in self.ledger.gpus if gpu.lacking_bytes]:
            asleep = [h for h in self.holdings.values() if h.state is State.SWAPPED_OUT and gpu_id in h.shares]
            for holding in sorted(asleep, key=_leaves_first):
                if not next(gpu.lacking_bytes for gpu in self.ledger.gpus if gpu.gpu_id == gpu_id):
                    break
                transaction.step(holding.instance.instance_id, msg.GivesWay("a start needs the memory it keeps"))

    def _transaction(self, now_s: float) -> Transaction:
        return Transaction(
            now_s=now_s,
            node_id=self.node_id,
            ledger=self.ledger,
            engines=self.engines,
            params=self.params,
            table=TABLE,
            holdings=self.holdings,
            overtaken=self._overtaken,
            shared_seen=self._shared_seen,
            node_stops=self._node_stops,
        )

    def _effects(self, transaction: Transaction) -> list[Effect]:
        self._is_checked = False
        self.steps += transaction.steps
        remember = [msg.Remember(self.memory())] if transaction.is_dirty else []
        return [*remember, *transaction.in_order()]

    # stimuli

    def _command(self, transaction: Transaction, event: Event) -> None:
        if event.data.target != self.node_id:
            return
        seen = dict(self._fence.seen)
        self._fence.admit(event)
        transaction.event, transaction.is_dirty = event, seen != self._fence.seen
        transaction.step(event.data.instance_id, event.data)

    def _outcome(self, transaction: Transaction, stimulus: Any) -> None:
        """Apply an outcome to its instance, or to the one that took over its start."""
        instance_id = stimulus.instance_id
        holding = self.holdings.get(instance_id)
        if holding is None or holding.instance.state.is_gone:
            taker = next((i for i, h in self.holdings.items() if h.engine_id == instance_id), None)
            if holding is None and taker is None:
                return
            instance_id = taker or instance_id
        transaction.step(instance_id, stimulus)

    def _look(self, _: Transaction, around: msg.Surroundings) -> None:
        if _rates(around) != _rates(self._surroundings):
            self._beat_at = 0.0  # the placer needs new rates at once
        self._surroundings = around

    def _node_stopping(self, transaction: Transaction, asked: msg.NodeStopping) -> None:
        self._node_stops = asked.reason
        for instance_id in list(self.holdings):
            transaction.step(instance_id, asked)

    def _tick(self, transaction: Transaction, tick: Tick) -> None:
        now_s = transaction.now_s
        for instance_id in list(self.holdings):
            transaction.step(instance_id, tick)
        for instance_id, (when, _) in list(self._overtaken.items()):
            if now_s - when >= self.params.keep_gone_s:  # its start can no longer arrive
                del self._overtaken[instance_id]

    def _recall(self, transaction: Transaction, recalled: msg.Recalled) -> None:
        for instance_id in list(self.holdings):
            if (why := self._doubts.pop(instance_id, None)) is not None:
                transaction.publish(self.holdings[instance_id], reason=why)
            transaction.step(instance_id, recalled)

    def _beat(self, transaction: Transaction) -> None:
        now_s = transaction.now_s
        self._beat_at, self._node_revision = now_s, max(self._node_revision + 1, int(now_s * 1000))
        node = self.node(now_s)
        transaction.effects += (Publish(NodeBeat(node=node)), Save(NODES, self.node_id, node))

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Repair the store's missing or old rows from the agent's records, which are the truth."""
        if table == LEADERS:
            self._fence.raise_to(rows)
            return []
        if table == NODES:
            own = rows.get(self.node_id)
            self._node_revision = max(self._node_revision, own.revision if own is not None else 0)
            return []
        transaction = self._transaction(now_s)
        for instance_id, holding in list(self.holdings.items()):
            if holding.state is not State.LOST:  # its row is another node's
                self._compare(transaction, holding, rows.get(instance_id))
            first = rows.get(holding.instance.part_of)
            is_over = first is not None and first.state.is_gone
            if is_over and self.holdings[instance_id].state is State.DRAINING:
                why = f"its pipeline {holding.instance.part_of} has ended"
                transaction.step(instance_id, msg.StopAsked(instance_id, why, 0.0))
        for instance_id, row in rows.items():
            if instance_id not in self.holdings and row.workers and row.node_id == self.node_id:
                self._disown(transaction, row)
        return self._effects(transaction)

    def _compare(self, transaction: Transaction, holding: Holding, row: Instance | None) -> None:
        """Repair one row, overwriting different ones at the agent's revision or above (a placer gave the instance up).
        Of two nodes given the same instance the later one keeps it, unless it has ended there."""
        mine = holding.instance
        if row is None:
            transaction.effects.append(Save(INSTANCES, mine.instance_id, mine))
            return
        is_theirs = row.node_id != self.node_id
        is_later = (row.created_at, row.node_id) > (mine.created_at, self.node_id)
        if is_theirs and (mine.state.is_gone or (is_later and not row.state.is_gone)):
            transaction.step(mine.instance_id, msg.RunsElsewhere())
        elif is_theirs or row.revision > mine.revision or (row.revision == mine.revision and row.state != mine.state):
            ahead = replace(mine, revision=max(row.revision, mine.revision))
            transaction.publish(replace(holding, instance=ahead), reason=f"the store knows it as {row.state}")
        elif row.revision < mine.revision:
            transaction.effects.append(Save(INSTANCES, mine.instance_id, mine))

    def _disown(self, transaction: Transaction, row: Instance) -> None:
        """Fail, and later remove, a row unknown to the agent (its memory was lost)."""
        if not row.state.is_gone:
            row = replace(
                row,
                state=InstanceState.FAILED,
                reason=f"the agent of {self.node_id} does not know this instance",
                changed_at=transaction.now_s,
                revision=row.revision + 1,
            )
            transaction.effects += (Publish(fact_of(row)), Save(INSTANCES, row.instance_id, row))
        elif transaction.now_s - row.changed_at >= self.params.keep_gone_s:
            transaction.effects.append(Remove(INSTANCES, row.instance_id))

    # checks

    def validate(self) -> None:
        found = self.violations()
        assert not found, f"agent of {self.node_id}: {'; '.join(found)}"

    def violations(self) -> tuple[str, ...]:
        """Return contradictions; empty without a stimulus since the last call."""
        if self._is_checked:
            return ()
        self._is_checked = True
        found = [what for step in self.steps for what in wrong(step)]
        self.steps.clear()
        found += [what for holding in self.holdings.values() for what in holding.faults()]
        return (*found, *self._wrong_bytes(), *self._wrong_owners())

    def _wrong_bytes(self) -> Iterator[str]:
        recorded = {
            (gpu_id, name, owner): num_bytes
            for name, holding in self.holdings.items()
            for gpu_id, of_gpu in holding.shares.items()
            for owner, num_bytes in of_gpu.items()
            if num_bytes
        }
        held: Counter[tuple[str, str, GrantOwner]] = Counter()
        for gpu in self.ledger.gpus:
            if not 0 <= gpu.used_bytes <= gpu.total_bytes:
                yield f"{gpu.gpu_id} holds {gpu.used_bytes} of {gpu.total_bytes} bytes"
            if gpu.lacking_bytes:
                yield f"{gpu.gpu_id} lacks {gpu.lacking_bytes} bytes for its sleepers"
            together = {h: one.num_bytes for one in gpu.shared if one.counts for h in one.holders}
            for grant in gpu.all_grants:
                is_shared = grant.owner in WEIGHT_OWNERS
                num_bytes = grant.num_bytes + (together.get(grant.holder, 0) if is_shared else 0)
                held[gpu.gpu_id, grant.holder, grant.owner] += num_bytes
        for key in sorted(recorded.keys() | held.keys()):
            gpu_id, name, owner = key
            if recorded.get(key, 0) != held[key]:
                yield f"{name} has {held[key]} bytes of {gpu_id} for {owner}, its record {recorded.get(key, 0)}"

    def _wrong_owners(self) -> Iterator[str]:
        owners: dict[str, str] = {}
        for name, holding in self.holdings.items():
            if name != holding.instance.instance_id:
                yield f"the record of {holding.instance.instance_id} stands under {name}"
            if holding.is_over:
                continue
            if holding.engine in owners:
                yield f"the process of {holding.engine} belongs to {owners[holding.engine]} and {name}"
            owners[holding.engine] = name
        snapshots, budget = promised(self.holdings.values()), self.params.swap_host_bytes
        if budget is not None and snapshots > budget:
            yield f"{snapshots} bytes of host memory are promised to engines asleep, of {budget}"
