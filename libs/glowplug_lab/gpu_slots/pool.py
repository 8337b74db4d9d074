"""The pool of chunks: each is created once and then only moves from one holder to another (WarmServe section 4.2).

On a GPU creating physical memory is expensive, mapping it elsewhere cheap. A chunk may have several holders (the
engines that share one model's weights) and is free once the last of them has given it back.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from glowplug.domain.units import show_bytes
from glowplug_lab.gpu_slots.gpu_memory import Chunk, GpuMemory, OutOfGpuMemory


class Chunks(Protocol):
    """The source of chunks for slots: a pool of this process (ChunkPool), or that of an owner (OwnerClient)."""

    @property
    def memory(self) -> GpuMemory: ...

    @property
    def num_free(self) -> int: ...

    def take(self, holder: str, num_chunks: int) -> list[Chunk]:
        """Take free chunks, all or none. Raises OutOfGpuMemory."""
        ...

    def take_up_to(self, holder: str, num_chunks: int) -> list[Chunk]:
        """Take as many free chunks as there are, at most `num_chunks`."""
        ...

    def give(self, holder: str, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Give back chunks of `holder`; returns those that are free now."""
        ...


class ChunkPool:
    """Chunks of one GPU with their holders, by name. Single writer. A chunk keeps its bytes when it changes holders:
    all belong to one user. `num_chunks` is the intended number; the pool has fewer where the GPU has less to give."""

    def __init__(self, memory: GpuMemory, num_chunks: int) -> None:
        self.memory, self.num_chunks = memory, num_chunks
        self._free: list[Chunk] = []
        self._adopted: set[Chunk] = set()
        self._holders: dict[Chunk, set[str]] = {}  # holders of each chunk that is not free
        self.fill()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._holders)

    @property
    def holders(self) -> frozenset[str]:
        return frozenset().union(*self._holders.values())

    def held(self, holder: str) -> list[Chunk]:
        """The chunks of `holder`, alone or with others."""
        return [chunk for chunk, holders in self._holders.items() if holder in holders]

    def fill(self) -> None:
        """Create missing chunks as far as the GPU has memory, which others may have used before."""
        with contextlib.suppress(OutOfGpuMemory):
            while self.num_free + self.num_held < self.num_chunks:
                self._free.append(self.memory.create())

    def take(self, holder: str, num_chunks: int) -> list[Chunk]:
        """Take free chunks, all or none. Raises OutOfGpuMemory."""
        if num_chunks > self.num_free:
            self.fill()
        if num_chunks > self.num_free:
            free, wanted = (show_bytes(num * self.memory.chunk_bytes) for num in (self.num_free, num_chunks))
            raise OutOfGpuMemory("take", f"{holder} needs {wanted}, {free} are free")
        taken = [self._free.pop() for _ in range(num_chunks)]
        self._holders.update({chunk: {holder} for chunk in taken})
        return taken

    def take_up_to(self, holder: str, num_chunks: int) -> list[Chunk]:
        """Take as many free chunks as there are, at most `num_chunks`."""
        return self.take(holder, min(num_chunks, self.num_free))

    def share(self, chunks: Sequence[Chunk], holder: str) -> None:
        """Add `holder` to the holders of these chunks. Raises KeyError, changing nothing, for a chunk that is free."""
        for held in [self._holders[chunk] for chunk in chunks]:
            held.add(holder)

    def give(self, holder: str, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Give back chunks of `holder`; returns those that are free now. Raises KeyError, changing nothing, for a chunk
        that it does not hold."""
        given = list(dict.fromkeys(chunks))
        if not all(holder in self._holders[chunk] for chunk in given):
            raise KeyError(f"{holder} does not hold all of these chunks")
        freed = []
        for chunk in given:
            self._holders[chunk].discard(holder)
            if not self._holders[chunk]:
                del self._holders[chunk]
                freed.append(chunk)
        self._free += [chunk for chunk in freed if chunk not in self._adopted]
        if adopted := self._adopted.intersection(freed):
            self._adopted -= adopted
            for chunk in adopted:
                self.memory.release(chunk)
            self.fill()
        return freed

    def leave(self, holder: str) -> list[Chunk]:
        """Give back all chunks of `holder`; returns those that are free now."""
        return self.give(holder, self.held(holder))

    def adopt(self, chunk: Chunk, holder: str) -> None:
        """Add a chunk that another pool created and `holder` still has. Unknown processes may still use it, so it is
        released when its known holders are done, and never given to another. Free chunks beyond `num_chunks` go back to
        the GPU."""
        self._adopted.add(chunk)
        self._holders[chunk] = {holder}
        while self._free and self.num_free + self.num_held > self.num_chunks:
            self.memory.release(self._free.pop())

    def close(self) -> None:
        """Release the free chunks to the GPU; held ones stay with their holders."""
        while self._free:
            self.memory.release(self._free.pop())
