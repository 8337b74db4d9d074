"""Service levels: which requests count, and which of them missed."""

import pytest

from glowplug.domain.model import Slo
from services.router.slo import SloBook

SLO = Slo(ttft_s=2.0, tpot_s=0.1)
NONE = -1.0


@pytest.mark.parametrize(
    ("status", "ttft_s", "tpot_s", "e2e_s", "ttft", "tpot"),
    [
        (200, 1.0, 0.05, 3.0, (1, 0), (1, 0)),
        (200, 2.5, 0.05, 3.0, (1, 1), (1, 0)),
        (200, 1.0, 0.2, 3.0, (1, 0), (1, 1)),
        (200, 1.0, NONE, 3.0, (1, 0), (0, 0)),  # one token, or not a stream
        (503, NONE, NONE, 0.1, (1, 1), (1, 1)),
        (429, NONE, NONE, 0.1, (1, 1), (1, 1)),
        (502, 1.0, 0.05, 3.0, (1, 1), (1, 1)),  # the engine died in mid-stream
        (400, NONE, NONE, 0.1, (0, 0), (0, 0)),
        (499, NONE, NONE, 1.0, (0, 0), (0, 0)),  # left before it could be called late
        (499, NONE, NONE, 9.0, (1, 1), (0, 0)),
        (499, 1.0, 0.2, 9.0, (0, 0), (0, 0)),
    ],
)
def test_what_counts_and_what_is_missed(
    status: int, ttft_s: float, tpot_s: float, e2e_s: float, ttft: tuple[int, int], tpot: tuple[int, int]
) -> None:
    book = SloBook()
    book.judge("m", SLO, status, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=tpot_s)
    counts = {level: (count.num, count.num_missed) for (_, level), count in book.counts.items()}
    assert counts.get("ttft", (0, 0)) == ttft
    assert counts.get("tpot", (0, 0)) == tpot


def test_a_model_without_levels_is_not_judged() -> None:
    book = SloBook()
    book.judge("m", Slo(), 503, e2e_s=9.0, ttft_s=NONE, tpot_s=NONE)
    assert book.counts == {}
