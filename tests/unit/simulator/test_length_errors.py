"""PreServe Table 2: expected lengths are off by what its predictor was off by."""

from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from glowplug.simulator.scenario.load import load
from glowplug.simulator.workload.arrival import Arrival
from glowplug.simulator.workload.sampling import PRESERVE, ErrorShape, expected_tokens, with_errors

NUM = 40_000


def lengths(kind: str) -> list[int]:
    """Responses of a chat: many short, some near the most there may be."""
    chance = Random(kind)
    if kind == "short":
        return [chance.randint(1, 60) for _ in range(NUM)]
    if kind == "long":
        return [chance.randint(3800, 4096) for _ in range(NUM)]
    return [min(4096, max(1, round(chance.lognormvariate(5.0, 1.1)))) for _ in range(NUM)]


@pytest.mark.parametrize("kind", ["short", "chat", "long"])
def test_the_errors_are_those_of_table_2(kind: str) -> None:
    """MAE 78.25; 56.77, 68.79 and 77.95 % within 25, 50 and 100 tokens: whatever the lengths are."""
    errors, expected = [], []
    for at, tokens in enumerate(lengths(kind)):
        expected.append(expected_tokens(tokens, 1, at))
        errors.append(abs(expected[-1] - tokens))
    assert fmean(errors) == pytest.approx(78.25, rel=0.02)
    for within, share in ((25, 0.5677), (50, 0.6879), (100, 0.7795)):
        assert fmean(error <= within for error in errors) == pytest.approx(share, abs=0.008), within
    assert min(expected) >= 1 and max(expected) <= 4096


def test_errors_go_both_ways_where_there_is_room() -> None:
    off = [expected_tokens(2000, "a", at) - 2000 for at in range(NUM)]
    assert fmean(o > 0 for o in off) == pytest.approx(0.5, abs=0.02) and abs(fmean(off)) < 3


def test_a_request_has_one_expectation_and_a_seed_another() -> None:
    first = [expected_tokens(300, 1, f"r-{at}") for at in range(50)]
    assert first == [expected_tokens(300, 1, f"r-{at}") for at in range(50)]
    assert first != [expected_tokens(300, 2, f"r-{at}") for at in range(50)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="true_tokens: 0"):
        expected_tokens(0, 1, 1)
    with pytest.raises(ValueError, match="true_tokens: 5000"):
        expected_tokens(5000, 1, 1)
    with pytest.raises(ValueError, match="within"):
        ErrorShape(within=((50, 0.5), (25, 0.6)))
    with pytest.raises(ValueError, match="mean_tokens"):
        ErrorShape(mean_tokens=10.0)


def test_the_tail_makes_up_the_mean() -> None:
    assert PRESERVE.tail_tokens == pytest.approx(171, abs=2)


def test_a_stream_carries_its_expectations() -> None:
    arrivals = [Arrival(float(at), "m", 10, 5 + at) for at in range(200)] + [Arrival(200.0, "m", 1, 9999)]
    told = list(with_errors(arrivals, 3))
    assert [a._replace(expected_tokens=0) for a in told] == arrivals
    assert told[7].expected_tokens == expected_tokens(12, 3, 7)
    assert all(1 <= a.expected_tokens <= 4096 for a in told)


def test_a_scenario_asks_for_them() -> None:
    """workload.length_errors sets the expectation beside the true length and changes nothing else."""
    path = Path(__file__).parents[3] / "scenarios" / "preserve.yaml"
    plain, off = (
        list(islice(load(path, [f"workload.length_errors={asked}"]).arrivals(), 300)) for asked in ("false", "true")
    )
    assert [a._replace(expected_tokens=0) for a in off] == plain
    assert 30 < fmean(abs(a.expected_tokens - a.response_tokens) for a in off) < 140
