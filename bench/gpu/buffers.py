"""Host memory to copy from, and a view of GPU memory."""

import ctypes
import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from glowplug_lab.gpu_slots.gpu_memory import GpuMemory

_HUGE = 0x0004  # MFD_HUGETLB
_PIECE = 64 << 20


@contextmanager
def host_bytes(num_bytes: int, *, huge: bool = False) -> Iterator[int]:
    """The address of so many bytes of shared memory, filled. Raises OSError if there are too few huge pages."""
    page = 2 << 20 if huge else mmap.PAGESIZE
    size = -(-num_bytes // page) * page
    file = os.memfd_create("bench", _HUGE if huge else 0)
    try:
        os.ftruncate(file, size)
        mapped = mmap.mmap(file, size)
    finally:
        os.close(file)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    pattern = os.urandom(1 << 20)
    for at in range(0, num_bytes, len(pattern)):
        size = min(len(pattern), num_bytes - at)
        ctypes.memmove(address + at, pattern, size)
        ctypes.memmove(address + at, at.to_bytes(8, "little"), min(8, size))  # no two pieces are the same
    yield address


@contextmanager
def pinned(memory: GpuMemory, num_bytes: int) -> Iterator[int]:
    """Likewise, registered with the driver."""
    with host_bytes(num_bytes) as address:
        memory.pin(address, num_bytes)
        try:
            yield address
        finally:
            memory.unpin(address)


def host_digest(address: int, num_bytes: int) -> str:
    return hashlib.sha256(ctypes.string_at(address, num_bytes)).hexdigest()


def gpu_digest(memory: GpuMemory, address: int, num_bytes: int) -> str:
    """The digest of bytes on the GPU, copied to the host in pieces."""
    digest = hashlib.sha256()
    buffer = ctypes.create_string_buffer(min(_PIECE, num_bytes))
    for at in range(0, num_bytes, len(buffer)):
        size = min(len(buffer), num_bytes - at)
        memory.copy_out(ctypes.addressof(buffer), address + at, size)
        digest.update(memoryview(buffer)[:size])
    return digest.hexdigest()


def write(memory: GpuMemory, address: int, data: bytes) -> None:
    source = ctypes.create_string_buffer(data, len(data))
    memory.copy_in(address, ctypes.addressof(source), len(data)).wait()


def read(memory: GpuMemory, address: int, num_bytes: int) -> bytes:
    buffer = ctypes.create_string_buffer(num_bytes)
    memory.copy_out(ctypes.addressof(buffer), address, num_bytes)
    return buffer.raw
