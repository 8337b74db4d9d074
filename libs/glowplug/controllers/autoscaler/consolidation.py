"""Pipelines that serve are brought back to instances of their own, at once and level by level (HydraServe section 6).

A scale down is one command, to the first stage; the placer ends the others when it is whole. A scale up goes to the
later stages first and to the first one when they are whole, because the placer takes the later ones of a pipeline that
is none any more for ended. Departures: the paper converts all at once; a stage that fails to become whole, or does
not in time, is on record, and is told again until it is.
"""

from collections.abc import Mapping

from glowplug.controllers.autoscaler.view import Records
from glowplug.controllers.effects import Effect, Publish, Record
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.commands import ConsolidateInstance
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.hydraserve_consolidation import Consolidation, ConsolidationDecision, consolidate
from glowplug.policies.scaling.standing import worths

POLICY = "hydraserve_consolidation"


class Consolidations:
    """What was decided of each pipeline, and when its workers were last told. A decision stands: what has begun to
    load cannot be taken back."""

    def __init__(self, records: Records, repeat_s: float) -> None:
        self._records, self._repeat_s = records, repeat_s
        self._decided: dict[str, ConsolidationDecision] = {}
        self._told_at: dict[str, float] = {}
        self._growing: set[str] = set()  # stages that said that they become whole

    def of_model(self, mine: Mapping[str, Instance], decision: ScaleDecision, now_s: float) -> list[Effect]:
        """`mine`: every row of the model; `decision`: what its scaling policy wants now."""
        pipelines = sorted(
            (i for i in mine.values() if i.serves and not i.is_whole and i.state is InstanceState.READY),
            key=lambda i: (i.created_at, i.instance_id),
        )
        if not pipelines:
            return []
        effects = self._unconsolidated(mine, decision, now_s)
        effects += self._decide(pipelines, mine, decision, now_s)
        for instance in pipelines:
            for target in self._targets(instance, mine):
                if now_s - self._told_at.get(target.instance_id, float("-inf")) >= self._repeat_s:
                    self._told_at[target.instance_id] = now_s
                    reason = self._decided[instance.instance_id].reason
                    command = ConsolidateInstance(target=target.node_id, instance_id=target.instance_id, reason=reason)
                    effects.append(Publish(command))
        return effects

    def keep(self, known: Mapping[str, Instance]) -> None:
        """Forget all but these instances, and of them those that are whole."""
        self._decided = {i: d for i, d in self._decided.items() if i in known and not known[i].is_whole}
        self._told_at = {i: at for i, at in self._told_at.items() if i in known and not known[i].is_whole}
        self._growing = {i for i in self._growing if i in known and not known[i].is_whole}

    def _unconsolidated(self, mine: Mapping[str, Instance], decision: ScaleDecision, now_s: float) -> list[Effect]:
        """Stages that were to become whole and have not: their pipelines serve on."""
        effects: list[Effect] = []
        for instance_id, row in mine.items():
            if row.consolidating:
                self._growing.add(instance_id)
            elif instance_id in self._growing:
                self._growing.discard(instance_id)
                if row.is_whole or row.state is not InstanceState.READY:
                    continue
                said = ScaleDecision(
                    model_key=decision.model_key,
                    num_wanted=decision.num_required,
                    reason=row.reason,
                    inputs={**decision.inputs, "stages": row.num_stages},
                )
                effects.append(Record(self._records.of(said, instance_id, "unconsolidated", now_s, policy=POLICY)))
        return effects

    def _decide(
        self, pipelines: list[Instance], mine: Mapping[str, Instance], decision: ScaleDecision, now_s: float
    ) -> list[Effect]:
        new = [i for i in pipelines if i.instance_id not in self._decided]
        if not new:
            return []
        effects: list[Effect] = []
        for made in consolidate(new, self._num_sure(mine), decision.num_required):
            self._decided[made.instance_id] = made
            said = ScaleDecision(
                model_key=decision.model_key,
                num_wanted=decision.num_required,
                reason=made.reason,
                inputs={**decision.inputs, "stages": mine[made.instance_id].num_stages},
            )
            effects.append(Record(self._records.of(said, made.instance_id, made.becomes.value, now_s, policy=POLICY)))
        return effects

    def _num_sure(self, mine: Mapping[str, Instance]) -> int:
        """Instances that are there or coming without those still to be decided on."""
        num = 0
        there = [i for i in mine.values() if i.serves and not i.state.is_gone and i.state is not InstanceState.DRAINING]
        worth = worths(there)
        for instance in there:
            decided = self._decided.get(instance.instance_id)
            if instance.is_whole or (decided is not None and decided.becomes is Consolidation.DOWN):
                num += 1
            elif decided is not None:
                num += worth[instance.instance_id]
        return num

    def _targets(self, instance: Instance, mine: Mapping[str, Instance]) -> list[Instance]:
        """Who is to be told now."""
        if self._decided[instance.instance_id].becomes is Consolidation.DOWN:
            return [instance]
        later = [
            i for i in mine.values() if i.part_of == instance.instance_id and not i.is_whole and not i.state.is_gone
        ]
        return later or [instance]
