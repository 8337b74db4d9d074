"""bench/papers/p_oracle.py: plans as starts, and the search."""

from collections.abc import Sequence

import pytest

from bench.papers import p_oracle
from bench.papers.experiment import Outcome
from bench.papers.p_oracle import LEAD_S, WINDOW_S, Search
from glowplug_lab.simulator.workload.arrival import Arrival

PROFILE = {"prompt_per_s": 10, "response_per_s": 2, "total_per_s": 12}


def test_a_window_takes_the_largest_of_the_three_ratios() -> None:
    arrivals = [Arrival(1.0, "m", 500, 10), Arrival(2.0, "m", 250, 10), Arrival(30.0, "m", 10, 100)]
    assert p_oracle.demand(arrivals, PROFILE, 70.0) == [pytest.approx(3.0), pytest.approx(2.0), 0.0]


def test_starts_begin_a_start_before_their_window_and_a_short_gap_is_bridged() -> None:
    found = p_oracle.steps([1, 1, 1, 3, 1, 3, 1, 1, 1, 2])
    assert found == [
        (0.0, 1),
        (3 * WINDOW_S - LEAD_S, 3),  # through a gap of one window, shorter than a start
        (6 * WINDOW_S, 1),
        (9 * WINDOW_S - LEAD_S, 2),
    ]


def held_with(needs: Sequence[int], runs: list[list[int]]) -> p_oracle.Callable[[Sequence[int]], Outcome]:
    """A service that misses a minute if a window has less than it needs by its beginning or end in that minute."""

    def run(counts: Sequence[int]) -> Outcome:
        runs.append(list(counts))
        late = {int(n * WINDOW_S // 60) for n, need in enumerate(needs) if counts[n] < need}
        minutes = range(int(len(needs) * WINDOW_S // 60) + 1)
        return {"minutes": [(minute, 9.0 if minute in late else 0.1) for minute in minutes]}

    return run


@pytest.mark.parametrize("error", [-1, 0, 1])
def test_the_search_ends_with_what_is_needed_whatever_it_began_with(error: int) -> None:
    needs = [1, 1, 2, 2, 3, 4, 4, 3, 2, 1, 1, 1, 1, 1, 2, 5, 5, 2, 1, 1, 1, 1, 1, 1]
    runs: list[list[int]] = []
    search = Search(held_with(needs, runs), 0.2, [max(1, need + error) for need in needs])
    outcome = search.fewest()
    assert outcome["counts"] == runs[-1] and outcome["num_runs"] == len(runs)
    assert all(have >= need for have, need in zip(outcome["counts"], needs, strict=True)), "every minute is held"
    assert sum(outcome["counts"]) - sum(needs) <= 13, "the search began with 24 too many or too few"


def test_no_window_gets_more_than_there_are() -> None:
    runs: list[list[int]] = []
    outcome = Search(held_with([99] * 6, runs), 0.2, [3.0] * 6).fewest()
    assert set(outcome["counts"]) == {p_oracle.MOST}
