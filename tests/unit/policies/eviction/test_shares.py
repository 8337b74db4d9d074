"""What models are given while memory is short, counted by hand."""

from glowplug.policies.eviction.shares import ModelDemand, Shares, account

FORGET_S = 30.0


def counted(shares, now_s, waiting=("a",), **demands):
    known = {key: ModelDemand(num_dispatched=num, num_open=num_open) for key, (num, num_open) in demands.items()}
    return account(shares, known, set(waiting), now_s, FORGET_S)


def test_only_what_is_dispatched_while_somebody_waits_is_counted():
    shares = counted(Shares(), 0.0, a=(100, 5), b=(7, 5))
    assert shares.given == {"a": 0, "b": 0}
    shares = counted(shares, 0.5, a=(100, 5), b=(10, 5))
    assert shares.given == {"a": 0, "b": 3} and shares.ahead("b", of="a") == 3
    assert shares.behind("a", {"a", "b"}) == 3 and shares.behind("b", {"a", "b"}) == 0
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
