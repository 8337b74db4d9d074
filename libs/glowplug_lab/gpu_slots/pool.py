"""The pool of chunks, created once and then passed between holders (WarmServe section 4.2).

On a GPU, creating memory is expensive and remapping cheap. A chunk of several holders is free after the last.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from glowplug.domain.units import show_bytes
from glowplug_lab.gpu_slots.gpu_memory import Chunk, GpuMemory, OutOfGpuMemory


class Chunks(Protocol):
    """A ChunkPool of this process, or an OwnerClient."""

    @property
    def memory(self) -> GpuMemory: ...

    @property
    def num_free(self) -> int: ...

    def take(self, holder: str, num_chunks: int) -> list[Chunk]:
        """All or none. Raises OutOfGpuMemory."""
        ...

    def take_up_to(self, holder: str, num_chunks: int) -> list[Chunk]:
        """Take the free chunks, at most `num_chunks`."""
        ...

    def give(self, holder: str, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks that become free."""
        ...


class ChunkPool:
    """Chunks of one GPU and their holders, by name. Single writer. Chunks keep their bytes between holders: all belong
    to one user. The GPU may have fewer than `num_chunks`."""

    def __init__(self, memory: GpuMemory, num_chunks: int) -> None:
        self.memory, self.num_chunks = memory, num_chunks
        self._free: list[Chunk] = []
        self._adopted: set[Chunk] = set()
        self._holders: dict[Chunk, set[str]] = {}
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
        return [chunk for chunk, holders in self._holders.items() if holder in holders]

    def fill(self) -> None:
        with contextlib.suppress(OutOfGpuMemory):
            while self.num_free + self.num_held < self.num_chunks:
                self._free.append(self.memory.create())

    def take(self, holder: str, num_chunks: int) -> list[Chunk]:
        """All or none. Raises OutOfGpuMemory."""
        if num_chunks > self.num_free:
            self.fill()
        if num_chunks > self.num_free:
            free, wanted = (show_bytes(num * self.memory.chunk_bytes) for num in (self.num_free, num_chunks))
            raise OutOfGpuMemory("take", f"{holder} needs {wanted}, {free} are free")
        taken = [self._free.pop() for _ in range(num_chunks)]
        self._holders.update({chunk: {holder} for chunk in taken})
        return taken

    def take_up_to(self, holder: str, num_chunks: int) -> list[Chunk]:
        return self.take(holder, min(num_chunks, self.num_free))

    def share(self, chunks: Sequence[Chunk], holder: str) -> None:
        """Raises KeyError, changing nothing, for a free chunk."""
        for held in [self._holders[chunk] for chunk in chunks]:
            held.add(holder)

    def give(self, holder: str, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks that become free. Raises KeyError, changing nothing, for a chunk not held."""
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
        return self.give(holder, self.held(holder))

    def adopt(self, chunk: Chunk, holder: str) -> None:
        """Add another pool's chunk. Unknown processes may use it, so it is released after its known holders, never
        given to others. Excess free chunks return to the GPU."""
        self._adopted.add(chunk)
        self._holders[chunk] = {holder}
        while self._free and self.num_free + self.num_held > self.num_chunks:
            self.memory.release(self._free.pop())

    def close(self) -> None:
        while self._free:
            self.memory.release(self._free.pop())
