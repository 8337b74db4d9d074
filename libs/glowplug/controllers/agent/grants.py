"""The bytes an instance takes on the GPUs of its node, by owner."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.domain.instance import Instance, Worker
from glowplug.domain.model import Model
from glowplug.policies.placement.shape import bytes_per_gpu, weights_per_gpu

Shares = Mapping[str, Mapping[GrantOwner, int]]  # gpu_id -> owner -> bytes


class Ledger(Protocol):
    """The byte ledger of the node's GPUs (memory/ledger.py)."""

    @property
    def gpus(self) -> tuple[Gpu, ...]: ...

    @property
    def holders(self) -> frozenset[str]: ...

    def grant(self, gpu_id: str, holder: str, bytes_by_owner: Mapping[GrantOwner, int]) -> None:
        """All the bytes or, raising OutOfMemory, none."""
        ...

    def release(self, holder: str) -> int: ...

    def exchange(
        self, releases: Iterable[str], holder: str, bytes_by_gpu: Mapping[str, Mapping[GrantOwner, int]]
    ) -> None:
        """Free and grant in one step or, raising OutOfMemory, not at all."""
        ...

    def shrink(self, gpu_id: str, holder: str, owner: GrantOwner, num_bytes: int) -> int:
        """Keep `num_bytes`; the bytes freed."""
        ...


def own_workers(instance: Instance) -> tuple[Worker, ...]:
    """The GPU processes that are this row's own: all, but of a pipeline's first stage, which lists one (or one tensor
    group) of each stage, the first."""
    if instance.num_stages > 1 and not instance.part_of:
        return instance.workers[: max(1, len(instance.workers) // instance.num_stages)]
    return instance.workers


def shares_of(instance: Instance, model: Model, node_id: str) -> dict[str, dict[GrantOwner, int]]:
    """What it is to hold of that node's GPUs. Workers that name no bytes take an even part of the model's memory; a
    replica holds weights alone, as prewarmed."""
    shares: dict[str, dict[GrantOwner, int]] = {}
    weights = weights_per_gpu(model, instance.num_stages)
    for worker in own_workers(instance):
        if worker.node_id != node_id:
            continue
        of_gpu = shares.setdefault(worker.gpu_id, {})
        if instance.replica:
            of_gpu[GrantOwner.PREWARM] = of_gpu.get(GrantOwner.PREWARM, 0) + (worker.num_bytes or weights)
        else:
            num_bytes = worker.num_bytes or bytes_per_gpu(model, instance.num_stages)
            part = min(weights, num_bytes)
            of_gpu[GrantOwner.WEIGHTS] = of_gpu.get(GrantOwner.WEIGHTS, 0) + part
            of_gpu[GrantOwner.KV] = of_gpu.get(GrantOwner.KV, 0) + num_bytes - part
    return shares


def total_of(shares: Shares, owner: GrantOwner) -> int:
    """Bytes of one owner over all GPUs."""
    return sum(of_gpu.get(owner, 0) for of_gpu in shares.values())
