"""Pipelines: an instance whose layers lie on several GPUs or nodes until one of them has all.

Paper: HydraServe sections 4 (pipelined cold starts), 6 (consolidation: scale down to one worker, or scale up into one
each). A stage is an instance of its own on its node; the first one answers clients once the placer has joined them.
Departure: a stage that finds no room for the whole model, or whose engine fails to become whole, or is not within
`consolidate_deadline_s`, goes on as a stage and says why; it is asked again, after a failure with a pause that doubles.
Of an engine that does not say what has become of it nothing is taken for granted: its bytes stay granted, and it is
asked to give up until it answers.
"""

from dataclasses import replace

from glowplug.controllers.agent.grants import own_workers, shares_of
from glowplug.controllers.agent.lifecycle import Lifecycle
from glowplug.controllers.agent.messages import (
    AbandonConsolidation,
    ConsolidateEngine,
    ConsolidationFailed,
    EngineConsolidated,
    EngineReady,
    Holding,
    ServeStages,
)
from glowplug.controllers.agent.transaction import Turn
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.instance import BEFORE_START, Instance, InstanceState
from glowplug.policies.placement.shape import bytes_per_gpu


class Stages:
    """Joins and consolidates what a Lifecycle has started."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def ready(self, turn: Turn, holding: Holding, report: EngineReady) -> None:
        """An engine answers. A pipeline's first stage has only its own part then, and waits for the others."""
        instance = holding.instance
        if not _is_first(holding):
            self._life.ready(turn, holding, report)
            return
        if instance.state is not InstanceState.LOADING or holding.is_stopping:
            return
        if holding.is_serving:
            names = {phase.name for phase in report.phases} | BEFORE_START
            kept = tuple(p for p in instance.phases if p.name not in names)
            decided = tuple(p for p in instance.phases if p.name in BEFORE_START)
            key_id = report.key_id or instance.key_id
            whole = replace(report, url=report.url or instance.url, key_id=key_id, phases=(*kept, *report.phases))
            self._life.ready(turn, replace(holding, instance=replace(instance, phases=decided)), whole)
        elif not holding.is_loaded:
            loaded = replace(holding, is_loaded=True)
            phases = (*instance.phases, *report.phases)
            holding = turn.tell(
                loaded,
                url=report.url,
                key_id=report.key_id,
                phases=phases,
                reason="its own stage is loaded, and the others are not",
            )
            self._serve(turn, holding)

    def join(self, turn: Turn, holding: Holding) -> None:
        """Every later stage is READY: serve as soon as this one is loaded. Said again, it changes nothing."""
        if _is_first(holding) and holding.instance.state.is_coming and not holding.is_joined:
            self._serve(turn, turn.keep(replace(holding, is_joined=True)))

    def _serve(self, turn: Turn, holding: Holding) -> None:
        if holding.is_joined and holding.is_loaded and not holding.is_serving and not holding.is_stopping:
            turn.ask(ServeStages(holding.engine))
            turn.keep(replace(holding, is_serving=True))

    def consolidate(self, turn: Turn, holding: Holding, reason: str) -> None:
        """Take the memory of the whole model, then bring the rest of it in. Without room it stays as it is."""
        instance = holding.instance
        if instance.state is not InstanceState.READY or instance.is_whole or holding.is_consolidating:
            return
        if turn.now_s < holding.consolidates_at:
            return
        if holding.is_abandoning:
            self._abandon(turn, holding, "its engine does not say what became of the last time")
            return
        try:
            shares = shares_of(_whole(holding), holding.model, self._life.node_id)
            holding = self._life.grant(replace(holding, shares=shares), (instance.instance_id,))
        except OutOfMemory as error:
            why = _stays(holding, error.message)
            if instance.reason != why:
                turn.tell(holding, reason=why)
            return
        turn.ask(ConsolidateEngine(instance.instance_id, holding.model))
        holding = replace(holding, is_consolidating=True, consolidate_by=self._due_at(turn))
        turn.tell(holding, consolidating=True, reason=f"it becomes whole: {reason}")

    def overdue(self, turn: Turn, holding: Holding) -> None:
        """It should have become whole by now: its engine is to give up, and serves on as the stage that it is."""
        if holding.is_consolidating and turn.now_s >= holding.consolidate_by:
            self._abandon(turn, holding, f"not whole after {self._life.params.consolidate_deadline_s:g} s")

    def recall(self, turn: Turn, holding: Holding) -> Holding:
        """Ask a living engine again for what was under way when the agent restarted."""
        if not (_is_under_way(holding) and holding.is_granted):
            return holding
        if holding.is_consolidating:
            turn.ask(ConsolidateEngine(holding.engine, holding.model))
            return replace(holding, consolidate_by=self._due_at(turn))
        turn.ask(AbandonConsolidation(holding.engine))
        return holding

    def _due_at(self, turn: Turn) -> float:
        return turn.now_s + self._life.params.consolidate_deadline_s

    def consolidated(self, turn: Turn, holding: Holding, report: EngineConsolidated) -> None:
        """It has all of the model: an instance of its own, whatever it was part of."""
        if not _is_under_way(holding):
            return
        whole = _whole(holding)
        turn.tell(
            replace(holding, is_consolidating=False, is_abandoning=False, stage=0),
            workers=whole.workers,
            num_stages=1,
            part_of="",
            consolidating=False,
            max_concurrency=holding.model.max_concurrency,
            kv_tokens=report.kv_tokens or whole.kv_tokens,
            reason="it has become whole and runs all of the model",
        )

    def unconsolidated(self, turn: Turn, holding: Holding, report: ConsolidationFailed) -> None:
        """It could not: a stage as before, with a stage's memory, which serves on."""
        if not _is_under_way(holding):
            return
        shares = shares_of(holding.instance, holding.model, self._life.node_id)
        freed = self._life.grant(replace(holding, shares=shares), (holding.instance.instance_id,))
        if holding.is_abandoning:  # it has been said already
            turn.keep(replace(freed, is_abandoning=False))
        else:
            self._failed(turn, freed, report.reason)

    def _abandon(self, turn: Turn, holding: Holding, why: str) -> None:
        turn.ask(AbandonConsolidation(holding.engine))
        self._failed(turn, replace(holding, is_abandoning=True), why)

    def _failed(self, turn: Turn, holding: Holding, why: str) -> None:
        params, failed = self._life.params, holding.num_unconsolidated
        pause_s = min(params.consolidate_retry_s * 2.0 ** min(failed, 30), params.consolidate_retry_max_s)
        kept = replace(
            holding, is_consolidating=False, num_unconsolidated=failed + 1, consolidates_at=turn.now_s + pause_s
        )
        said = f"failed to consolidate, again in {pause_s:g} s at the earliest: {why}"
        turn.tell(kept, consolidating=False, reason=_stays(holding, said))


def _is_under_way(holding: Holding) -> bool:
    """Whether its engine may still become whole, or say that it will not."""
    waits = holding.is_consolidating or holding.is_abandoning
    return waits and not (holding.instance.state.is_gone or holding.is_stopping)


def _stays(holding: Holding, why: str) -> str:
    return f"it stays stage {holding.stage} of {holding.instance.num_stages}: {why}"


def _is_first(holding: Holding) -> bool:
    """Whether it is the stage of a pipeline that answers for all of them."""
    return not holding.instance.is_whole and not holding.instance.part_of


def _whole(holding: Holding) -> Instance:
    """The instance as it is once it is consolidated, with room for all of the model."""
    num_bytes = bytes_per_gpu(holding.model)
    workers = tuple(replace(w, num_bytes=max(w.num_bytes, num_bytes)) for w in own_workers(holding.instance))
    return replace(holding.instance, workers=workers, num_stages=1, part_of="")
