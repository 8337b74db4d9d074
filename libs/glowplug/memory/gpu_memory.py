"""The port to a GPU's memory: ranges of addresses on one side, chunks of physical memory on the other, and mappings.

Two adapters, host_memory.py and cuda_memory.py, keep one contract (tests/contract/test_gpu_memory.py). What CUDA's
virtual memory management refuses, both refuse, with the same error; what faults on a GPU faults in both.
"""

from enum import Enum
from typing import Any, NewType, Protocol

Chunk = NewType("Chunk", int)  # a name for physical memory of `chunk_bytes`, valid in the process that has it


class Access(Enum):
    """What may be done to mapped memory. A fresh mapping may not even be read."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read_write"


class GpuError(RuntimeError):
    """A call to the GPU's memory failed. `call` names it, `status` is the driver's name of the error ("" for a refusal
    of ours). After one of the driver that is not OutOfGpuMemory the process must end: its context cannot be trusted."""

    def __init__(self, call: str, reason: str, status: str = "") -> None:
        super().__init__(f"{call}: {reason}" + (f" ({status})" if status else ""))
        self.call, self.status = call, status


class OutOfGpuMemory(GpuError):
    """There is no physical memory left for another chunk. Nothing has changed: evict and try again."""


class WrongMapping(GpuError):
    """The range or the chunk is not in the state that the call needs. Nothing has changed."""


class GpuUnavailable(RuntimeError):
    """There is no GPU of this kind here; the message says what is missing, for a person."""


class Copy(Protocol):
    """A copy under way. Its source must stay as it is until then."""

    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


class GpuMemory(Protocol):
    """One GPU's memory as one process sees it. Sizes and addresses are bytes, multiples of `chunk_bytes` where chunks
    are concerned. Calls may come from any thread. Each raises GpuError, or a kind of it that is named."""

    @property
    def kind(self) -> str:
        """host | cuda"""
        ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def total_bytes(self) -> int:
        """What the GPU has, in whole chunks."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Addresses without memory behind them; returns the first. Costs nothing but addresses."""
        ...

    def free(self, address: int) -> None:
        """Give a reserved range back. Raises WrongMapping while something is mapped in it."""
        ...

    def create(self) -> Chunk:
        """Physical memory. Raises OutOfGpuMemory."""
        ...

    def release(self, chunk: Chunk) -> None:
        """Give it up, and its memory too if this process created it: no other may use it any more. Raises WrongMapping
        while it is mapped here."""
        ...

    def map(self, address: int, chunk: Chunk) -> None:
        """Put a chunk behind an address. Nothing may touch it before `set_access`. One chunk may lie behind several
        addresses. Raises WrongMapping where something is mapped already."""
        ...

    def set_access(self, address: int, num_bytes: int, access: Access) -> None:
        """For a run of mapped chunks, in one call: its cost is by call. Raises WrongMapping where none is mapped."""
        ...

    def unmap(self, address: int, num_bytes: int) -> list[Chunk]:
        """Take the chunks of a run from behind their addresses, in order, contents as they are. It does not wait for
        kernels that still use them: `synchronize` does. Raises WrongMapping where none is mapped."""
        ...

    def export_fd(self, chunk: Chunk) -> tuple[int, int]:
        """(descriptor, offset) by which another process has the same memory. The caller closes the descriptor."""
        ...

    def import_fd(self, descriptor: int, offset: int) -> Chunk:
        """The chunk that another process exported. The caller closes the descriptor."""
        ...

    def pin(self, address: int, num_bytes: int) -> None:
        """Let host memory be copied from at full speed. Once for each region, not for each engine."""
        ...

    def unpin(self, address: int) -> None: ...

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> Copy:
        """Begin to copy from host memory. Raises WrongMapping where access does not allow it."""
        ...

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        """Copy to host memory and wait. Raises WrongMapping where access does not allow it."""
        ...

    def synchronize(self) -> None:
        """Wait for all that this process has begun on the GPU."""
        ...

    def tensor(self, address: int, num_bytes: int, owner: object) -> Any:
        """The bytes for `torch.from_dlpack` or `numpy.from_dlpack`, uint8; `owner` lives as long as any tensor does."""
        ...

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes as the device itself counts, all processes together."""
        ...

    def close(self) -> None:
        """Unmap, release and free all that is left. Idempotent."""
        ...
