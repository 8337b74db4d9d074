"""Shares of time of overlapping stages."""

import pytest

from glowplug.services.console.story import FIRST_TOKEN, Mark, Span
from glowplug.services.console.trace_api import stages


def row(name: str, start_s: float, end_s: float, *, parent: str = "r", first_token_s: float = 0.0) -> Span:
    marks = (Mark(name=FIRST_TOKEN, at=first_token_s),) if first_token_s else ()
    span_id = "r" if name == "router.request" else name
    return Span(
        span_id=span_id, parent_id="" if span_id == "r" else parent, name=name, service="s", process="s-1",
        started_at=start_s, ended_at=end_s, marks=marks,
    )  # fmt: skip


def phase(name: str, start_s: float, end_s: float) -> Span:
    return Span(
        span_id=name, parent_id="start", name=name, service="s", process="s-1", started_at=start_s, ended_at=end_s,
        phase=name,
    )  # fmt: skip


COLD = [
    phase("decide", 10.0, 10.5), phase("fetch", 10.5, 12.0), phase("launch", 10.5, 13.0), phase("load", 13.0, 14.0),
    phase("warmup", 14.0, 14.5),
]  # fmt: skip
REQUEST = [
    row("router.request", 10.0, 20.0),
    row("router.hold", 10.0, 14.6),
    row("engine.generate", 14.6, 19.9, first_token_s=15.0),
]


def test_a_cold_request_is_cut_into_its_stages() -> None:
    found = {stage.name: (stage.seconds, stage.own_s) for stage in stages([*REQUEST, *COLD])}
    assert found == {
        "queue": (pytest.approx(4.6), pytest.approx(0.1)),
        "decide": (pytest.approx(0.5), pytest.approx(0.5)),
        "fetch": (pytest.approx(1.5), 0.0),
        "launch": (pytest.approx(2.5), pytest.approx(2.5)),
        "load": (pytest.approx(1.0), pytest.approx(1.0)),
        "warmup": (pytest.approx(0.5), pytest.approx(0.5)),
        "prefill": (pytest.approx(0.4), pytest.approx(0.4)),
        "decode": (pytest.approx(4.9), pytest.approx(4.9)),
        "other": (pytest.approx(0.1), pytest.approx(0.1)),
    }


def test_the_shares_are_the_whole() -> None:
    assert sum(stage.own_s for stage in stages([*REQUEST, *COLD])) == pytest.approx(10.0)


def test_a_warm_request_has_prefill_and_decode_only() -> None:
    rows = [row("router.request", 1.0, 2.0), row("engine.generate", 1.0, 2.0, first_token_s=1.25)]
    assert [(s.name, s.own_s) for s in stages(rows)] == [("prefill", 0.25), ("decode", 0.75)]


def test_an_answer_in_one_piece_is_not_guessed_apart() -> None:
    rows = [row("router.request", 1.0, 2.0), row("engine.generate", 1.0, 2.0)]
    assert [s.name for s in stages(rows)] == ["answer"]


def test_what_lies_outside_the_request_does_not_count() -> None:
    rows = [row("router.request", 10.0, 11.0), row("router.hold", 10.0, 11.0)]
    found = stages([*rows, phase("load", 5.0, 10.5), phase("warmup", 11.0, 12.0)])
    assert [(s.name, s.own_s) for s in found] == [("queue", 0.5), ("load", 0.5)]


def test_a_trace_without_a_request_has_none() -> None:
    assert stages([row("agent.start", 1.0, 2.0), phase("load", 1.0, 2.0)]) == []
