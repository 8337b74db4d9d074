"""Consolidation of serving pipelines into instances of one stage, at once and level by level (HydraServe section 6).

A scale down is one command, to the first stage; the placer ends the other stages when the first one is whole. A scale
up goes to the later stages first and to the first one when they are whole, because the placer ends the later stages of
an instance that is no longer a pipeline.

Departures: the paper converts all stages at once; here a stage that fails to become whole, or does not in time, is
recorded and asked again until it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from glowplug.controllers.autoscaler.decisions import Decisions
from glowplug.controllers.effects import Effect, Publish
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.commands import ConsolidateInstance
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.hydraserve import Consolidation, ConsolidationDecision, consolidate
from glowplug.policies.scaling.port import worths

POLICY = "hydraserve_consolidation"


@dataclass(slots=True)
class _Stage:
    """State of one stage that is not whole. A decision stands: what has begun to load cannot be taken back."""

    decided: ConsolidationDecision | None = None  # of the whole pipeline, kept with its first stage
    asked_at: float = float("-inf")  # when it was last asked to become whole
    is_growing: bool = False  # its row has said that it becomes whole


class Consolidations:
    """Decisions on pipelines, and the commands sent to their stages."""

    def __init__(self, decisions: Decisions, repeat_s: float) -> None:
        self._decisions, self._repeat_s = decisions, repeat_s
        self._stages: dict[str, _Stage] = {}  # instance_id -> stage

    def of_model(self, rows: Mapping[str, Instance], decision: ScaleDecision, now_s: float) -> list[Effect]:
        """Decide on new pipelines and command their stages. `rows`: every living row of the model; `decision`: the
        answer of its scaling policy now."""
        pipelines = [i for i in rows.values() if not i.is_whole and i.serves and i.state is InstanceState.READY]
        if not pipelines:
            return []
        pipelines.sort(key=lambda i: (i.created_at, i.instance_id))
        effects = self._unconsolidated(rows, decision, now_s)
        effects += self._decide(pipelines, rows, decision, now_s)
        for instance in pipelines:
            decided = self._decided(instance)
            assert decided is not None
            for target in _targets(instance, decided, rows):
                stage = self._stage(target)
                if now_s - stage.asked_at >= self._repeat_s:
                    stage.asked_at = now_s
                    command = ConsolidateInstance(
                        target=target.node_id, instance_id=target.instance_id, reason=decided.reason
                    )
                    effects.append(Publish(command))
        return effects

    def expire(self, known: Mapping[str, Instance]) -> None:
        """Forget instances that are not in `known` or have become whole."""
        self._stages = {i: stage for i, stage in self._stages.items() if i in known and not known[i].is_whole}

    def _stage(self, instance: Instance) -> _Stage:
        return self._stages.setdefault(instance.instance_id, _Stage())

    def _decided(self, instance: Instance) -> ConsolidationDecision | None:
        stage = self._stages.get(instance.instance_id)
        return stage.decided if stage is not None else None

    def _unconsolidated(self, rows: Mapping[str, Instance], decision: ScaleDecision, now_s: float) -> list[Effect]:
        """Record stages that were to become whole and have not: their pipelines serve on."""
        effects: list[Effect] = []
        for instance_id, row in rows.items():
            if row.consolidating:
                self._stage(row).is_growing = True
            elif (stage := self._stages.get(instance_id)) is not None and stage.is_growing:
                stage.is_growing = False
                if not row.is_whole and row.state is InstanceState.READY:
                    effects.append(self._record(row, decision, row.reason, "unconsolidated", now_s))
        return effects

    def _decide(
        self, pipelines: list[Instance], rows: Mapping[str, Instance], decision: ScaleDecision, now_s: float
    ) -> list[Effect]:
        new = [i for i in pipelines if self._decided(i) is None]
        effects: list[Effect] = []
        for made in consolidate(new, self._num_sure(rows), decision.num_required) if new else ():
            row = rows[made.instance_id]
            self._stage(row).decided = made
            effects.append(self._record(row, decision, made.reason, made.becomes.value, now_s))
        return effects

    def _record(self, row: Instance, decision: ScaleDecision, reason: str, chosen: str, now_s: float) -> Effect:
        made = ScaleDecision(
            model_key=decision.model_key,
            num_wanted=decision.num_required,
            reason=reason,
            inputs={**decision.inputs, "stages": row.num_stages},
        )
        return self._decisions.record(made, row.instance_id, chosen, now_s, policy=POLICY)

    def _num_sure(self, rows: Mapping[str, Instance]) -> int:
        """Number of instances that are there or coming, less the pipelines still to be decided on."""
        num = 0
        there = [i for i in rows.values() if i.serves and not i.state.is_gone and i.state is not InstanceState.DRAINING]
        worth = worths(there)
        for instance in there:
            decided = self._decided(instance)
            if instance.is_whole or (decided is not None and decided.becomes is Consolidation.DOWN):
                num += 1
            elif decided is not None:
                num += worth[instance.instance_id]
        return num


def _targets(instance: Instance, decided: ConsolidationDecision, rows: Mapping[str, Instance]) -> list[Instance]:
    """The stages to command now."""
    if decided.becomes is Consolidation.DOWN:
        return [instance]
    later = [i for i in rows.values() if i.part_of == instance.instance_id and not i.is_whole and not i.state.is_gone]
    return later or [instance]
