"""Copies and the switch of models (WarmServe section 4.2)."""

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.weights.region import Region
from glowplug_lab.gpu_slots.copies import Copier, CopyBuckets, CopyClass
from glowplug_lab.gpu_slots.gpu_memory import Access, GpuError, OutOfGpuMemory
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.pool import ChunkPool
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import URGENT_BYTES, Source, WeightsLate, activate, donate, evict, prewarm
from tests.waiting import WAIT_S, wait_until

CHUNK = 4096
CRITICAL, PREWARM, BACKGROUND = CopyClass.CRITICAL, CopyClass.PREWARM, CopyClass.BACKGROUND


@pytest.fixture
def pool() -> Iterator[ChunkPool]:
    memory = HostMemory(32 * CHUNK, CHUNK)
    yield ChunkPool(memory, 32)
    memory.close()


def a_source(num_bytes: int, ready: int | None = None) -> tuple[Source, bytes, ctypes.Array[ctypes.c_char]]:
    data = bytes(number % 251 for number in range(num_bytes))
    kept = ctypes.create_string_buffer(data, num_bytes)
    return Source(ctypes.addressof(kept), num_bytes, lambda: num_bytes if ready is None else ready), data, kept


def seen(memory: HostMemory, address: int, num_bytes: int) -> bytes:
    buffer = ctypes.create_string_buffer(num_bytes)
    memory.copy_out(ctypes.addressof(buffer), address, num_bytes)
    return buffer.raw


class SlowMemory(HostMemory):
    """Copies run until released."""

    def __init__(self) -> None:
        super().__init__(32 * CHUNK, CHUNK)
        self.begun: list[int] = []
        self.done: set[int] = set()

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> "SlowCopy":  # type: ignore[override]
        self.begun.append(num_bytes)
        return SlowCopy(self, len(self.begun) - 1)


class SlowCopy:
    def __init__(self, memory: SlowMemory, number: int) -> None:
        self.memory, self.number = memory, number

    def is_done(self) -> bool:
        return self.number in self.memory.done

    def wait(self) -> None:
        raise AssertionError("a copier asks, it does not wait for one of several")


def test_a_class_has_so_many_bytes_under_way_and_waits_for_more_urgent_ones() -> None:
    buckets = CopyBuckets({CRITICAL: 100, PREWARM: 60, BACKGROUND: 30})
    buckets.ask(BACKGROUND)
    assert buckets.admits(BACKGROUND, 30)
    buckets.begin(BACKGROUND, 30)
    assert not buckets.admits(BACKGROUND, 1) and buckets.admits(PREWARM, 60)
    buckets.ask(CRITICAL)
    assert not buckets.admits(PREWARM, 1) and buckets.admits(CRITICAL, 100)
    buckets.begin(CRITICAL, 100)
    buckets.end(CRITICAL, 100)
    buckets.end(BACKGROUND, 30)
    assert buckets.admits(BACKGROUND, 30) and buckets.admits(PREWARM, 1000)  # larger than its bucket, and alone


def test_an_urgent_copy_waits_for_what_is_under_way_alone() -> None:
    memory = SlowMemory()
    copier = Copier(memory, CopyBuckets({CRITICAL: 100, PREWARM: 20, BACKGROUND: 20}), piece_bytes=10)
    background = threading.Thread(target=lambda: copier.wait(copier.begin(0, 0, 60, BACKGROUND)))
    background.start()
    wait_until("two are under way", lambda: len(memory.begun) == 2, every_s=0.001)
    pieces = copier.begin(0, 0, 35, CRITICAL)
    assert memory.begun == [10, 10, 10, 10, 10, 5] and len(pieces) == 4
    memory.done |= {0, 1}
    time.sleep(0.01)
    assert len(memory.begun) == 6, "the background goes on only after the urgent copy"
    memory.done |= {2, 3, 4, 5}
    copier.wait(pieces)
    wait_until("the background goes on", lambda: len(memory.begun) == 8, every_s=0.001)
    memory.done |= set(range(6, 10))
    background.join(timeout=WAIT_S)
    assert memory.begun[6:] == [10] * 4 and all(piece.is_done for piece in pieces)


def test_a_copy_that_cannot_begin_leaves_no_tokens_taken(pool: ChunkPool) -> None:
    copier = Copier(pool.memory, piece_bytes=CHUNK)
    with pytest.raises(GpuError):
        copier.begin(0, 0, CHUNK, CRITICAL)
    slot, (source, data, _) = Slot(pool.memory, "m"), a_source(3 * CHUNK - 7)
    prewarm(slot, source, pool, copier, BACKGROUND)
    assert seen(pool.memory, slot.address, len(data)) == data


def test_what_has_begun_is_done_before_a_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, waited = SlowMemory(), list[int]()
    begin = memory.copy_in

    def third_fails(*where: int) -> SlowCopy:
        if len(memory.begun) == 2:
            threading.Timer(0.01, memory.done.update, [(0, 1)]).start()
            raise GpuError("copy", "no third one")
        return begin(*where)

    monkeypatch.setattr(memory, "copy_in", third_fails)
    monkeypatch.setattr(SlowCopy, "is_done", lambda self: waited.append(self.number) or self.number in memory.done)
    with pytest.raises(GpuError):
        Copier(memory, piece_bytes=10).begin(0, 0, 30, CRITICAL)
    assert memory.done == {0, 1} and set(waited) == {0, 1}


def test_weights_are_copied_while_they_come(pool: ChunkPool) -> None:
    whole, data, kept = a_source(20 * CHUNK)
    landed = iter([0, 0, 3 * CHUNK, 8 * CHUNK, 8 * CHUNK, 19 * CHUNK])
    source = Source(whole.address, whole.num_bytes, lambda: next(landed, whole.num_bytes))
    slot = Slot(pool.memory, "m")
    prewarm(slot, source, pool, Copier(pool.memory))
    assert seen(pool.memory, slot.address, len(data)) == data and slot.num_weight_chunks == 20 and kept


def test_weights_come_through_a_region(pool: ChunkPool, tmp_path: Path) -> None:
    """As the prefetcher writes: bytes, then the watermark."""
    size, region = 20 * CHUNK - 11, Region(tmp_path / "region")
    region.begin()
    data = bytes(number % 241 for number in range(size))
    region.blob.write_bytes(bytes(size))

    def write() -> None:
        with region.blob.open("r+b") as blob:
            for at in range(0, size, 3000):
                blob.write(data[at : at + 3000])
                blob.flush()
                region.set_watermark(min(at + 3000, size))

    with region.blob.open("r+b") as blob, mmap.mmap(blob.fileno(), size) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        slot, writer = Slot(pool.memory, "m"), threading.Thread(target=write)
        writer.start()
        prewarm(slot, Source(ctypes.addressof(view), size, region.watermark), pool, Copier(pool.memory))
        writer.join()
        del view
    assert seen(pool.memory, slot.address, size) == data


@pytest.mark.parametrize("ready", [0, 9 * CHUNK])
def test_weights_that_stop_coming_leave_nothing_behind(pool: ChunkPool, ready: int) -> None:
    source, _, _ = a_source(20 * CHUNK, ready)
    slot = Slot(pool.memory, "m")
    with pytest.raises(WeightsLate, match=f"{ready} of {20 * CHUNK} bytes"):
        prewarm(slot, source, pool, Copier(pool.memory), patience_s=0.01)
    assert (slot.num_chunks, pool.num_free, pool.holders) == (0, 32, frozenset())


def test_what_does_not_fit_is_refused_before_anything_is_mapped(pool: ChunkPool) -> None:
    slot = Slot(pool.memory, "m")
    with pytest.raises(OutOfGpuMemory, match="m needs"):
        prewarm(slot, a_source(33 * CHUNK)[0], pool, Copier(pool.memory))
    assert slot.num_chunks == 0 and pool.num_free == 32


def test_a_switch_of_models_step_by_step(pool: ChunkPool) -> None:
    """Fig. 6: of three prewarmed models one serves with all the memory, donates as it drains, and leaves its
    weights."""
    memory, copier = pool.memory, Copier(pool.memory)
    first, second, third = slots = [Slot(memory, name) for name in "abc"]
    sources = [a_source(num * CHUNK) for num in (6, 4, 8)]
    for slot, (source, _, _) in zip(slots, sources, strict=True):
        prewarm(slot, source, pool, copier)
    assert pool.num_free == 32 - 18
    grown = list(activate(second, [first, third], pool))
    assert grown == [28 * CHUNK] == [second.kv_bytes] and URGENT_BYTES > 28 * CHUNK
    assert (first.num_chunks, third.num_chunks, pool.num_free) == (0, 0, 0)
    assert seen(memory, second.address, 4 * CHUNK) == sources[1][1]
    freed = donate(second, pool, num_running=2, max_concurrency=8, kv_bytes_used=3 * CHUNK)
    assert freed == 21 * CHUNK == pool.num_free * CHUNK  # keep max(28 * 2/8, 3 + 28/8) = 7
    prewarm(third, sources[2][0], pool, copier)
    assert evict(second, pool, keep_weights=True) == 7 * CHUNK and second.num_chunks == 4
    assert seen(memory, second.address, 4 * CHUNK) == sources[1][1]
    assert seen(memory, third.address, 8 * CHUNK) == sources[2][1]


def test_slots_that_are_not_needed_are_evicted_after_the_winner_serves(pool: ChunkPool) -> None:
    winner, other = Slot(pool.memory, "w"), Slot(pool.memory, "o")
    for slot in (winner, other):
        prewarm(slot, a_source(2 * CHUNK)[0], pool, Copier(pool.memory))
    steps = activate(winner, [other], pool, most_bytes=10 * CHUNK)
    assert next(steps) == 10 * CHUNK and other.num_chunks == 2
    assert list(steps) == [] and other.num_chunks == 0 and pool.num_free == 32 - 12


def test_a_slot_that_cannot_grow_stays_as_it_was(pool: ChunkPool) -> None:
    slot = Slot(pool.memory, "m", 3 * CHUNK)
    slot.grow(pool.take("m", 2))
    with pytest.raises(GpuError):
        slot.grow(pool.take("m", 2))
    assert slot.num_chunks == 2 and slot.cut(0) and pool.memory.mem_info()[1] == 32 * CHUNK
    slot.grow(pool.held("m")[2:])
    with pytest.raises(ValueError, match="behind it already"):
        prewarm(slot, a_source(CHUNK)[0], pool, Copier(pool.memory))


def test_weights_that_are_shared_are_read_only(pool: ChunkPool) -> None:
    slot = Slot(pool.memory, "m")
    prewarm(slot, a_source(CHUNK)[0], pool, Copier(pool.memory))
    slot.protect(Access.READ)
    with pytest.raises(GpuError, match="written"):
        pool.memory.copy_in(slot.address, slot.address, 1)


def test_a_chunk_of_two_holders_is_free_with_the_second(pool: ChunkPool) -> None:
    chunks = pool.take("a", 2)
    pool.share(chunks, "b")
    assert pool.give("a", chunks) == [] and pool.held("b") == chunks and pool.num_free == 30
    with pytest.raises(KeyError):
        pool.give("a", chunks)
    assert pool.leave("b") == chunks and pool.num_free == 32


def test_a_pool_takes_what_the_gpu_has_and_more_when_others_are_gone() -> None:
    memory = HostMemory(4 * CHUNK, CHUNK)
    other = memory.create()
    pool = ChunkPool(memory, 4)
    assert pool.num_free == 3
    with pytest.raises(OutOfGpuMemory):
        pool.take("a", 4)
    memory.release(other)
    assert len(pool.take("a", 4)) == 4
