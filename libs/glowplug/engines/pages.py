"""Pages of this process: which are all zeros, and giving them back to the kernel. Linux only.

llama.cpp fills its KV cache with zeros when it makes a context. At that moment nothing else of its length is zero and
resident, so the cache is found from the outside, without a change to llama.cpp. Pages that are given back read as zeros
when they are touched again: as llama.cpp left them. Standard library only, since engine processes import it.
"""

import array
import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 18
_PRESENT = 1 << 63  # in an entry of /proc/self/pagemap: the page is in memory
_PRESENT_BYTE = 1 << 7  # ... in its last byte
_ENTRY_BYTES = 8
_AROUND_BYTES = (1 << 21, 1 << 16)  # what a fault on a file's page brings in: a large folio, or fault_around_bytes
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
    return [pages for pages, permissions, path, _ in _mappings() if permissions == "rw-p" and path in ("", "[heap]")]


def mapped(path: Path) -> list[Pages]:
    """Where this process has mapped that file, deleted or not; none on another system than Linux."""
    return [pages for pages, _ in _mapped(path)]


def num_bytes_read(path: Path, spans: Iterable[tuple[int, int]]) -> int:
    """Bytes of those spans (first byte, end) of a mapped file in which this process has read since its pages were last
    given back; 0 on another system than Linux. A span counts whole: of a table one row may have been read. The kernel
    brings neighbours of a page in with it, so that what lies near the ends of a long span says nothing; where it keeps
    the file in large folios it brings all of one in (Linux 6.18), and short spans seem to have been read."""
    mappings = _mapped(path)
    if not mappings:
        return 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        return sum(end - first for first, end in spans if _was_read(first, end, mappings, pagemap.fileno()))


def _was_read(first: int, end: int, mappings: list[tuple[Pages, int]], pagemap: int) -> bool:
    margin = next((one for one in _AROUND_BYTES if end - first > 2 * one + mmap.PAGESIZE), 0)
    first, end = first + margin, end - margin
    for pages, offset in mappings:
        low, high = max(first, offset), min(end, offset + pages.num_bytes)
        if low < high:
            start = (pages.start + low - offset) // mmap.PAGESIZE
            stop = (pages.start + high - offset - 1) // mmap.PAGESIZE + 1
            entries = os.pread(pagemap, (stop - start) * _ENTRY_BYTES, start * _ENTRY_BYTES)
            if max(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES], default=0) & _PRESENT_BYTE:
                return True
    return False


def _mapped(path: Path) -> list[tuple[Pages, int]]:
    """(addresses, first byte of the file) of each mapping of it."""
    name = str(path.resolve())
    return [(pages, offset) for pages, _, at, offset in _mappings() if at.removesuffix(" (deleted)") == name]


def _mappings() -> list[tuple[Pages, str, str, int]]:
    """(addresses, permissions, path or "", first byte of its file) of each mapping."""
    if sys.platform != "linux":
        return []
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, offset, _, _, *path = line.split(maxsplit=5)
        low, high = addresses.split("-")
        found.append((Pages(int(low, 16), int(high, 16)), permissions, path[0] if path else "", int(offset, 16)))
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


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind; 0 on another system than Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) << 10
    return 0


def give_back(runs: Iterable[Pages]) -> None:
    """Their memory is free at once. Private pages read as zeros from now on, mapped ones as their file has them. Raises
    OSError."""
    for run in runs:
        _advise(run, mmap.MADV_DONTNEED)


def give_back_small(runs: Iterable[Pages]) -> None:
    """`give_back` of mapped pages, so that from now on they come back a few at a time, and never as huge ones. Raises
    OSError."""
    for run in runs:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            _advise(run, mmap.MADV_NOHUGEPAGE)
        _advise(run, mmap.MADV_DONTNEED)


def _advise(run: Pages, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(run.start, run.num_bytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")
