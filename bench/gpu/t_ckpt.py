"""T11 to T13: the driver moves our frozen processes from the GPU to host memory and back."""

import time
from collections.abc import Iterator

from bench.gpu.children import Child
from bench.gpu.owners import NAME, served
from bench.gpu.report import GB, GIB, MIB, Place, Row, not_measured
from glowplug.engines import checkpoint
from glowplug.engines.checkpoint import CheckpointFailed, Checkpoints
from glowplug.engines.freezer import Freezer

ROWS = (
    ("T11", "checkpoint and restore of 4, 16 and 32 GiB", "5 to 13 GB/s and 0.25 s", "restored data equal"),
    ("T12", "frozen before and after the checkpoint", "after works", "one order works"),
    (
        "T13",
        "a process with imported chunks; the same after it gave them up",
        "refused; 0.3 to 0.6 s",
        "restored and equal",
    ),
)


def run(place: Place) -> Iterator[Row]:
    """Group 3."""
    made, why = checkpoint.find()
    if not place.is_gpu:
        why, made = "host memory cannot be checkpointed", None
    if made is None:
        for row in ROWS:
            yield not_measured(*row, why)
        return
    for size in (4 * GIB, 16 * GIB, 32 * GIB):
        if size <= place.most_bytes:
            yield _there_and_back(place, made, size)
    for before in (False, True):
        yield _frozen(place, made, before=before)
    yield _imported(place, made)


def _moved(made: Checkpoints, pids: list[int]) -> tuple[float, float]:
    """(seconds out to host memory, seconds back)."""
    began = time.perf_counter()
    checkpoint.swap_out(made, pids)
    out = time.perf_counter()
    checkpoint.swap_in(made, pids)
    return out - began, time.perf_counter() - out


def _there_and_back(place: Place, made: Checkpoints, size: int) -> Row:
    child = Child("hold", device=place.device, num_bytes=size, chunk_bytes=2 * MIB)
    try:
        child.ask()
        out_s, in_s = _moved(made, [child.process.pid])
        is_equal = child.ask("check") == {"equal": True}
        data = "equal" if is_equal else "DIFFER"
        shown = f"out {out_s:.2f} s, in {in_s:.2f} s ({size / GB / in_s:.1f} GB/s); data {data}"
        figures = {"bytes": float(size), "out_seconds": out_s, "in_seconds": in_s}
    except CheckpointFailed as error:
        is_equal, shown, figures = False, str(error), {}
    finally:
        child.end()
    return Row("T11", f"checkpoint and restore of {size / GIB:g} GiB", *ROWS[0][2:], shown, is_equal, figures)


def _frozen(place: Place, made: Checkpoints, *, before: bool) -> Row:
    child = Child("hold", device=place.device, num_bytes=GIB, chunk_bytes=2 * MIB)
    freezer, pids = Freezer(f"bench-{child.process.pid}"), [child.process.pid]
    order = "before" if before else "after"
    try:
        child.ask()
        if before:
            how = freezer.freeze(pids)
        checkpoint.swap_out(made, pids)
        if not before:
            how = freezer.freeze(pids)
        freezer.thaw(pids)
        checkpoint.swap_in(made, pids)
        works = child.ask("check") == {"equal": True}
        shown = f"by {how}: {'works' if works else 'data DIFFER'}"
    except CheckpointFailed as error:
        works, shown = False, str(error)
    finally:
        freezer.thaw(pids)
        child.end()
    return Row("T12", f"frozen {order} the checkpoint", *ROWS[1][2:], shown, None if before else works)


def _imported(place: Place, made: Checkpoints) -> Row:
    with served(place, place.size(4 * GIB)) as (owner, _, _):
        args = {"device": place.device, "chunk_bytes": place.chunk_bytes, "path": str(owner.path), "name": NAME}
        child = Child("hold", num_bytes=2 * GIB, **args)
        pids = [child.process.pid]
        try:
            child.ask()
            try:
                _moved(made, pids)
                first = "with imported chunks it works"
            except CheckpointFailed as error:
                first = f"with imported chunks: {error}"
            child.ask("drop")
            seconds = sum(_moved(made, pids))
            is_equal = child.ask("again") == {"equal": True}
            shown = f"{first}; without them {seconds:.2f} s, data {'equal' if is_equal else 'DIFFER'}"
        except CheckpointFailed as error:
            is_equal, shown = False, f"{first}; without them: {error}"
        finally:
            child.end()
    return Row(*ROWS[2], shown, is_equal)
