"""One router's limiter: admissions, refusals and lasting state."""

import math

import pytest

from glowplug.domain.access import AccessLimits
from glowplug.domain.limits import ScopeUse, WindowUse
from glowplug.policies.limits.limiter import Limiter, month_of, until_next_day_s, until_next_month_s
from glowplug.policies.limits.scope import Limit, LimiterParams, Scope
from tests.unit.policies.limits.rig import START_S, expect_admitted, expect_refused, scopes

MIDNIGHT_S = 1_790_035_200.0  # 2026-09-22 00:00 UTC
HOUR_S = 3600.0


def test_a_minutes_amount_may_come_at_once_and_the_bucket_fills_without_a_break() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60)
    for _ in range(60):
        expect_admitted(limiter.admit(asked, 0, START_S))
    why = expect_refused(limiter.admit(asked, 0, START_S))
    assert (why.scope_id, why.limit, why.amount) == ("tenant/acme", Limit.REQUESTS, 60)
    assert why.wait_s == pytest.approx(1.0)
    expect_admitted(limiter.admit(asked, 0, START_S + why.wait_s))
    assert expect_refused(limiter.admit(asked, 0, START_S + 1.5)).wait_s == pytest.approx(0.5)


def test_what_is_left_reads_as_in_openais_headers() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60, tokens_per_minute=6000)
    assert limiter.left(asked, START_S)[0] is not None
    expect_admitted(limiter.admit(asked, 1500, START_S))
    requests, tokens = limiter.left(asked, START_S)
    assert requests is not None and tokens is not None
    assert requests == (60, 59, pytest.approx(1.0))
    assert tokens == (6000, 4500, pytest.approx(15.0))
    assert limiter.left(scopes(concurrent=3), START_S) == (None, None)


def test_nothing_is_taken_from_any_scope_when_one_refuses() -> None:
    limiter = Limiter("r-1")
    wide, narrow = scopes("tenant/a", requests_per_minute=10)[0], scopes("key/b", requests_per_minute=1)[0]
    expect_admitted(limiter.admit((wide, narrow), 0, START_S))
    for _ in range(5):
        assert expect_refused(limiter.admit((wide, narrow), 0, START_S)).scope_id == "key/b"
    left = limiter.left((wide,), START_S)[0]
    assert left is not None
    assert left[1] == 9


def test_the_refusal_is_the_one_that_lasts_longest() -> None:
    limiter = Limiter("r-1")
    asked = (*scopes("tenant/a", requests_per_minute=60), *scopes("key/b", requests_per_minute=6))
    for _ in range(6):
        expect_admitted(limiter.admit(asked, 0, START_S))
    for _ in range(54):
        expect_admitted(limiter.admit(asked[:1], 0, START_S))
    why = expect_refused(limiter.admit(asked, 0, START_S))
    assert (why.scope_id, round(why.wait_s)) == ("key/b", 10)


def test_the_end_gives_back_what_was_reserved_too_much() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_minute=600)
    limiter.end(expect_admitted(limiter.admit(asked, 600, START_S)), 100, START_S)
    expect_admitted(limiter.admit(asked, 500, START_S))


def test_what_was_reserved_too_little_makes_the_next_wait_longer() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_minute=600)
    limiter.end(expect_admitted(limiter.admit(asked, 100, START_S)), 1200, START_S)
    why = expect_refused(limiter.admit(asked, 100, START_S))
    assert why.limit is Limit.TOKENS
    assert why.wait_s == pytest.approx(70.0)  # 600 below zero, and 100 more, at 10 a second


def test_a_request_ends_once() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_minute=600, concurrent=1)
    reserved = expect_admitted(limiter.admit(asked, 600, START_S))
    for _ in range(2):
        limiter.end(reserved, 0, START_S)
    expect_admitted(limiter.admit(asked, 600, START_S))
    assert expect_refused(limiter.admit(asked, 0, START_S)).limit is Limit.CONCURRENT


def test_a_request_larger_than_the_limit_is_never_admitted() -> None:
    why = expect_refused(Limiter("r-1").admit(scopes(tokens_per_minute=600), 601, START_S))
    assert why.is_for_ever


def test_requests_at_once_and_held() -> None:
    limiter, asked = Limiter("r-1"), scopes(concurrent=2, queued=1)
    first, second = (expect_admitted(limiter.admit(asked, 0, START_S)) for _ in range(2))
    assert expect_refused(limiter.admit(asked, 0, START_S)).limit is Limit.CONCURRENT
    assert limiter.hold(first) is None
    assert limiter.hold(first) is None  # held again
    assert expect_refused(limiter.hold(second)).limit is Limit.QUEUED
    limiter.release(first)
    assert limiter.hold(second) is None
    limiter.end(second, 0, START_S)
    expect_admitted(limiter.admit(asked, 0, START_S))
    assert limiter.hold(first) is None


def test_other_routers_requests_at_once_count_as_reported() -> None:
    limiter, asked = Limiter("r-1"), scopes(concurrent=3)
    limiter.take("r-2", 1, {"tenant/acme": ScopeUse(num_running=2)}, START_S)
    expect_admitted(limiter.admit(asked, 0, START_S))
    expect_refused(limiter.admit(asked, 0, START_S))
    limiter.take("r-2", 2, {"tenant/acme": ScopeUse(num_running=0)}, START_S)
    expect_admitted(limiter.admit(asked, 0, START_S))


def test_tokens_of_a_day_and_a_month() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_day=1000, tokens_per_month=1500)
    now_s = MIDNIGHT_S - HOUR_S
    limiter.end(expect_admitted(limiter.admit(asked, 900, now_s)), 950, now_s)
    why = expect_refused(limiter.admit(asked, 100, now_s))
    assert (why.limit, why.wait_s) == (Limit.DAY, HOUR_S)
    expect_admitted(limiter.admit(asked, 50, now_s))  # still running: reserved
    expect_refused(limiter.admit(asked, 1, now_s))
    why = expect_refused(limiter.admit(asked, 600, MIDNIGHT_S))
    assert why.limit is Limit.MONTH
    assert why.wait_s == until_next_month_s(MIDNIGHT_S) == 9 * 86_400
    expect_admitted(limiter.admit(asked, 500, MIDNIGHT_S))
    expect_admitted(limiter.admit(asked, 450, MIDNIGHT_S + 9 * 86_400))


def test_the_windows_are_those_of_utc() -> None:
    assert month_of(MIDNIGHT_S) == 2026 * 12 + 8
    assert month_of(MIDNIGHT_S + 9 * 86_400 - 1) == 2026 * 12 + 8
    assert month_of(MIDNIGHT_S + 9 * 86_400) == 2026 * 12 + 9
    assert until_next_day_s(MIDNIGHT_S + 1) == 86_399
    assert until_next_month_s(MIDNIGHT_S + 101 * 86_400) == 31 * 86_400  # on 2027-01-01


def test_windows_of_all_routers_count_and_survive_them() -> None:
    asked, now_s = scopes(tokens_per_day=1000), MIDNIGHT_S
    first, second = Limiter("r-1"), Limiter("r-2")
    for limiter, tokens in ((first, 300), (second, 600)):
        limiter.end(expect_admitted(limiter.admit(asked, tokens, now_s)), tokens, now_s)
    first.take("r-2", *second.report(now_s), now_s)
    assert expect_refused(first.admit(asked, 101, now_s)).limit is Limit.DAY
    again = Limiter("r-1")
    again.restore(first.peers.others(), kept_of(first, now_s), now_s, now_s + 60)
    assert expect_refused(again.admit(asked, 101, now_s + 60)).limit is Limit.DAY
    third = Limiter("r-3")
    for second_s in range(60, 90):  # until r-2 counts as gone
        report = again.report(now_s + second_s)
        again.take("r-1", *report, now_s + second_s)
        third.take("r-1", *report, now_s + second_s)
    assert expect_refused(third.admit(asked, 101, now_s + 90)).limit is Limit.DAY
    expect_admitted(third.admit(asked, 100, now_s + 90))


def kept_of(limiter: Limiter, now_s: float) -> dict[str, ScopeUse]:
    return {scope_id: use for scope_id, use in limiter.copy(now_s) if use is not None}


def test_a_bucket_survives_its_router() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60)
    for _ in range(60):
        expect_admitted(limiter.admit(asked, 0, START_S))
    again = Limiter("r-1")
    again.restore([], kept_of(limiter, START_S), START_S, START_S + 5)
    for _ in range(5):
        expect_admitted(again.admit(asked, 0, START_S + 5))
    expect_refused(again.admit(asked, 0, START_S + 5))


def test_a_router_that_starts_without_the_bus_knows_how_many_share_the_limit() -> None:
    limiter = Limiter("r-1")
    limiter.restore(["r-2", "r-3"], {}, START_S, START_S)
    for half in range(20):
        limiter.report(START_S + half / 2)
    now_s, asked = START_S + 10, scopes(requests_per_minute=60, concurrent=90)
    assert limiter.peers.is_cut
    for _ in range(20):
        expect_admitted(limiter.admit(asked, 0, now_s))
    assert expect_refused(limiter.admit(asked, 0, now_s)).wait_s == pytest.approx(3.0)


def test_shares_are_those_of_the_demand_with_a_floor_and_add_up() -> None:
    limiters = [Limiter(f"r-{n}") for n in range(3)]
    rows = [{"tenant/acme": ScopeUse(asked_s=asked_s)} for asked_s in (30.0, 10.0, 0.0)]
    for limiter in limiters:
        for n, row in enumerate(rows):
            limiter.take(f"r-{n}", 1, row, START_S)
        limiter.report(START_S + 5)
    parts = [limiter.peers.part(limiter._counts["tenant/acme"].heard) for limiter in limiters]
    assert sum(parts) == pytest.approx(1.0)
    assert parts == pytest.approx([0.9 * 0.75 + 1 / 30, 0.9 * 0.25 + 1 / 30, 1 / 30])


def test_a_changed_limit_holds_at_once_and_keeps_its_waits() -> None:
    limiter = Limiter("r-1")
    for _ in range(60):
        expect_admitted(limiter.admit(scopes(requests_per_minute=60), 0, START_S))
    now_s = START_S + 1
    for _ in range(10):
        expect_admitted(limiter.admit(scopes(requests_per_minute=600), 0, now_s))
    expect_refused(limiter.admit(scopes(requests_per_minute=600), 0, now_s))


def test_an_older_report_changes_nothing() -> None:
    limiter, asked = Limiter("r-1"), scopes(concurrent=3)
    limiter.take("r-2", 7, {"tenant/acme": ScopeUse(num_running=0)}, START_S)
    limiter.take("r-2", 6, {"tenant/acme": ScopeUse(num_running=3)}, START_S)
    expect_admitted(limiter.admit(asked, 0, START_S))


def test_a_clock_that_is_set_back_fills_nothing_twice() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60)
    for _ in range(60):
        expect_admitted(limiter.admit(asked, 0, START_S))
    expect_refused(limiter.admit(asked, 0, START_S - 100))
    expect_refused(limiter.admit(asked, 0, START_S - 99.5))
    expect_admitted(limiter.admit(asked, 0, START_S - 99))


def test_ten_thousand_keys_are_forgotten_once_they_rest() -> None:
    limiter, now_s = Limiter("r-1"), START_S
    limits = AccessLimits(requests_per_minute=60, tokens_per_minute=6000, concurrent=5)
    for n in range(10_000):
        asked = (Scope("tenant/acme", AccessLimits(requests_per_minute=10**6)), Scope(f"key/{n:08}", limits))
        limiter.end(expect_admitted(limiter.admit(asked, 10, now_s)), 10, now_s)
    assert len(limiter) == 10_001
    most = LimiterParams().most_rows
    sizes = []
    for half in range(400):
        limiter.take("r-2", half, {}, now_s + half / 2)
        sizes.append(len(limiter.report(now_s + half / 2)[1]))
    assert sizes[:11] == [most] * 10 + [1]
    assert not any(sizes[11:])
    assert len(limiter) == 0


def test_a_router_without_others_names_no_scope_and_one_that_joins_hears_of_each_as_it_stands() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60, tokens_per_month=10**6)
    for half in range(20):
        limiter.end(expect_admitted(limiter.admit(asked, 10, START_S + half / 2)), 10, START_S + half / 2)
        number, rows = limiter.report(START_S + half / 2)
        assert bool(rows) == (half <= 5)  # another may not have been heard yet
        limiter.take("r-1", number, rows, START_S + half / 2)
    limiter.take("r-2", 1, {}, START_S + 10)
    row = limiter.report(START_S + 10)[1]["tenant/acme"]
    assert row.requests_s == 0  # the joining router finds it in what is left
    assert row.requests_left_s == pytest.approx(60 - 20 + 10, abs=0.6)
    assert row.asked_s == pytest.approx(sum(math.exp(-half / 20) for half in range(1, 21)), rel=0.05)
    assert [use.month_tokens for use in row.windows] == [200]


def test_windows_are_repeated_for_routers_that_are_new_and_dropped_with_their_month() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_month=1000)
    limiter.end(expect_admitted(limiter.admit(asked, 10, MIDNIGHT_S)), 10, MIDNIGHT_S)
    for half in range(3):
        assert limiter.report(MIDNIGHT_S + half / 2)[1]["tenant/acme"].windows == (
            WindowUse("r-1", int(MIDNIGHT_S // 86_400), 10, 2026 * 12 + 8, 10),
        )
    later_s = MIDNIGHT_S + 31 * 86_400
    assert limiter.report(later_s)[1] == {}
    assert len(limiter) == 0


def test_times_are_finite_numbers() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=1, tokens_per_minute=1)
    expect_admitted(limiter.admit(asked, 1, 0.0))
    assert math.isfinite(expect_refused(limiter.admit(asked, 1, 0.0)).wait_s)


def test_a_burst_and_a_share_of_requests_at_once_are_reported_soon() -> None:
    limiter, calls = Limiter("r-1"), list[None]()
    limiter.on_urgent = lambda: calls.append(None)
    asked = scopes(requests_per_minute=60, concurrent=6)
    expect_admitted(limiter.admit(asked, 1, START_S))
    assert not calls
    limiter.take("r-2", 1, {}, START_S)
    limiter.report(START_S)
    expect_admitted(limiter.admit(asked, 1, START_S))
    assert not calls
    last = expect_admitted(limiter.admit(asked, 1, START_S))  # third at once, of six at two routers
    assert len(calls) == 1 and limiter.report_urgent(START_S)[1]["tenant/acme"].num_running == 3
    assert limiter.report_urgent(START_S)[1] == {}
    limiter.end(last, 1, START_S)
    assert len(calls) == 2 and limiter.report_urgent(START_S)[1]["tenant/acme"].num_running == 2
    wide = scopes("tenant/wide", requests_per_minute=60)
    for _ in range(4):  # four seconds of the limit
        expect_admitted(limiter.admit(wide, 1, START_S))
    assert limiter.report_urgent(START_S)[1]["tenant/wide"].requests_s == 4.0
