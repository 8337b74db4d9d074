"""The port to a GPU's memory: address ranges, chunks of physical memory, and mappings.

host_memory.py and cuda_memory.py keep one contract (tests/contract/test_gpu_memory.py): they refuse what CUDA refuses
and fault where a GPU would.
"""

from enum import Enum
from typing import Any, NewType, Protocol

Chunk = NewType("Chunk", int)  # id of `chunk_bytes`, valid in one process


class Access(Enum):
    """A fresh mapping may not even be read."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read_write"


class GpuError(RuntimeError):
    """`call` names the failed call, `status` is the driver's error name ("" if Glowplug refused). After a driver error
    other than OutOfGpuMemory the process must end: its context cannot be trusted."""

    def __init__(self, call: str, reason: str, status: str = "") -> None:
        super().__init__(f"{call}: {reason}" + (f" ({status})" if status else ""))
        self.call, self.status = call, status


class OutOfGpuMemory(GpuError):
    """Nothing has changed: evict and retry."""


class WrongMapping(GpuError):
    """The range or chunk is in the wrong state. Nothing has changed."""


class GpuUnavailable(RuntimeError):
    """No GPU of this kind; the message says what is missing."""


class Copy(Protocol):
    """Its source must not change meanwhile."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class GpuMemory(Protocol):
    """One GPU's memory in one process. Sizes and addresses are bytes, for chunks multiples of `chunk_bytes`. Callable
    from any thread. Every method raises GpuError, or the kind named."""

    @property
    def kind(self) -> str:
        """host | cuda"""
        ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int:
        """In whole chunks."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses without memory; return the first."""
        ...

    def free(self, address: int) -> None:
        """Raises WrongMapping while anything is mapped there."""
        ...

    def create(self) -> Chunk:
        """Allocate physical memory. Raises OutOfGpuMemory."""
        ...

    def release(self, chunk: Chunk) -> None:
        """Give up a chunk; its creator frees the memory for all processes. Raises WrongMapping while mapped here."""
        ...

    def map(self, address: int, chunk: Chunk) -> None:
        """Map a chunk, possibly at several addresses, without access. Raises WrongMapping if the address is taken."""
        ...

    def set_access(self, address: int, num_bytes: int, access: Access) -> None:
        """Set access in one call, since cost is per call. Raises WrongMapping where no chunk is mapped."""
        ...

    def unmap(self, address: int, num_bytes: int) -> list[Chunk]:
        """Return the unmapped chunks in order, contents unchanged. Does not wait for kernels: `synchronize` does.
        Raises WrongMapping where none is mapped."""
        ...

    def export_fd(self, chunk: Chunk) -> tuple[int, int]:
        """Return (descriptor, offset) for another process. The caller closes the descriptor."""
        ...

    def import_fd(self, descriptor: int, offset: int) -> Chunk:
        """The caller closes the descriptor."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin host memory for full copy speed, once per region."""
        ...

    def unpin(self, address: int) -> None: ...

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> Copy:
        """Raises WrongMapping without access."""
        ...

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copy and wait. Raises WrongMapping without access."""
        ...

    def synchronize(self) -> None:
        """Wait for all GPU work of this process."""
        ...

    def tensor(self, address: int, num_bytes: int, owner: object) -> Any:
        """Bytes for `torch.from_dlpack` or `numpy.from_dlpack`, uint8; tensors keep `owner` alive."""
        ...

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device, over all processes."""
        ...

    def close(self) -> None:
        """Unmap, release and free everything. Idempotent."""
        ...
