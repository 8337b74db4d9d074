"""Pages of this process: which are all zeros, and giving them back to the kernel. Linux only.

llama.cpp fills its KV cache with zeros when it makes a context. At that moment nothing else of its length is zero and
resident, so the cache is found from the outside, without a change to llama.cpp. Pages that are given back read as zeros
when they are touched again: as llama.cpp left them. Standard library only, since engine processes import it.
"""

import array
import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 18
_PRESENT = 1 << 63  # in an entry of /proc/self/pagemap: the page is in memory
_ENTRY_BYTES = 8
_SAMPLE_BYTES = 64
_ZEROS = bytes(CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Pages:
    """Addresses from `start` up to `end`, multiples of the page size."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def zero_runs(least_bytes: int) -> list[Pages]:
    """Runs of private memory that is resident and zero, of at least `least_bytes`, in whole chunks. Nothing may write
    to them meanwhile. The chunks at both ends are read whole, those between at three places each, so a run is all zeros
    with near certainty. Raises OSError where the kernel does not let a process look at itself."""
    candidates = [pages for pages in _private() if pages.num_bytes >= least_bytes]
    if not candidates:
        return []
    own = Path("/proc/self")
    with (own / "pagemap").open("rb", buffering=0) as pagemap, (own / "mem").open("rb", buffering=0) as memory:
        runs = [run for pages in candidates for run in _runs_of(pages, pagemap.fileno(), memory.fileno())]
    return [run for run in runs if run.num_bytes >= least_bytes]


def _private() -> list[Pages]:
    """Mappings of this process that can be written and have no file behind them."""
    return [pages for pages, permissions, path in _mappings() if permissions == "rw-p" and path in ("", "[heap]")]


def mapped(path: Path) -> list[Pages]:
    """Where this process has mapped that file, deleted or not; none on another system than Linux."""
    name = str(path.resolve())
    return [pages for pages, _, its_path in _mappings() if its_path.removesuffix(" (deleted)") == name]


def _mappings() -> list[tuple[Pages, str, str]]:
    """(addresses, permissions, path or "") of each mapping."""
    if sys.platform != "linux":
        return []
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
        low, high = addresses.split("-")
        found.append((Pages(int(low, 16), int(high, 16)), permissions, path[0] if path else ""))
    return found


def _runs_of(within: Pages, pagemap: int, memory: int) -> Iterator[Pages]:
    begins, end = -1, within.end - within.num_bytes % CHUNK_BYTES
    for at in range(within.start, end + 1, CHUNK_BYTES):
        if at < end and _is_resident(at, pagemap) and _samples_are_zero(at, memory):
            begins = at if begins < 0 else begins
        elif begins >= 0:
            yield _trimmed(begins, at, memory)
            begins = -1


def _is_resident(at: int, pagemap: int) -> bool:
    """Asked first: reading a page that was never touched would make it look like one that holds zeros."""
    num_pages = CHUNK_BYTES // mmap.PAGESIZE
    entries = array.array("Q", os.pread(pagemap, num_pages * _ENTRY_BYTES, at // mmap.PAGESIZE * _ENTRY_BYTES))
    return len(entries) == num_pages and min(entries) >= _PRESENT


def _samples_are_zero(at: int, memory: int) -> bool:
    places = (at, at + CHUNK_BYTES // 2, at + CHUNK_BYTES - _SAMPLE_BYTES)
    return all(os.pread(memory, _SAMPLE_BYTES, place) == _ZEROS[:_SAMPLE_BYTES] for place in places)


def _trimmed(start: int, end: int, memory: int) -> Pages:
    while start < end and os.pread(memory, CHUNK_BYTES, start) != _ZEROS:
        start += CHUNK_BYTES
    while start < end and os.pread(memory, CHUNK_BYTES, end - CHUNK_BYTES) != _ZEROS:
        end -= CHUNK_BYTES
    return Pages(start, end)


def give_back(runs: Iterable[Pages]) -> None:
    """Their memory is free at once. Private pages read as zeros from now on, mapped ones as their file has them. Raises
    OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for run in runs:
        if libc.madvise(run.start, run.num_bytes, mmap.MADV_DONTNEED):
            number = ctypes.get_errno()
            raise OSError(number, f"madvise: {os.strerror(number)}")
