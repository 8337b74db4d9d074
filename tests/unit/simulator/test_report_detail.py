"""What a report's page is given of a run: never more than it can carry, whatever the run was."""

from typing import Any

import pytest

from glowplug.simulator.report import page_data
from glowplug.simulator.report.page_data import Spans
from glowplug.simulator.scenario.load import load
from tests.unit.simulator.scenarios import write


@pytest.fixture
def spans(tmp_path: Any) -> Spans:
    """Ten stays on one GPU, of 1 s, 2 s, ... with a second between them."""
    held = Spans(load(write(tmp_path)).setup)
    at_s = 0.0
    for number in range(1, 11):
        held.gpu("node-1/0", at_s, [(f"i-{number}", "weights", 10)])
        held.gpu("node-1/0", at_s + number, [])
        at_s += number + 1
    held.finish(at_s)
    return held


def test_a_page_that_can_carry_all_stays_leaves_none_out(spans: Spans) -> None:
    columns, num_left_out = spans.kept()
    assert (len(columns["from"]), num_left_out) == (10, 0)
    assert spans.use()[:3] == [(0.0, 1), (1.0, 0), (2.0, 1)]


def test_of_too_many_stays_the_longest_are_kept_in_their_order(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "MAX_SPANS", 3)
    monkeypatch.setattr(page_data, "MAX_STEPS", 5)
    columns, num_left_out = spans.kept()
    assert [upto - since for since, upto in zip(columns["from"], columns["to"], strict=True)] == [8, 9, 10]
    assert num_left_out == 7
    assert len(spans.use()) <= 5
