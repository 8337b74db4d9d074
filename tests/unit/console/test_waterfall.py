"""Rows in tree order, even of broken trees."""

from hypothesis import given
from hypothesis import strategies as st

from glowplug.services.console.spans import Resource, Span
from glowplug.services.console.trace_api import Waterfall, waterfall
from glowplug.services.console.trace_store import TraceStore
from tests import console_story as story

RESOURCE = Resource("svc")


def draw(*parents: tuple[int, int]) -> Waterfall:
    """From (id, parent id) pairs, in order of start."""
    store = TraceStore()
    store.add(
        (
            Span("a" * 32, f"{own:016x}", f"{parent:016x}" if parent else "", f"s{own}", 1, 10 + i, 20 + i),
            RESOURCE,
        )
        for i, (own, parent) in enumerate(parents)
    )
    summary, spans = store.summary("a" * 32), store.get("a" * 32)
    assert summary and spans
    return waterfall(summary, spans)


def test_children_stand_under_their_parent_by_start() -> None:
    rows = draw((1, 0), (2, 1), (3, 2), (4, 1)).rows
    assert [(row.name, row.depth, row.num_children) for row in rows] == [
        ("s1", 0, 2),
        ("s2", 1, 1),
        ("s3", 2, 0),
        ("s4", 1, 0),
    ]


def test_a_child_that_starts_before_its_parent_still_stands_under_it() -> None:
    assert [(row.name, row.depth) for row in draw((2, 1), (1, 0)).rows] == [("s1", 0), ("s2", 1)]


def test_an_orphan_stands_at_the_top_with_its_mark() -> None:
    drawn = draw((1, 0), (5, 99), (6, 5))
    assert [(row.name, row.depth, row.is_orphan) for row in drawn.rows] == [
        ("s1", 0, False),
        ("s5", 0, True),
        ("s6", 1, False),
    ]
    assert drawn.num_orphans == 1


def test_a_ring_of_parents_is_cut_open() -> None:
    rows = draw((1, 2), (2, 1), (3, 3)).rows
    assert sorted(row.name for row in rows) == ["s1", "s2", "s3"]
    assert [row.depth for row in rows if row.name == "s1"] == [0]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 35)), min_size=1, max_size=40, unique_by=lambda p: p[0]))
def test_every_span_is_exactly_one_row(parents: list[tuple[int, int]]) -> None:
    rows = draw(*parents).rows
    assert sorted(row.span_id for row in rows) == sorted(f"{own:016x}" for own, _ in parents)
    depth_of = {row.span_id: row.depth for row in rows}
    assert all(row.depth == depth_of[row.parent_id] + 1 for row in rows if row.parent_id)


def test_phases_and_offsets_of_a_cold_start() -> None:
    store = TraceStore()
    store.add(story.received(story.cold_trace(0, 100.0, "m", "r")).spans)
    summary, spans = store.summary(story.trace_id(0)), store.get(story.trace_id(0))
    assert summary and spans
    drawn = waterfall(summary, spans)
    assert [phase.name for phase in drawn.phases] == ["decide", "fetch", "launch", "load", "warmup"]
    assert drawn.services[0] == "glowplug-router" and drawn.request_ids == ("r",)
    assert abs(drawn.duration_s - 2.61) < 1e-6 and drawn.rows[0].offset_s == 0.0
    fetch = drawn.phases[1]
    assert abs(fetch.duration_s - 0.61) < 1e-6 and abs(fetch.predicted_s - 0.671) < 1e-6
