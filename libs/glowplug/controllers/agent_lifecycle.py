"""The life of one instance on its node: STARTING -> LOADING -> READY -> DRAINING -> STOPPED, or FAILED.

Bytes are granted before anything starts and released only when the engine's process is known to be gone.
"""

from collections.abc import Iterable
from dataclasses import replace

from glowplug.controllers.agent_phases import PhaseHistory
from glowplug.controllers.agent_turn import Turn
from glowplug.controllers.agent_words import (
    AgentParams,
    AwaitWeights,
    EngineReady,
    Holding,
    LaunchEngine,
    Ledger,
    LoadEngine,
    ReportStart,
    StopEngine,
)
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import InstanceState, Phase, PhaseName


class Lifecycle:
    """Every transition of a holding. Stateless but for the ledger and the history it keeps up to date."""

    def __init__(self, node_id: str, ledger: Ledger, history: PhaseHistory, params: AgentParams) -> None:
        self.node_id, self.ledger, self.history, self.params = node_id, ledger, history, params

    def grant(self, holding: Holding) -> Holding:
        """Take the bytes of its workers on this node. Raises OutOfMemory, with nothing taken."""
        instance_id = holding.instance.instance_id
        bytes_of: dict[str, int] = {}
        for worker in holding.instance.workers:
            if worker.node_id == self.node_id:
                num_bytes = worker.num_bytes or holding.model.memory_bytes
                bytes_of[worker.gpu_id] = bytes_of.get(worker.gpu_id, 0) + num_bytes
        try:
            for gpu_id, num_bytes in bytes_of.items():
                weights = min(holding.model.weights_bytes, num_bytes)
                shares = {GrantOwner.WEIGHTS: weights, GrantOwner.KV: num_bytes - weights}
                self.ledger.grant(gpu_id, instance_id, shares)
        except OutOfMemory:
            self.ledger.release(instance_id)
            raise
        return replace(holding, is_granted=True)

    def begin(self, turn: Turn, holding: Holding) -> None:
        """Launch the process while the weights are on their way; both halves report back."""
        instance = holding.instance
        worker = next(w for w in instance.workers if w.node_id == self.node_id)
        gpus = self.ledger.gpus
        index = next(i for i, gpu in enumerate(gpus) if gpu.gpu_id == worker.gpu_id)
        turn.ask(
            LaunchEngine(
                instance.instance_id, holding.model, worker, gpus[index].kind, index, holding.cause.traceparent
            ),
            AwaitWeights(instance.instance_id, holding.model.weights, holding.deadline_at),
        )

    def launched(self, turn: Turn, holding: Holding) -> None:
        if holding.instance.state is InstanceState.STARTING and not holding.is_stopping:
            self._load_when_both(turn, turn.keep(replace(holding, is_launched=True)))

    def fetched(self, turn: Turn, holding: Holding, path: str, *, cached: bool) -> None:
        if holding.instance.state is not InstanceState.STARTING or holding.is_stopping or holding.fetch:
            return
        fetch = Phase(name=PhaseName.FETCH, started_at=holding.instance.created_at, ended_at=turn.now_s)
        self._load_when_both(turn, turn.keep(replace(holding, weights_path=path, fetch=fetch, is_cached=cached)))

    def _load_when_both(self, turn: Turn, holding: Holding) -> None:
        if holding.is_launched and holding.weights_path is not None:
            turn.ask(LoadEngine(holding.instance.instance_id, holding.weights_path))
            turn.tell(holding, state=InstanceState.LOADING, reason="weights are in host memory")

    def ready(self, turn: Turn, holding: Holding, report: EngineReady) -> None:
        """The engine answers. Its phases and the fetch are kept with what was expected of them, then learned."""
        if holding.instance.state is not InstanceState.LOADING or holding.is_stopping:
            return
        model_key = holding.instance.model_key
        measured = (*((holding.fetch,) if holding.fetch else ()), *report.phases)
        phases = self.history.predict(model_key, (*holding.instance.phases, *measured))
        self.history.learn(model_key, (p for p in measured if not (p.name is PhaseName.FETCH and holding.is_cached)))
        holding = turn.tell(
            holding,
            state=InstanceState.READY,
            url=report.url,
            ready_at=turn.now_s,
            phases=phases,
            reason=f"ready after {turn.now_s - holding.instance.created_at:.2f} s",
        )
        turn.ask(ReportStart(holding.instance, holding.cause.traceparent, holding.is_cached))

    def fail(self, turn: Turn, holding: Holding, code: str, reason: str) -> None:
        """FAILED for everyone at once; the bytes stay granted until the process is gone."""
        if holding.instance.state.is_gone:
            return
        was_coming = holding.instance.state.is_coming
        holding = turn.tell(holding, code, state=InstanceState.FAILED, reason=reason)
        if was_coming:
            turn.ask(ReportStart(holding.instance, holding.cause.traceparent))
        if holding.is_granted and not holding.is_stopping:
            self._stop(turn, holding, 0.0)

    def drain(self, turn: Turn, holding: Holding, reason: str, grace_s: float) -> None:
        """Accept nothing, finish what is there for at most `grace_s`, then stop. A start under way is given up."""
        instance = holding.instance
        if instance.state.is_gone:
            return
        deadline_at = turn.now_s + grace_s
        if instance.state is InstanceState.DRAINING:
            holding = turn.keep(replace(holding, deadline_at=min(holding.deadline_at, deadline_at)))
        else:
            quiet_until = min(turn.now_s + self.params.drain_quiet_s, deadline_at)
            at_once = instance.state.is_coming
            holding = replace(holding, deadline_at=turn.now_s if at_once else deadline_at, quiet_until=quiet_until)
            holding = turn.tell(holding, state=InstanceState.DRAINING, reason=reason)
        self.expire_drain(turn, holding)

    def expire_drain(self, turn: Turn, holding: Holding) -> None:
        """Stop a draining engine whose grace is over."""
        if turn.now_s >= holding.deadline_at and not holding.is_stopping:
            grace_s = self.params.stop_grace_s if holding.instance.ready_at else 0.0
            self._stop(turn, holding, grace_s)

    def counted(self, turn: Turn, holding: Holding, num_in_flight: int) -> None:
        """Stop a draining engine that has nothing left, once routers have had time to hear."""
        draining = holding.instance.state is InstanceState.DRAINING and not holding.is_stopping
        if draining and num_in_flight == 0 and turn.now_s >= holding.quiet_until:
            self._stop(turn, holding, self.params.stop_grace_s)

    def resume(self, turn: Turn, holding: Holding, reason: str) -> None:
        """End a drain that is no longer wanted, unless its engine is being stopped already."""
        if holding.instance.state is InstanceState.DRAINING and holding.instance.url and not holding.is_stopping:
            turn.tell(holding, state=InstanceState.READY, reason=reason)

    def gone(self, turn: Turn, holding: Holding, *, clean: bool) -> None:
        """The process is gone: its bytes are free, and a drain ends in STOPPED. When it is not, stop it again later."""
        if not holding.is_stopping:
            return
        if not clean:
            turn.keep(replace(holding, stop_asked_at=turn.now_s, is_stopping=True))
            return
        if holding.is_restarting:
            again = replace(holding, is_stopping=False, is_restarting=False, is_launched=False, weights_path=None)
            self.begin(turn, turn.keep(replace(again, fetch=None)))
            return
        self.ledger.release(holding.instance.instance_id)
        holding = turn.keep(replace(holding, is_stopping=False, is_granted=False))
        if not holding.instance.state.is_gone:
            turn.tell(holding, state=InstanceState.STOPPED)

    def stop_again(self, turn: Turn, holding: Holding) -> None:
        """Ask once more for the end of a process that outlived its stop."""
        if holding.is_stopping and turn.now_s - holding.stop_asked_at >= self.params.stop_retry_s:
            self._stop(turn, holding, 0.0)

    def lose(self, turn: Turn, holding: Holding) -> None:
        """Give up an instance that another node runs by now: its row and its facts are theirs, so nothing is told."""
        instance = replace(holding.instance, state=InstanceState.STOPPED, changed_at=turn.now_s, reason="moved away")
        holding = turn.keep(replace(holding, instance=instance, is_lost=True))
        if holding.is_granted and not holding.is_stopping:
            self._stop(turn, holding, 0.0)

    def shift(self, turn: Turn, holding: Holding, by_s: float) -> None:
        """Move every wait by a jump of the clock, so that none ends early and none lasts for ever."""
        turn.holdings[holding.instance.instance_id] = replace(
            holding,
            deadline_at=holding.deadline_at + by_s,
            quiet_until=holding.quiet_until + by_s,
            stop_asked_at=holding.stop_asked_at + by_s,
            health_asked_at=holding.health_asked_at + by_s,
        )

    def _stop(self, turn: Turn, holding: Holding, grace_s: float) -> None:
        turn.ask(StopEngine(holding.instance.instance_id, grace_s))
        turn.keep(replace(holding, is_stopping=True, stop_asked_at=turn.now_s + grace_s))

    def recall(self, turn: Turn, holding: Holding, *, is_living: bool) -> None:
        """Take up an instance after the agent's restart, from what is left of its engine."""
        state = holding.instance.state
        if not holding.is_granted and not state.is_gone:
            self.fail(turn, holding, "out_of_memory", "the node has less GPU memory than before its restart")
            self._stop(turn, turn.holdings[holding.instance.instance_id], 0.0)
        elif holding.is_stopping or state.is_gone:
            if holding.is_granted or holding.is_stopping:
                self._stop(turn, holding, 0.0)
        elif state.is_coming:
            holding = turn.tell(
                replace(holding, is_restarting=True),
                state=InstanceState.STARTING,
                reason="the agent restarted during the start; the engine starts again",
            )
            self._stop(turn, holding, 0.0)
        elif not is_living:
            self.fail(turn, holding, "engine_failed", "the engine died while its agent was down")
        else:
            turn.tell(holding, reason="adopted by a restarted agent")

    def regrant(self, holdings: Iterable[Holding]) -> dict[str, Holding]:
        """Grants as they were before a restart; `is_granted` is False where the GPUs have become too small."""
        again = {}
        for holding in holdings:
            kept = replace(holding, is_granted=False)
            if holding.is_granted:
                try:
                    kept = self.grant(holding)
                except OutOfMemory:
                    kept = replace(holding, is_granted=False)
            again[holding.instance.instance_id] = kept
        return again
