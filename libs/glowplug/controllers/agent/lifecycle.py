"""What happens to one instance from its launch to the end of its process; and the transaction of one stimulus.

Bytes are granted before anything starts and released only when the engine's process is known to be gone; those of a
replica, when it is dropped. Which action runs in which state stands in table.py; drains.py, stages.py and starts.py
hold the actions that are not here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import (
    COMING,
    OVER,
    RULES,
    STARTING,
    Holding,
    Ledger,
    State,
    Stop,
    enter,
    own_workers,
    shares_of,
)
from glowplug.controllers.agent.table import TABLE, Ignored, InvalidTransition, Move
from glowplug.controllers.effects import Effect, Publish, Remove, Save, Tick
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.instance import BEFORE_START, Instance, InstanceState, Phase, PhaseName
from glowplug.events import Event
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceLoading,
    InstancePrewarmed,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    InstanceSwappedOut,
)
from glowplug.policies.start_times import fresh_kind, kind_from

INSTANCES = "instances"
INTERRUPTED = "interrupted"  # the kind of a start that nobody is to learn from
_ORDER = {name: rank for rank, name in enumerate(PhaseName)}
_FACTS = {
    InstanceState.STARTING: InstanceStarting,
    InstanceState.LOADING: InstanceLoading,
    InstanceState.READY: InstanceReady,
    InstanceState.DRAINING: InstanceDraining,
    InstanceState.STOPPED: InstanceStopped,
    InstanceState.PREWARMED: InstancePrewarmed,
    InstanceState.SWAPPED_OUT: InstanceSwappedOut,
}
_ENDS = {State.FAILING: State.FAILED, State.LOSING: State.LOST}  # the others end STOPPED
_HAS_REST = {State.STOPPED: State.DROPPING, State.FAILED: State.FAILING, State.LOST: State.LOSING}
Action = Callable[["Transaction", Any, Any], None]  # (transaction, record, stimulus)


def fact_of(instance: Instance, code: str = "") -> Any:
    """The fact that publishes an instance's state."""
    if instance.state is InstanceState.FAILED:
        return InstanceFailed(instance=instance, code=code or "engine_failed")
    return _FACTS[instance.state](instance=instance)


def _rank(effect: Effect) -> int:
    """What needs nobody else goes first, so that a slow bus or store delays no engine."""
    return {Publish: 1, Save: 2, Remove: 2}.get(type(effect), 0)


@dataclass(slots=True)
class Transaction:
    """The handling of one stimulus: the records it changes and the effects it asks for, in the order they are done.

    `holdings` is the controller's own map. An action changes it through `keep` and `publish`; `step` applies a stimulus
    to one record by the table.
    """

    now_s: float
    holdings: dict[str, Holding]
    actions: Mapping[str, Action]
    event: Event | None = None
    effects: list[Effect] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    is_dirty: bool = False  # what a restart must know has changed
    _asked: list[type] = field(default_factory=list)  # by the step under way

    def step(self, instance_id: str, stimulus: Any) -> None:
        """Apply a stimulus to one record. Raises InvalidTransition, with nothing changed."""
        holding, kind = self.holdings.get(instance_id), type(stimulus)
        state = holding.state if holding is not None else None
        row = TABLE.get((state, kind))
        if row is None:
            raise InvalidTransition(instance_id, state, kind)
        if isinstance(row, Ignored):
            return
        outer, self._asked = self._asked, []
        self.actions[row.does](self, holding, stimulus)
        asked, self._asked = tuple(self._asked), outer
        after = self.holdings.get(instance_id)
        self.moves.append(
            Move(
                instance_id,
                state,
                kind,
                after.state if after is not None else None,
                asked,
                _consolidation(holding),
                _consolidation(after),
                after is not None and bool(after.engine_id),
            )
        )

    def ask(self, *effects: Effect) -> None:
        """Ask for effects of the agent's own."""
        self.effects.extend(effects)
        self._asked.extend(map(type, effects))

    def keep(self, holding: Holding) -> Holding:
        """Take the record as it is now, and remember it over a restart."""
        self.is_dirty = True
        return self.note(holding)

    def note(self, holding: Holding) -> Holding:
        """Take the record as it is now; a restart may forget what has changed."""
        self.holdings[holding.instance.instance_id] = holding
        return holding

    def publish(self, holding: Holding, code: str = "", **changes: Any) -> Holding:
        """Change the instance, raise its revision, and publish and save it in the state that its record is in."""
        was = holding.instance
        changes |= {"state": RULES[holding.state].public, "changed_at": self.now_s, "revision": was.revision + 1}
        instance = replace(was, **changes)
        cause = None if self.event is not None else holding.cause  # None: the shell takes the event in hand
        self.effects += (Publish(fact_of(instance, code), cause), Save(INSTANCES, instance.instance_id, instance))
        return self.keep(replace(holding, instance=instance))

    def remove(self, instance_id: str) -> None:
        """Take the row out of the store."""
        self.effects.append(Remove(INSTANCES, instance_id))

    def in_order(self) -> list[Effect]:
        """The effects, those that need neither bus nor store first."""
        return sorted(self.effects, key=_rank)


def _consolidation(holding: Holding | None) -> Any:
    return holding.consolidation.state if holding is not None and holding.consolidation is not None else None


class Lifecycle:
    """The actions of every instance. It keeps nothing but the ledger."""

    def __init__(self, node_id: str, ledger: Ledger, params: msg.AgentParams) -> None:
        self.node_id, self.ledger, self.params = node_id, ledger, params
        self.actions: dict[str, Action] = {
            "launched": self.launched,
            "fetched": self.fetched,
            "start_failed": self.start_failed,
            "exited": self.exited,
            "health": self.health,
            "give_way": self.give_way,
            "lose": self.lose,
            "gone": self.gone,
            "tick_start": self.tick_start,
            "tick_stop": self.tick_stop,
            "tick_over": self.tick_over,
        }

    # bytes

    def grant(self, holding: Holding, releases: Iterable[str] = ()) -> Holding:
        """Take the bytes of its workers on this node, in one step with giving up those of `releases`.

        Raises OutOfMemory, with nothing changed.
        """
        shares = holding.shares or shares_of(holding.instance, holding.model, self.node_id)
        self.ledger.exchange(releases, holding.instance.instance_id, shares)
        return replace(holding, shares=shares)

    def ungrant(self, holding: Holding) -> Holding:
        """Free what it holds."""
        self.ledger.release(holding.instance.instance_id)
        return replace(holding, shares={})

    # a start

    def begin(self, transaction: Transaction, holding: Holding) -> None:
        """Launch the process while the weights are on their way; both report back."""
        instance, start = holding.instance, holding.start
        assert start is not None
        workers = self.workers_here(instance)
        gpus = self.ledger.gpus
        index = next(i for i, gpu in enumerate(gpus) if gpu.gpu_id == workers[0].gpu_id)
        stage, name = holding.pipeline.stage if holding.pipeline else 0, instance.instance_id
        transaction.ask(
            msg.LaunchEngine(
                name,
                holding.model,
                workers[0],
                gpus[index].kind,
                index,
                holding.cause.traceparent,
                workers,
                instance.replica,
                stage,
                instance.num_stages,
            ),
            msg.AwaitWeights(name, holding.model.weights, start.deadline_at, stage, instance.num_stages),
        )

    def workers_here(self, instance: Instance) -> tuple[Any, ...]:
        """Its own GPU processes on this node."""
        return tuple(w for w in own_workers(instance) if w.node_id == self.node_id)

    def launched(self, transaction: Transaction, holding: Holding, _: msg.EngineLaunched) -> None:
        """Its process is up: load, once the weights are there."""
        start = holding.start
        if start is not None and start.weights_path is not None:
            self._load(transaction, holding, start.weights_path)
        else:
            transaction.keep(enter(holding, State.LAUNCHED))

    def fetched(self, transaction: Transaction, holding: Holding, report: msg.WeightsComplete) -> None:
        """Its weights are in host memory: load, once its process is up."""
        assert holding.start is not None
        fetch = Phase(name=PhaseName.FETCH, started_at=holding.instance.created_at, ended_at=transaction.now_s)
        start = replace(holding.start, weights_path=report.path, fetch=fetch)
        holding = replace(holding, start=start, was_cached=report.cached)
        if holding.state is State.LAUNCHED:
            self._load(transaction, holding, report.path)
        else:
            transaction.keep(enter(holding, State.FETCHED))

    def _load(self, transaction: Transaction, holding: Holding, path: str) -> None:
        transaction.ask(msg.LoadEngine(holding.engine, path))
        if holding.engine_id:
            holding = self.activate(transaction, holding, holding.engine_id)
        else:
            holding = enter(holding, State.LOADING)
        transaction.publish(holding, reason="its weights are in host memory")

    def activate(self, transaction: Transaction, holding: Holding, source: str) -> Holding:
        """Let the engine of `source` go on as this one's, from now on under its own id. The caller publishes it."""
        instance = holding.instance
        workers = self.workers_here(instance)
        transaction.ask(msg.ActivateEngine(instance.instance_id, source, holding.model, workers))
        return enter(holding, State.ACTIVATING, engine_id="")

    def ready(self, transaction: Transaction, holding: Holding, report: msg.EngineReady) -> None:
        """The engine answers. Its phases and the fetch are published with what was expected of them, and what the start
        had found: whoever learns from starts learns from this."""
        start, instance = holding.start, holding.instance
        assert start is not None
        measured = (*((start.fetch,) if start.fetch else ()), *report.phases)
        if start.has_restarted:
            kind = INTERRUPTED
        elif start.grew_from is not None:
            kind = kind_from(start.grew_from).value
        else:
            kind = fresh_kind(is_cached=holding.was_cached).value
        holding = transaction.publish(
            enter(holding, State.READY),
            url=report.url,
            ready_at=transaction.now_s,
            phases=_predicted(start.predicted, (*instance.phases, *measured)),
            max_concurrency=report.num_slots or instance.max_concurrency,
            kv_tokens=report.kv_tokens,
            lacks=report.lacks,
            key_id=report.key_id,
            start_kind=kind,
            reason=f"it is ready after {transaction.now_s - instance.created_at:.2f} s",
        )
        transaction.ask(msg.ReportStart(holding.instance, holding.cause.traceparent, holding.was_cached))

    def tick_start(self, transaction: Transaction, holding: Holding, _: Tick) -> None:
        """A start past its deadline has failed."""
        assert holding.start is not None
        if transaction.now_s < holding.start.deadline_at:
            return
        seconds = self.params.start_deadline_s
        if holding.state in STARTING and holding.start.weights_path is None:
            why = "weights_unavailable", f"its weights were not in host memory after {seconds:g} s"
        else:
            why = "start_timeout", f"its engine was not ready after {seconds:g} s"
        self.fail(transaction, holding, *why)

    # failures

    def start_failed(
        self, transaction: Transaction, holding: Holding, report: msg.WeightsFailed | msg.EngineStartFailed
    ) -> None:
        """Its start is over."""
        reason = report.message if isinstance(report, msg.WeightsFailed) else report.reason
        self.fail(transaction, holding, report.code, reason)

    def exited(
        self, transaction: Transaction, holding: Holding, report: msg.EngineExited | msg.EngineOverLimit
    ) -> None:
        """Its process has ended by itself, or has to."""
        self.fail(transaction, holding, "engine_failed", report.reason)

    def health(self, transaction: Transaction, holding: Holding, seen: msg.HealthSeen) -> None:
        """A process that is gone has failed, and so has one that hangs. What sleeps need not answer."""
        if not seen.alive:
            self.fail(transaction, holding, "engine_failed", seen.reason or "its engine process is gone")
        elif holding.state in (State.READY, State.DRAINING):
            num_misses = 0 if seen.ok else holding.num_misses + 1
            holding = transaction.note(replace(holding, num_misses=num_misses))
            if num_misses >= self.params.health_misses:
                why = f"its engine hangs ({num_misses} health checks failed): {seen.reason}"
                self.fail(transaction, holding, "engine_failed", why)

    def check_health(self, transaction: Transaction, holding: Holding) -> Holding:
        """Ask for its health once a period."""
        if transaction.now_s - holding.health_asked_at < self.params.health_every_s:
            return holding
        transaction.ask(msg.CheckHealth(holding.instance.instance_id))
        return transaction.note(replace(holding, health_asked_at=transaction.now_s))

    def fail(self, transaction: Transaction, holding: Holding, code: str, reason: str) -> None:
        """FAILED for everyone at once; the bytes stay granted until the process is gone."""
        was, stops = holding.instance.state, holding.stop is None and bool(holding.shares)
        stops = stops or (holding.stop is None and was.is_dormant)
        state = State.FAILING if stops or holding.stop is not None else State.FAILED
        holding = transaction.publish(enter(holding, state), code, reason=reason)
        if was.is_coming:
            transaction.ask(msg.ReportStart(holding.instance, holding.cause.traceparent))
        if stops:
            self.stop(transaction, holding, 0.0, state)

    # ends

    def stop(self, transaction: Transaction, holding: Holding, grace_s: float, state: State) -> Holding:
        """Ask for the end of its process; it is in `state` meanwhile."""
        transaction.ask(msg.StopEngine(holding.engine, grace_s))
        return transaction.keep(enter(holding, state, stop=Stop(transaction.now_s + grace_s)))

    def tick_stop(self, transaction: Transaction, holding: Holding, _: Tick) -> None:
        """Ask once more for the end of a process that outlived its stop."""
        assert holding.stop is not None
        if transaction.now_s - holding.stop.asked_at >= self.params.stop_retry_s:
            self.stop(transaction, holding, 0.0, holding.state)

    def drop(self, transaction: Transaction, holding: Holding, reason: str) -> None:
        """End a dormant instance, or a replica on its way: its bytes are free at once (its pages are mapped anew,
        WarmServe section 4.2), its process follows."""
        holding = transaction.publish(enter(self.ungrant(holding), State.DROPPING), reason=reason)
        if holding.stop is None:
            self.stop(transaction, holding, 0.0, State.DROPPING)

    def give_way(self, transaction: Transaction, holding: Holding, asked: msg.GivesWay) -> None:
        """Another instance needs its bytes."""
        self.drop(transaction, holding, asked.reason)

    def gone(self, transaction: Transaction, holding: Holding, report: msg.EngineGone) -> None:
        """The process is gone: its bytes are free, or its start begins again. When it is not, it is stopped again
        later."""
        state = holding.state
        if not report.clean:
            state = State.STOPPING if state is State.FALLING_ASLEEP else state
            transaction.keep(enter(holding, state, stop=Stop(transaction.now_s)))
        elif state is State.RESTARTING and holding.start is not None:
            decided = tuple(p for p in holding.instance.phases if p.name in BEFORE_START)
            instance = replace(holding.instance, source="", phases=decided)
            start = replace(holding.start, weights_path=None, fetch=None, grew_from=None, has_restarted=True)
            again = enter(holding, State.LAUNCHING, instance=instance, start=start, engine_id="")
            self.begin(transaction, transaction.keep(again))
        else:
            ended = enter(self.ungrant(holding), _ENDS.get(state, State.STOPPED), engine_id="", snapshot_bytes=0)
            if holding.instance.state.is_gone:
                transaction.keep(ended)
            else:
                transaction.publish(ended)

    def lose(self, transaction: Transaction, holding: Holding, _: Any) -> None:
        """Give up an instance that another node runs by now: its row and its facts are theirs, so nothing is
        published."""
        why, stops = "it has another id now", holding.stop is None and holding.state not in OVER
        instance = replace(holding.instance, state=InstanceState.STOPPED, changed_at=transaction.now_s, reason=why)
        state = State.LOST if holding.state in OVER else State.LOSING
        holding = transaction.keep(enter(holding, state, instance=instance))
        if stops:
            self.stop(transaction, holding, 0.0, state)

    def tick_over(self, transaction: Transaction, holding: Holding, _: Tick) -> None:
        """Forget it, once no command for it can be under way."""
        if transaction.now_s - holding.instance.changed_at < self.params.keep_gone_s:
            return
        instance_id = holding.instance.instance_id
        del transaction.holdings[instance_id]
        transaction.is_dirty = True
        if not any(instance_id in h.past_ids for h in transaction.holdings.values()):  # else its engine lives on
            transaction.ask(*(msg.ForgetEngine(past_id) for past_id in (instance_id, *holding.past_ids)))
        if holding.state is not State.LOST:
            transaction.remove(instance_id)

    # a restart, and a clock that jumps

    def recall(self, transaction: Transaction, holding: Holding, *, is_living: bool) -> None:
        """Take up an instance after the agent's restart, from what is left of its engine."""
        state = holding.state
        if not holding.shares and "shares" in RULES[state].needs:
            self.fail(transaction, holding, "out_of_memory", "the node has less GPU memory than before its restart")
            self.stop(transaction, transaction.holdings[holding.instance.instance_id], 0.0, State.FAILING)
        elif holding.stop is not None:
            self.stop(transaction, holding, 0.0, state)
        elif state in OVER:
            name = holding.instance.instance_id
            if is_living and not any(h.engine_id == name for h in transaction.holdings.values()):  # else it is theirs
                self.stop(transaction, holding, 0.0, _HAS_REST[state])
        elif state in COMING:
            why = "its agent restarted during the start, and its engine starts again"
            holding = transaction.publish(enter(holding, State.RESTARTING), reason=why)
            self.stop(transaction, holding, 0.0, State.RESTARTING)
        elif not is_living and holding.instance.state.is_dormant:
            self.drop(transaction, holding, "its engine went while its agent was down")
        elif not is_living:
            self.fail(transaction, holding, "engine_failed", "the engine died while its agent was down")
        else:
            state = State.DRAINING if state is State.FALLING_ASLEEP else state
            transaction.publish(enter(holding, state), reason="its agent has restarted and found it again")

    def regrant(self, holdings: Iterable[Holding]) -> dict[str, Holding]:
        """Grants as they were before a restart; `shares` is empty where the GPUs have become too small."""
        again = {}
        for holding in holdings:
            if holding.shares:
                try:
                    holding = self.grant(holding)
                except (OutOfMemory, ValueError):
                    holding = replace(holding, shares={})
            again[holding.instance.instance_id] = holding
        return again

    def shift(self, transaction: Transaction, holding: Holding, by_s: float) -> None:
        """Move every wait by a jump of the clock, so that none ends early and none lasts for ever."""
        start, drain, stop, consolidation, pipeline = (
            holding.start,
            holding.drain,
            holding.stop,
            holding.consolidation,
            holding.pipeline,
        )
        transaction.note(
            replace(
                holding,
                start=start and replace(start, deadline_at=start.deadline_at + by_s),
                drain=drain
                and replace(drain, deadline_at=drain.deadline_at + by_s, quiet_until=drain.quiet_until + by_s),
                stop=stop and Stop(stop.asked_at + by_s),
                consolidation=consolidation and replace(consolidation, deadline_at=consolidation.deadline_at + by_s),
                pipeline=pipeline and replace(pipeline, retry_at=pipeline.retry_at + by_s),
                health_asked_at=holding.health_asked_at + by_s,
            )
        )


def _predicted(expected: Mapping[str, float], phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """`phases` in order, each with what its start's command expected of it, where it carries nothing yet."""
    return tuple(
        p if p.predicted_s else replace(p, predicted_s=expected.get(p.name.value, 0.0))
        for p in sorted(phases, key=lambda p: (_ORDER[p.name], p.started_at))
    )
