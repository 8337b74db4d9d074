"""What it takes to read weights out of host memory, with and without prefaulting: `python -m bench.region_read [MIB]`.

A region is a file on a memory file system, which an engine maps. Each way of reading it is tried in turn, several
times, in one run: pages taken as they are touched; mapped at once by MAP_POPULATE; by MADV_POPULATE_READ after mapping;
asked for by MADV_WILLNEED; in huge pages where the kernel has them for shared memory. `map` is what it takes until the
mapping stands, `read` to copy every byte into private memory (as an engine does that packs its weights), `touch` to
look at one byte of each page. `write` is how a region is made: with its bytes allocated before the first one lands, as
a fetch does, and without.
"""

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

MIB = 1 << 20
STEP = 1 * MIB
TRIES = 7
MADV_POPULATE_READ = 22  # Linux 5.14
SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

Times = dict[tuple[str, str], list[float]]


def mapped(fd: int, size: int, flags: int = 0, *advice: int) -> mmap.mmap:
    """The file, mapped; advice that the kernel does not know raises OSError."""
    found = mmap.mmap(fd, size, mmap.MAP_SHARED | flags, mmap.PROT_READ)
    for one in advice:
        found.madvise(one)
    return found


WAYS: dict[str, Callable[[int, int], mmap.mmap]] = {
    "as touched": lambda fd, size: mapped(fd, size),
    "MAP_POPULATE": lambda fd, size: mapped(fd, size, mmap.MAP_POPULATE),
    "MADV_POPULATE_READ": lambda fd, size: mapped(fd, size, 0, MADV_POPULATE_READ),
    "MADV_WILLNEED": lambda fd, size: mapped(fd, size, 0, mmap.MADV_WILLNEED),
    "MADV_HUGEPAGE": lambda fd, size: mapped(fd, size, 0, mmap.MADV_HUGEPAGE),
}


def read(way: str, path: Path, size: int, target: np.ndarray, times: Times) -> None:
    """Map, then copy all of it or look at each page."""
    for what in ("read", "touch"):
        fd = os.open(path, os.O_RDONLY)
        began = time.perf_counter()
        try:
            region = WAYS[way](fd, size)
        except OSError as error:
            print(f"{way}: {error}", file=sys.stderr)
            return
        finally:
            os.close(fd)
        stands = time.perf_counter()
        view = np.frombuffer(region, dtype=np.uint8)
        if what == "read":
            np.copyto(target, view)
        else:
            int(view[:: mmap.PAGESIZE].sum())
        done = time.perf_counter()
        times[way, "map"].append(stands - began)
        times[way, what].append(done - stands)
        times[way, f"map + {what}"].append(done - began)
        del view
        region.close()


def write(path: Path, size: int, chunk: bytes, times: Times) -> None:
    for way in ("allocated first", "as it lands"):
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        began = time.perf_counter()
        if way == "allocated first":
            os.posix_fallocate(fd, 0, size)
        for position in range(0, size, len(chunk)):
            os.pwrite(fd, chunk, position)
        times[way, "write"].append(time.perf_counter() - began)
        os.close(fd)


def main() -> None:
    size = int(sys.argv[1] if len(sys.argv) > 1 else 512) * MIB
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    chunk, target, times = os.urandom(STEP), np.empty(size, np.uint8), defaultdict[tuple[str, str], list[float]](list)
    target.fill(1)  # its own pages are there before anything is measured
    with tempfile.TemporaryDirectory(dir=root) as folder:
        path = Path(folder) / "blob"
        for _ in range(TRIES):
            write(path, size, chunk, times)
            for way in WAYS:
                read(way, path, size, target, times)
    huge = SHMEM_HUGE.read_text().strip() if SHMEM_HUGE.exists() else "not there"
    print(f"{size // MIB} MiB on {root or tempfile.gettempdir()}, median of {TRIES}; load {os.getloadavg()[0]:.1f}")
    print(f"huge pages of shared memory ({SHMEM_HUGE}): {huge}")
    for (way, what), seconds in times.items():
        middle, least = statistics.median(seconds), min(seconds)
        print(
            f"{way:20} {what:12} {middle * 1e3:8.1f} ms   best {least * 1e3:8.1f} ms   {size / middle / 1e9:6.2f} GB/s"
        )


if __name__ == "__main__":
    main()
