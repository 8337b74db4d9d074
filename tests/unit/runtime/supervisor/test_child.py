"""How long a start may go unanswered."""

from glowplug.runtime.supervisor.child import MOST_START_TIMEOUTS, start_limit_s


def test_each_further_start_gets_twice_the_time_up_to_a_bound() -> None:
    limits = [start_limit_s(num_unanswered, 60.0) for num_unanswered in range(7)]
    assert limits[:5] == [60.0, 120.0, 240.0, 480.0, 960.0]
    assert set(limits[5:]) == {60.0 * MOST_START_TIMEOUTS} == {start_limit_s(10**9, 60.0)}


def test_no_limit_stays_none() -> None:
    assert start_limit_s(3, 0.0) == 0.0
