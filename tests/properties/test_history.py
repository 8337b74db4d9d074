"""The console's history: coarse slots sum fine ones, quantiles keep their bound."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from glowplug.services.console.history import QUANTILE_ERROR, SPANS, Cell, History, Sample, bucket_of, quantile
from tests import console_story as story

T = 1_700_000_400.0
ONE = story.request_finished(1, T)
MODELS = ("a", "b", "c")
EVENTS = st.lists(
    st.tuples(
        st.floats(-300.0, 4000.0),  # seconds since the one before: clocks go back too
        st.sampled_from(MODELS),
        st.integers(0, 5000),
        st.floats(0.0, 500.0),
        st.booleans(),
    ),
    max_size=60,
)


def whole(history: History, span: str, scope: str) -> Cell:
    """All slots of a ring, with data that finer rings still hold."""
    total = Cell()
    for start in {
        *history.rings[span].closed,
        *(history.rings[span].start_of(ring.open_at) for ring in history.rings.values() if ring.open_at is not None),
    }:
        if slot := history._slot(span, start, scope):
            total.add(slot[1])
    return total


@given(EVENTS)
def test_a_sum_over_coarse_slots_is_the_sum_over_fine_ones(events: list[tuple[float, str, int, float, bool]]) -> None:
    history, now_s = History({name: (width, 10**6) for name, (width, _) in SPANS.items()}), T
    for step_s, model, tokens, ttft_s, cold in events:
        now_s += step_s
        fact = replace(ONE, model_key=model, response_tokens=tokens, ttft_s=ttft_s, cold=cold)
        history.take(story.fact(fact, now_s), now_s)
        history.sample(Sample({model: tokens}, {}, tokens, 0, tokens), now_s)
    for scope in ("", *MODELS):
        fine, *coarser = (whole(history, span, scope) for span in SPANS)
        assert all(coarse == fine for coarse in coarser)
    assert whole(history, "1h", "").num_requests == len(events) or _went_far_back(events)


def _went_far_back(events: list[tuple[float, str, int, float, bool]]) -> bool:
    at = highest = 0.0
    for step_s, *_ in events:
        at += step_s
        highest = max(highest, at)
        if highest - at > 1200 - 1:
            return True
    return False


@given(st.lists(st.floats(1e-3, 3600.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bound_however_slots_are_split(seconds: list[float], share: float) -> None:
    total = Cell()
    for second in seconds:
        total.add(Cell(ttft={bucket_of(second): 1}))
    true = sorted(seconds)[max(1, math.ceil(share * len(seconds))) - 1]
    found = quantile(total.ttft, share)
    assert found is not None and abs(found - true) <= (QUANTILE_ERROR + 1e-9) * true


def test_thirty_days_take_no_more_than_the_rings() -> None:
    history, now_s = History(), T
    fact = story.fact(replace(ONE, model_key="a"), T)
    for _ in range(30 * 86400 // 60):
        now_s += 60
        history.take(fact, now_s)
    for span, (_, num_slots) in SPANS.items():
        assert len(history.rings[span].closed) <= num_slots
        assert len(history.rings[span].unsaved) <= num_slots
    assert (
        sum(len(raw) for ring in history.rings.values() for slot in ring.closed.values() for raw in slot.values()) < 1e6
    )
