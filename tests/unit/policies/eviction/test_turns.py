"""Turns on a GPU: served to the end of a burst, left once more wait elsewhere than would come for who is there."""

import pytest

from glowplug.policies.eviction.turns import Turn, TurnParams, goes_on

BALANCED = TurnParams(rule="balanced")


def turn(**fields):
    given = {
        "served_s": 10.0,
        "start_s": 8.0,
        "num_in_flight": 4,
        "num_waiting": 0,
        "arriving_per_s": 0.0,
        "num_wanting": 3,
    }
    return Turn(**(given | fields))


def test_fair_turns_last_their_time_whatever_the_queues_are():
    assert goes_on(turn(served_s=4.9)) and not goes_on(turn(served_s=5.0, arriving_per_s=100.0))
    assert not goes_on(turn(served_s=1.0, num_in_flight=0)), "nobody at work: no turn to end"


@pytest.mark.parametrize(("arriving_per_s", "stays"), [(0.0, False), (0.1, False), (0.15, True), (2.0, True)])
def test_a_balanced_turn_ends_when_more_wait_than_would_come_in_a_round(arriving_per_s, stays):
    """A round is two starts of 8 s and a turn of 5 s; three wait, so the balance is at one request in 7 s."""
    assert bool(goes_on(turn(arriving_per_s=arriving_per_s), BALANCED)) is stays


def test_a_balanced_turn_has_a_beginning_and_an_end():
    assert goes_on(turn(served_s=0.9), BALANCED), "its queue has not reached it"
    assert goes_on(turn(served_s=4.0, num_waiting=1), BALANCED)
    assert not goes_on(turn(served_s=4.0, num_waiting=0), BALANCED)
    assert not goes_on(turn(served_s=30.0, arriving_per_s=100.0), BALANCED), "nobody starves"


def test_a_longer_queue_never_lengthens_another_turn():
    for per_s in (0.0, 0.5, 1.0, 3.0):
        held = [bool(goes_on(turn(arriving_per_s=per_s, num_wanting=n), BALANCED)) for n in range(1, 100)]
        assert held == sorted(held, reverse=True)


def test_an_engine_with_a_queue_stays_until_it_is_a_quantum_ahead_and_not_longer():
    busy = {"num_waiting": 5, "num_wanting": 50}
    assert goes_on(turn(ahead=5, **busy), BALANCED) == "it is 5 requests ahead of the other, and may be 6"
    assert not goes_on(turn(ahead=6, **busy), BALANCED)
    assert goes_on(turn(ahead=60, served_s=4.9, **busy), BALANCED), "a start is for more than one batch"
    assert not goes_on(turn(ahead=-60, served_s=30.0, **busy), BALANCED), "nobody keeps a GPU longer"
    assert not goes_on(turn(ahead=0, num_wanting=50), BALANCED), "without a queue its turn ends as before"
    assert goes_on(turn(ahead=60, arriving_per_s=9.0), BALANCED), "a burst is served to its end"
    assert not goes_on(turn(ahead=5, **busy), TurnParams(rule="balanced", fair_requests=0))
