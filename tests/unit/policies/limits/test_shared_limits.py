"""Routers share one limit: within 5 % of it, and no refusal below 90 %."""

import math
from collections.abc import Callable

import pytest

from tests.unit.policies.limits.rig import Routers, scopes

LIMIT = 600  # requests a minute: 10 a second
PER_S = LIMIT / 60
SPLITS: dict[str, Callable[[float, int], tuple[float, ...]]] = {
    "one": lambda t, num: (1.0, 0.0, 0.0),
    "equal": lambda t, num: (1.0, 1.0, 1.0),
    "skewed": lambda t, num: (0.7, 0.25, 0.05),
    "moving": lambda t, num: tuple(float(int(t / 7) % num == n) for n in range(3)),
    "swinging": lambda t, num: (1 + math.sin(t / 5), 1 - math.sin(t / 5), 0.0),
}


def split(name: str, num: int, rate: float) -> Callable[[float], list[float]]:
    def rates(t: float) -> list[float]:
        parts = SPLITS[name](t, num)[:num]
        return [rate * part / sum(parts) for part in parts]

    return rates


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("name", list(SPLITS))
def test_what_is_asked_for_above_the_limit_is_admitted_up_to_the_limit(name: str, num: int) -> None:
    routers = Routers(num, scopes(requests_per_minute=LIMIT))
    routers.run(60, split(name, num, 2.5 * PER_S))
    routers.run(120, split(name, num, 2.5 * PER_S))
    assert routers.per_minute(120) == pytest.approx(LIMIT, rel=0.05)
    assert routers.per_minute(30) == pytest.approx(LIMIT, rel=0.05)


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("name", list(SPLITS))
def test_nothing_is_refused_below_nine_tenths(name: str, num: int) -> None:
    routers = Routers(num, scopes(requests_per_minute=LIMIT))
    routers.run(120, split(name, num, 0.9 * PER_S))
    assert not routers.refused


@pytest.mark.parametrize("name", list(SPLITS))
def test_tokens_are_kept_to_as_requests_are(name: str) -> None:
    """Requests of 500 tokens, 60,000 tokens a minute: 120 requests."""
    routers = Routers(3, scopes(tokens_per_minute=60_000))
    routers.run(60, split(name, 3, 6.0), 500)
    routers.run(180, split(name, 3, 6.0), 500)
    assert routers.per_minute(180) == pytest.approx(120, rel=0.05)
    calm = Routers(3, scopes(tokens_per_minute=60_000))
    calm.run(120, split(name, 3, 1.8), 500)
    assert not calm.refused


@pytest.mark.parametrize("name", ["one", "equal", "skewed"])
def test_with_the_bus_away_each_router_keeps_its_share(name: str) -> None:
    routers = Routers(3, scopes(requests_per_minute=LIMIT))
    routers.run(60, split(name, 3, 2.5 * PER_S))
    routers.is_bus_away = True
    routers.run(10, split(name, 3, 2.5 * PER_S))
    routers.run(300, split(name, 3, 2.5 * PER_S))
    assert all(limiter.peers.is_cut for limiter in routers.limiters)
    assert 0.9 * LIMIT <= routers.per_minute(300) <= 1.05 * LIMIT
    routers.is_bus_away = False
    routers.run(30, split(name, 3, 2.5 * PER_S))
    routers.run(60, split(name, 3, 2.5 * PER_S))
    assert routers.per_minute(60) == pytest.approx(LIMIT, rel=0.05)


def test_a_router_that_dies_keeps_its_share_for_a_while_and_then_the_others_have_it() -> None:
    routers = Routers(3, scopes(requests_per_minute=LIMIT))
    routers.run(60, split("equal", 3, 2.5 * PER_S))
    routers.dead.add(2)
    routers.run(4, lambda t: [12.5, 12.5, 0.0])
    routers.run(8, lambda t: [12.5, 12.5, 0.0])
    assert routers.per_minute(8) == pytest.approx(LIMIT * 2 / 3, rel=0.15)
    routers.run(20, lambda t: [12.5, 12.5, 0.0])
    routers.run(60, lambda t: [12.5, 12.5, 0.0])
    assert routers.per_minute(60) == pytest.approx(LIMIT, rel=0.05)


def test_nothing_is_refused_below_nine_tenths_while_a_router_dies() -> None:
    routers = Routers(3, scopes(requests_per_minute=LIMIT))
    routers.run(60, split("equal", 3, 0.9 * PER_S))
    routers.dead.add(2)
    routers.run(120, lambda t: [4.5, 4.5, 0.0])
    assert not routers.refused


def test_a_router_that_starts_anew_does_not_bring_a_new_minute() -> None:
    routers = Routers(3, scopes(requests_per_minute=LIMIT))
    routers.run(60, split("equal", 3, 2.5 * PER_S))
    routers.limiters[2] = type(routers.limiters[2])("r-2")
    routers.run(10, split("equal", 3, 2.5 * PER_S))
    assert routers.per_minute(10) < 2 * LIMIT
    routers.run(60, split("equal", 3, 2.5 * PER_S))
    routers.run(60, split("equal", 3, 2.5 * PER_S))
    assert routers.per_minute(60) == pytest.approx(LIMIT, rel=0.05)
    each = [sum(at > routers.now_s - 60 and n == router for at, n in routers.admitted) for router in range(3)]
    assert min(each) > LIMIT / 6, each


def test_routers_that_are_hit_at_once_from_idle_admit_little_more_than_a_minute() -> None:
    """Each router gets 600 requests within 0.4 s; reports take 5 ms."""
    admitted = []
    for is_hurrying in (True, False):
        routers = Routers(3, scopes(requests_per_minute=LIMIT), delay_s=0.005, is_hurrying=is_hurrying)
        routers.run(2.3, lambda t: [0.0] * 3)
        routers.run(0.4, lambda t: [1500.0] * 3)
        admitted.append(len(routers.admitted))
    assert admitted[0] <= 1.25 * LIMIT < 1.9 * LIMIT <= admitted[1]
