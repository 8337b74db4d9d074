"""A KV cache shrinking under running requests, on a block pool like vLLM's. Lane: fast, 0.1 s."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from glowplug_vllm.kv_limit import BlockLimit, runs


@dataclass(frozen=True)
class Block:
    block_id: int


class Queue:
    """Like vLLM's FreeKVCacheBlockQueue."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = list(blocks)

    def get_all_free_blocks(self) -> list[Block]:
        return list(self.blocks)

    def remove(self, block: Block) -> None:
        self.blocks.remove(block)

    def append_n(self, blocks: Sequence[Block]) -> None:
        self.blocks += blocks

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self.blocks[:0] = blocks


@dataclass
class Pool:
    num_gpu_blocks: int = 10
    cached: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free_block_queue = Queue([Block(number) for number in range(self.num_gpu_blocks)])

    def _maybe_evict_cached_block(self, block: Block) -> None:
        self.cached.discard(block.block_id)

    def take(self, number: int) -> Block:
        block = next(block for block in self.free_block_queue.blocks if block.block_id == number)
        self.free_block_queue.remove(block)
        return block

    @property
    def free(self) -> set[int]:
        return {block.block_id for block in self.free_block_queue.blocks}


class Rig:
    def __init__(self) -> None:
        self.pool, self.given_back = Pool(), set[int]()
        self.limit = BlockLimit(self.pool, self._give_back)

    def _give_back(self, found: list[tuple[int, int]]) -> None:
        self.given_back |= {number for first, end in found for number in range(first, end)}


def test_free_blocks_leave_at_once_and_nothing_in_a_prefix_cache_points_to_them() -> None:
    rig = Rig()
    rig.pool.cached = {2, 7}
    rig.limit.set(4)
    assert rig.pool.free == {0, 1, 2, 3} and rig.given_back == {4, 5, 6, 7, 8, 9}
    assert rig.pool.cached == {2} and rig.pool.num_gpu_blocks == 4


@pytest.mark.parametrize("put", ["append_n", "prepend_n"])
def test_a_block_in_use_leaves_when_its_request_ends(put: str) -> None:
    rig = Rig()
    used = [rig.pool.take(2), rig.pool.take(8)]
    rig.limit.set(4)
    assert 8 not in rig.given_back and rig.pool.num_gpu_blocks == 5
    getattr(rig.pool.free_block_queue, put)(used)
    assert rig.pool.free == {0, 1, 2, 3} and 8 in rig.given_back and rig.pool.num_gpu_blocks == 4


def test_a_limit_that_rises_gives_blocks_out_again() -> None:
    rig = Rig()
    rig.limit.set(4)
    rig.limit.set(6)
    assert rig.pool.free == {0, 1, 2, 3, 4, 5} and rig.pool.num_gpu_blocks == 6
    rig.limit.set(99)
    assert rig.pool.free == set(range(10)) and (rig.limit.limit, rig.pool.num_gpu_blocks) == (10, 10)


def test_a_block_that_comes_back_after_the_limit_rose_again_is_free() -> None:
    rig = Rig()
    used = rig.pool.take(8)
    rig.limit.set(4)
    rig.limit.set(10)
    rig.pool.free_block_queue.append_n([used])
    assert rig.pool.free == set(range(10)) and rig.pool.num_gpu_blocks == 10


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], []), ([3], [(3, 4)]), ([5, 3, 4], [(3, 6)]), ([1, 3, 4, 9], [(1, 2), (3, 5), (9, 10)])],
)
def test_consecutive_blocks_are_one_run(numbers: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(numbers) == expected
