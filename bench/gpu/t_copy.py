"""T2: bytes per second from host memory to the GPU, by kind of host memory, size of a copy and number of streams."""

import threading
import time
from collections.abc import Iterator

from bench.gpu.buffers import host_bytes
from bench.gpu.report import GB, GIB, MIB, Place, Row
from glowplug_lab.gpu_slots.gpu_memory import GpuError, GpuMemory
from glowplug_lab.gpu_slots.pool import ChunkPool
from glowplug_lab.gpu_slots.slots import Slot

KINDS = ("registered, 4 KiB pages", "registered, huge pages", "pageable")


def run(place: Place) -> Iterator[Row]:
    """Group 1."""
    size = place.size(4 * GIB)
    with place.memory() as memory:
        pool = ChunkPool(memory, size // memory.chunk_bytes)
        slot = Slot(memory, "copy", size)
        slot.grow(pool.take("copy", pool.num_free))
        for kind in KINDS:
            yield _of_kind(place, memory, slot, size, kind)


def _of_kind(place: Place, memory: GpuMemory, slot: Slot, size: int, kind: str) -> Row:
    figures: dict[str, float | str] = {}
    try:
        with host_bytes(size, huge="huge" in kind) as source:
            if "registered" in kind:
                began = time.perf_counter()
                memory.pin(source, size)
                figures["pin_s_per_gb"] = (time.perf_counter() - began) * GB / size
            try:
                for piece in (2 * MIB, 16 * MIB, 64 * MIB):
                    for num_streams in (1, 2, 4):
                        rate = _rate(memory, slot.address, source, size, min(piece, size), num_streams)
                        figures[f"{piece // MIB} MiB, {num_streams} streams"] = rate / GB
            finally:
                if "registered" in kind:
                    memory.unpin(source)
    except (OSError, GpuError) as error:
        return Row("T2", f"copy to the GPU, {kind}", "", "", f"not measured: {error}")
    rates = {name: float(value) for name, value in figures.items() if "streams" in name}
    best = max(rates, key=lambda name: rates[name])
    pin = f", pin {float(figures['pin_s_per_gb']):.3f} s/GB" if "pin_s_per_gb" in figures else ""
    expected = "5 to 15 GB/s" if kind == "pageable" else "53 to 57 GB/s on Gen5"
    is_met = rates[best] >= 50 if place.is_gpu and kind != "pageable" else None
    shown = f"{rates[best]:.1f} GB/s ({best}){pin}"
    return Row(
        "T2", f"copy to the GPU, {kind}", expected, "registered: at least 50 GB/s on Gen5", shown, is_met, figures
    )


def _rate(memory: GpuMemory, address: int, source: int, size: int, piece: int, num_streams: int) -> float:
    """Bytes per second; a thread has a stream of its own."""
    share = size // num_streams // piece * piece or size // num_streams

    def copy(number: int) -> None:
        first = number * share
        pending = [
            memory.copy_in(address + first + at, source + first + at, min(piece, share - at))
            for at in range(0, share, piece)
        ]
        for one in pending:
            one.wait()

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(num_streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return share * num_streams / (time.perf_counter() - began)
