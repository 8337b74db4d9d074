"""Pipelines: an instance and its later stages start together, serve together and end together.

Paper: HydraServe sections 4 and 6. The placement starts the stages; this file makes sure, whatever is lost, that

- the first stage serves once every later one is READY (`agent.join`, repeated until it does);
- a lost stage ends the others: a pipeline with a hole serves no request. A first stage that becomes whole has
  `hole_grace_s` before that: with all of the weights it goes on alone, and its row says so. Where a later stage drains,
  the first stage drains with it and ends before it, or becomes whole;
- the other stages end where no agent has reported one for `give_up_s`: it was never begun (its placer was killed before
  it had sent all of the starts);
- later stages end when the instance is gone, or serves alone after it was consolidated (section 6.2, scale down) and
  nothing runs in its stages any more;
- a stage that is to become whole gets the rest of its weights (`prefetcher.fetch`, in the background, repeated until
  they are there).
"""

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.network import REST, rest_of
from glowplug.controllers.placer.placement import NEVER, stop
from glowplug.domain.instance import Instance, InstanceState, StageAddress
from glowplug.events.commands import FetchWeights, JoinStages
from glowplug.policies.placement.links import has_weights

ENDS_AHEAD_S = 0.5  # how long before a later stage's drain that of the first stage ends


class Stages:
    """Commands sent about pipelines, and when."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._sent_at: dict[str, float] = {}  # instance or stage id -> when it was last commanded to join or end

    def row_changed(self, row: Instance, now_s: float) -> list[Effect]:
        """Take a changed row, and command what follows for its pipeline."""
        whole, capacity = row.part_of or row.instance_id, self.fleet.capacity
        is_pipeline = whole in capacity.stages or whole in capacity.pipelines
        follows = self._follow_up(whole, now_s) if is_pipeline else []
        return [*follows, *self._fetch_rest(row, now_s)]

    def work(self, now_s: float) -> list[Effect]:
        """Send again the commands that have not been carried out."""
        parts, known = self.fleet.capacity.stages, self.fleet.instances.by_id
        self._sent_at = {key: at for key, at in self._sent_at.items() if key.removesuffix(REST) in known}
        wholes = sorted(parts.keys() | self.fleet.capacity.pipelines.keys())
        follows = [effect for whole in wholes for effect in self._follow_up(whole, now_s)]
        rows = [row for w in wholes for row in (known.get(w), *parts.get(w, {}).values()) if row is not None]
        return [*follows, *(effect for row in rows for effect in self._fetch_rest(row, now_s))]

    def _fetch_rest(self, row: Instance, now_s: float) -> list[Effect]:
        """Fetch the weights that a stage lacks while it becomes whole."""
        model, node = self.fleet.models.get(row.model_key), self.fleet.nodes.by_id.get(row.node_id)
        grows = row.consolidating and not row.state.is_gone
        if not (grows and self.fleet.params.follows_parts) or model is None or node is None:
            return []
        if has_weights(node, model) or not self._is_due(rest_of(row), now_s):
            return []
        self.fleet.network.rest(row, model, node, now_s)
        command = FetchWeights(
            target=row.node_id,
            model_key=model.key,
            weights=model.weights,
            instance_id=row.instance_id,
            priority=model.priority,
            background=True,
        )
        return [Publish(command)]

    def _follow_up(self, whole: str, now_s: float) -> list[Effect]:
        first = self.fleet.instances.by_id.get(whole)
        parts = list(self.fleet.capacity.stages.get(whole, {}).values())
        living = [part for part in parts if not part.state.is_gone]
        if first is None:
            orphaned = [p for p in living if now_s - p.created_at > self.fleet.params.give_up_s]
            return self._end(orphaned, f"its pipeline {whole} is not known", now_s)
        if first.state.is_gone:
            return self._end(living, f"{whole} is gone: {first.reason}", now_s)
        if first.is_whole:
            left = [p for p in living if not p.is_whole and not p.consolidating]
            is_busy = first.stages_busy and first.state in (InstanceState.READY, InstanceState.DRAINING)
            if is_busy and all(p.state in (InstanceState.READY, InstanceState.DRAINING) for p in parts):
                return []
            return self._end(left, f"{whole} serves alone", now_s)
        hole = next((p for p in parts if p.state.is_gone or p.state is InstanceState.DRAINING), None)
        if hole is not None and first.consolidating:
            is_there = not hole.state.is_gone  # the stage serves while it drains
            if is_there or now_s - hole.changed_at < self.fleet.params.hole_grace_s:
                return []
        if hole is not None:
            why = f"its stage {hole.instance_id} is {hole.state.value}: {hole.reason}"
            return self._end([first], why, now_s, self._grace_s(hole, now_s))
        is_late = first.state.is_coming and now_s - first.created_at > self.fleet.params.give_up_s
        if is_late and len(parts) < first.num_stages - 1:
            why = f"only {len(parts)} of its {first.num_stages - 1} later stages were started"
            return self._end([first, *living], why, now_s)
        is_ready = len(living) == first.num_stages - 1 and all(p.state is InstanceState.READY for p in living)
        if first.state.is_coming and is_ready and self._is_due(whole, now_s):
            later = tuple(_address(part) for part in sorted(living, key=lambda part: part.stage))
            return [Publish(JoinStages(target=first.node_id, instance_id=whole, stages=later))]
        return []

    def _grace_s(self, hole: Instance, now_s: float) -> float:
        """Seconds that the first stage may drain, so that it ends before the lost stage does."""
        if hole.state.is_gone:
            return 0.0
        most_s = self.fleet.params.evict_grace_s
        return min(most_s, max(0.0, hole.drain_ends_at - ENDS_AHEAD_S - now_s)) if hole.drain_ends_at else most_s

    def _end(self, rows: list[Instance], why: str, now_s: float, grace_s: float = 0.0) -> list[Effect]:
        return [
            Publish(stop(row.node_id, row.instance_id, why, grace_s))
            for row in rows
            if self._is_due(row.instance_id, now_s)
        ]

    def _is_due(self, key: str, now_s: float) -> bool:
        if now_s - self._sent_at.get(key, NEVER) < self.fleet.params.repeat_s:
            return False
        self._sent_at[key] = now_s
        return True


def _address(part: Instance) -> StageAddress:
    return StageAddress(instance_id=part.instance_id, url=part.url, key_id=part.key_id)
