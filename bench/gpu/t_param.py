"""T10: weights stream to the GPU behind their writer, and an urgent copy overtakes one in the background."""

import threading
import time
from collections.abc import Iterator

from bench.gpu.buffers import gpu_digest, host_digest, pinned
from bench.gpu.report import GB, GIB, Place, Row
from glowplug.weights.region import Region
from glowplug_lab.gpu_slots.copies import Copier, CopyBuckets, CopyClass
from glowplug_lab.gpu_slots.pool import ChunkPool
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import Source, prewarm

WRITER_BYTES_PER_S = 4 * GB
STEP_S = 0.002


def run(place: Place) -> Iterator[Row]:
    """Group 2."""
    yield _progress(place)
    yield _pacer(place)


def _progress(place: Place) -> Row:
    """A writer moves a region's watermark; the loader copies up to it."""
    size = place.size(8 * GIB)
    region = Region(place.folder / "region")
    region.begin()
    ended = {}

    def write() -> None:
        began, done = time.perf_counter(), 0
        while done < size:
            time.sleep(STEP_S)
            done = min(size, int((time.perf_counter() - began) * _rate(place)))
            region.set_watermark(done)
        ended["writer"] = time.perf_counter()

    with place.memory() as memory, pinned(memory, size) as source:
        pool = ChunkPool(memory, size // memory.chunk_bytes)
        slot, writer = Slot(memory, "m", size), threading.Thread(target=write)
        writer.start()
        prewarm(slot, Source(source, size, region.watermark), pool, Copier(memory))
        late_s = time.perf_counter() - ended["writer"]
        writer.join()
        is_equal = gpu_digest(memory, slot.address, size) == host_digest(source, size)
    what = f"{size / GIB:.3g} GiB written at {_rate(place) / GB:.3g} GB/s, copied as they come"
    shown = f"{late_s * 1000:.1f} ms behind the writer; bytes {'equal' if is_equal else 'DIFFER'}"
    is_met = place.met(is_equal, in_time=late_s <= 0.060)
    return Row(
        "T10", what, "60 ms behind", "at most 60 ms behind, bytes equal", shown, is_met, {"late_seconds": late_s}
    )


def _rate(place: Place) -> float:
    """Host memory plays a smaller GPU: the write takes as long."""
    return WRITER_BYTES_PER_S * place.size(8 * GIB) / (8 * GIB)


def _pacer(place: Place) -> Row:
    """2 GiB that a request waits for, beside 8 GiB in the background: alone, in their order, and unordered."""
    urgent, background = place.size(2 * GIB), place.size(8 * GIB)
    with place.memory() as memory, pinned(memory, background) as source:
        pool = ChunkPool(memory, (urgent + background) // memory.chunk_bytes)
        slot = Slot(memory, "m", urgent + background)
        slot.grow(pool.take("m", pool.num_free))
        piece = max(memory.chunk_bytes, 1 << 14) if not place.is_gpu else 16 << 20
        free_for_all = dict.fromkeys(CopyClass, 1 << 50)

        def seconds(copier: Copier, urgency: CopyClass, beside: bool) -> float:
            other = threading.Thread(
                target=lambda: copier.wait(
                    copier.begin(slot.address + urgent, source, background, CopyClass.BACKGROUND)
                )
            )
            if beside:
                other.start()
                time.sleep(0.01 if place.is_gpu else 0)
            began = time.perf_counter()
            copier.wait(copier.begin(slot.address, source, urgent, urgency))
            took = time.perf_counter() - began
            if beside:
                other.join()
            return took

        alone = seconds(Copier(memory, piece_bytes=piece), CopyClass.CRITICAL, beside=False)
        paced = seconds(Copier(memory, piece_bytes=piece), CopyClass.CRITICAL, beside=True)
        unpaced = seconds(Copier(memory, CopyBuckets(free_for_all), piece), CopyClass.BACKGROUND, beside=True)
    shown = f"{paced / alone:.2f} times alone ({alone * 1000:.1f} ms); without an order {unpaced / alone:.2f} times"
    figures = {"alone": alone, "paced": paced, "unpaced": unpaced}
    what = f"an urgent copy of {urgent / GIB:.3g} GiB beside {background / GIB:.3g} GiB in the background"
    return Row(
        "T10",
        what,
        "1.1 times alone",
        "at most 1.2 times alone",
        shown,
        place.met(True, in_time=paced <= 1.2 * alone),
        figures,
    )
