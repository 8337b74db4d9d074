"""Ranges, chunks and mappings of one process, with the refusals common to all GPUs."""

from dataclasses import dataclass, field

from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, WrongMapping


@dataclass(slots=True)
class _Range:
    num_bytes: int
    chunks: dict[int, Chunk] = field(default_factory=dict)  # address -> chunk
    access: dict[int, Access] = field(default_factory=dict)  # absent: none


class Mappings:
    """Pure. `may_*` methods raise WrongMapping for calls that a GPU would refuse. Addresses are first bytes of
    chunks."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._ranges: dict[int, _Range] = {}
        self._num_mappings: dict[Chunk, int] = {}

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of each."""
        return [(address, one.num_bytes) for address, one in self._ranges.items()]

    @property
    def chunks(self) -> list[Chunk]:
        return list(self._num_mappings)

    def mapped(self, address: int) -> list[int]:
        return sorted(self._ranges[address].chunks)

    def reserved(self, address: int, num_bytes: int) -> None:
        self._ranges[address] = _Range(num_bytes)

    def may_free(self, address: int) -> int:
        if address not in self._ranges:
            raise WrongMapping("free", f"no range begins at {address:#x}")
        if self._ranges[address].chunks:
            raise WrongMapping("free", f"{len(self._ranges[address].chunks)} chunks are mapped at {address:#x}")
        return self._ranges[address].num_bytes

    def freed(self, address: int) -> None:
        del self._ranges[address]

    def created(self, chunk: Chunk) -> None:
        self._num_mappings[chunk] = 0

    def has(self, call: str, chunk: Chunk) -> None:
        """Raises WrongMapping for an unknown chunk."""
        if chunk not in self._num_mappings:
            raise WrongMapping(call, f"chunk {chunk} is not one of this process")

    def may_release(self, chunk: Chunk) -> None:
        self.has("release", chunk)
        if num := self._num_mappings[chunk]:
            raise WrongMapping("release", f"chunk {chunk} is mapped {num} times")

    def released(self, chunk: Chunk) -> None:
        del self._num_mappings[chunk]

    def may_map(self, address: int, chunk: Chunk) -> None:
        self.has("map", chunk)
        if address in self._range("map", address, self._chunk_bytes).chunks:
            raise WrongMapping("map", f"something is mapped at {address:#x} already")

    def did_map(self, address: int, chunk: Chunk) -> None:
        self._range("map", address, self._chunk_bytes).chunks[address] = chunk
        self._num_mappings[chunk] += 1

    def run(self, call: str, address: int, num_bytes: int) -> list[Chunk]:
        """Raises WrongMapping where no chunk is mapped."""
        one = self._range(call, address, num_bytes)
        found = [one.chunks.get(at) for at in range(address, address + num_bytes, self._chunk_bytes)]
        if None in found:
            missing = address + found.index(None) * self._chunk_bytes
            raise WrongMapping(call, f"nothing is mapped at {missing:#x}")
        return [chunk for chunk in found if chunk is not None]

    def did_set_access(self, address: int, num_bytes: int, access: Access) -> None:
        one = self._range("set_access", address, num_bytes)
        for at in range(address, address + num_bytes, self._chunk_bytes):
            one.access[at] = access

    def did_unmap(self, address: int, num_bytes: int) -> None:
        one = self._range("unmap", address, num_bytes)
        for at in range(address, address + num_bytes, self._chunk_bytes):
            self._num_mappings[one.chunks.pop(at)] -= 1
            one.access.pop(at, None)

    def may_touch(self, call: str, address: int, num_bytes: int, *, write: bool) -> None:
        """Accepts any bytes, not only whole chunks. Raises WrongMapping."""
        start = address - self._inside(call, address, num_bytes)
        one, allowed = self._ranges[start], {Access.READ_WRITE} if write else {Access.READ, Access.READ_WRITE}
        first = address - (address - start) % self._chunk_bytes
        for at in range(first, address + num_bytes, self._chunk_bytes):
            if one.access.get(at) not in allowed:
                raise WrongMapping(call, f"{at:#x} may not be {'written' if write else 'read'}")

    def _range(self, call: str, address: int, num_bytes: int) -> _Range:
        offset = self._inside(call, address, num_bytes)
        if offset % self._chunk_bytes or num_bytes % self._chunk_bytes:
            raise WrongMapping(call, f"{address:#x} and {num_bytes} bytes are no whole chunks of {self._chunk_bytes}")
        return self._ranges[address - offset]

    def _inside(self, call: str, address: int, num_bytes: int) -> int:
        for start, one in self._ranges.items():
            if start <= address and num_bytes > 0 and address + num_bytes <= start + one.num_bytes:
                return address - start
        raise WrongMapping(call, f"{num_bytes} bytes at {address:#x} lie in no reserved range")
