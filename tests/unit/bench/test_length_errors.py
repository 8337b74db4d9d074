"""Expected lengths with tabled errors."""

from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from bench.papers.length_errors import MAX_TOKENS, LengthErrors
from glowplug_lab.simulator.workload.arrival import Arrival

TABLE = "edges = [0.5, 2.0]\nshares = [0.25, 0.75]\nratios = [[2, 4], [1, 1], [0.5, 0.7]]\n"


def table(tmp_path: Path, text: str) -> LengthErrors:
    path = tmp_path / "errors.toml"
    path.write_text(text, encoding="utf-8")
    return LengthErrors.read(path)


def test_a_ratio_lies_between_the_quantiles_of_its_row(tmp_path: Path) -> None:
    errors = table(tmp_path, TABLE)
    assert [errors.ratio(0.1, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [2, 2, 3, 4, 4]
    assert errors.ratio(1.0, 0.3) == 1 and errors.ratio(2.0, 0.5) == pytest.approx(0.6)


def test_each_request_expects_its_own_length_by_the_seed(tmp_path: Path) -> None:
    errors = table(tmp_path, TABLE)
    arrivals = [Arrival(float(at), "m", 10, (10, 100, 10_000)[at % 3]) for at in range(300)]
    found = list(errors.given(arrivals, 100.0, 1))
    assert [one._replace(expected_tokens=0) for one in found] == arrivals
    assert all(20 <= one.expected_tokens <= 40 for one in found[::3])
    assert all(one.expected_tokens == 100 for one in found[1::3])
    assert all(one.expected_tokens == MAX_TOKENS for one in found[2::3])
    assert list(errors.given(arrivals, 100.0, 1)) == found != list(errors.given(arrivals, 100.0, 2))
    assert list(errors.given(arrivals, 1000.0, 1))[1].expected_tokens >= 200, "100 is short where the median is 1000"


@pytest.mark.parametrize("text", [TABLE.replace("[1, 1], ", ""), TABLE.replace("[1, 1]", "[1, 0.5]")])
def test_a_table_with_a_row_too_few_or_one_that_falls_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"errors\.toml"):
        table(tmp_path, text)


def test_the_shipped_table_draws_short_answers_longer_and_long_ones_shorter() -> None:
    """A hedging model regresses to the median."""
    errors = LengthErrors.read()
    middle = [errors.ratio(length, 0.5) for length in (0.04, 0.15, 0.6, 1.2, 4.0)]
    assert all(left > right for left, right in pairwise(middle)) and middle[0] > 1 > middle[-1]
    off = [abs(errors.ratio(1.0, at / 100) - 1.0) for at in range(1, 100)]
    assert 0.1 < fmean(off) < 0.6
