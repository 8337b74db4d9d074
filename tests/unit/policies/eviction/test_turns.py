"""Time slices on a GPU, and models' shares while memory is short, counted by hand."""

import pytest

from glowplug.policies.eviction.turns import BusyEngine, ModelDemand, Shares, TurnParams, account, goes_on

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
    return BusyEngine(**(given | fields))


def test_fair_turns_last_their_time_whatever_the_queues_are():
    assert goes_on(turn(served_s=4.9)) and not goes_on(turn(served_s=5.0, arriving_per_s=100.0))
    assert not goes_on(turn(served_s=1.0, num_in_flight=0)), "nobody at work: no turn to end"


@pytest.mark.parametrize(("arriving_per_s", "stays"), [(0.0, False), (0.1, False), (0.15, True), (2.0, True)])
def test_a_balanced_turn_ends_when_more_wait_than_would_come_in_a_round(arriving_per_s, stays):
    """A round is two starts of 8 s and a turn of 5 s; three wait, so the balance is one request in 7 s."""
    assert bool(goes_on(turn(arriving_per_s=arriving_per_s), BALANCED)) is stays


def test_as_many_waiting_as_would_come_are_no_reason_to_go():
    """A round of 12 s at one request in 4 s: three would come, and three wait."""
    even = {"start_s": 3.5, "arriving_per_s": 0.25}
    assert (
        goes_on(turn(num_wanting=3, **even), BALANCED)
        == "3.0 requests would come for it until it is back, and 3 wait for the other"
    )
    assert not goes_on(turn(num_wanting=4, **even), BALANCED)


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


@pytest.mark.parametrize(
    ("fields", "stays"),
    [
        ({"served_s": 0.99}, True),
        ({"served_s": 1.0}, False),
        ({"served_s": 4.99, "num_waiting": 1, "ahead": 9}, True),
        ({"served_s": 5.0, "num_waiting": 1, "ahead": 9}, False),
        ({"served_s": 29.9, "num_waiting": 1, "ahead": 5}, True),
        ({"served_s": 30.0, "num_waiting": 1, "ahead": 5}, False),
        ({"served_s": 29.9, "arriving_per_s": 9.0}, True),
        ({"served_s": 30.0, "arriving_per_s": 9.0}, False),
        ({"num_waiting": 1, "ahead": 5, "served_s": 12.0}, True),
        ({"num_waiting": 1, "ahead": 6, "served_s": 12.0}, False),
    ],
)
def test_a_balanced_turn_ends_at_each_of_its_limits(fields, stays):
    assert bool(goes_on(turn(**fields), BALANCED)) is stays


@pytest.mark.parametrize(("in_flight", "waiting", "stays"), [(0, 0, False), (1, 0, True), (0, 1, True), (1, 1, True)])
def test_a_fair_turn_is_one_while_anybody_is_served_or_waits(in_flight, waiting, stays):
    fields = {"num_in_flight": in_flight, "num_waiting": waiting}
    assert bool(goes_on(turn(served_s=1.0, **fields))) is stays
    assert not goes_on(turn(served_s=5.0, **fields))


FORGET_S = 30.0


def counted(shares, now_s, waiting=("a",), **demands):
    known = {key: ModelDemand(num_dispatched=num, num_open=num_open) for key, (num, num_open) in demands.items()}
    return account(shares, known, set(waiting), now_s, FORGET_S)


def test_only_what_is_dispatched_while_somebody_waits_is_counted():
    shares = counted(Shares(), 0.0, a=(100, 5), b=(7, 5))
    assert shares.given == {"a": 0, "b": 0}
    shares = counted(shares, 0.5, a=(100, 5), b=(10, 5))
    assert shares.given == {"a": 0, "b": 3} and shares.ahead("b", of="a") == 3
    assert shares.behind({"a", "b", "nobody"}) == {"a": 3, "b": 0} and shares.least_given == 0
    assert shares.ahead("b", of="nobody") == 0


def test_a_router_that_began_anew_takes_nothing_back():
    shares = counted(counted(Shares(), 0.0, a=(5, 1), b=(50, 1)), 0.5, a=(5, 1), b=(60, 1))
    assert counted(shares, 1.0, a=(5, 1), b=(2, 1)).given == {"a": 0, "b": 10}


def test_who_begins_to_wait_starts_level_with_the_waiting_one_that_has_least():
    shares = counted(Shares(), 0.0, a=(0, 1), b=(0, 1), idle=(0, 0))
    shares = counted(shares, 5.0, a=(20, 1), b=(40, 1), idle=(0, 0))
    shares = counted(shares, 6.0, ("a", "b", "new", "idle"), a=(20, 1), b=(40, 1), idle=(0, 3), new=(9, 2))
    assert shares.given == {"a": 20, "b": 40, "idle": 20, "new": 20}, "an empty queue saves nothing for later"
    shares = counted(shares, 7.0, ("a",), a=(20, 1), b=(40, 0))
    shares = counted(shares, 8.0, ("a", "b"), a=(20, 1), b=(40, 2))
    assert shares.given["b"] == 40, "nor is what it has had forgotten"


def test_the_count_begins_anew_when_nobody_has_waited_for_a_while():
    shares = counted(counted(Shares(), 0.0, a=(0, 1), b=(0, 1)), 1.0, a=(0, 1), b=(30, 1))
    shares = counted(shares, 29.0, (), a=(0, 0), b=(40, 1))
    assert shares.given["b"] == 40
    assert counted(shares, 31.1, a=(0, 1), b=(41, 1)).given == {"a": 0, "b": 0}


def test_the_count_is_kept_until_nobody_has_waited_for_longer_than_that():
    shares = counted(counted(Shares(), 0.0, a=(0, 1), b=(0, 1)), 1.0, a=(2, 1), b=(30, 1))
    assert counted(shares, 31.0, a=(4, 1), b=(41, 1)).given == {"a": 4, "b": 41}
    late = counted(shares, 31.1, a=(4, 1), b=(41, 1))
    assert (late.given, late.counted, late.short_at) == ({"a": 0, "b": 0}, {"a": 4, "b": 41}, 31.1)
    assert counted(shares, 5.0, (), a=(2, 1), b=(30, 1)).short_at == 1.0


def test_who_is_back_keeps_what_it_has_had_and_who_left_is_counted_as_before():
    shares = counted(Shares(), 0.0, a=(0, 1), b=(0, 1), c=(0, 1))
    shares = counted(shares, 1.0, a=(10, 1), b=(3, 0), c=(5, 1))
    assert shares.open == {"a", "c"} and shares.least_given == 3
    assert shares.behind({"a", "b", "c"}) == {"a": 0, "b": 7, "c": 5} and shares.behind({"nobody"}) == {}
    assert (shares.ahead("a", of="b"), shares.ahead("b", of="a"), shares.ahead("nobody", of="a")) == (7, -7, 0)
    shares = counted(shares, 2.0, ("b", "c"), a=(12, 1), b=(4, 1))  # c has no memory any more, and waits
    assert shares.given == {"a": 12, "b": 5, "c": 5}, "level with the waiting one that was open before"
    assert shares.counted == {"a": 12, "b": 4, "c": 5} and shares.least_given == 5
    assert counted(shares, 3.0, ("d",), d=(7, 0)).given["d"] == 0, "nobody waits that was open before"
