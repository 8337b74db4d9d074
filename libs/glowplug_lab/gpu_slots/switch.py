"""Switch a GPU between models (WarmServe section 4.2): prewarm, activate, donate, evict."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from glowplug.policies.prewarming.warmserve_reservation import prewarmable_bytes
from glowplug_lab.gpu_slots.copies import Copier, CopyClass, Piece
from glowplug_lab.gpu_slots.gpu_memory import GpuMemory
from glowplug_lab.gpu_slots.pool import Chunks
from glowplug_lab.gpu_slots.slots import Slot

RUN_CHUNKS = 8  # mapped together, copied while the next are mapped
URGENT_BYTES = 1 << 30  # of KV cache, before the first request
_POLL_S = 0.0001


class WeightsLate(TimeoutError):
    """No weights have arrived for too long."""


@dataclass(frozen=True, slots=True)
class Source:
    """Weights in host memory; `num_ready` is the watermark of weights/region.py, whose file is mapped at `address`."""

    address: int
    num_bytes: int
    num_ready: Callable[[], int]

    def wait_for(self, num_bytes: int, patience_s: float) -> int:
        """Return the bytes ready. Raises WeightsLate when none arrives for `patience_s`."""
        ready, last_at = self.num_ready(), time.monotonic()
        while ready < num_bytes:
            time.sleep(_POLL_S)
            before, ready = ready, self.num_ready()
            if ready != before:
                last_at = time.monotonic()
            elif time.monotonic() - last_at > patience_s:
                raise WeightsLate(f"{ready} of {self.num_bytes} bytes of weights have come, none for {patience_s:g} s")
        return ready


def num_chunks(memory: GpuMemory, num_bytes: int) -> int:
    return -(-num_bytes // memory.chunk_bytes)


def prewarm(
    slot: Slot,
    source: Source,
    pool: Chunks,
    copier: Copier,
    urgency: CopyClass = CopyClass.PREWARM,
    patience_s: float = 60.0,
) -> None:
    """Load weights into an empty slot: map runs of chunks, and copy each while the next is mapped. Raises
    OutOfGpuMemory before mapping anything, and WeightsLate and GpuError, with the chunks back in the pool."""
    if slot.num_chunks:
        raise ValueError(f"slot {slot.name} has {slot.num_chunks} chunks behind it already")
    memory = pool.memory
    chunks = pool.take(slot.name, num_chunks(memory, source.num_bytes))
    pieces: list[Piece] = []
    try:
        for first in range(0, len(chunks), RUN_CHUNKS):
            run = chunks[first : first + RUN_CHUNKS]
            offset = slot.grow(run)
            end = min(offset + len(run) * memory.chunk_bytes, source.num_bytes)
            source.wait_for(end, patience_s)
            pieces += copier.begin(slot.address + offset, source.address + offset, end - offset, urgency)
        copier.wait(pieces)
    except BaseException:
        copier.wait(pieces)  # do not unmap under a copy
        slot.cut(0)
        pool.give(slot.name, chunks)
        raise
    slot.num_weight_chunks = len(chunks)


def activate(
    winner: Slot, others: Iterable[Slot], pool: Chunks, most_bytes: int | None = None, run_chunks: int = RUN_CHUNKS
) -> Iterator[int]:
    """Give the other slots' chunks to the winner's KV cache. Yields its bytes, first after URGENT_BYTES, then after
    each run, while the engine serves. No GPU work may use the other slots."""
    pool.memory.synchronize()
    losers = list(others)
    urgent = num_chunks(pool.memory, URGENT_BYTES)
    limit = winner.num_bytes // pool.memory.chunk_bytes - winner.num_chunks
    if most_bytes is not None:
        limit = min(limit, num_chunks(pool.memory, most_bytes) - winner.kv_bytes // pool.memory.chunk_bytes)
    while limit > 0:
        step = min(limit, urgent or run_chunks)
        while pool.num_free < step and losers:
            evict(losers.pop(0), pool)
        chunks = pool.take_up_to(winner.name, step)
        if not chunks:
            break
        winner.grow(chunks)
        limit, urgent = limit - len(chunks), 0
        yield winner.kv_bytes
    for slot in losers:
        evict(slot, pool)


def donate(slot: Slot, pool: Chunks, *, num_running: int, max_concurrency: int, kv_bytes_used: int) -> int:
    """Give back KV cache of a draining instance as WarmServe Eq. 1 allows; return its bytes. The engine's blocks there
    must be free and stay so."""
    may_go = prewarmable_bytes(num_running, max_concurrency, kv_bytes_used, slot.kv_bytes)
    size = pool.memory.chunk_bytes
    chunks = slot.cut(slot.num_chunks - may_go // size)
    pool.give(slot.name, chunks)
    return len(chunks) * size


def evict(slot: Slot, pool: Chunks, keep_weights: bool = False) -> int:
    """Give back a slot's chunks; return the bytes freed."""
    chunks = slot.cut(slot.num_weight_chunks if keep_weights else 0)
    return len(pool.give(slot.name, chunks)) * pool.memory.chunk_bytes
