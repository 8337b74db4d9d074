"""The console's key, its sessions and how often it may be guessed, under a clock of the test's own."""

import pytest

from services.console import login
from services.console.login import Access, TooManyWrongKeys, WrongKey

ONE_CLIENT, ANOTHER = "10.0.0.1", "10.0.0.2"


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made(clock: Clock) -> Access:
    return Access("the key", 3600.0, clock)


def guess(made: Access, address: str = ONE_CLIENT, key: str = "wrong") -> type[Exception] | None:
    try:
        made.check(key, address)
    except (WrongKey, TooManyWrongKeys) as error:
        return type(error)
    return None


def test_a_session_lasts_its_time_or_until_the_logout(made: Access, clock: Clock) -> None:
    first, second = made.log_in("the key", ONE_CLIENT), made.log_in("the key", ONE_CLIENT)
    assert first != second and len(first) >= 43
    clock.now_s += 3599
    assert made.is_open(first) and made.is_open(second)
    made.log_out(first)
    assert not made.is_open(first) and made.is_open(second)
    clock.now_s += 1
    assert not made.is_open(second)
    assert not made.is_open("") and not made.is_open("\ud800")


@pytest.mark.parametrize("key", ["", "the kex", "the key ", "\ud800", "é"])
def test_another_key_opens_nothing(made: Access, key: str) -> None:
    with pytest.raises(WrongKey):
        made.log_in(key, ONE_CLIENT)


def test_wrong_keys_are_bounded_by_address_and_time(made: Access, clock: Clock) -> None:
    assert [guess(made) for _ in range(login.MAX_WRONG)] == [WrongKey] * login.MAX_WRONG
    assert guess(made) is TooManyWrongKeys
    assert guess(made, key="the key") is TooManyWrongKeys, (
        "else a right guess could still be distinguished from a wrong one"
    )
    assert guess(made, ANOTHER, "the key") is None, "others still log in"
    clock.now_s += login.WINDOW_S
    assert guess(made, key="the key") is None


def test_right_keys_are_not_counted(made: Access) -> None:
    assert {guess(made, key="the key") for _ in range(100)} == {None}


def test_many_addresses_guess_no_more_than_so_often(made: Access) -> None:
    tried = [guess(made, f"10.0.{k // 256}.{k % 256}") for k in range(2 * login.MAX_WRONG_IN_ALL)]
    assert tried.count(WrongKey) == login.MAX_WRONG_IN_ALL


def test_the_addresses_of_one_ipv6_network_are_one(made: Access) -> None:
    tried = [guess(made, f"2001:db8::{k:x}") for k in range(20)]
    assert tried.count(WrongKey) == login.MAX_WRONG
    assert guess(made, "2001:db8:0:1::1") is WrongKey


def test_sessions_are_bounded_and_the_oldest_leaves(made: Access) -> None:
    first = made.log_in("the key", ONE_CLIENT)
    tokens = [made.log_in("the key", ONE_CLIENT) for _ in range(login.MAX_SESSIONS)]
    assert not made.is_open(first) and all(made.is_open(token) for token in tokens)
