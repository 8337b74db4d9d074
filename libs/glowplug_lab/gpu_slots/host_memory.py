"""Host memory in place of a GPU: chunks of a memfd, mapped at reserved addresses with MAP_FIXED. Linux only.

As on a GPU, fresh mappings fault until access is granted, contents stay with their chunk, other processes map it by
descriptor, and released memory returns to the system (a hole is punched). Copies complete at once. A process may have
65,530 mappings: keep it small.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from glowplug_lab.gpu_slots import dlpack
from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, GpuError, OutOfGpuMemory
from glowplug_lab.gpu_slots.mappings import Mappings

MIB = 1 << 20
_PROT = {Access.NONE: 0, Access.READ: mmap.PROT_READ, Access.READ_WRITE: mmap.PROT_READ | mmap.PROT_WRITE}
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_FIXED = 0x10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FULL = (errno.ENOSPC, errno.ENOMEM)
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

P = ParamSpec("P")
R = TypeVar("R")


def _alone(
    method: Callable[Concatenate["HostMemory", P], R],
) -> Callable[Concatenate["HostMemory", P], R]:
    def locked(self: "HostMemory", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class HostMemory:
    """Chunks are allocated on creation, as a GPU's are."""

    kind = "host"

    def __init__(self, total_bytes: int, chunk_bytes: int = 2 * MIB) -> None:
        if chunk_bytes <= 0 or chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"a chunk is whole pages of {mmap.PAGESIZE} bytes, not {chunk_bytes} bytes")
        self.chunk_bytes, self.total_bytes = chunk_bytes, total_bytes // chunk_bytes * chunk_bytes
        self._file = os.memfd_create("glowplug-gpu", os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.total_bytes)
        self._unused = list(range(self.total_bytes - chunk_bytes, -1, -chunk_bytes))  # offsets
        self._places: dict[Chunk, tuple[int, int]] = {}  # descriptor, offset
        self._files = {os.fstat(self._file).st_ino: self._file}  # by inode: ours and imported ones
        self._mappings = Mappings(chunk_bytes)
        self._next = 0
        self._lock = threading.RLock()

    @_alone
    def reserve(self, num_bytes: int) -> int:
        address = self._mmap("reserve", None, num_bytes, 0, _EMPTY)
        self._mappings.reserved(address, num_bytes)
        return address

    @_alone
    def free(self, address: int) -> None:
        _check("free", _libc.munmap(address, self._mappings.may_free(address)))
        self._mappings.freed(address)

    @_alone
    def create(self) -> Chunk:
        if not self._unused:
            raise OutOfGpuMemory("create", f"all {self.total_bytes} bytes are taken")
        offset = self._unused[-1]
        try:
            os.posix_fallocate(self._file, offset, self.chunk_bytes)
        except OSError as error:
            if error.errno in _FULL:
                raise OutOfGpuMemory("create", "the machine has no memory left", _name(error.errno)) from error
            raise GpuError("create", str(error), _name(error.errno)) from error
        self._unused.pop()
        return self._named(self._file, offset)

    @_alone
    def release(self, chunk: Chunk) -> None:
        self._mappings.may_release(chunk)
        file, offset = self._places.pop(chunk)
        self._mappings.released(chunk)
        if file == self._file:
            hole = _KEEP_SIZE | _PUNCH_HOLE
            _check("release", _libc.fallocate(file, hole, ctypes.c_long(offset), ctypes.c_long(self.chunk_bytes)))
            self._unused.append(offset)

    @_alone
    def map(self, address: int, chunk: Chunk) -> None:
        self._mappings.may_map(address, chunk)
        file, offset = self._places[chunk]
        self._mmap("map", address, self.chunk_bytes, 0, mmap.MAP_SHARED | _FIXED, file, offset)
        self._mappings.did_map(address, chunk)

    @_alone
    def set_access(self, address: int, num_bytes: int, access: Access) -> None:
        self._mappings.run("set_access", address, num_bytes)
        _check("set_access", _libc.mprotect(address, num_bytes, _PROT[access]))
        self._mappings.did_set_access(address, num_bytes, access)

    @_alone
    def unmap(self, address: int, num_bytes: int) -> list[Chunk]:
        chunks = self._mappings.run("unmap", address, num_bytes)
        self._mmap("unmap", address, num_bytes, 0, _EMPTY | _FIXED)
        self._mappings.did_unmap(address, num_bytes)
        return chunks

    @_alone
    def export_fd(self, chunk: Chunk) -> tuple[int, int]:
        self._mappings.has("export_fd", chunk)
        file, offset = self._places[chunk]
        return os.dup(file), offset

    @_alone
    def import_fd(self, descriptor: int, offset: int) -> Chunk:
        try:
            there = os.fstat(descriptor)
        except OSError as error:
            raise GpuError("import_fd", str(error), _name(error.errno)) from error
        if offset < 0 or offset % self.chunk_bytes or offset + self.chunk_bytes > there.st_size:
            raise GpuError("import_fd", f"{there.st_size} bytes of memory have no chunk at {offset}")
        if there.st_ino not in self._files:
            self._files[there.st_ino] = os.dup(descriptor)
        return self._named(self._files[there.st_ino], offset)

    def pin(self, address: int, num_bytes: int) -> None:
        """Do nothing."""

    def unpin(self, address: int) -> None:
        """Do nothing."""

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> _Done:
        self._may_touch("copy_in", address, num_bytes, write=True)
        ctypes.memmove(address, host_address, num_bytes)
        return _Done()

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        self._may_touch("copy_out", address, num_bytes, write=False)
        ctypes.memmove(host_address, address, num_bytes)

    def synchronize(self) -> None:
        """Return at once."""

    def tensor(self, address: int, num_bytes: int, owner: object) -> Any:
        self._may_touch("tensor", address, num_bytes, write=False)
        return dlpack.Exported(address, num_bytes, owner)

    def mem_info(self) -> tuple[int, int]:
        return self.total_bytes - os.fstat(self._file).st_blocks * 512, self.total_bytes

    @_alone
    def close(self) -> None:
        for address, num_bytes in self._mappings.ranges:
            _check("close", _libc.munmap(address, num_bytes))
        for file in self._files.values():
            os.close(file)
        self._mappings, self._files, self._places, self._unused = Mappings(self.chunk_bytes), {}, {}, []

    def _named(self, file: int, offset: int) -> Chunk:
        chunk = Chunk(self._next)
        self._next += 1
        self._places[chunk] = file, offset
        self._mappings.created(chunk)
        return chunk

    @_alone
    def _may_touch(self, call: str, address: int, num_bytes: int, *, write: bool) -> None:
        self._mappings.may_touch(call, address, num_bytes, write=write)

    def _mmap(
        self, call: str, address: int | None, num_bytes: int, prot: int, flags: int, file: int = -1, offset: int = 0
    ) -> int:
        got = _libc.mmap(address, num_bytes, prot, flags, file, offset)
        if got is None or got == _FAILED:
            raise GpuError(call, f"{num_bytes} bytes cannot be mapped", _name(ctypes.get_errno()))
        return int(got)


def _check(call: str, result: int) -> None:
    if result:
        raise GpuError(call, "the kernel refused", _name(ctypes.get_errno()))


def _name(number: int | None) -> str:
    return errno.errorcode.get(number or 0, str(number))
