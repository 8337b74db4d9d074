"""Finding and returning zero pages. Lane: fast, 0.5 s."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from glowplug.engines import llamacpp_sleep
from glowplug.engines.llamacpp_sleep import CHUNK_BYTES, Pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUM_BYTES = 24 * CHUNK_BYTES


@pytest.fixture
def buffer() -> Iterator[mmap.mmap]:
    """Like a cleared KV cache."""
    with mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as made:
        made.write(bytes(NUM_BYTES))
        yield made


def place_of(buffer: mmap.mmap) -> Pages:
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return Pages(start, start + len(buffer))


def overlap(place: Pages) -> int:
    runs = llamacpp_sleep.zero_runs(1 << 20)
    return sum(max(0, min(run.end, place.end) - max(run.start, place.start)) for run in runs)


def test_a_buffer_of_zeros_is_found(buffer: mmap.mmap) -> None:
    assert overlap(place_of(buffer)) >= NUM_BYTES - 2 * CHUNK_BYTES


def test_memory_that_was_never_touched_is_not(buffer: mmap.mmap) -> None:
    with mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as untouched:
        assert overlap(place_of(untouched)) == 0


@pytest.mark.parametrize("at", [0, CHUNK_BYTES // 2, NUM_BYTES - 1], ids=["start", "inside its first chunk", "end"])
def test_what_is_not_zero_bounds_a_run(buffer: mmap.mmap, at: int) -> None:
    buffer[at] = 1
    place = place_of(buffer)
    assert all(not run.start <= place.start + at < run.end for run in llamacpp_sleep.zero_runs(1 << 20))


def test_short_runs_are_left_out(buffer: mmap.mmap) -> None:
    for at in range(0, NUM_BYTES, 2 * CHUNK_BYTES):
        buffer[at] = 1
    assert overlap(place_of(buffer)) == 0


def test_what_is_given_back_is_free_and_reads_as_zeros(buffer: mmap.mmap) -> None:
    place, process = place_of(buffer), psutil.Process()
    buffer[:] = b"x" * NUM_BYTES
    before = process.memory_info().rss
    llamacpp_sleep.give_back([place])
    assert before - process.memory_info().rss >= NUM_BYTES // 2
    assert buffer[:] == bytes(NUM_BYTES)


def test_a_mapped_file_is_found_by_its_name_even_when_it_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert sum(found.num_bytes for found in llamacpp_sleep.mapped(path)) == len(mapping)
        path.unlink()
        assert llamacpp_sleep.mapped(path)
    assert llamacpp_sleep.mapped(path) == []


def test_pages_that_are_not_ours_are_an_error() -> None:
    with pytest.raises(OSError, match="madvise"):
        llamacpp_sleep.give_back([Pages(mmap.PAGESIZE, 2 * mmap.PAGESIZE)])


def test_what_of_a_mapped_file_was_read_since_its_pages_were_given_back(tmp_path: Path) -> None:
    path, part = tmp_path / "weights", 16 << 20
    with path.open("wb") as file:
        file.write(bytes(part))
        file.seek(3 * part - 1)
        file.write(b"x")
    spans = [(0, part), (part, 2 * part), (2 * part, 3 * part)]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as data:
        assert data[part // 2] == data[2 * part + part // 2] == 0
        assert llamacpp_sleep.num_bytes_read(path, spans) == 2 * part
        llamacpp_sleep.give_back_small(llamacpp_sleep.mapped(path))
        assert llamacpp_sleep.num_bytes_read(path, spans) == 0
        assert data[part + part // 2] == 0
        assert llamacpp_sleep.num_bytes_read(path, spans) == part
    assert llamacpp_sleep.num_bytes_read(path, spans) == 0, "it is mapped no more"
