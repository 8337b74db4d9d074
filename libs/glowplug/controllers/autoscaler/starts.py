"""Instances asked of the placer for a model, and called off again, each for the most urgent class that needs it.

A start is batch's (`PlaceInstance.is_batch`) while batch requests wait and all others have enough instances without it.
Once they have not, or no batch request waits, it is asked for again as any other start.
"""

import math

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.decisions import Decisions
from glowplug.controllers.autoscaler.models import ModelRecord, ModelRecords, Start, place
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.naming import Ids
from glowplug.domain.access import Priority
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import CancelPlacement
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView


class Starts:
    """The starts of all models of one autoscaler."""

    def __init__(
        self, models: ModelRecords, decisions: Decisions, ids: Ids, policy: str, params: AutoscalerParams
    ) -> None:
        self._models, self._decisions, self._ids = models, decisions, ids
        self._policy, self._params = policy, params

    def add(
        self,
        record: ModelRecord,
        model: Model,
        decision: ScaleDecision,
        num: int,
        load: ModelLoad,
        view: ScalingView,
        now_s: float,
    ) -> list[Effect]:
        """Ask the placer for `num` more instances. `load`: as the routers report it."""
        cause = record.waiting if load.num_waiting else None
        wanted_at = cause.data.waiting_since if cause else now_s
        if num <= 0 or now_s < record.not_before or (cause and now_s - wanted_at < self._params.gather_s):
            return []
        is_asked = bool(record.asked) and decision.reason == record.asked
        policy, node_id = (operator.POLICY, record.asked_node) if is_asked else (self._policy, "")
        effects: list[Effect] = []
        num_there = view.num_coming_or_there
        while num > 0:
            instance_id, num_required = self._ids.next(model.key), min(num, max(1, decision.group_size))
            num -= num_required
            start = Start(wanted_at, now_s, decision.reason, cause, num_required, node_id=node_id)
            start.is_awaited = is_asked or load.num_waiting > 0
            start.is_batch = not is_asked and _is_for_batch(view, num_there)
            num_there += num_required
            self._models.start(record, instance_id, start)
            effects += [
                self._decisions.record(decision, instance_id, "start", now_s, policy=policy, cause=cause),
                place(instance_id, start, model),
            ]
        return effects

    def as_urgent(self, record: ModelRecord, model: Model, view: ScalingView, now_s: float) -> list[Effect]:
        """Ask for batch's starts as for any other once others than batch requests need them."""
        effects: list[Effect] = []
        num_there = view.num_coming_or_there - record.num_pending
        for instance_id, start in record.starts.items():
            if start.is_batch and not _is_for_batch(view, num_there):
                start.is_batch, start.sent_at = False, now_s
                effects.append(place(instance_id, start, model))
            num_there += 0 if start.waits else start.num_required
        if effects:
            self._models.changed()
        return effects

    def cancel_spare(self, record: ModelRecord, decision: ScaleDecision, missing: int, now_s: float) -> list[Effect]:
        """Cancel spare starts, without taking away more than `missing` (negative) allows."""
        effects: list[Effect] = []
        for instance_id, start in list(record.starts.items()):
            if not start.waits and missing + start.num_required <= 0:
                missing += start.num_required
                effects.append(self._decisions.record(decision, instance_id, "cancel", now_s))
                effects += self.cancel(record, instance_id, "it is no longer wanted")
        return effects

    def cancel(self, record: ModelRecord, instance_id: str, reason: str) -> list[Effect]:
        """Call off one start."""
        self._models.started(record, instance_id)
        return [Publish(CancelPlacement(instance_id=instance_id, reason=reason))]


def _is_for_batch(view: ScalingView, num_there: int) -> bool:
    """Return whether one instance more than `num_there` is for batch requests alone."""
    load = view.load
    if not load.of_class(Priority.BATCH).num_waiting:
        return False
    num_urgent = load.num_urgent_waiting + load.num_urgent_in_flight
    return num_there >= max(view.floor, math.ceil(num_urgent / view.per_instance))
