"""Starts: refused, overtaken, or granted, from scratch or from a dormant instance; and a restart of the agent.

An instance that grows from another (`StartInstance.source`) takes its bytes and engine, and the source ends STOPPED in
the same transaction. A loading source is activated and loads on; one with weights still arriving continues under its
own id (`Holding.engine_id`) until they are complete; if it is gone, or has other weights or GPUs, the start begins from
scratch.
"""

from collections.abc import Iterable
from dataclasses import replace

from glowplug.controllers.agent import adapters, lifecycle, sharing, stages
from glowplug.controllers.agent.messages import GivesWay, Recalled, SleepEngine, TakenOver
from glowplug.controllers.agent.params import EngineKind
from glowplug.controllers.agent.record import (
    COMING,
    DORMANT,
    ENDED,
    FETCHING,
    RULES,
    Holding,
    Pipeline,
    StartProgress,
    State,
    Stop,
)
from glowplug.controllers.agent.transaction import Transaction
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.events.commands import StartInstance, StopInstance
from glowplug.policies.placement.shape import weights_per_gpu


def on_start(transaction: Transaction, _: None, command: StartInstance) -> None:
    holding = adapters.on_host(transaction, _new(transaction, command), command.host_id)
    overtaken = transaction.overtaken.pop(command.instance_id, None)
    if overtaken is not None:
        transaction.publish(holding.enter(State.STOPPED), reason=overtaken[1])
        return
    refusal = _refusal(transaction, command, holding)
    if refusal is not None:
        lifecycle.fail(transaction, holding, *refusal)
        return
    source = _source(transaction, command)
    drops = [i for i in dict.fromkeys(command.drops) if _is_replica(transaction, i, command)]
    holding = sharing.expected(transaction, holding)
    try:
        holding = transaction.grant(holding, [*drops, *([source.instance.instance_id] if source else ())])
    except OutOfMemory as error:
        lifecycle.fail(transaction, holding, error.code, error.message)
        return
    for unknown in {command.source, *command.drops} - {""} - transaction.holdings.keys():
        transaction.overtaken[unknown] = (transaction.now_s, f"given to {command.instance_id} before it arrived")
    for drop in drops:
        transaction.step(drop, GivesWay(f"gives way to {command.instance_id}"))
    if source is not None:
        _grow(transaction, holding, source)
        return
    why = "its memory is granted, its engine starts and its weights are on their way"
    if command.host_id:
        why = f"its adapter is on its way to the engine of {command.host_id}"
    lifecycle.begin(transaction, transaction.publish(holding, reason=why + sharing.said(transaction, holding)))


def on_early_stop(transaction: Transaction, _: None, command: StopInstance) -> None:
    """Remember a stop ahead of its start, which will end STOPPED."""
    transaction.overtaken[command.instance_id] = (transaction.now_s, command.reason)


def _new(transaction: Transaction, command: StartInstance) -> Holding:
    event, now_s = transaction.event, transaction.now_s
    assert event is not None
    mine = {worker.gpu_id for worker in command.workers}
    model, kind = command.model, transaction.engines.get(command.model.engine)
    instance = Instance(
        instance_id=command.instance_id,
        model_key=model.key,
        engine=model.engine,
        state=InstanceState.STARTING,
        workers=_workers(transaction, command, kind),
        max_concurrency=model.max_concurrency * (1 if command.part_of else command.num_stages),
        model_revision=model.revision,
        engine_digest=model.engine_digest,
        created_at=now_s,
        phases=command.phases,
        emulated=bool(kind and kind.emulated),
        cause_id=event.event_id,
        decision_id=command.decision_id,
        replica=command.replica,
        part_of=command.part_of,
        num_stages=command.num_stages,
        gpu_kind=next((gpu.kind for gpu in transaction.ledger.gpus if gpu.gpu_id in mine), ""),
        predicted_s=command.predicted_s,
        slowdown=command.slowdown,
        adapter_slots=command.adapter_slots,
        adapter_rank=command.adapter_rank,
    )
    return Holding(
        state=State.STARTING,
        instance=instance,
        command=command,
        cause=replace(event, data=None),
        start=StartProgress(deadline_at=now_s + transaction.params.start_deadline_s),
        pipeline=None if instance.is_whole else Pipeline(),
    )


def _workers(transaction: Transaction, command: StartInstance, kind: EngineKind | None) -> tuple[Worker, ...]:
    """Fill in this node's GPU sizes. A replica of the first layers gets bytes for all where its engine cannot hold a
    part."""
    holds_layers = kind is None or (
        kind.holds_layers and (command.model.num_gpus == 1 or "first_layers" not in kind.groups_lack)
    )
    sizes = {gpu.gpu_id: gpu.total_bytes for gpu in transaction.ledger.gpus}
    workers = tuple(replace(w, gpu_bytes=sizes.get(w.gpu_id, w.gpu_bytes)) for w in command.workers)
    if not command.replica or holds_layers:
        return workers
    whole = weights_per_gpu(command.model)
    return tuple(replace(w, num_bytes=max(w.num_bytes, whole) if w.num_bytes else 0) for w in workers)


def _refusal(transaction: Transaction, command: StartInstance, holding: Holding) -> tuple[str, str] | None:
    node_id, engine = transaction.node_id, command.model.engine
    if transaction.node_stops:
        return "node_stopping", f"node {node_id} is stopping: {transaction.node_stops}"
    mine = holding.workers_on(node_id)
    gpu_ids = {gpu.gpu_id for gpu in transaction.ledger.gpus}
    if not mine or any(w.gpu_id not in gpu_ids or w.num_bytes < 0 for w in mine):
        asked = ", ".join(f"{w.num_bytes} B of {w.gpu_id}" if w.num_bytes < 0 else w.gpu_id for w in mine)
        has = f"node {node_id} has the GPUs {', '.join(sorted(gpu_ids))}"
        return "bad_request", f"{has}, and the start asks for {asked or 'none of them'}"
    kind = transaction.engines.get(engine)
    if kind is None or kind.unavailable:
        why = kind.unavailable if kind else "no driver has this name"
        return "engine_unavailable", f"{engine} cannot start on {node_id}: {why}"
    needs = {"prewarm": command.replica, "stages": command.num_stages > 1, "share": command.model.weights_shared}
    lacks = [
        ability for ability, is_needed in needs.items() if is_needed and not transaction.can(command.model, ability)
    ]
    if lacks:
        return "engine_unavailable", f"{engine} on {node_id} cannot do {', '.join(lacks)}"
    return adapters.refusal(transaction, holding)


def _is_replica(transaction: Transaction, instance_id: str, command: StartInstance) -> bool:
    """Return whether it may be dropped: never a serving instance or the source."""
    holding = transaction.holdings.get(instance_id)
    if holding is None or instance_id == command.source or not holding.instance.replica:
        return False
    return holding.instance.state.is_coming or holding.state is State.PREWARMED


def _source(transaction: Transaction, command: StartInstance) -> Holding | None:
    """Return the dormant source; None if gone, or of another engine, model or place."""
    holding = transaction.holdings.get(command.source)
    if holding is None or command.replica or command.num_stages > 1:
        return None
    if not (holding.state in DORMANT or (holding.instance.replica and holding.state in COMING)):
        return None
    if holding.model.key != command.model.key or holding.instance.is_outdated(command.model):
        return None
    places = {w.gpu_id for w in holding.own_workers}, {w.gpu_id for w in command.workers}
    may_move = holding.state is State.SWAPPED_OUT and holding.instance.gpu_kind != "cuda"  # a process keeps its device
    return holding if may_move or places[0] == places[1] else None


def _grow(transaction: Transaction, holding: Holding, source: Holding) -> None:
    """End `source`; its engine and start continue as `holding`, which has the bytes."""
    from_id, was, start = source.instance.instance_id, source.instance.state, holding.start
    assert start is not None
    if source.start is not None:
        begun = source.start
        start = replace(
            start,
            is_launched=begun.is_launched,
            arriving_path=begun.arriving_path,
            weights_path=begun.weights_path,
        )
    if was.is_dormant:  # nothing to load: a slow wake hangs
        deadline_at = min(start.deadline_at, transaction.now_s + transaction.params.wake_deadline_s)
        start = replace(start, deadline_at=deadline_at)
    holding = replace(
        holding,
        instance=replace(holding.instance, source=from_id, host_bytes=source.snapshot_bytes),
        past_ids=source.past_ids or (from_id,),
        found=source.found,
        start=replace(start, grew_from=was),
    )
    if source.state in FETCHING:
        taken = holding.enter(source.state, engine_id=from_id)
        transaction.publish(taken, reason=f"it takes over the start of {from_id}")
    else:
        holding = lifecycle.activate(transaction, holding)
        transaction.publish(holding, reason=f"it grows from {from_id}, which was {was.value}")
    # published last: the prefetcher already knows which instance needs the weights
    transaction.step(from_id, TakenOver(holding.instance.instance_id))


def on_taken_over(transaction: Transaction, holding: Holding, taker: TakenOver) -> None:
    ended = holding.enter(State.STOPPED, shares={}, snapshot_bytes=0)
    transaction.publish(ended, reason=f"it continues as {taker.instance_id}")


# a restart of the agent


def remembered(transaction: Transaction, holdings: Iterable[Holding]) -> dict[str, str]:
    """Take over a predecessor's records and grants; `shares` is empty on GPUs now too small. A contradictory record is
    FAILED, and its process will be stopped. Returns id -> why."""
    doubts = {}
    for holding in holdings:
        instance = holding.instance
        if not holding.shares and "shares" in RULES[holding.state].needs:
            holding = replace(holding, shares=holding.shares_on(transaction.node_id))
        if why := next(holding.faults(), ""):
            doubts[instance.instance_id] = f"its agent's record of it contradicts itself: {why}"
            holding = Holding(
                state=State.FAILED,
                instance=replace(instance, state=InstanceState.FAILED),
                command=holding.command,
                cause=holding.cause,
                pipeline=None if instance.is_whole else Pipeline(),
                stop=Stop(0.0),
                engine_id=holding.engine_id,
                past_ids=holding.past_ids,
            )
        try:
            transaction.note(transaction.grant(holding) if holding.shares else holding)
        except (OutOfMemory, ValueError):
            transaction.note(replace(holding, shares={}))
    return doubts


def on_recalled(transaction: Transaction, holding: Holding, recalled: Recalled) -> None:
    """Continue after the agent's restart. Deadlines of a start or sleep begin anew."""
    state, name = holding.state, holding.instance.instance_id
    is_living = (holding.instance.host_id or name) in recalled.living  # an adapter's engine is its host's
    if holding.start is not None:
        deadline_at = transaction.now_s + transaction.params.start_deadline_s
        holding = replace(holding, start=replace(holding.start, deadline_at=deadline_at))
    if is_living:
        holding = stages.recall(transaction, holding)
    if not holding.shares and "shares" in RULES[state].needs:
        why = "the node has less GPU memory than before its restart"
        lifecycle.fail(transaction, holding, "out_of_memory", why)
        lifecycle.stop(transaction, transaction.holdings[name], 0.0, State.FAILED)
    elif holding.stop is not None:
        lifecycle.stop(transaction, holding, 0.0, state)
    elif state in ENDED:
        if is_living and not any(h.engine_id == name for h in transaction.holdings.values()):  # else it is another's
            lifecycle.stop(transaction, holding, 0.0, state)
    elif state in COMING:
        why = "its agent restarted during the start, and its engine starts again"
        holding = transaction.publish(holding.enter(State.RESTARTING), reason=why)
        lifecycle.stop(transaction, holding, 0.0, State.RESTARTING)
    elif not is_living and holding.instance.state.is_dormant:
        lifecycle.drop(transaction, holding, "its engine ended while its agent was down")
    elif not is_living:
        lifecycle.fail(transaction, holding, "engine_failed", "the engine died while its agent was down")
    else:
        if state is State.FALLING_ASLEEP and holding.drain is not None:
            transaction.ask(SleepEngine(holding.engine, holding.drain.becomes, holding.drain.busy_until > 0))
            deadline_at = transaction.now_s + transaction.params.sleep_deadline_s
            holding = replace(holding, drain=replace(holding.drain, deadline_at=deadline_at))
        why = holding.instance.reason if holding.drain is not None else "its agent has restarted and found it again"
        transaction.publish(holding, reason=why)
