"""An NVIDIA GPU's memory by CUDA virtual memory management, through cuda-python (`pip install 'glowplug[gpu]'`).

Threads share the device's primary context with torch. A process that only creates, exports and releases chunks
(owner.py) makes no context, so device faults do not reach it. Not measured yet: see docs/gpu.md.
"""

import importlib
import threading
from typing import Any

from glowplug_lab.gpu_slots import dlpack
from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, GpuError, GpuUnavailable, OutOfGpuMemory
from glowplug_lab.gpu_slots.mappings import Mappings

MIB = 1 << 20
_DRIVER = "cuda.bindings.driver"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


def load_driver() -> Any:
    """Raises GpuUnavailable."""
    try:
        driver = importlib.import_module(_DRIVER)
    except ImportError as error:
        raise GpuUnavailable("cuda-python is not installed: pip install 'glowplug[gpu]'") from error
    try:
        check(driver, "cuInit", driver.cuInit(0))
        num_devices = check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount())
    except (GpuError, RuntimeError, OSError, ImportError) as error:  # the library may be missing
        raise GpuUnavailable(f"no NVIDIA driver answers: {error}") from error
    if not num_devices:
        raise GpuUnavailable("the NVIDIA driver answers but there is no GPU")
    return driver


def check(driver: Any, call: str, answer: tuple[Any, ...]) -> Any:
    """Raises OutOfGpuMemory and GpuError."""
    status, *values = answer
    if status == driver.CUresult.CUDA_SUCCESS:
        return values[0] if len(values) == 1 else tuple(values)
    name = getattr(status, "name", str(status))
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfGpuMemory(call, "the device has no memory left", name)
    raise GpuError(call, "the driver refused", name)


class _Event:
    def __init__(self, memory: "CudaMemory", event: Any) -> None:
        self._memory, self._event, self._is_done = memory, event, False

    def is_done(self) -> bool:
        if not self._is_done:
            driver = self._memory.driver
            self._memory.enter()
            answer = driver.cuEventQuery(self._event)
            if answer[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
                return False
            check(driver, "cuEventQuery", answer)
            self._end()
        return True

    def wait(self) -> None:
        if not self._is_done:
            self._memory.enter()
            self._memory.call("cuEventSynchronize", self._event)
            self._end()

    def _end(self) -> None:
        self._memory.call("cuEventDestroy", self._event)
        self._is_done = True


class CudaMemory:
    """Only tests pass `driver`. Raises GpuUnavailable; ValueError for chunks that are no multiple of the
    granularity."""

    kind = "cuda"

    def __init__(self, device: int = 0, chunk_bytes: int = 32 * MIB, driver: Any = None) -> None:
        self.driver = driver or load_driver()
        self.device, self._device = device, self.call("cuDeviceGet", device)
        self._properties = self._chunk_properties()
        minimum = self.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self.call("cuMemGetAllocationGranularity", self._properties, minimum))
        if chunk_bytes <= 0 or chunk_bytes % self.granularity:
            raise ValueError(f"a chunk is a multiple of {self.granularity} bytes on this device, not {chunk_bytes}")
        self.chunk_bytes = chunk_bytes
        self.total_bytes = int(self.call("cuDeviceTotalMem", self._device)) // chunk_bytes * chunk_bytes
        self._handles: dict[Chunk, Any] = {}
        self._mappings = Mappings(chunk_bytes)
        self._threads = threading.local()
        self._lock = threading.RLock()
        self._next = 0
        self._has_context = False

    def call(self, name: str, *args: Any) -> Any:
        """Raises OutOfGpuMemory and GpuError."""
        return check(self.driver, name, getattr(self.driver, name)(*args))

    def reserve(self, num_bytes: int) -> int:
        with self._lock:
            address = int(self.call("cuMemAddressReserve", num_bytes, self.granularity, 0, 0))
            self._mappings.reserved(address, num_bytes)
            return address

    def free(self, address: int) -> None:
        with self._lock:
            self.call("cuMemAddressFree", address, self._mappings.may_free(address))
            self._mappings.freed(address)

    def create(self) -> Chunk:
        with self._lock:
            return self._named(self.call("cuMemCreate", self.chunk_bytes, self._properties, 0))

    def release(self, chunk: Chunk) -> None:
        with self._lock:
            self._mappings.may_release(chunk)
            self.call("cuMemRelease", self._handles.pop(chunk))
            self._mappings.released(chunk)

    def map(self, address: int, chunk: Chunk) -> None:
        with self._lock:
            self._mappings.may_map(address, chunk)
            self.enter()
            self.call("cuMemMap", address, self.chunk_bytes, 0, self._handles[chunk], 0)
            self._mappings.did_map(address, chunk)

    def set_access(self, address: int, num_bytes: int, access: Access) -> None:
        with self._lock:
            self._mappings.run("set_access", address, num_bytes)
            self.enter()
            self.call("cuMemSetAccess", address, num_bytes, [self._access_of(access)], 1)
            self._mappings.did_set_access(address, num_bytes, access)

    def unmap(self, address: int, num_bytes: int) -> list[Chunk]:
        """The driver takes only whole mappings."""
        with self._lock:
            chunks = self._mappings.run("unmap", address, num_bytes)
            self.enter()
            for at in range(address, address + num_bytes, self.chunk_bytes):
                self.call("cuMemUnmap", at, self.chunk_bytes)
                self._mappings.did_unmap(at, self.chunk_bytes)
            return chunks

    def export_fd(self, chunk: Chunk) -> tuple[int, int]:
        with self._lock:
            self._mappings.has("export_fd", chunk)
            return int(self.call("cuMemExportToShareableHandle", self._handles[chunk], self._as_descriptor, 0)), 0

    def import_fd(self, descriptor: int, offset: int) -> Chunk:
        if offset:
            raise GpuError("import_fd", f"a chunk of a GPU has no offset, and got {offset}")
        with self._lock:
            handle = self.call("cuMemImportFromShareableHandle", descriptor, self._as_descriptor)
            return self._named(handle)

    def pin(self, address: int, num_bytes: int) -> None:
        """Pinning populates pages: pin written ones, a few hundred MiB at a time."""
        self.enter()
        flags = self.driver.CU_MEMHOSTREGISTER_PORTABLE | self.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self.call("cuMemHostRegister", address, num_bytes, flags)

    def unpin(self, address: int) -> None:
        self.enter()
        self.call("cuMemHostUnregister", address)

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> _Event:
        """Copy on the calling thread's own stream."""
        with self._lock:
            self._mappings.may_touch("copy_in", address, num_bytes, write=True)
        stream = self._stream()
        self.call("cuMemcpyHtoDAsync", address, host_address, num_bytes, stream)
        event = self.call("cuEventCreate", _NO_TIMING)
        self.call("cuEventRecord", event, stream)
        return _Event(self, event)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        with self._lock:
            self._mappings.may_touch("copy_out", address, num_bytes, write=False)
        self.synchronize()
        self.call("cuMemcpyDtoH", host_address, address, num_bytes)

    def synchronize(self) -> None:
        self.enter()
        self.call("cuCtxSynchronize")

    def tensor(self, address: int, num_bytes: int, owner: object) -> Any:
        with self._lock:
            self._mappings.may_touch("tensor", address, num_bytes, write=False)
        return dlpack.Exported(address, num_bytes, owner, dlpack.CUDA, self.device)

    def mem_info(self) -> tuple[int, int]:
        self.enter()
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        with self._lock:
            if self._has_context:
                self.synchronize()
            for address, _ in self._mappings.ranges:
                for at in self._mappings.mapped(address):
                    self.unmap(at, self.chunk_bytes)
                self.free(address)
            for chunk in self._mappings.chunks:
                self.release(chunk)
            if self._has_context:
                self.call("cuDevicePrimaryCtxRelease", self._device)
                self._has_context = False
                self._threads = threading.local()

    def enter(self) -> None:
        if getattr(self._threads, "is_current", False):
            return
        with self._lock:
            if not self._has_context:
                self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
                self._has_context = True
        self.call("cuCtxSetCurrent", self._context)
        self._threads.is_current = True

    def _stream(self) -> Any:
        self.enter()
        if not hasattr(self._threads, "stream"):
            self._threads.stream = self.call("cuStreamCreateWithPriority", _NON_BLOCKING, 0)
        return self._threads.stream

    def _named(self, handle: Any) -> Chunk:
        chunk = Chunk(self._next)
        self._next += 1
        self._handles[chunk] = handle
        self._mappings.created(chunk)
        return chunk

    def _chunk_properties(self) -> Any:
        driver = self.driver
        made = driver.CUmemAllocationProp()
        made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = self.device
        made.requestedHandleTypes = self._as_descriptor  # required for a later export
        return made

    @property
    def _as_descriptor(self) -> Any:
        return self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _access_of(self, access: Access) -> Any:
        flags = self.driver.CUmemAccess_flags
        made = self.driver.CUmemAccessDesc()
        made.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = self.device
        made.flags = {
            Access.NONE: flags.CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Access.READ: flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access.READ_WRITE: flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }[access]
        return made
