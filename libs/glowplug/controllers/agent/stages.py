"""Pipelines: instances spread over several GPUs or nodes until one stage has all layers.

Paper: HydraServe sections 4 (pipelined cold starts), 6 (consolidation: scale down to one worker, or scale up into one
each). A stage is an instance of its own on its node; the first stage answers clients once the placer has joined them.
Departure: a stage without memory for the whole model, or whose engine fails to become whole within
`consolidate_deadline_s`, continues as a stage and says why; after a failure it is asked again, with a doubling pause.
Wrong weights end the stage. Until an engine reports how its consolidation ended, its bytes stay granted, and it is
asked to give up.

An engine that becomes whole in another process leaves its stages behind, with answers that no router can continue
elsewhere. These end there within `consolidate_deadline_s`; meanwhile the row says `stages_busy`: the placer keeps the
later stages, and new requests use the whole engine. A former later stage stays while the first stage's pipeline does.
"""

from dataclasses import replace

from glowplug.controllers.agent import lifecycle
from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.record import Consolidation, ConsolidationState, Holding, State
from glowplug.controllers.agent.transaction import Transaction
from glowplug.controllers.backoff import backoff_s
from glowplug.domain.errors import ChecksumMismatch, OutOfMemory
from glowplug.domain.instance import BEFORE_START, Instance, Phase, Spell, SpellName
from glowplug.events.commands import ConsolidateInstance, JoinStages
from glowplug.policies.placement.shape import bytes_per_gpu

RUNNING, ABANDONED = ConsolidationState.RUNNING, ConsolidationState.ABANDONED
FINISHING = ConsolidationState.FINISHING


def on_ready(transaction: Transaction, holding: Holding, report: msg.EngineReady) -> None:
    """A pipeline's first stage has only its own part loaded, and waits for the others; a replica ignores the report."""
    instance = holding.instance
    if instance.replica:
        return
    if not holding.is_first_stage:
        lifecycle.become_ready(transaction, holding, report)
    elif holding.state is State.JOINING:
        names = {phase.name for phase in report.phases} | BEFORE_START
        kept = tuple(p for p in instance.phases if p.name not in names)
        decided = tuple(p for p in instance.phases if p.name in BEFORE_START)
        key_id = report.key_id or instance.key_id
        whole = replace(report, url=report.url or instance.url, key_id=key_id, phases=(*kept, *report.phases))
        lifecycle.become_ready(transaction, replace(holding, instance=replace(instance, phases=decided)), whole)
    else:
        holding = transaction.publish(
            holding.enter(State.STAGE_LOADED),
            url=report.url,
            key_id=report.key_id,
            phases=(*instance.phases, *report.phases),
            reason="its own stage is loaded, and the others are not",
        )
        if holding.pipeline is not None and holding.pipeline.is_joined:
            _serve(transaction, holding)


def on_join(transaction: Transaction, holding: Holding, command: JoinStages) -> None:
    """All later stages are READY: serve once this one is loaded. Idempotent."""
    pipeline = holding.pipeline
    if pipeline is None or not holding.is_first_stage or pipeline.is_joined:
        return
    holding = transaction.keep(replace(holding, pipeline=replace(pipeline, is_joined=True, later=command.stages)))
    if holding.state is State.STAGE_LOADED:
        _serve(transaction, holding)


def _serve(transaction: Transaction, holding: Holding) -> None:
    later = holding.pipeline.later if holding.pipeline is not None else ()
    transaction.ask(msg.ServeStages(holding.engine, later))
    transaction.keep(holding.enter(State.JOINING))


def on_consolidate(transaction: Transaction, holding: Holding, command: ConsolidateInstance) -> None:
    """Take the whole model's memory and load the rest; without that memory the stage stays one."""
    instance, pipeline, under_way = holding.instance, holding.pipeline, holding.consolidation
    if pipeline is None or (under_way is not None and under_way.state is RUNNING):
        return
    if transaction.now_s < pipeline.retry_at:
        return
    if under_way is not None:
        _abandon(transaction, holding, "its engine does not say how its last consolidation ended")
        return
    try:
        shares = replace(holding, instance=_whole(holding)).shares_on(transaction.node_id)
        holding = transaction.grant(replace(holding, shares=shares), (instance.instance_id,))
    except OutOfMemory as error:
        why = _stays(holding, error.message)
        if instance.reason != why:
            transaction.publish(holding, reason=why)
        return
    transaction.ask(msg.ConsolidateEngine(instance.instance_id, holding.model))
    traceparent = transaction.event.traceparent if transaction.event is not None else ""
    running = replace(_running(transaction), began_at=transaction.now_s, traceparent=traceparent)
    holding = replace(holding, consolidation=running)
    transaction.publish(holding, consolidating=True, reason=f"it becomes whole: {command.reason}")


def overdue(transaction: Transaction, holding: Holding) -> None:
    under_way = holding.consolidation
    if under_way is not None and under_way.state is RUNNING and transaction.now_s >= under_way.deadline_at:
        _abandon(transaction, holding, f"not whole after {transaction.params.consolidate_deadline_s:g} s")


def recall(transaction: Transaction, holding: Holding) -> Holding:
    if holding.consolidation is None or not holding.shares:
        return holding
    if holding.consolidation.state is RUNNING:
        transaction.ask(msg.ConsolidateEngine(holding.engine, holding.model))
        deadline_at = _running(transaction).deadline_at
        return replace(holding, consolidation=replace(holding.consolidation, deadline_at=deadline_at))
    if holding.consolidation.state is FINISHING:
        transaction.ask(msg.FinishStages(holding.engine, holding.consolidation.deadline_at))
        return holding
    transaction.ask(msg.AbandonConsolidation(holding.engine))
    return holding


def _running(transaction: Transaction) -> Consolidation:
    return Consolidation(deadline_at=transaction.now_s + transaction.params.consolidate_deadline_s)


def on_consolidated(transaction: Transaction, holding: Holding, report: msg.EngineConsolidated) -> None:
    under_way, pipeline = holding.consolidation, holding.pipeline
    if under_way is None or pipeline is None:
        return
    whole, finishing = _whole(holding), None
    if report.url:
        deadline_at = 0.0 if holding.command.stage else transaction.now_s + transaction.params.consolidate_deadline_s
        finishing = replace(under_way, state=FINISHING, deadline_at=deadline_at)
        transaction.ask(msg.FinishStages(holding.engine, deadline_at))
    became_whole = "it has become whole and runs all of the model"
    holding = _over(transaction, holding, under_way, became_whole, report.phases)
    transaction.publish(
        replace(holding, consolidation=finishing, pipeline=None),
        workers=whole.workers,
        num_stages=1,
        part_of="",
        consolidating=False,
        stages_busy=finishing is not None,
        max_concurrency=holding.model.max_concurrency,
        kv_tokens=report.kv_tokens or whole.kv_tokens,
        url=report.url or whole.url,
        key_id=report.key_id if report.url else whole.key_id,
        reason=became_whole,
    )


def on_stages_finished(transaction: Transaction, holding: Holding, report: msg.StagesFinished) -> None:
    if holding.consolidation is None or holding.consolidation.state is not FINISHING:
        return
    seconds = transaction.params.consolidate_deadline_s
    cut = f"they were ended with what still ran there after {seconds:g} s"
    why = cut if report.cut else "its stages have finished their requests"
    transaction.publish(
        replace(holding, consolidation=None),
        stages_busy=False,
        reason=f"it has become whole and runs all of the model; {why}",
    )


def on_not_consolidated(transaction: Transaction, holding: Holding, report: msg.ConsolidationFailed) -> None:
    """Return to a stage's memory and serve on. A wrong checksum fails the stage, because its own part was served
    unchecked (weights/region.py)."""
    under_way = holding.consolidation
    if under_way is None or under_way.state is FINISHING:
        return
    if report.code == ChecksumMismatch.code:
        holding = _over(transaction, holding, under_way, report.reason, error=report.reason)
        lifecycle.fail(transaction, holding, report.code, report.reason)
        return
    shares = holding.shares_on(transaction.node_id)
    holding = transaction.grant(replace(holding, shares=shares), (holding.instance.instance_id,))
    holding = replace(holding, consolidation=None)
    if under_way.state is ABANDONED:  # its failure is published already
        transaction.keep(holding)
    else:
        _failed(transaction, holding, under_way, report.reason)


def _abandon(transaction: Transaction, holding: Holding, why: str) -> None:
    under_way = holding.consolidation
    assert under_way is not None
    transaction.ask(msg.AbandonConsolidation(holding.engine))
    abandoned = replace(under_way, state=ABANDONED, deadline_at=transaction.now_s)
    _failed(transaction, replace(holding, consolidation=abandoned), under_way, why)


def _over(
    transaction: Transaction,
    holding: Holding,
    ended: Consolidation,
    reason: str,
    phases: tuple[Phase, ...] = (),
    error: str = "",
) -> Holding:
    if not ended.began_at or ended.state is not RUNNING:
        return holding  # told already, or begun by an earlier agent version
    spell = Spell(
        name=SpellName.CONSOLIDATE,
        started_at=ended.began_at,
        ended_at=transaction.now_s,
        phases=phases,
        reason=reason,
        error=error,
        traceparent=ended.traceparent,
    )
    transaction.ask(msg.ReportConsolidation(model_key=holding.instance.model_key, spell=spell))
    return holding.lived(spell)


def _failed(transaction: Transaction, holding: Holding, ended: Consolidation, why: str) -> None:
    params, pipeline = transaction.params, holding.pipeline
    assert pipeline is not None
    pause_s = backoff_s(pipeline.num_failed + 1, params.consolidate_retry_s, params.consolidate_retry_max_s)
    retry_at = transaction.now_s + pause_s
    pipeline = replace(pipeline, num_failed=pipeline.num_failed + 1, retry_at=retry_at)
    said = f"failed to consolidate, again in {pause_s:g} s at the earliest: {why}"
    reason = _stays(holding, said)
    holding = _over(transaction, replace(holding, pipeline=pipeline), ended, reason, error=why)
    transaction.publish(holding, consolidating=False, reason=reason)


def _stays(holding: Holding, why: str) -> str:
    return f"it stays stage {holding.command.stage} of {holding.instance.num_stages}: {why}"


def _whole(holding: Holding) -> Instance:
    num_bytes = bytes_per_gpu(holding.model)
    workers = tuple(replace(w, num_bytes=max(w.num_bytes, num_bytes)) for w in holding.own_workers)
    return replace(holding.instance, workers=workers, num_stages=1, part_of="")
