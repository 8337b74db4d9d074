"""Who could make room for an instance, and on which GPU that costs least."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from glowplug.controllers.views import LoadView
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.residency.resident import Resident


def on_gpus(instances: Iterable[Instance]) -> dict[str, list[Instance]]:
    """gpu_id -> the instances there that are not gone."""
    found: dict[str, list[Instance]] = {}
    for instance in instances:
        if not instance.state.is_gone:
            found.setdefault(instance.gpu_id, []).append(instance)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A view of the fleet's bytes. `reserved`: gpu_id -> bytes promised to other placements."""

    now_s: float
    nodes: list[Node]
    reserved: Mapping[str, int]
    by_gpu: Mapping[str, list[Instance]]  # those that are not gone
    models: Mapping[str, Model]
    loads: LoadView
    min_residency_s: float
    fair_turn_s: float

    def make(
        self, model: Model, evict: Callable[..., EvictDecision], *, busy_may_go: bool
    ) -> tuple[str, EvictDecision] | None:
        """The GPU where room is made at the least cost, and who leaves there; None when nobody may leave.

        Order: a GPU where drains under way suffice, then fewest victims, then oldest use, then id.
        """
        best: tuple[tuple[int, float, str], str, EvictDecision] | None = None
        for node in self.nodes:
            if node.draining or model.engine not in node.engines:
                continue
            for gpu in node.gpus:
                decision = self._on(gpu, model, evict, busy_may_go)
                if decision is None:
                    continue
                victims = [i for i in self.by_gpu.get(gpu.gpu_id, ()) if i.instance_id in decision.victims]
                newest = max((self._used_at(i) for i in victims), default=0.0)
                cost = (len(decision.victims), newest, gpu.gpu_id)
                if best is None or cost < best[0]:
                    best = (cost, gpu.gpu_id, decision)
        return (best[1], best[2]) if best else None

    def is_being_made(self, gpu_id: str, victims: tuple[str, ...]) -> bool:
        """Whether somebody who was asked to leave this GPU, or leaves it by itself, still holds bytes there."""
        grants = [grant for node in self.nodes for gpu in node.gpus if gpu.gpu_id == gpu_id for grant in gpu.grants]
        staying = {i.instance_id for i in self.by_gpu.get(gpu_id, ()) if i.state is not InstanceState.DRAINING}
        return any(grant.holder in victims or grant.holder not in staying for grant in grants)

    def _on(self, gpu: Gpu, model: Model, evict: Callable[..., EvictDecision], busy: bool) -> EvictDecision | None:
        if gpu.total_bytes < model.memory_bytes:
            return None
        here = self.by_gpu.get(gpu.gpu_id, [])
        holders = {grant.holder for grant in gpu.grants}  # a beat may show what is free before the fact says who went
        draining = [i for i in here if i.state is InstanceState.DRAINING and i.instance_id in holders]
        leaving = sum(i.workers[0].num_bytes for i in draining)
        need = model.memory_bytes - (gpu.free_bytes - self.reserved.get(gpu.gpu_id, 0)) - leaving
        if need <= 0:
            return EvictDecision(reason="instances that drain already free enough") if leaving else None
        residents = [self._resident(i, model, busy) for i in here if i.state is not InstanceState.DRAINING]
        decision = evict(residents, need)
        return decision if decision.victims else None

    def _resident(self, instance: Instance, model: Model, busy_may_go: bool) -> Resident:
        return Resident(
            name=instance.instance_id,
            num_bytes=instance.workers[0].num_bytes,
            last_used_at=self._used_at(instance),
            priority=self._priority(instance),
            held=self._held(instance, model, busy_may_go),
        )

    def _held(self, instance: Instance, model: Model, busy_may_go: bool) -> str:
        """Why an instance must stay, "" when it may go."""
        owner = self.models.get(instance.model_key)
        if owner is not None and owner.pinned:
            return "pinned"
        if instance.state is not InstanceState.READY:
            return instance.state.value
        if self.now_s - instance.ready_at < self.min_residency_s:
            return f"ready for less than {self.min_residency_s:g} s"
        if self._priority(instance) > model.priority:
            return f"priority {self._priority(instance)} over {model.priority}"
        load = self.loads.of(instance.model_key)
        num = load.in_flight_by_instance.get(instance.instance_id, 0)
        if busy_may_go:
            is_new = self.now_s - instance.ready_at < self.fair_turn_s
            return "its turn has just begun" if is_new and (num or load.num_waiting) else ""
        if not self.loads.is_fresh(self.now_s):
            return "no router has spoken lately"
        if num:
            return f"{num} requests in flight"
        return f"{load.num_waiting} requests wait for it" if load.num_waiting else ""

    def _priority(self, instance: Instance) -> int:
        owner = self.models.get(instance.model_key)
        return owner.priority if owner is not None else 0

    def _used_at(self, instance: Instance) -> float:
        return max(instance.ready_at, self.loads.of(instance.model_key).last_active_at)
