"""Replacement of outdated instances: of a model whose engines are declared otherwise now than at their start.

- One that serves is replaced, `AT_ONCE` of a model at a time. The start of the new one waits for free memory
  (`PlaceInstance.waits`), and where there is none the placer brings its weights to the old one's node and lets that
  leave first (`replaces`). The old one drains once the new one is READY. Until then the scaling policy sees the old one
  alone, so that a replacement may exceed `max_instances`.
- One that starts, sleeps or is prewarmed ends at once.
- After a failed start the old one serves on, the next try waits as any start does, and none lets it leave first.
- An adapter drains at once, and is loaded anew into its host.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.policies.placement.shape import bytes_per_gpu
from glowplug.policies.scaling.port import ScalingView, needed_by_pipeline

AT_ONCE: Final = 1
STUCK_S: Final = 30.0  # after which a start without a place holds up no replacement


@dataclass(slots=True)
class Replacing:
    """One model's replacements under way: the new instance's id -> the old one's."""

    of: dict[str, str] = field(default_factory=dict)

    def without_new(self, rows: dict[str, Instance]) -> dict[str, Instance]:
        """Return the rows without those that are still to replace another."""
        return {i: row for i, row in rows.items() if i not in self.of} if self.of else rows

    def settle(
        self, rows: Mapping[str, Instance], starts: Mapping[str, object], is_leaving: Callable[[str], bool]
    ) -> tuple[list[str], list[str]]:
        """End replacements that are over. Return old instances to drain, since the new one is READY and stays; and new
        ones, still without a place, that count as any other start from now on, since the old one no longer serves."""
        drain, ordinary = [], []
        for new_id, old_id in list(self.of.items()):
            new, old = rows.get(new_id), rows.get(old_id)
            is_serving = old is not None and old.state is InstanceState.READY
            if is_serving and (new_id in starts or (new is not None and new.state.is_coming)):
                continue
            if is_serving and new is not None and new.state is InstanceState.READY and not is_leaving(new_id):
                drain.append(old_id)
            elif new_id in starts:
                ordinary.append(new_id)
            del self.of[new_id]
        return drain, ordinary

    def next(self, view: ScalingView, outdated: Mapping[str, Instance], asked_at: float | None) -> Instance | None:
        """Return the instance to replace now: the one with the fewest requests, then the oldest; none while another of
        the model is coming. `asked_at`: the latest start without a place."""
        is_coming = view.num_coming > view.num_pending
        is_asked = asked_at is not None and (view.draining or view.now_s - asked_at < STUCK_S)
        if len(self.of) >= AT_ONCE or is_coming or is_asked or view.model.suspended:
            return None
        serving = [row for row in view.ready if row.instance_id in outdated.keys() - self.of.values()]
        return min(serving, key=lambda i: (view.in_flight(i), i.created_at, i.instance_id), default=None)


def outdated_of(model: Model, rows: Mapping[str, Instance]) -> dict[str, Instance]:
    return {i: row for i, row in rows.items() if not row.part_of and row.is_outdated(model)}


def ends_at_once(row: Instance, rows: Mapping[str, Instance]) -> bool:
    """Return whether an outdated instance does not serve, and so needs no replacement."""
    return (row.state.is_dormant or row.state.is_coming) and not needed_by_pipeline(row.instance_id, rows)


def has_room(model: Model, nodes: Iterable[Node]) -> bool:
    """Return whether a node has the free memory for one more instance, by what the agents have granted."""
    need = bytes_per_gpu(model)
    able = (node for node in nodes if not node.draining and model.engine in node.engines)
    return any(sum(gpu.total_bytes - gpu.used_bytes >= need for gpu in node.gpus) >= model.num_gpus for node in able)
