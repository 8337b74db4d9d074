"""Events of one instance from its launch to the end of its process.

Bytes are granted before anything starts and released only when the process is known to be gone, a replica's when it is
dropped. Other actions are in drains.py, stages.py and starts.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from glowplug.controllers.agent import adapters, sharing
from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import ENDED, FETCHING, Holding, StartProgress, State, Stop
from glowplug.controllers.agent.transaction import INSTANCES, Transaction
from glowplug.controllers.effects import Remove, Tick
from glowplug.domain.errors import WEIGHTS_CODES, OutOfMemory
from glowplug.domain.hardware import Devices
from glowplug.domain.instance import BEFORE_START, Instance, InstanceState, Phase, PhaseName
from glowplug.domain.phrasing import counted
from glowplug.fleet.start_times import StartKind, kind_from
from glowplug.policies.placement.expect import STREAMS

INTERRUPTED = "interrupted"  # kind of a start whose times are not learned
_ORDER = {name: rank for rank, name in enumerate(PhaseName)}


def begin(transaction: Transaction, holding: Holding) -> None:
    start = holding.start
    assert start is not None
    if holding.instance.host_id:
        adapters.begin(transaction, holding)
        return
    gpus = {gpu.gpu_id: (ordinal, gpu.kind) for ordinal, gpu in enumerate(transaction.ledger.gpus)}
    mine = [gpus[worker.gpu_id] for worker in holding.workers_on(transaction.node_id)]
    devices = Devices(
        kind=mine[0][1],
        ordinals=tuple(ordinal for ordinal, _ in mine),
        num_bytes=sum(sum(of_gpu.values()) for of_gpu in holding.shares.values()),
    )
    transaction.ask(
        msg.LaunchEngine(holding.command, devices, holding.cause.traceparent),
        msg.AwaitWeights(holding.command, start.deadline_at, transaction.can(holding.model, STREAMS)),
    )


def on_launched(transaction: Transaction, holding: Holding, _: msg.EngineLaunched) -> None:
    assert holding.start is not None
    if not holding.start.is_launched:
        advance(transaction, replace(holding, start=replace(holding.start, is_launched=True)))


def on_weights(transaction: Transaction, holding: Holding, report: msg.WeightsComplete) -> None:
    assert holding.start is not None
    if holding.start.weights_path is None:
        advance(transaction, with_weights(transaction, holding, report))


def with_weights(transaction: Transaction, holding: Holding, report: msg.WeightsComplete) -> Holding:
    assert holding.start is not None
    fetch = Phase(name=PhaseName.FETCH, started_at=holding.instance.created_at, ended_at=transaction.now_s)
    start = replace(holding.start, weights_path=report.path, fetch=fetch)
    return replace(holding, start=start, found=report.found)


def advance(transaction: Transaction, holding: Holding) -> None:
    start = holding.start
    if start is None or not start.is_launched or (start.weights_path is None and start.arriving_path is None):
        transaction.keep(holding)
        return
    if start.weights_path is None:
        assert start.arriving_path is not None
        transaction.ask(msg.LoadEngine(holding.engine, start.arriving_path))
        transaction.publish(holding.enter(State.STREAMING), reason="its engine loads its weights while they arrive")
        return
    transaction.ask(adapters.load(holding, start.weights_path))
    loading = activate(transaction, holding) if holding.engine_id else holding.enter(State.LOADING)
    transaction.publish(loading, reason="its weights are in host memory")


def activate(transaction: Transaction, holding: Holding) -> Holding:
    """Let the engine of its source continue as this instance. The caller publishes the record."""
    transaction.ask(msg.ActivateEngine(holding.command))
    return holding.enter(State.ACTIVATING, engine_id="")


def become_ready(transaction: Transaction, holding: Holding, report: msg.EngineReady) -> None:
    """Publish that the engine answers, with the figures from which start times are learned."""
    start = holding.start
    assert start is not None
    try:
        holding = sharing.seen(transaction, holding, report.figures.shared_bytes)
    except OutOfMemory as error:
        fail(transaction, holding, error.code, error.message)
        return
    instance = holding.instance
    measured = (*((start.fetch,) if start.fetch else ()), *report.phases)
    if start.has_restarted:
        kind = INTERRUPTED
    elif start.grew_from is not None:
        kind = kind_from(start.grew_from).value
    else:
        kind = holding.found.value
    holding = transaction.publish(
        holding.enter(State.READY),
        **reported(instance, report),
        ready_at=transaction.now_s,
        phases=_predicted(holding.command.predicted, (*instance.phases, *measured)),
        start_kind=kind,
        reason=f"it is ready after {transaction.now_s - instance.created_at:.2f} s{sharing.said(transaction, holding)}",
    )
    transaction.ask(msg.ReportStart(holding.instance, holding.found is StartKind.CACHED))


def reported(instance: Instance, report: msg.EngineReady) -> dict[str, Any]:
    """Return the changes of an instance, except for phases and shared bytes."""
    figures = report.figures
    return {
        "url": report.url,
        "key_id": report.key_id,
        "max_concurrency": figures.num_slots or instance.max_concurrency,
        "kv_tokens": figures.kv_tokens,
        "step_s": figures.step_s,
        "lacks": figures.lacks,
    }


def on_start_tick(transaction: Transaction, holding: Holding, _: Tick) -> None:
    assert holding.start is not None
    if transaction.now_s < holding.start.deadline_at:
        return
    seconds, grew_from = transaction.params.start_deadline_s, holding.start.grew_from
    if grew_from is not None and grew_from.is_dormant:
        seconds = min(seconds, transaction.params.wake_deadline_s)
        why = "start_timeout", f"the engine of {holding.instance.source} did not wake within {seconds:g} s"
    elif holding.state in FETCHING and holding.start.weights_path is None:
        why = "weights_unavailable", f"its weights were not in host memory after {seconds:g} s"
    else:
        why = "start_timeout", f"its engine was not ready after {seconds:g} s"
    fail(transaction, holding, *why)


# failures


def on_start_failed(transaction: Transaction, holding: Holding, report: Any) -> None:
    fail(transaction, holding, report.code, report.reason)


def on_exited(transaction: Transaction, holding: Holding, report: msg.EngineExited | msg.EngineOverLimit) -> None:
    fail(transaction, holding, "engine_failed", report.reason)


def on_health(transaction: Transaction, holding: Holding, seen: msg.HealthSeen) -> None:
    """Fail a dead or hanging instance; a sleeping engine need not answer."""
    if not seen.alive:
        fail(transaction, holding, "engine_failed", seen.reason or "its engine process is gone")
    elif holding.state in (State.READY, State.DRAINING):
        num_misses = 0 if seen.ok else holding.num_misses + 1
        holding = transaction.note(replace(holding, num_misses=num_misses))
        if num_misses >= transaction.params.health_misses:
            why = f"its engine hangs ({num_misses} health checks failed): {seen.reason}"
            fail(transaction, holding, "engine_failed", why)


def check_health(transaction: Transaction, holding: Holding) -> Holding:
    """Ask once a period; an adapter's host answers for both."""
    if holding.instance.host_id or transaction.now_s - holding.health_asked_at < transaction.params.health_every_s:
        return holding
    transaction.ask(msg.CheckHealth(holding.instance.instance_id))
    return transaction.note(replace(holding, health_asked_at=transaction.now_s))


def fail(transaction: Transaction, holding: Holding, code: str, reason: str) -> None:
    """Publish FAILED; bytes stay granted until the process is gone. A start without weights names its tries left."""
    was = holding.instance.state
    tries_left = holding.command.tries_left if holding.start is not None and code in WEIGHTS_CODES else 0
    if tries_left:
        reason = f"{reason}; {counted(tries_left, 'other node')} may be tried"
    if holding.state is State.SWAPPED_OUT:
        holding = transaction.ungrant(holding)  # a failed sleeper could not give way
    holding = transaction.publish(holding.enter(State.FAILED), code, reason=reason, tries_left=tries_left)
    if holding.stop is None and (holding.shares or was.is_dormant):
        stop(transaction, holding, 0.0, State.FAILED)


# ends


def stop(transaction: Transaction, holding: Holding, grace_s: float, state: State) -> Holding:
    """Ask for the process's end; the record is in `state` meanwhile."""
    transaction.ask(adapters.unload(holding) or msg.StopEngine(holding.engine, grace_s))
    return transaction.keep(holding.enter(state, stop=Stop(transaction.now_s + grace_s)))


def drop(transaction: Transaction, holding: Holding, reason: str) -> None:
    """Free the bytes of a dormant instance or starting replica at once (its pages are mapped anew, WarmServe section
    4.2), before its process ends."""
    holding = transaction.publish(transaction.ungrant(holding).enter(State.STOPPED), reason=reason)
    if holding.stop is None:
        stop(transaction, holding, 0.0, State.STOPPED)


def on_give_way(transaction: Transaction, holding: Holding, asked: msg.GivesWay) -> None:
    drop(transaction, holding, asked.reason)


def on_gone(transaction: Transaction, holding: Holding, report: msg.EngineGone) -> None:
    """Free a dead process's bytes, or restart it. Survivors are stopped again later."""
    state = holding.state
    if holding.is_over:
        return  # a stop asked for twice is reported twice
    if not report.clean:
        transaction.keep(holding.enter(state, stop=Stop(transaction.now_s)))
    elif state is State.RESTARTING and holding.start is not None:
        decided = tuple(p for p in holding.instance.phases if p.name in BEFORE_START)
        instance = replace(holding.instance, source="", phases=decided)
        start = StartProgress(deadline_at=holding.start.deadline_at, has_restarted=True)
        again = holding.enter(State.STARTING, instance=instance, start=start, engine_id="")
        begin(transaction, transaction.keep(again))
    else:
        state = state if state in ENDED else State.STOPPED
        ended = transaction.ungrant(holding).enter(state, stop=None, engine_id="", snapshot_bytes=0)
        if holding.instance.state.is_gone:
            transaction.keep(ended)
        else:
            transaction.publish(ended)


def on_lost(transaction: Transaction, holding: Holding, _: Any) -> None:
    """Give up an instance of another node, publishing nothing: its row and facts are that node's."""
    stops = holding.stop is None and holding.state not in ENDED
    why = "another node runs it by now"
    over = replace(holding.instance, state=InstanceState.STOPPED, consolidating=False)
    instance = replace(over, changed_at=transaction.now_s, reason=why)
    holding = transaction.keep(holding.enter(State.LOST, instance=instance))
    if stops:
        stop(transaction, holding, 0.0, State.LOST)


def on_stop_tick(transaction: Transaction, holding: Holding, _: Tick) -> None:
    assert holding.stop is not None
    if transaction.now_s - holding.stop.asked_at >= transaction.params.stop_retry_s:
        stop(transaction, holding, 0.0, holding.state)


def on_end_tick(transaction: Transaction, holding: Holding, tick: Tick) -> None:
    """Forget an instance once its process is gone and no command can be under way."""
    if holding.stop is not None:
        on_stop_tick(transaction, holding, tick)
        return
    if transaction.now_s - holding.instance.changed_at < transaction.params.keep_gone_s:
        return
    instance_id = holding.instance.instance_id
    del transaction.holdings[instance_id]
    transaction.is_dirty = True
    in_use = {past_id for other in transaction.holdings.values() for past_id in other.past_ids}
    names = [name for name in (instance_id, *holding.past_ids) if name not in in_use]
    transaction.ask(*(msg.ForgetEngine(name) for name in names))
    if holding.state is not State.LOST:
        transaction.effects.append(Remove(INSTANCES, instance_id))


def _predicted(expected: Mapping[str, float], phases: Iterable[Phase]) -> tuple[Phase, ...]:
    return tuple(
        p if p.predicted_s else replace(p, predicted_s=expected.get(p.name.value, 0.0))
        for p in sorted(phases, key=lambda p: (_ORDER[p.name], p.started_at))
    )
