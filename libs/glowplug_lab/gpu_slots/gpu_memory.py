"""The port to a GPU's memory: ranges of addresses on one side, chunks of physical memory on the other, and mappings.

Two adapters, host_memory.py and cuda_memory.py, keep one contract (tests/contract/test_gpu_memory.py). Both refuse what
CUDA's virtual memory management refuses, with the same error; an access that faults on a GPU faults in both.
"""

from enum import Enum
from typing import Any, NewType, Protocol

Chunk = NewType("Chunk", int)  # id of physical memory of `chunk_bytes`, valid in one process


class Access(Enum):
    """Permitted access to mapped memory. A fresh mapping may not even be read."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read_write"


class GpuError(RuntimeError):
    """A call to the GPU's memory failed. `call` names it, `status` is the driver's name of the error ("" where Glowplug
    refused). After a driver's error other than OutOfGpuMemory the process must end: its context cannot be trusted."""

    def __init__(self, call: str, reason: str, status: str = "") -> None:
        super().__init__(f"{call}: {reason}" + (f" ({status})" if status else ""))
        self.call, self.status = call, status


class OutOfGpuMemory(GpuError):
    """No physical memory is left for another chunk. Nothing has changed: evict and try again."""


class WrongMapping(GpuError):
    """The range or the chunk is not in the state that the call needs. Nothing has changed."""


class GpuUnavailable(RuntimeError):
    """No GPU of this kind is here; the message tells a person what is missing."""


class Copy(Protocol):
    """A copy under way. Its source must not change until it is done."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class GpuMemory(Protocol):
    """One GPU's memory as one process sees it. Sizes and addresses are bytes, multiples of `chunk_bytes` where chunks
    are concerned. Calls may come from any thread. Each raises GpuError, or the named kind of it."""

    @property
    def kind(self) -> str:
        """host | cuda"""
        ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int:
        """Bytes of the GPU, in whole chunks."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses without memory behind them; returns the first. Costs nothing but addresses."""
        ...

    def free(self, address: int) -> None:
        """Give a reserved range back. Raises WrongMapping while something is mapped in it."""
        ...

    def create(self) -> Chunk:
        """Allocate physical memory. Raises OutOfGpuMemory."""
        ...

    def release(self, chunk: Chunk) -> None:
        """Give up a chunk, and its memory too if this process created it: no other process may use it then. Raises
        WrongMapping while it is mapped here."""
        ...

    def map(self, address: int, chunk: Chunk) -> None:
        """Map a chunk at an address. No access is allowed before `set_access`. A chunk may be mapped at several
        addresses. Raises WrongMapping where a chunk is mapped already."""
        ...

    def set_access(self, address: int, num_bytes: int, access: Access) -> None:
        """Set the access to a run of mapped chunks in one call, since its cost is per call. Raises WrongMapping where
        none is mapped."""
        ...

    def unmap(self, address: int, num_bytes: int) -> list[Chunk]:
        """Unmap a run of chunks; returns them in order, contents unchanged. Does not wait for kernels that still use
        them: `synchronize` does. Raises WrongMapping where none is mapped."""
        ...

    def export_fd(self, chunk: Chunk) -> tuple[int, int]:
        """Export a chunk as (descriptor, offset), by which another process maps the same memory. The caller closes the
        descriptor."""
        ...

    def import_fd(self, descriptor: int, offset: int) -> Chunk:
        """Import a chunk that another process exported. The caller closes the descriptor."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin host memory so that copies from it run at full speed. Once for each region, not for each engine."""
        ...

    def unpin(self, address: int) -> None: ...

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> Copy:
        """Begin to copy from host memory. Raises WrongMapping where access does not allow it."""
        ...

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copy to host memory and wait. Raises WrongMapping where access does not allow it."""
        ...

    def synchronize(self) -> None:
        """Wait for all work that this process has begun on the GPU."""
        ...

    def tensor(self, address: int, num_bytes: int, owner: object) -> Any:
        """The bytes for `torch.from_dlpack` or `numpy.from_dlpack`, uint8; every tensor keeps `owner` alive."""
        ...

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes as the device itself counts, all processes together."""
        ...

    def close(self) -> None:
        """Unmap, release and free everything that is left. Idempotent."""
        ...
