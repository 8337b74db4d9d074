"""Random operations on ledger, pool and slots of one host GPU, checked against a simple model.

An operation that the model forbids must raise its typed error and change nothing.
"""

import ctypes
import random
from collections import Counter
from dataclasses import dataclass

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.prewarming.warmserve_reservation import prewarmable_bytes
from glowplug_lab.gpu_slots.copies import Copier
from glowplug_lab.gpu_slots.gpu_memory import Access, OutOfGpuMemory, WrongMapping
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.pool import ChunkPool
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import Source, activate, donate, evict, num_chunks, prewarm

CHUNK = 4096
NUM_CHUNKS = 48
MOST_WEIGHTS = 20  # chunks of one model
NAMES = ("a", "b", "c", "d")
GPU = "n/0"
OPERATIONS = ("prewarm", "prewarm", "activate", "donate", "evict", "evict", "keep_weights", "write", "misuse")


@dataclass
class Held:
    weights: int = 0
    kv: int = 0
    seed: int = 0  # its weights' offset in `_BYTES`
    num_bytes: int = 0
    kv_mark: bytes = b""


class MemoryModel:
    def __init__(self) -> None:
        self.memory = HostMemory(NUM_CHUNKS * CHUNK, CHUNK)
        self.ledger = ByteLedger([Gpu(gpu_id=GPU, total_bytes=NUM_CHUNKS * CHUNK)])
        self.pool = ChunkPool(self.memory, NUM_CHUNKS)
        self.copier = Copier(self.memory, piece_bytes=3 * CHUNK)
        self.slots = {name: Slot(self.memory, name) for name in NAMES}
        self.held = {name: Held() for name in NAMES}
        self.done: Counter[str] = Counter()
        self._bytes = random.Random(7).randbytes(MOST_WEIGHTS * CHUNK + 256)
        self._source = ctypes.create_string_buffer(self._bytes, len(self._bytes))
        self._scratch = ctypes.create_string_buffer(CHUNK)

    def step(self, chance: random.Random) -> None:
        operation, name = chance.choice(OPERATIONS), chance.choice(NAMES)
        getattr(self, f"_{operation}")(name, chance)
        self._check(chance)

    def close(self) -> None:
        for name, slot in self.slots.items():
            self.pool.give(name, slot.close())
        assert self.pool.num_free == NUM_CHUNKS and not self.pool.holders
        self.pool.close()
        assert self.memory.mem_info() == (NUM_CHUNKS * CHUNK, NUM_CHUNKS * CHUNK)
        self.memory.close()

    @property
    def num_free(self) -> int:
        return NUM_CHUNKS - sum(one.weights + one.kv for one in self.held.values())

    def _prewarm(self, name: str, chance: random.Random) -> None:
        """The pool must have every chunk the ledger grants."""
        slot, held = self.slots[name], self.held[name]
        seed, num_bytes = chance.randrange(256), chance.randint(1, MOST_WEIGHTS * CHUNK)
        wanted = num_chunks(self.memory, num_bytes)
        source = Source(ctypes.addressof(self._source) + seed, num_bytes, lambda: num_bytes)
        if held.weights:
            self._refused(ValueError, lambda: prewarm(slot, source, self.pool, self.copier))
        elif wanted > self.num_free:
            self._refused(OutOfMemory, lambda: self._grant(name, {GrantOwner.PREWARM: wanted}))
            self._refused(OutOfGpuMemory, lambda: prewarm(slot, source, self.pool, self.copier))
        else:
            self._grant(name, {GrantOwner.PREWARM: wanted})
            prewarm(slot, source, self.pool, self.copier)
            self.held[name] = Held(weights=wanted, seed=seed, num_bytes=num_bytes)
            self.done["prewarmed"] += 1

    def _activate(self, name: str, chance: random.Random) -> None:
        held = self.held[name]
        if not held.weights:
            return
        losers = [other for other in NAMES if other != name and chance.random() < 0.6]
        most = chance.choice([None, chance.randrange(NUM_CHUNKS) * CHUNK])
        for loser in losers:
            self.held[loser] = Held()
        space = self.num_free
        grows = space if most is None else max(0, min(space, most // CHUNK - held.kv))
        self.ledger.exchange([*losers, name], name, self._shares(held.weights, held.kv + grows))
        steps = list(activate(self.slots[name], [self.slots[one] for one in losers], self.pool, most, run_chunks=5))
        held.kv += grows
        assert steps == sorted(steps) and (not grows or steps[-1] == held.kv * CHUNK)
        self._mark(name, chance)
        self.done["activated"] += 1

    def _donate(self, name: str, chance: random.Random) -> None:
        slot, held = self.slots[name], self.held[name]
        running, used = chance.randint(0, 8), chance.randint(0, held.kv) * CHUNK
        asked = {"num_running": running, "max_concurrency": 8, "kv_bytes_used": used}
        kept = held.kv - prewarmable_bytes(running, 8, used, held.kv * CHUNK) // CHUNK
        if held.kv:
            self.ledger.shrink(GPU, name, GrantOwner.KV, kept * CHUNK)
        assert donate(slot, self.pool, **asked) == (held.kv - kept) * CHUNK
        held.kv = kept
        held.kv_mark = held.kv_mark if kept else b""
        self.done["donated"] += 1

    def _evict(self, name: str, _: random.Random) -> None:
        held = self.held[name]
        assert self.ledger.release(name) == (held.weights + held.kv) * CHUNK
        assert evict(self.slots[name], self.pool) == (held.weights + held.kv) * CHUNK
        self.held[name] = Held()
        self.done["evicted"] += 1

    def _keep_weights(self, name: str, _: random.Random) -> None:
        """Turn a dedicated worker into a prewarmed replica again (WarmServe Fig. 6b)."""
        held = self.held[name]
        if not held.weights:
            return
        self.ledger.exchange([name], name, {GPU: {GrantOwner.PREWARM: held.weights * CHUNK}})
        assert evict(self.slots[name], self.pool, keep_weights=True) == held.kv * CHUNK
        held.kv, held.kv_mark = 0, b""
        self.done["kept"] += 1

    def _write(self, name: str, chance: random.Random) -> None:
        if self.held[name].kv:
            self._mark(name, chance)
        self.done["written"] += 1

    def _misuse(self, name: str, chance: random.Random) -> None:
        slot, memory = self.slots[name], self.memory
        behind = slot.address + slot.num_chunks * CHUNK
        attempts = [
            lambda: memory.free(slot.address + CHUNK),
            lambda: memory.set_access(behind - CHUNK, 2 * CHUNK, Access.READ),
            lambda: memory.unmap(slot.address - CHUNK, 2 * CHUNK),
        ]
        if slot.num_chunks:
            attempts += [
                lambda: memory.map(slot.address, self.pool.held(name)[0]),
                lambda: memory.release(self.pool.held(name)[0]),
                lambda: memory.free(slot.address),
            ]
        self._refused(WrongMapping, chance.choice(attempts))
        self._refused(KeyError, lambda: self.pool.give("stranger", self.pool.held(name) or [-1]))

    def _refused(self, kind: type[Exception], attempt) -> None:
        try:
            attempt()
        except kind:
            self.done[f"refused {kind.__name__}"] += 1
            return
        raise AssertionError(f"{kind.__name__} was to come")

    def _grant(self, name: str, chunks: dict[GrantOwner, int]) -> None:
        self.ledger.exchange((), name, {GPU: {owner: num * CHUNK for owner, num in chunks.items()}})

    def _shares(self, weights: int, kv: int) -> dict[str, dict[GrantOwner, int]]:
        return {GPU: {GrantOwner.WEIGHTS: weights * CHUNK, GrantOwner.KV: kv * CHUNK}}

    def _mark(self, name: str, chance: random.Random) -> None:
        """The mark must last as long as the KV cache."""
        held, slot = self.held[name], self.slots[name]
        if held.kv:
            held.kv_mark = chance.randbytes(8)
            mark = ctypes.create_string_buffer(held.kv_mark, 8)
            self.memory.copy_in(slot.address + slot.weights_end, ctypes.addressof(mark), 8)

    def _check(self, chance: random.Random) -> None:
        assert self.pool.num_free == self.num_free and self.pool.num_held == NUM_CHUNKS - self.num_free
        assert sum(gpu.free_bytes for gpu in self.ledger.gpus) == self.num_free * CHUNK
        for name, held in self.held.items():
            slot = self.slots[name]
            assert (slot.num_weight_chunks, slot.kv_bytes) == (held.weights, held.kv * CHUNK), name
        name = chance.choice(NAMES)
        held, slot = self.held[name], self.slots[name]
        assert self.ledger.held_bytes(name) == (held.weights + held.kv) * CHUNK
        assert len(self.pool.held(name)) == held.weights + held.kv
        if held.weights:
            at = chance.randrange(held.weights) * CHUNK
            size = min(CHUNK, held.num_bytes - at)
            assert self._read(slot.address + at, size) == self._bytes[held.seed + at : held.seed + at + size], name
        if held.kv_mark:
            assert self._read(slot.address + slot.weights_end, 8) == held.kv_mark, name

    def _read(self, address: int, num_bytes: int) -> bytes:
        self.memory.copy_out(ctypes.addressof(self._scratch), address, num_bytes)
        return self._scratch.raw[:num_bytes]
