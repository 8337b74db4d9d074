"""A log's last lines: bounds, filters, cursors."""

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.telemetry.log_ring import LINE_BYTES, MAX_LINE_CHARS, LogFilter, LogRing


def texts(ring: LogRing, after: str = "", wanted: LogFilter = LogFilter(), limit: int = 1000) -> list[str]:
    return [line.text for line in ring.read(after, wanted, limit).lines]


def filled(*said: str, **bounds: int) -> LogRing:
    ring = LogRing(**bounds)
    for number, text in enumerate(said):
        ring.put(float(number), "info", text, {})
    return ring


def test_the_oldest_lines_leave_beyond_either_bound() -> None:
    assert texts(filled("a", "b", "c", max_lines=2)) == ["b", "c"]
    ring = filled(*(f"{n:0100}" for n in range(50)), max_bytes=10 * (LINE_BYTES + 100))
    assert len(texts(ring)) == 10 and ring.num_bytes == 10 * (LINE_BYTES + 100)


def test_a_line_is_cut_and_one_that_is_too_large_stands_alone() -> None:
    ring = filled("a", "x" * 100_000, max_bytes=1000)
    assert texts(ring) == ["x" * MAX_LINE_CHARS]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 5)), max_size=30), st.integers(1, 20))
def test_a_reader_gets_every_line_once_or_hears_how_many_it_lost(steps: list[tuple[int, int]], max_lines: int) -> None:
    ring, cursor, got, num_lost, said = LogRing(max_lines=max_lines), "", [], 0, 0
    cursor = ring.read().cursor
    for num_lines, limit in [*steps, (0, 1000)]:
        for _ in range(num_lines):
            ring.put(0.0, "info", str(said), {})
            said += 1
        page = ring.read(cursor, limit=limit)
        cursor, num_lost = page.cursor, num_lost + page.num_lost
        got += [int(line.text) for line in page.lines]
    assert got == sorted(set(got)) and len(got) + num_lost == said


def test_a_filter_moves_the_cursor_past_what_does_not_fit() -> None:
    ring = filled("red fox", "blue fox", "red hen")
    start = filled().read().cursor.replace(filled().run, ring.run)
    page = ring.read(f"{ring.run}:0", LogFilter(words=("RED",)), limit=1)
    assert [line.text for line in page.lines] == ["red fox"] and start
    assert texts(ring, page.cursor, LogFilter(words=("red",))) == ["red hen"]
    assert texts(ring, ring.read(page.cursor, LogFilter(words=("none",))).cursor) == []


def test_levels_words_and_ids() -> None:
    ring = LogRing()
    ring.put(1.0, "warning", "the bus is away", {"request_id": "r-1", "model": "", "exception": None})
    ring.put(2.0, "info", "placed i-7", {"model": "smol-chat"})
    assert texts(ring, wanted=LogFilter(level="warning")) == ["the bus is away"]
    assert texts(ring, wanted=LogFilter(ids=("r-1", "i-7"))) == ["the bus is away", "placed i-7"]
    assert texts(ring, wanted=LogFilter(ids=("r-",))) == []  # an id in a field must match whole
    assert texts(ring, wanted=LogFilter(words=("smol", "placed"))) == ["placed i-7"]
    assert ring.read().lines[0].fields == {"request_id": "r-1"}


@pytest.mark.parametrize("cursor", ["another:5", "nonsense", "x:", ":", "9:9:9"])
def test_a_cursor_of_another_run_begins_anew(cursor: str) -> None:
    assert texts(filled("a", "b"), cursor) == ["a", "b"]


async def test_a_reader_that_waits_is_woken_from_another_thread() -> None:
    ring = filled("a")
    cursor = ring.read().cursor
    waiting = asyncio.create_task(ring.wait(cursor, 10))
    await asyncio.sleep(0)
    threading.Thread(target=ring.put, args=(time.time(), "info", "b", {})).start()
    await waiting
    assert texts(ring, cursor) == ["b"]
    await ring.wait(cursor, 10)
    await ring.wait(ring.read(cursor).cursor, 0.01)
