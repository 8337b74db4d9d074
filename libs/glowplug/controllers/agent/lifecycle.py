"""The life of one instance on its node: STARTING -> LOADING -> READY -> DRAINING -> STOPPED, or FAILED.

Bytes are granted before anything starts and released only when the engine's process is known to be gone; those of a
replica, when it is dropped. See agent_dormant.py for what lies dormant, agent_stages.py for pipelines.
"""

from collections.abc import Iterable
from dataclasses import replace

from glowplug.controllers.agent.grants import Ledger, own_workers, shares_of, total_of
from glowplug.controllers.agent.messages import (
    ActivateEngine,
    AgentParams,
    AwaitWeights,
    EngineReady,
    Holding,
    LaunchEngine,
    LimitKv,
    LoadEngine,
    ReportStart,
    SleepEngine,
    StopEngine,
)
from glowplug.controllers.agent.phases import predicted, start_kind
from glowplug.controllers.agent.transaction import Turn
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import BEFORE_START, InstanceState, Phase, PhaseName


class Lifecycle:
    """Every transition of a holding. Stateless but for the ledger."""

    def __init__(self, node_id: str, ledger: Ledger, params: AgentParams) -> None:
        self.node_id, self.ledger, self.params = node_id, ledger, params

    def grant(self, holding: Holding, releases: Iterable[str] = ()) -> Holding:
        """Take the bytes of its workers on this node, in one step with giving up those of `releases`.

        Raises OutOfMemory, with nothing changed.
        """
        shares = holding.shares or shares_of(holding.instance, holding.model, self.node_id)
        self.ledger.exchange(releases, holding.instance.instance_id, shares)
        return replace(holding, is_granted=True, shares=shares)

    def ungrant(self, holding: Holding) -> Holding:
        """Free what it holds."""
        self.ledger.release(holding.instance.instance_id)
        return replace(holding, is_granted=False, shares={})

    def begin(self, turn: Turn, holding: Holding) -> None:
        """Launch the process while the weights are on their way; both halves report back."""
        instance = holding.instance
        workers = tuple(w for w in own_workers(instance) if w.node_id == self.node_id)
        gpus = self.ledger.gpus
        index = next(i for i, gpu in enumerate(gpus) if gpu.gpu_id == workers[0].gpu_id)
        turn.ask(
            LaunchEngine(
                instance.instance_id,
                holding.model,
                workers[0],
                gpus[index].kind,
                index,
                holding.cause.traceparent,
                workers,
                instance.replica,
                holding.stage,
                instance.num_stages,
            ),
            AwaitWeights(
                instance.instance_id, holding.model.weights, holding.deadline_at, holding.stage, instance.num_stages
            ),
        )

    def launched(self, turn: Turn, holding: Holding) -> None:
        if holding.instance.state is InstanceState.STARTING and not holding.is_stopping:
            self._load_when_both(turn, turn.keep(replace(holding, is_launched=True)))

    def fetched(self, turn: Turn, holding: Holding, path: str, *, cached: bool) -> None:
        if holding.instance.state is not InstanceState.STARTING or holding.is_stopping:
            return
        if holding.weights_path is not None:
            return
        fetch = Phase(name=PhaseName.FETCH, started_at=holding.instance.created_at, ended_at=turn.now_s)
        self._load_when_both(turn, turn.keep(replace(holding, weights_path=path, fetch=fetch, is_cached=cached)))

    def _load_when_both(self, turn: Turn, holding: Holding) -> None:
        if holding.is_launched and holding.weights_path is not None:
            turn.ask(LoadEngine(holding.engine, holding.weights_path))
            if holding.engine_id:
                holding = self.activate(turn, holding, holding.engine_id)
            turn.tell(holding, state=InstanceState.LOADING, reason="its weights are in host memory")

    def activate(self, turn: Turn, holding: Holding, source: str) -> Holding:
        """Let the engine of `source` go on as this one's, from now on under its own id."""
        instance = holding.instance
        workers = tuple(w for w in own_workers(instance) if w.node_id == self.node_id)
        turn.ask(ActivateEngine(instance.instance_id, source, holding.model, workers))
        return turn.keep(replace(holding, engine_id=""))

    def ready(self, turn: Turn, holding: Holding, report: EngineReady) -> None:
        """The engine answers. Its phases and the fetch are told with what was expected of them, and what the start had
        found: whoever learns from starts learns from this."""
        if holding.instance.state is not InstanceState.LOADING or holding.is_stopping or holding.instance.replica:
            return
        measured = (*((holding.fetch,) if holding.fetch else ()), *report.phases)
        phases = predicted(holding, (*holding.instance.phases, *measured))
        holding = turn.tell(
            holding,
            state=InstanceState.READY,
            url=report.url,
            ready_at=turn.now_s,
            phases=phases,
            max_concurrency=report.num_slots or holding.instance.max_concurrency,
            kv_tokens=report.kv_tokens,
            lacks=report.lacks,
            key_id=report.key_id,
            start_kind=start_kind(holding),
            reason=f"it is ready after {turn.now_s - holding.instance.created_at:.2f} s",
        )
        turn.ask(ReportStart(holding.instance, holding.cause.traceparent, holding.is_cached))

    def fail(self, turn: Turn, holding: Holding, code: str, reason: str) -> None:
        """FAILED for everyone at once; the bytes stay granted until the process is gone."""
        if holding.instance.state.is_gone:
            return
        state = holding.instance.state
        holding = turn.tell(holding, code, state=InstanceState.FAILED, reason=reason)
        if state.is_coming:
            turn.ask(ReportStart(holding.instance, holding.cause.traceparent))
        if (holding.is_granted or state.is_dormant) and not holding.is_stopping:
            self._stop(turn, holding, 0.0)

    def drain(self, turn: Turn, holding: Holding, reason: str, grace_s: float, becomes: str = "") -> None:
        """Accept nothing, finish what is there for at most `grace_s`, then stop, or become what it can (`becomes`, ""
        for nothing). A start under way is given up; a replica, or what sleeps, is dropped at once."""
        instance = holding.instance
        if instance.state.is_gone:
            return
        if instance.state.is_dormant or (instance.replica and instance.state.is_coming):
            self.drop(turn, holding, reason)
            return
        deadline_at = turn.now_s + grace_s
        if instance.state is InstanceState.DRAINING:
            kept = becomes if holding.becomes else ""  # once it is to stop, it stops
            if holding.is_sleeping:
                if not kept and not holding.is_stopping:
                    self._stop(turn, replace(holding, becomes=""), self.params.stop_grace_s)
                return
            holding = turn.keep(replace(holding, deadline_at=min(holding.deadline_at, deadline_at), becomes=kept))
        else:
            quiet_until = min(turn.now_s + self.params.drain_quiet_s, deadline_at)
            at_once = instance.state.is_coming
            holding = replace(
                holding,
                deadline_at=turn.now_s if at_once else deadline_at,
                quiet_until=quiet_until,
                becomes="" if at_once else becomes,
            )
            holding = turn.tell(holding, state=InstanceState.DRAINING, reason=reason)
        self.expire_drain(turn, holding)

    def drop(self, turn: Turn, holding: Holding, reason: str) -> None:
        """End a dormant instance, or a replica on its way: its bytes are free at once (its pages are mapped anew,
        WarmServe section 4.2), its process follows."""
        was_stopping = holding.is_stopping
        holding = turn.tell(self.ungrant(holding), state=InstanceState.STOPPED, reason=reason)
        if not was_stopping:
            self._stop(turn, holding, 0.0)

    def expire_drain(self, turn: Turn, holding: Holding) -> None:
        """End the drain of an engine whose grace is over."""
        if turn.now_s >= holding.deadline_at and not holding.is_stopping:
            self._end_drain(turn, holding, self.params.stop_grace_s if holding.instance.ready_at else 0.0)

    def counted(self, turn: Turn, holding: Holding, num_in_flight: int) -> None:
        """End the drain of an engine that has nothing left, once routers have had time to hear."""
        draining = holding.instance.state is InstanceState.DRAINING and not holding.is_stopping
        if draining and num_in_flight == 0 and turn.now_s >= holding.quiet_until and not holding.is_sleeping:
            self._end_drain(turn, holding, self.params.stop_grace_s)

    def _end_drain(self, turn: Turn, holding: Holding, grace_s: float) -> None:
        """Stop it, or put it to sleep; one that does not fall asleep in time is stopped too."""
        if holding.becomes and not holding.is_sleeping:
            turn.ask(SleepEngine(holding.engine, holding.becomes))
            deadline_at = turn.now_s + self.params.start_deadline_s
            turn.keep(replace(holding, is_sleeping=True, deadline_at=deadline_at))
        else:
            self._stop(turn, holding, grace_s)

    def resume(self, turn: Turn, holding: Holding, reason: str) -> None:
        """End a drain that is no longer wanted, unless its engine is being stopped already. A KV cache that has been
        cut down takes its bytes back, or the drain goes on."""
        instance = holding.instance
        draining = instance.state is InstanceState.DRAINING and instance.url
        if not draining or holding.is_stopping or holding.is_sleeping:
            return
        whole = shares_of(instance, holding.model, self.node_id)
        if not (holding.is_consolidating or holding.is_abandoning) and holding.shares != whole:
            try:
                holding = self.grant(replace(holding, shares={}), (instance.instance_id,))
            except OutOfMemory as error:
                why = f"it cannot go on, since its KV cache has been given away: {error.message}"
                if instance.reason != why:
                    turn.tell(holding, reason=why)
                return
            turn.ask(LimitKv(instance.instance_id, total_of(whole, GrantOwner.KV)))
        turn.tell(replace(holding, becomes="", snapshot_bytes=0), state=InstanceState.READY, reason=reason)

    def gone(self, turn: Turn, holding: Holding, *, clean: bool) -> None:
        """The process is gone: its bytes are free, and a drain ends in STOPPED. When it is not, stop it again later."""
        if not holding.is_stopping and not holding.is_sleeping:
            return
        if not clean:
            turn.keep(replace(holding, stop_asked_at=turn.now_s, is_stopping=True))
            return
        if holding.is_restarting and holding.instance.state.is_coming:
            decided = tuple(p for p in holding.instance.phases if p.name in BEFORE_START)
            again = replace(holding, is_stopping=False, is_restarting=False, is_launched=False, weights_path=None)
            again = replace(again, fetch=None, engine_id="", warmth="", is_loaded=False, is_serving=False)
            again = replace(again, instance=replace(again.instance, source="", phases=decided), has_restarted=True)
            self.begin(turn, turn.keep(again))
            return
        holding = replace(self.ungrant(holding), is_stopping=False, is_sleeping=False, snapshot_bytes=0)
        holding = turn.keep(replace(holding, engine_id=""))
        if not holding.instance.state.is_gone:
            turn.tell(holding, state=InstanceState.STOPPED)

    def stop_again(self, turn: Turn, holding: Holding) -> None:
        """Ask once more for the end of a process that outlived its stop."""
        if holding.is_stopping and turn.now_s - holding.stop_asked_at >= self.params.stop_retry_s:
            self._stop(turn, holding, 0.0)

    def lose(self, turn: Turn, holding: Holding) -> None:
        """Give up an instance that another node runs by now: its row and its facts are theirs, so nothing is told."""
        instance = replace(
            holding.instance, state=InstanceState.STOPPED, changed_at=turn.now_s, reason="it has another id now"
        )
        has_process = holding.is_granted or holding.instance.state.is_dormant
        holding = turn.keep(replace(holding, instance=instance, is_lost=True))
        if has_process and not holding.is_stopping:
            self._stop(turn, holding, 0.0)

    def shift(self, turn: Turn, holding: Holding, by_s: float) -> None:
        """Move every wait by a jump of the clock, so that none ends early and none lasts for ever."""
        turn.holdings[holding.instance.instance_id] = replace(
            holding,
            deadline_at=holding.deadline_at + by_s,
            quiet_until=holding.quiet_until + by_s,
            stop_asked_at=holding.stop_asked_at + by_s,
            health_asked_at=holding.health_asked_at + by_s,
            consolidates_at=holding.consolidates_at + by_s,
            consolidate_by=holding.consolidate_by + by_s,
        )

    def _stop(self, turn: Turn, holding: Holding, grace_s: float) -> None:
        turn.ask(StopEngine(holding.engine, grace_s))
        turn.keep(replace(holding, is_stopping=True, stop_asked_at=turn.now_s + grace_s))

    def recall(self, turn: Turn, holding: Holding, *, is_living: bool) -> None:
        """Take up an instance after the agent's restart, from what is left of its engine."""
        state = holding.instance.state
        needs_bytes = not state.is_gone and state is not InstanceState.SWAPPED_OUT
        if not holding.is_granted and needs_bytes:
            self.fail(turn, holding, "out_of_memory", "the node has less GPU memory than before its restart")
            self._stop(turn, turn.holdings[holding.instance.instance_id], 0.0)
        elif holding.is_stopping or state.is_gone:
            if holding.is_granted or holding.is_stopping or is_living:
                self._stop(turn, holding, 0.0)
        elif state.is_coming:
            holding = turn.tell(
                replace(holding, is_restarting=True),
                state=InstanceState.STARTING,
                reason="its agent restarted during the start, and its engine starts again",
            )
            self._stop(turn, holding, 0.0)
        elif not is_living and state.is_dormant:
            self.drop(turn, holding, "its engine went while its agent was down")
        elif not is_living:
            self.fail(turn, holding, "engine_failed", "the engine died while its agent was down")
        else:
            turn.tell(replace(holding, is_sleeping=False), reason="its agent has restarted and found it again")

    def regrant(self, holdings: Iterable[Holding]) -> dict[str, Holding]:
        """Grants as they were before a restart; `is_granted` is False where the GPUs have become too small."""
        again = {}
        for holding in holdings:
            kept = replace(holding, is_granted=False)
            if holding.is_granted:
                try:
                    kept = self.grant(holding)
                except OutOfMemory:
                    kept = replace(holding, is_granted=False, shares={})
            again[holding.instance.instance_id] = kept
        return again
