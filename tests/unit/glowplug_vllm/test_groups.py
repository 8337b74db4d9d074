"""One process group per set of ranks in a pipeline. Lane: fast, no vLLM."""

from collections.abc import Sequence
from typing import Any

from glowplug_vllm import groups

WORLD = object()


class Torch:
    """torch's `new_group` on one rank: records ranks, numbers groups alike on every rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.made = rank, list[list[int]]()

    def new_group(self, ranks: Sequence[int], backend: str = "", timeout: Any = None) -> Any:
        self.made.append(list(ranks))
        return (tuple(ranks), len(self.made)) if self.rank in ranks else None


def as_vllm(rank: int, num_tp: int, num_pp: int) -> tuple[list[Any], list[list[int]]]:
    """Return a rank's world, tensor, pipeline and data-parallel groups (device and CPU), and torch's."""
    torch = Torch(rank)
    new_group = groups.OneOfEach(torch.new_group, num_tp * num_pp, lambda: WORLD).new_group
    num_ranks = num_tp * num_pp
    everybody = list(range(num_ranks))
    tensor = [everybody[n * num_tp : (n + 1) * num_tp] for n in range(num_pp)]
    pipeline = [everybody[n::num_tp] for n in range(num_tp)]
    got = []
    for of_one_kind in ([everybody], tensor, pipeline, [[rank] for rank in everybody]):
        for ranks in of_one_kind:
            pair = [new_group(ranks, backend="gloo", timeout=1), new_group(ranks, backend="gloo")]
            got += pair if rank in ranks else []
    return got, torch.made


def test_stages_of_one_worker_have_the_world_and_themselves() -> None:
    for rank in range(4):
        got, made = as_vllm(rank, 1, 4)
        assert got == [WORLD, WORLD, *[((rank,), rank + 1)] * 2, WORLD, WORLD, *[((rank,), rank + 1)] * 2]
        assert made == [[0], [1], [2], [3]], "of eight kinds and sets, each once"


def test_every_rank_makes_the_same_groups_in_the_same_order() -> None:
    """torch names a group by its number."""
    assert len({str(as_vllm(rank, 2, 2)[1]) for rank in range(4)}) == 1
    got, made = as_vllm(3, 2, 2)
    assert made == [[0, 1], [2, 3], [0, 2], [1, 3], [0], [1], [2], [3]]
    assert got == [WORLD, WORLD, *[((2, 3), 2)] * 2, *[((1, 3), 4)] * 2, *[((3,), 8)] * 2]


def test_without_ranks_it_is_the_world() -> None:
    assert groups.OneOfEach(Torch(0).new_group, 2, lambda: WORLD).new_group() is WORLD


def test_who_is_on_one_node_follows_from_the_ranks() -> None:
    assert groups.on_one_node([0, 1, 2, 3], 0, 2) == [True, True, False, False]
    assert groups.on_one_node([0, 1, 2, 3], 1, 1) == [False, True, False, False]
    assert groups.on_one_node([2, 3], 1, 2) == [True, True], "ranks of a group, which need not begin with 0"
