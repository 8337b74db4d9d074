"""A slot: addresses for one model, as many as the GPU has bytes; only the first have memory.

Weights start at offset 0, the KV cache follows, and addresses stay while memory comes and goes (WarmServe section 4.2,
Fig. 6). Departure: the KV cache begins at a whole chunk.
"""

from collections.abc import Sequence

from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, GpuMemory


class Slot:
    """Chunks mapped without a gap. Single writer. Raises GpuError."""

    def __init__(self, memory: GpuMemory, name: str, num_bytes: int = 0) -> None:
        """`num_bytes` defaults to the GPU's size."""
        self.name = name
        self._memory = memory
        self.num_bytes = num_bytes or memory.total_bytes
        self.address = memory.reserve(self.num_bytes)
        self.num_chunks = 0
        self.num_weight_chunks = 0  # the rest is KV cache

    @property
    def weights_end(self) -> int:
        """Offset where the KV cache begins."""
        return self.num_weight_chunks * self._memory.chunk_bytes

    @property
    def kv_bytes(self) -> int:
        return (self.num_chunks - self.num_weight_chunks) * self._memory.chunk_bytes

    def grow(self, chunks: Sequence[Chunk], access: Access = Access.READ_WRITE) -> int:
        """Map chunks behind the present ones, all or none; return their offset."""
        size = self._memory.chunk_bytes
        offset = self.num_chunks * size
        begins, mapped = self.address + offset, 0
        try:
            for chunk in chunks:
                self._memory.map(begins + mapped * size, chunk)
                mapped += 1
            if chunks:
                self._memory.set_access(begins, mapped * size, access)
        except BaseException:
            if mapped:
                self._memory.unmap(begins, mapped * size)
            raise
        self.num_chunks += mapped
        return offset

    def protect(self, access: Access) -> None:
        if self.num_weight_chunks:
            self._memory.set_access(self.address, self.weights_end, access)

    def cut(self, num_chunks: int) -> list[Chunk]:
        """Unmap and return chunks. Their users must have ended."""
        size = self._memory.chunk_bytes
        if num_chunks >= self.num_chunks:
            return []
        chunks = self._memory.unmap(self.address + num_chunks * size, (self.num_chunks - num_chunks) * size)
        self.num_chunks = num_chunks
        self.num_weight_chunks = min(self.num_weight_chunks, num_chunks)
        return chunks

    def close(self) -> list[Chunk]:
        chunks = self.cut(0)
        self._memory.free(self.address)
        return chunks
