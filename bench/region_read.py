"""What it takes to read weights out of host memory and to touch memory first, prefaulted or not, in huge pages or not:
`python -m bench.region_read [MIB] [TRIES]`.

A region is a file on a memory file system, which an engine maps; its own memory is anonymous. Tried in turns, in one
run: that file system as the machine has it, one mounted with huge pages (needs root, else it is left out), a memfd, and
anonymous memory. Each way of mapping: pages taken as they are touched; mapped at once by MAP_POPULATE; by
MADV_POPULATE_READ or _WRITE after mapping; asked for by MADV_WILLNEED; in huge pages where the kernel has them.

`map` is what it takes until the mapping stands, `read` to copy every byte into memory that is there (as an engine does
that packs its weights), `touch` to look at one byte of each page, `fill` to write every byte of fresh anonymous memory,
`again` to read it all once more. `write` is how a region is made: with its bytes allocated before the first one lands,
as a fetch of a GGUF does, and without. `huge` is how much of a mapping the kernel had in huge pages.
"""

import contextlib
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

MIB = 1 << 20
STEP = 1 * MIB
TRIES = 7
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")

Times = dict[tuple[str, str, str], list[float]]
Sizes = dict[tuple[str, str], float]  # of what was mapped, the share in huge pages


def mapped(fd: int, size: int, flags: int, *advice: int) -> mmap.mmap:
    """The file, or of -1 fresh memory. Advice that the kernel does not know raises OSError."""
    if fd < 0:
        found = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    else:
        found = mmap.mmap(fd, size, mmap.MAP_SHARED | flags, mmap.PROT_READ)
    for one in advice:
        found.madvise(one)
    return found


Ways = dict[str, Callable[[int, int], mmap.mmap]]
READS: Ways = {
    "as touched": lambda fd, size: mapped(fd, size, 0),
    "MAP_POPULATE": lambda fd, size: mapped(fd, size, mmap.MAP_POPULATE),
    "MADV_POPULATE_READ": lambda fd, size: mapped(fd, size, 0, MADV_POPULATE_READ),
    "MADV_WILLNEED": lambda fd, size: mapped(fd, size, 0, mmap.MADV_WILLNEED),
    "MADV_HUGEPAGE": lambda fd, size: mapped(fd, size, 0, mmap.MADV_HUGEPAGE),
}
FILLS: Ways = {
    "as touched": lambda fd, size: mapped(fd, size, 0),
    "MADV_POPULATE_WRITE": lambda fd, size: mapped(fd, size, 0, MADV_POPULATE_WRITE),
    "MADV_HUGEPAGE": lambda fd, size: mapped(fd, size, 0, mmap.MADV_HUGEPAGE),
    "both": lambda fd, size: mapped(fd, size, 0, mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE),
}


def in_huge_pages() -> int:
    """Bytes of this process's mappings."""
    fields = (line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(value.split()[0]) << 10 for name, value in fields if name in HUGE)


def mapped_in(way: str, ways: Ways, fd: int, size: int) -> tuple[mmap.mmap, float] | None:
    """The mapping, and what it took; None where this kernel does not know the way."""
    began = time.perf_counter()
    try:
        region = ways[way](fd, size)
    except OSError as error:
        print(f"{way}: {error}", file=sys.stderr)
        return None
    return region, time.perf_counter() - began


def read(kind: str, way: str, fd: int, size: int, target: np.ndarray, times: Times, huge: Sizes) -> None:
    """Map, then copy all of it or look at each page."""
    for what in ("read", "touch"):
        before = in_huge_pages()
        if (found := mapped_in(way, READS, fd, size)) is None:
            return
        region, map_s = found
        view, began = np.frombuffer(region, dtype=np.uint8), time.perf_counter()
        if what == "read":
            np.copyto(target, view)
        else:
            int(view[:: mmap.PAGESIZE].sum())
        took = time.perf_counter() - began
        times[kind, way, "map"].append(map_s)
        times[kind, way, what].append(took)
        times[kind, way, f"map + {what}"].append(map_s + took)
        huge[kind, way] = (in_huge_pages() - before) / size
        del view
        region.close()


def fill(way: str, size: int, source: np.ndarray, times: Times, huge: Sizes) -> None:
    """Fresh anonymous memory, written and read once more."""
    before, kind = in_huge_pages(), "anonymous"
    if (found := mapped_in(way, FILLS, -1, size)) is None:
        return
    region, map_s = found
    view = np.frombuffer(region, dtype=np.uint8)
    began = time.perf_counter()
    np.copyto(view, source)
    filled = time.perf_counter()
    int(view.view(np.uint64).max())
    done = time.perf_counter()
    times[kind, way, "map"].append(map_s)
    times[kind, way, "fill"].append(filled - began)
    times[kind, way, "map + fill"].append(map_s + filled - began)
    times[kind, way, "again"].append(done - filled)
    huge[kind, way] = (in_huge_pages() - before) / size
    del view
    region.close()


def write(kind: str, open_new: Callable[[], int], size: int, chunk: bytes, times: Times) -> int:
    """Make the region in both ways; returns the last one's descriptor."""
    fd = -1
    for way in ("allocated first", "as it lands"):
        if fd >= 0:
            os.close(fd)
        fd, began = open_new(), time.perf_counter()
        if way == "allocated first":
            os.posix_fallocate(fd, 0, size)
        for position in range(0, size, len(chunk)):
            os.pwrite(fd, chunk, position)
        times[kind, way, "write"].append(time.perf_counter() - began)
    return fd


def fresh_file(path: Path) -> int:
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT)


@contextlib.contextmanager
def with_huge_pages(size: int) -> Iterator[Path | None]:
    """A memory file system that was mounted with huge pages; None where this user may mount none."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"huge=always,size={size + 64 * MIB}"
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
        if made.returncode:
            print(f"no file system with huge pages: {made.stderr.decode().strip()}", file=sys.stderr)
        try:
            yield Path(folder) if not made.returncode else None
        finally:
            if not made.returncode:
                subprocess.run(["umount", folder], check=True)


def main() -> None:
    size = int(sys.argv[1] if len(sys.argv) > 1 else 512) * MIB
    num_tries = int(sys.argv[2] if len(sys.argv) > 2 else TRIES)
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    chunk, target = os.urandom(STEP), np.empty(size, np.uint8)
    times, huge = defaultdict[tuple[str, str, str], list[float]](list), dict[tuple[str, str], float]()
    target.fill(1)  # its own pages are there before anything is measured
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=root) as folder, with_huge_pages(size) as huge_folder:
        kinds: dict[str, Callable[[], int]] = {"file system": lambda: fresh_file(Path(folder) / "blob")}
        if huge_folder is not None:
            kinds["... huge=always"] = lambda: fresh_file(huge_folder / "blob")
        kinds["memfd"] = lambda: os.memfd_create("region")
        for _ in range(num_tries):
            for kind, open_new in kinds.items():
                fd = write(kind, open_new, size, chunk, times)
                for way in READS:
                    read(kind, way, fd, size, target, times, huge)
                os.ftruncate(fd, 0)
                os.close(fd)
            for way in FILLS:
                fill(way, size, target, times, huge)
    print(f"{size // MIB} MiB on {root or tempfile.gettempdir()}, median of {num_tries}; ", end="")
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after; Linux {os.uname().release}")
    for name in ("enabled", "shmem_enabled", "defrag"):
        held = (SETTINGS / name).read_text().strip() if (SETTINGS / name).exists() else "not there"
        print(f"{SETTINGS / name}: {held}")
    for (kind, way, what), seconds in times.items():
        middle, least = statistics.median(seconds), min(seconds)
        share = f"   {huge[kind, way]:4.0%} huge" if (kind, way) in huge else ""
        print(
            f"{kind:16} {way:20} {what:12} {middle * 1e3:8.1f} ms   best {least * 1e3:8.1f} ms"
            f"   {size / middle / 1e9:6.2f} GB/s{share}"
        )


if __name__ == "__main__":
    main()
