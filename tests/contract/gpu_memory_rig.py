"""GPU memories: host memory, CUDA's adapter over a fake driver, a GPU."""

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug_lab.gpu_slots.cuda_memory import CudaMemory
from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, GpuMemory, GpuUnavailable, OutOfGpuMemory, WrongMapping
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.owner import Owner

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
BACKENDS = ("host", "faked driver", "cuda")


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600


class FakeCudaDriver:
    """The part of cuda.bindings.driver that CudaMemory calls. Like the real one it refuses exports of chunks not
    created for it and mappings without a context."""

    CUresult = Status
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_NONE=0, CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3
    )

    def __init__(self, total_bytes: int, chunk_bytes: int) -> None:
        self.host = HostMemory(total_bytes, chunk_bytes)
        self.contexts = 0
        self.current = False
        self.handles: dict[int, Chunk] = {}
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu"):
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None), requestedHandleTypes=None)

    def CUmemAccessDesc(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace(type=None, id=None), flags=None)

    def cuDeviceGet(self, device: int) -> Any:
        return Status.CUDA_SUCCESS, device

    def cuDeviceTotalMem(self, device: int) -> Any:
        return Status.CUDA_SUCCESS, self.host.total_bytes

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.contexts += 1
        return Status.CUDA_SUCCESS, "context"

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.contexts -= 1
        return (Status.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context: str) -> Any:
        self.current = context == "context"
        return (Status.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> Any:
        return (Status.CUDA_SUCCESS if self.current else Status.CUDA_ERROR_INVALID_VALUE,)

    def cuMemGetAllocationGranularity(self, properties: Any, flags: int) -> Any:
        return Status.CUDA_SUCCESS, self.host.chunk_bytes

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> Any:
        return Status.CUDA_SUCCESS, self.host.reserve(size)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        return self._done(self.host.free, address)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        if size % self.host.chunk_bytes or properties.requestedHandleTypes != 1:
            return Status.CUDA_ERROR_INVALID_VALUE, None
        try:
            return Status.CUDA_SUCCESS, self.host.create()
        except OutOfGpuMemory:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None

    def cuMemRelease(self, handle: Chunk) -> Any:
        return self._done(self.host.release, handle)

    def cuMemMap(self, address: int, size: int, offset: int, handle: Chunk, flags: int) -> Any:
        if offset or flags or not self.current:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        return self._done(self.host.map, address, handle)

    def cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], count: int) -> Any:
        (one,) = descriptions
        access = {0: Access.NONE, 1: Access.READ, 3: Access.READ_WRITE}[one.flags]
        return self._done(self.host.set_access, address, size, access)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        return self._done(self.host.unmap, address, size)

    def cuMemExportToShareableHandle(self, handle: Chunk, kind: int, flags: int) -> Any:
        """The file's position keeps the chunk's offset."""
        file, offset = self.host.export_fd(handle)
        own = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        os.close(file)
        os.lseek(own, offset, os.SEEK_SET)
        return Status.CUDA_SUCCESS, own

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> Any:
        return Status.CUDA_SUCCESS, self.host.import_fd(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR))

    def cuMemGetInfo(self) -> Any:
        return Status.CUDA_SUCCESS, *self.host.mem_info()

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        return Status.CUDA_SUCCESS, "stream"

    def cuMemcpyHtoDAsync(self, address: int, host_address: int, size: int, stream: str) -> Any:
        ctypes.memmove(address, host_address, size)
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, host_address: int, address: int, size: int) -> Any:
        ctypes.memmove(host_address, address, size)
        return (Status.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> Any:
        return Status.CUDA_SUCCESS, {"asked": 0}

    def cuEventRecord(self, event: dict[str, int], stream: str) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuEventQuery(self, event: dict[str, int]) -> Any:
        """Not ready the first time, like a copy of some size."""
        event["asked"] += 1
        return (Status.CUDA_SUCCESS if event["asked"] > 1 else Status.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: dict[str, int]) -> Any:
        return (Status.CUDA_SUCCESS,)

    def cuEventDestroy(self, event: dict[str, int]) -> Any:
        return (Status.CUDA_SUCCESS,)

    def _done(self, call: Any, *args: Any) -> Any:
        try:
            call(*args)
        except WrongMapping:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        return (Status.CUDA_SUCCESS,)


@contextmanager
def gpu(backend: str, num_chunks: int = 64) -> Iterator[GpuMemory]:
    """64 KiB chunks in host memory; a real GPU has its own number, in chunks of 2 MiB."""
    try:
        memory: GpuMemory = _made(backend, num_chunks * 64 * KIB, 64 * KIB)
    except GpuUnavailable as error:
        pytest.skip(str(error))
    try:
        yield memory
    finally:
        memory.close()


def _made(backend: str, total_bytes: int, chunk_bytes: int) -> GpuMemory:
    if backend == "host":
        return HostMemory(total_bytes, chunk_bytes)
    if backend == "cuda":
        return CudaMemory(chunk_bytes=2 * MIB)
    return CudaMemory(chunk_bytes=chunk_bytes, driver=FakeCudaDriver(total_bytes, chunk_bytes))


def mapped(memory: GpuMemory, address: int, num_chunks: int, access: Access = Access.READ_WRITE) -> list[Chunk]:
    chunks = [memory.create() for _ in range(num_chunks)]
    for number, chunk in enumerate(chunks):
        memory.map(address + number * memory.chunk_bytes, chunk)
    memory.set_access(address, num_chunks * memory.chunk_bytes, access)
    return chunks


class RunningOwner:
    def __init__(self, path: Path, num_chunks: int = 16, memory: HostMemory | None = None) -> None:
        self.memory = memory or HostMemory(num_chunks * PAGE, PAGE)
        self.owner = Owner(self.memory, num_chunks, path)
        self._stop, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self.owner.serve, args=(theirs,))
        self._thread.start()

    def stop(self) -> None:
        self._stop.close()
        self._thread.join(timeout=5)
        assert not self._thread.is_alive()
