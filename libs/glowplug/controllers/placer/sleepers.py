"""Sleeping engines that end: those of no use where they are, and those that a node's host memory is needed for.

A device's sleepers of one model beyond those that could be awake there at once end (policies/eviction/sleeping.py). A
node's sleepers stay within the host memory that its agent has for them (`Node.swap_host_bytes`): the eviction policy
chooses who ends among them and the victim that would join them, by the same worth as on GPUs (holdings.py), per byte of
host memory. An engine kept asleep by its model stays, and others end before it falls asleep. The agent is the last to
check, by the bytes that it sees.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.placement import NEVER, stop
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Becomes, Instance, InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.domain.units import show_bytes
from glowplug.fleet.status import lacks_one_asleep
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.eviction.sleeping import num_useful

GIVEN_UP = "dropped"  # holder of the promise of a copy that was asked to leave
EvictPolicy = Callable[..., EvictDecision]


class Drops:
    """Copies asked to leave, again until they are gone, and never used meanwhile."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._dropped: dict[str, tuple[float, str]] = {}  # copy -> when it was last asked, and why

    def drop(self, copy_id: str, why: str, now_s: float) -> list[Effect]:
        row = self.fleet.instances.by_id.get(copy_id)
        if row is None or now_s - self._dropped.get(copy_id, (NEVER, ""))[0] < self.fleet.params.repeat_s:
            return []
        self._dropped[copy_id] = now_s, why
        self.fleet.capacity.take(copy_id, GIVEN_UP)
        return [Publish(stop(row.node_id, copy_id, why, 0.0))]

    def repeat(self, now_s: float) -> list[Effect]:
        rows = self.fleet.instances.by_id
        self._dropped = {r: at for r, at in self._dropped.items() if r in rows and not rows[r].state.is_gone}
        return [e for copy_id, (_, why) in self._dropped.items() for e in self.drop(copy_id, why, now_s)]


@dataclass(frozen=True, slots=True)
class Leave:
    """How a victim leaves: asleep after `ends`, or stopped."""

    becomes: Becomes
    ends: tuple[Effect, ...] = ()


class Sleepers:
    def __init__(self, fleet: Fleet, evict: EvictPolicy, drops: Drops) -> None:
        self.fleet, self._evict, self._drops = fleet, evict, drops

    def work(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for node_id in sorted(self.fleet.capacity.leaving) if self.fleet.is_settled(now_s) else ():
            node = self.fleet.nodes.by_id.get(node_id)
            if node is None:
                continue
            for row in self._of_no_use(node):
                effects += self._end(row, node, "as many of its model sleep there as can be awake at once", now_s)
            if (over := self._over(node)) > 0:
                effects += self._free(node, over, Holdings(self.fleet, now_s), now_s)
        return effects

    def leave(self, victim: Instance, holdings: Holdings, now_s: float) -> Leave:
        """Return how a victim leaves its GPUs, with the ends of sleepers worth less than it."""
        becomes, node = self.fleet.becomes_of(victim), self.fleet.nodes.by_id.get(victim.node_id)
        model = self.fleet.models.get(victim.model_key)
        if becomes != "swapped_out" or node is None or model is None:
            return Leave(becomes)
        alike = [row for row in self._on(node) if _place(row) == _place(victim)]
        if len(alike) >= _num_useful(model, victim, node):
            return Leave("stopped")
        over = self._over(node, victim)
        if over <= 0:
            return Leave(becomes)
        residents = [self._resident(row, row.host_bytes, holdings) for row in self._on(node)]
        joins = self._resident(victim, self.fleet.asleep_bytes(victim), holdings)
        decision = self._evict([*residents, joins], over)
        if not decision.victims or victim.instance_id in decision.victims:
            return Leave("stopped")
        return Leave(becomes, tuple(self._ended(decision, node, now_s)))

    def _on(self, node: Node) -> list[Instance]:
        """Return sleepers not promised to a start or asked to leave."""
        here = self.fleet.capacity.dormant.get(node.node_id, ())
        return [row for row in here if row.state is InstanceState.SWAPPED_OUT]

    def _of_no_use(self, node: Node) -> Iterator[Instance]:
        for (model_key, _), alike in groupby(sorted(self._on(node), key=_place), key=_place):
            if (model := self.fleet.models.get(model_key)) is not None:
                oldest_first = sorted(alike, key=lambda row: (row.created_at, row.instance_id))
                yield from oldest_first[_num_useful(model, oldest_first[0], node) :]

    def _over(self, node: Node, joining: Instance | None = None) -> int:
        """Return by how much sleepers, one that joins them, and engines that their models will keep asleep, exceed the
        node's host memory for them."""
        if node.swap_host_bytes < 0:
            return 0
        held, taken = 0, self.fleet.capacity.taken
        for row in self.fleet.capacity.on_node.get(node.node_id, {}).values():
            if row.state is InstanceState.SWAPPED_OUT:
                held += row.host_bytes if taken.get(row.instance_id) != GIVEN_UP else 0
            elif row is joining or self._is_to_sleep(row):
                held += self.fleet.asleep_bytes(row)
        return held - node.swap_host_bytes

    def _is_to_sleep(self, row: Instance) -> bool:
        model = self.fleet.models.get(row.model_key)
        is_lacking = model is not None and lacks_one_asleep(model, self.fleet.instances.living(row.model_key).values())
        return is_lacking and row.serves

    def _free(self, node: Node, num_bytes: int, holdings: Holdings, now_s: float) -> list[Effect]:
        return self._ended(
            self._evict([self._resident(row, row.host_bytes, holdings) for row in self._on(node)], num_bytes),
            node,
            now_s,
        )

    def _ended(self, decision: EvictDecision, node: Node, now_s: float) -> list[Effect]:
        rows, bound = self.fleet.instances.by_id, show_bytes(node.swap_host_bytes)
        why = f"sleeping engines have {bound} of host memory there: {decision.reason}"
        return [e for name in decision.victims for e in self._end(rows[name], node, why, now_s, decision)]

    def _end(
        self, row: Instance, node: Node, why: str, now_s: float, decision: EvictDecision | None = None
    ) -> list[Effect]:
        ends = self._drops.drop(row.instance_id, why, now_s)
        if not ends:
            return []
        decided = self.fleet.decided(
            "evict",
            self.fleet.policies["eviction"],
            f"{row.model_key}'s sleeping engine {row.instance_id} ends on {node.node_id}: {why}",
            now_s,
            model_key=row.model_key,
            instance_id=row.instance_id,
            node_id=node.node_id,
            gpu_id=row.gpu_id,
            chosen=row.instance_id,
            inputs={"host_bytes": row.host_bytes, "swap_host_bytes": node.swap_host_bytes},
            rivals=decision.rivals if decision else (),
        )
        return [decided, *ends]

    def _resident(self, row: Instance, num_bytes: int, holdings: Holdings) -> Resident:
        model = self.fleet.models.get(row.model_key)
        is_kept = model is not None and model.pinned_at is Rung.ASLEEP and self._is_last(row)
        return Resident(
            name=row.instance_id,
            num_bytes=num_bytes,
            last_used_at=max(row.ready_at, self.fleet.load_of(row.model_key).last_active_at),
            priority=model.priority if model else 0,
            held="its model keeps one asleep" if is_kept else "",
            saves_s=holdings.asleep_saves_s(row),
        )

    def _is_last(self, row: Instance) -> bool:
        others: Iterable[Instance] = self.fleet.instances.living(row.model_key).values()
        return all(other is row or other.state is not InstanceState.SWAPPED_OUT for other in others)


def _place(row: Instance) -> tuple[str, tuple[str, ...]]:
    return row.model_key, tuple(sorted(worker.gpu_id for worker in row.workers))


def _num_useful(model: Model, row: Instance, node: Node) -> int:
    gpu_ids = {worker.gpu_id for worker in row.workers}
    sizes = [gpu.total_bytes for gpu in node.gpus if gpu.gpu_id in gpu_ids]
    return num_useful(model, min(sizes, default=0), shares=node.can(model.engine, "share"))
