"""Let the workers of pipeline stages meet with few messages.

vLLM makes two process groups (device and CPU) for each of six kinds of parallelism, and finds the workers of one
node by collectives. On CPUs both groups are gloo's, most kinds have one member, and the command line gives the
nodes. Each group costs round trips through links full of weights, before any loading."""

from collections.abc import Callable, Sequence
from typing import Any


class OneOfEach:
    """Replace torch's `new_group`: one group per set of ranks; `world` for all ranks. Every rank asks for the same sets
    in the same order, as vLLM does, so that torch numbers groups alike."""

    def __init__(self, new_group: Callable[..., Any], num_ranks: int, world: Callable[[], Any]) -> None:
        self._new_group, self._everybody, self._world = new_group, tuple(range(num_ranks)), world
        self._made: dict[tuple[int, ...], Any] = {}

    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        members = tuple(sorted(ranks)) if ranks is not None else self._everybody
        if members == self._everybody:
            return self._world()
        if members not in self._made:
            self._made[members] = self._new_group(list(members), *args, **options)
        return self._made[members]


def install(num_ranks: int, num_local: int) -> None:
    """For a pipeline's worker, before it meets the others: `num_ranks` in all, `num_local` on each node."""
    from torch import distributed
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    destroy, shares_memory = distributed.destroy_process_group, CpuCommunicator._all_group_ranks_share_shm_group_name

    def destroy_once(group: Any = None) -> None:
        """vLLM ends each of its groups."""
        if group is None or group in distributed.distributed_c10d._world.pg_map:
            destroy(group)

    def is_of_one_node(communicator: Any) -> bool:
        nodes = {rank // num_local for rank in communicator.ranks}
        return len(nodes) == 1 and shares_memory(communicator)

    def in_the_same_node_as(group: Any, source_rank: int = 0) -> list[bool]:
        return on_one_node(distributed.get_process_group_ranks(group), source_rank, num_local)

    distributed.new_group = OneOfEach(distributed.new_group, num_ranks, lambda: distributed.group.WORLD).new_group
    distributed.destroy_process_group = destroy_once
    parallel_state.in_the_same_node_as = in_the_same_node_as
    CpuCommunicator._all_group_ranks_share_shm_group_name = is_of_one_node


def on_one_node(ranks: Sequence[int], source: int, num_local: int) -> list[bool]:
    """Whether each rank is on the node of the one with index `source`."""
    return [rank // num_local == ranks[source] // num_local for rank in ranks]
