"""Shrink and regrow a KV cache while requests run (WarmServe section 4, Eq. 1).

Runs in the engine core. Blocks at or above the limit leave the free queue, and their pages are released; blocks in
use follow once freed. The core's scheduler sees a smaller pool."""

from collections.abc import Callable, Sequence
from typing import Any

WORKER = "SleepingCpuWorker"
_STATE = "_glowplug_limit"


class BlockLimit:
    """Of one `vllm.v1.core.block_pool.BlockPool`."""

    def __init__(self, pool: Any, give_back: Callable[[list[tuple[int, int]]], Any]) -> None:
        self._pool, self._give_back = pool, give_back
        self.total = self.limit = int(pool.num_gpu_blocks)
        self._withheld: dict[int, Any] = {}
        queue = pool.free_block_queue
        self._append = queue.append_n
        queue.prepend_n, queue.append_n = self._keeping(queue.prepend_n), self._keeping(queue.append_n)

    def set(self, num_blocks: int) -> None:
        """Allow only blocks with an id below `num_blocks`."""
        num_blocks = min(num_blocks, self.total)
        is_growing, self.limit = num_blocks >= self.limit, num_blocks
        if is_growing:
            back = [self._withheld.pop(number) for number in sorted(self._withheld) if number < num_blocks]
            self._append(back)
            self._pool.num_gpu_blocks += len(back)
            return
        queue = self._pool.free_block_queue
        above = [block for block in queue.get_all_free_blocks() if block.block_id >= num_blocks]
        for block in above:
            queue.remove(block)
        self._withhold(above)

    def _keeping(self, put: Callable[[list[Any]], None]) -> Callable[[Sequence[Any]], None]:
        def put_those_below(blocks: Sequence[Any]) -> None:
            put([block for block in blocks if block.block_id < self.limit])
            if above := [block for block in blocks if block.block_id >= self.limit]:
                self._withhold(above)

        return put_those_below

    def _withhold(self, blocks: list[Any]) -> None:
        for block in blocks:
            self._pool._maybe_evict_cached_block(block)  # a prefix hit must not find a released page
            self._withheld[block.block_id] = block
        self._pool.num_gpu_blocks -= len(blocks)  # vLLM computes its usage from it
        self._give_back(runs([block.block_id for block in blocks]))


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def kv(core: Any, num_bytes: int = -1) -> dict[str, int]:
    """Return {"total_bytes", "limit_bytes", "used_bytes"} of an engine core's KV cache.

    `num_bytes` sets its limit, in whole blocks and at least one context. For another worker, or a KV cache without a
    given size, `used_bytes` is -1, and a limit raises RuntimeError."""
    config, pool = core.vllm_config, core.scheduler.kv_cache_manager.block_pool
    granted = config.cache_config.kv_cache_memory_bytes
    if not granted or not str(config.parallel_config.worker_cls).endswith(WORKER):
        if num_bytes >= 0:
            raise RuntimeError("its worker cannot give KV blocks back")
        return {"total_bytes": granted or 0, "limit_bytes": granted or 0, "used_bytes": -1}
    granted *= getattr(config.parallel_config, "world_size", 1)
    block_bytes = granted // config.cache_config.num_gpu_blocks
    limit: BlockLimit | None = getattr(pool, _STATE, None)
    if num_bytes >= 0:
        if limit is None:
            limit = BlockLimit(pool, lambda found: core.collective_rpc("give_back_blocks", args=(found,)))
            setattr(pool, _STATE, limit)
        least = -(-config.model_config.max_model_len // config.cache_config.block_size) + 1  # vLLM keeps one for itself
        limit.set(max(num_bytes // block_bytes, least))
    total = limit.total if limit is not None else int(pool.num_gpu_blocks)
    used = int(pool.num_gpu_blocks) - int(pool.get_num_free_blocks()) - 1
    allowed = limit.limit if limit is not None else total
    return {"total_bytes": total * block_bytes, "limit_bytes": allowed * block_bytes, "used_bytes": used * block_bytes}
