"""T0, T1, T3, T4 and T5: mapping memory, weights into slots, the switch from one model to another."""

import resource
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from bench.gpu.buffers import gpu_digest, host_digest, pinned, read, write
from bench.gpu.report import GIB, MIB, Place, Row, not_measured, torch_on_gpu
from glowplug.engines.freezer import own_cgroup
from glowplug_lab.gpu_slots.copies import Copier, CopyClass
from glowplug_lab.gpu_slots.gpu_memory import Access, Chunk, GpuMemory
from glowplug_lab.gpu_slots.pool import ChunkPool
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import Source, activate, prewarm


def run(place: Place) -> Iterator[Row]:
    """Group 1."""
    yield facts(place)
    best = yield from mapping(place)
    yield pipeline(place, best)
    yield from switch(place)
    yield stalls(place)


def facts(place: Place) -> Row:
    """T0."""
    own = own_cgroup(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())
    found = {
        "link": _smi("pcie.link.gen.current,pcie.link.width.current") if place.is_gpu else "none",
        "device": _smi("name,driver_version") if place.is_gpu else "host memory",
        "cgroup v2": str(own) if own else "none",
        "descriptors": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        "huge pages": Path("/proc/sys/vm/nr_hugepages").read_text().strip(),
    }
    with place.memory() as memory:
        found["granularity"] = f"{getattr(memory, 'granularity', memory.chunk_bytes)} B"
    shown = ", ".join(f"{name} {value}" for name, value in found.items())
    return Row("T0", "device, link, rights", "Gen5 x16, 2 MiB", "recorded", shown, figures=found)


def mapping(place: Place) -> Generator[Row, None, float]:
    """T1, by chunk size; returns the seconds per GiB of mapping with the best."""
    best, size = float("inf"), place.size(16 * GIB)
    shares: dict[int, float] = {}  # chunk bytes -> of the copy
    for chunk_bytes in place.chunk_sizes:
        with place.memory(chunk_bytes) as memory:
            seconds = _calls(memory, size // chunk_bytes)
            copy_s = _copy_seconds(memory, size)
        per_gib = {name: value * GIB / size for name, value in seconds.items()}
        total = per_gib["map"] + per_gib["access by run"]
        best = min(best, total)
        shares[chunk_bytes] = total / copy_s * size / GIB
        shown = ", ".join(f"{name} {value * 1000:.1f}" for name, value in per_gib.items())
        yield Row(
            "T1",
            f"chunks of {chunk_bytes / MIB:g} MiB: ms per GiB of each call",
            "map and access: 19 ms at 2 MiB, below 4 ms at 64 MiB",
            "recorded",
            f"{shown}; {shares[chunk_bytes]:.0%} of the copy",
            figures=per_gib,
        )
    chunk_bytes, share = min(shares.items(), key=lambda one: one[1])
    yield Row(
        "T1",
        "map and access, with the best chunk size",
        "map and access: below 4 ms per GiB at 64 MiB",
        "map and access at most 30 % of the copy with one of the sizes",
        f"{share:.0%} of the copy with chunks of {chunk_bytes / MIB:g} MiB",
        share <= 0.3 if place.is_gpu else None,
    )
    return best


def _calls(memory: GpuMemory, num: int) -> dict[str, float]:
    """Seconds that each call took for `num` chunks."""
    size = memory.chunk_bytes
    address = memory.reserve(num * size)
    chunks: list[Chunk] = []
    seconds = {}
    addresses = range(address, address + num * size, size)
    work: dict[str, Callable[[], Any]] = {
        "create": lambda: chunks.extend(memory.create() for _ in range(num)),
        "map": lambda: deque(map(memory.map, addresses, chunks), maxlen=0),
        "access by run": lambda: memory.set_access(address, num * size, Access.READ_WRITE),
        "access by chunk": lambda: deque(
            map(memory.set_access, addresses, repeat(size), repeat(Access.READ_WRITE)), maxlen=0
        ),
        "unmap": lambda: memory.unmap(address, num * size),
        "release": lambda: deque(map(memory.release, chunks), maxlen=0),
    }
    for name, call in work.items():
        began = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - began
    memory.free(address)
    return seconds


def _copy_seconds(memory: GpuMemory, num_bytes: int) -> float:
    """Seconds to copy so many bytes into mapped memory, from a pinned buffer of 256 MiB at most."""
    pool = ChunkPool(memory, num_bytes // memory.chunk_bytes)
    slot = Slot(memory, "copy", num_bytes)
    slot.grow(pool.take("copy", pool.num_free))
    piece = min(256 * MIB, num_bytes)
    with pinned(memory, piece) as source:
        memory.copy_in(slot.address, source, piece).wait()
        began = time.perf_counter()
        pending = [
            memory.copy_in(slot.address + at, source, min(piece, num_bytes - at)) for at in range(0, num_bytes, piece)
        ]
        for copy in pending:
            copy.wait()
        seconds = time.perf_counter() - began
    pool.give("copy", slot.close())
    pool.close()
    return seconds


def pipeline(place: Place, map_s_per_gib: float) -> Row:
    """T3: weights into a slot, mapped and copied side by side, against the copy alone."""
    size = place.size(14 * GIB)
    with place.memory() as memory, pinned(memory, size) as source:
        alone_s = min(_copy_whole(memory, source, size) for _ in range(3))
        pool = ChunkPool(memory, size // memory.chunk_bytes)
        slot, both = Slot(memory, "m", size), []
        for _ in range(3):
            began = time.perf_counter()
            prewarm(slot, Source(source, size, lambda: size), pool, Copier(memory))
            both.append(time.perf_counter() - began)
            is_equal = gpu_digest(memory, slot.address, size) == host_digest(source, size)
            pool.give("m", slot.cut(0))
    ratio, data = min(both) / alone_s, "equal" if is_equal else "DIFFER"
    return Row(
        "T3",
        f"map and copy {size / GIB:.3g} GiB side by side",
        "1.05 times the copy alone",
        "at most 1.10, bytes equal",
        f"{min(both):.4f} s, {ratio:.2f} times the copy alone ({alone_s:.4f} s); bytes {data}",
        place.met(is_equal, in_time=ratio <= 1.10),
        {"seconds": min(both), "alone_seconds": alone_s, "map_s_per_gib": map_s_per_gib},
    )


def _copy_whole(memory: GpuMemory, source: int, size: int) -> float:
    slot = Slot(memory, "alone", size)
    slot.grow([memory.create() for _ in range(size // memory.chunk_bytes)])
    copier = Copier(memory)
    began = time.perf_counter()
    copier.wait(copier.begin(slot.address, source, size, CopyClass.PREWARM))
    seconds = time.perf_counter() - began
    for chunk in slot.close():
        memory.release(chunk)
    return seconds


def switch(place: Place) -> Iterator[Row]:
    """T4, with the default chunk and with the smallest: four models prewarmed, one is hit."""
    for chunk_bytes, most_s in ((place.chunk_bytes, 0.3), (place.chunk_sizes[0], 2.5)):
        weights = place.size(8 * GIB)
        total = max(place.size(100 * GIB), 4 * weights)
        with place.memory(chunk_bytes) as memory, pinned(memory, weights) as source:
            pool = ChunkPool(memory, total // chunk_bytes)
            slots = [Slot(memory, f"m{number}", total) for number in range(4)]
            for slot in slots:
                prewarm(slot, Source(source, weights, partial(int, weights)), pool, Copier(memory))
            began = time.perf_counter()
            steps = activate(slots[0], slots[1:], pool)
            next(steps)
            first_s = time.perf_counter() - began
            for _ in steps:
                continue
            all_s = time.perf_counter() - began
            is_equal = gpu_digest(memory, slots[0].address, weights) == host_digest(source, weights)
            is_usable = _usable(memory, slots[0])
        yield Row(
            "T4",
            f"evict 3 of 4 models of {weights / GIB:.3g} GiB, grow the KV cache to {slots[0].kv_bytes / GIB:.3g} GiB, "
            f"chunks of {chunk_bytes / MIB:g} MiB",
            f"first GiB 20 ms, all {most_s:g} s",
            "weights equal, every chunk of the cache keeps its bytes, times within 2x",
            f"first {first_s * 1000:.1f} ms, all {all_s * 1000:.1f} ms; weights {'equal' if is_equal else 'DIFFER'}, "
            f"cache {'usable' if is_usable else 'NOT USABLE'}",
            place.met(is_equal and is_usable, in_time=first_s <= 0.04 and all_s <= 2 * most_s),
            {"first_seconds": first_s, "all_seconds": all_s},
        )


def _usable(memory: GpuMemory, slot: Slot) -> bool:
    """Whether every chunk of its KV cache keeps a mark of its own."""
    begins = slot.address + slot.weights_end
    places = range(begins, begins + slot.kv_bytes, memory.chunk_bytes)
    for number, at in enumerate(places):
        write(memory, at, number.to_bytes(8, "little"))
    return all(read(memory, at, 8) == number.to_bytes(8, "little") for number, at in enumerate(places))


def stalls(place: Place) -> Row:
    """T5: a loop like decoding, alone and while other memory is mapped, unmapped and copied."""
    texts = (
        "T5",
        "steps of a decode-like loop beside mapping, unmapping and copying",
        "p99 +5 % map, +10 % copy",
        "unmap stalls no step for 10 ms",
    )
    size = place.size(32 * GIB)
    with place.memory() as memory, pinned(memory, min(size, 256 * MIB)) as source:
        stepping = _steps(place, memory)
        if isinstance(stepping, str):
            return not_measured(*texts, stepping)
        with stepping as step:
            alone = _timed(step, 200)
            pool = ChunkPool(memory, size // memory.chunk_bytes)
            slot, stop = Slot(memory, "m", size), threading.Event()
            piece = (source, min(size, 256 * MIB))
            worker = threading.Thread(target=_disturb, args=(memory, pool, slot, piece, stop))
            worker.start()
            beside = _timed(step, 400)
            stop.set()
            worker.join()
    p99 = [statistics.quantiles(values, n=100)[98] for values in (alone, beside)]
    shown = f"p99 {p99[0] * 1000:.2f} ms alone, {p99[1] * 1000:.2f} ms beside; longest {max(beside) * 1000:.2f} ms"
    is_met = max(beside) - statistics.median(alone) <= 0.010 if place.is_gpu else None
    return Row(*texts, shown, is_met, {"p99_alone": p99[0], "p99_beside": p99[1], "longest": max(beside)})


def _disturb(memory: GpuMemory, pool: ChunkPool, slot: Slot, piece: tuple[int, int], stop: threading.Event) -> None:
    copier = Copier(memory)
    while not stop.is_set():
        slot.grow(pool.take("m", pool.num_free))
        copier.wait(copier.begin(slot.address, *piece, CopyClass.BACKGROUND))
        pool.give("m", slot.cut(0))


def _steps(place: Place, memory: GpuMemory) -> Any:
    """One step of about 5 ms, as a context; or the reason why there is none."""

    @contextmanager
    def on_host() -> Iterator[Callable[[], None]]:
        yield lambda: time.sleep(0.001)

    if not place.is_gpu:
        return on_host()
    torch, why = torch_on_gpu()
    if why:
        return why

    @contextmanager
    def on_gpu() -> Iterator[Callable[[], None]]:
        matrix = torch.randn(8192, 8192, device=f"cuda:{place.device}", dtype=torch.bfloat16)
        out = torch.empty_like(matrix)
        torch.matmul(matrix, matrix, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                torch.matmul(matrix, matrix, out=out)

        def step() -> None:
            graph.replay()
            torch.cuda.synchronize()

        yield step

    return on_gpu()


def _timed(step: Callable[[], None], num: int) -> list[float]:
    seconds = []
    for _ in range(num):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds


def _smi(fields: str) -> str:
    asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
