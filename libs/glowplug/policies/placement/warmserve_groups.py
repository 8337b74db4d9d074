"""GPUs and the prewarmed replicas on them, as WarmServe's placement sees them: bits of one node's GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    """One replica that lies on GPUs of one node, or is on its way there."""

    replica_id: str
    model_key: str
    gpu_ids: tuple[str, ...]
    score: float = 0.0
    is_ready: bool = True
    counts: bool = True  # for a wish; False: it lies where no start can use it
    bytes_per_gpu: int = 0  # that it holds; 0: what any replica of its model does
    may_go: bool = True  # a plan may drop it; not what drains, nor what is only planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmNode:
    """One node's GPUs that may hold prewarmed weights: idle and universal ones, and dedicated ones that drain.

    `free_bytes` is what each could take, in the order of `gpu_ids`; `draining` names those that still serve.
    """

    node_id: str
    gpu_ids: tuple[str, ...]
    free_bytes: tuple[int, ...]
    draining: frozenset[str] = frozenset()
    replicas: tuple[Prewarmed, ...] = ()
    engines: frozenset[str] | None = None  # whose replicas it can hold; None: any

    def bits(self, gpu_ids: Sequence[str]) -> int:
        """A set of this node's GPUs as bits. GPUs that are not candidates count as bits past the last."""
        place = {gpu_id: at for at, gpu_id in enumerate(self.gpu_ids)}
        beyond = len(self.gpu_ids)
        return sum(1 << place.get(gpu_id, beyond + at) for at, gpu_id in enumerate(gpu_ids))


@lru_cache(maxsize=256)
def groups_of(num_gpus: int, size: int) -> tuple[int, ...]:
    """Every set of `size` out of `num_gpus` GPUs, as bits, lowest GPUs first."""
    return tuple(sum(1 << at for at in chosen) for chosen in combinations(range(num_gpus), size))


def is_nested_or_disjoint(one: int, other: int) -> bool:
    """WarmServe's first guideline: two models' GPU sets share nothing, or one holds the other."""
    common = one & other
    return common in (0, one, other)


def members(bits: int) -> Iterator[int]:
    """Positions of the set bits."""
    at = 0
    while bits:
        if bits & 1:
            yield at
        bits >>= 1
        at += 1
