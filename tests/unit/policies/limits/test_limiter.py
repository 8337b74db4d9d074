"""One router's limiter: admissions, refusals and lasting state."""

import math
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits
from glowplug.domain.limits import ScopeUse, WindowUse
from glowplug.policies.limits.limiter import (
    TINY_S,
    Heard,
    Limiter,
    Peers,
    ScopeCount,
    day_of,
    month_of,
    running_at,
    until_next_day_s,
    until_next_month_s,
)
from glowplug.policies.limits.scope import Limit, LimiterParams, Reservation, Scope
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


def test_tokens_reserved_too_few_are_taken_from_the_bucket_as_it_is_by_then() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_minute=600)
    limiter.end(expect_admitted(limiter.admit(asked, 50, START_S)), 150, START_S + 100)
    assert limiter.left(asked, START_S + 100)[1] == (600, 500, 10.0)


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
    at, months = MIDNIGHT_S, list[int]()
    for _ in range(15):
        at += until_next_month_s(at)
        months.append(month_of(at))
    assert months == list(range(MONTH + 1, MONTH + 16)) and at == MIDNIGHT_S + 435 * DAYS_S  # 2027-12-01


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


def test_a_bucket_fills_by_the_routers_part_and_only_a_shrinking_part_changes_it_at_once() -> None:
    count, seen = ScopeCount("r-1", 100.0, requests_left_s=30.0, tokens_left_s=-20.0), []
    for part, at in ((0.5, 110), (1.0, 110), (1.0, 120), (1.0, 90), (1.0, 100), (0.5, 100), (0.25, 100), (0.25, 300)):
        count.fill(part, at)
        seen.append((count.requests_left_s, count.tokens_left_s, count.is_full()))
    assert [(requests, tokens) for requests, tokens, _ in seen] == [
        *((20, -5), (20, -5), (30, 5), (30, 5), (40, 15)),
        *((20, 7.5), (10, 3.75), (15, 15)),
    ]
    assert [is_full for *_, is_full in seen] == [False] * 7 + [True]
    count.requests_left_s = 14.0
    assert not count.is_full()


def test_a_wait_is_by_the_part_and_for_no_more_than_a_full_bucket() -> None:
    count = ScopeCount("r-1", 0.0, part=0.5)
    waits = [
        count.wait_s(wanted_s, left_s)
        for wanted_s, left_s in ((10, 4), (10, -4), (100, 4), (10, 10), (9, 10), (TINY_S, 0))
    ]
    assert waits == [12, 28, 52, 0, 0, 0]


def test_demand_fades_with_the_time_since_it_was_told() -> None:
    count = ScopeCount("r-1", 0.0, asked_since_s=4.0)
    assert count.asked(10.0, 10.0) == 4.0
    count.asked_since_s = 2.0
    told_s = 4 / math.e + 2
    assert [count.asked(at, 10.0) for at in (20.0, 15.0, 25.0)] == pytest.approx([told_s, told_s, told_s / math.e])


DAY, MONTH = day_of(MIDNIGHT_S), month_of(MIDNIGHT_S)
DAYS_S = 86_400.0
NEXT_MONTH_S = MIDNIGHT_S + 9 * DAYS_S


def test_used_tokens_are_those_of_the_day_and_the_month_at_all_routers() -> None:
    count = ScopeCount("r-1", MIDNIGHT_S)
    for tokens, at in ((5, MIDNIGHT_S - 1), (6, MIDNIGHT_S), (1, MIDNIGHT_S + HOUR_S)):
        count.use(tokens, at)
    for use in (WindowUse("r-2", DAY, 10, MONTH, 100), WindowUse("r-3", DAY - 1, 20, MONTH, 200)):
        count.merge(use)
    count.merge(WindowUse("r-4", DAY - 40, 30, MONTH - 1, 300))
    times = (MIDNIGHT_S, MIDNIGHT_S + DAYS_S, NEXT_MONTH_S, MIDNIGHT_S)
    assert [count.used(at) for at in times] == [(17, 312), (0, 312), (0, 0), (17, 312)]
    count.merge(WindowUse("r-3", DAY, 2, MONTH, 202))
    assert count.used(MIDNIGHT_S) == (19, 314)
    count.drop_past(MIDNIGHT_S)
    assert [use.router_id for use in count.windows()] == ["r-1", "r-2", "r-3"]
    assert count.used(MIDNIGHT_S) == (19, 314)
    count.use(4, NEXT_MONTH_S)
    assert count.used(NEXT_MONTH_S) == (4, 4)
    count.drop_past(NEXT_MONTH_S)
    assert [use.router_id for use in count.windows()] == ["r-1"]
    assert count.has_windows
    count.drop_past(NEXT_MONTH_S + 31 * DAYS_S)
    assert (count.has_windows, count.own_use(), count.windows()) == (False, None, ())


@pytest.mark.parametrize("router_id", ["r-1", "r-2"])
@pytest.mark.parametrize(
    ("later", "wanted"),
    [
        ((DAY, 5, MONTH, 150), (DAY, 10, MONTH, 150)),
        ((DAY, 15, MONTH, 90), (DAY, 15, MONTH, 100)),
        ((DAY + 1, 1, MONTH, 101), (DAY + 1, 1, MONTH, 101)),
        ((DAY + 20, 1, MONTH + 1, 1), (DAY + 20, 1, MONTH + 1, 1)),
        ((DAY - 1, 99, MONTH - 1, 999), (DAY, 10, MONTH, 100)),
    ],
)
def test_of_two_reports_of_a_routers_windows_the_later_counts(
    router_id: str, later: tuple[int, int, int, int], wanted: tuple[int, int, int, int]
) -> None:
    count = ScopeCount("r-1", MIDNIGHT_S)
    for use in ((DAY, 10, MONTH, 100), later):
        count.merge(WindowUse(router_id, *use))
    assert count.windows() == (WindowUse(router_id, *wanted),)
    assert (count.own_use() is None) == (router_id == "r-2")


def test_unshown_tokens_are_those_since_the_last_report() -> None:
    count = ScopeCount("r-1", MIDNIGHT_S)
    seen = [count.unshown(MIDNIGHT_S)]
    for tokens, days, is_reported in ((7, 0, True), (5, 0, False), (3, 1, False), (0, 2, False), (4, 9, False)):
        count.use(tokens, MIDNIGHT_S + days * DAYS_S)
        seen.append(count.unshown(MIDNIGHT_S + days * DAYS_S))
        if is_reported:
            count.reported(MIDNIGHT_S, 10.0)
    assert seen == [(0, 0), (7, 7), (5, 5), (3, 8), (0, 8), (4, 4)]
    assert count.unshown(NEXT_MONTH_S + DAYS_S) == (0, 4)
    assert count.unshown(NEXT_MONTH_S + 31 * DAYS_S) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "reserved", "tokens", "is_short"),
    [
        ({"tokens_per_day": 100}, 0, 60, False),
        ({"tokens_per_day": 100}, 0, 61, True),
        ({"tokens_per_day": 100}, 10, 51, True),
        ({"tokens_per_month": 100}, 0, 50, False),
        ({"tokens_per_month": 100}, 0, 51, True),
        ({"tokens_per_day": 1000, "tokens_per_month": 100}, 10, 41, True),
        ({}, 0, 10**6, False),
    ],
)
def test_a_window_is_short_of_what_is_above_it(
    limits: dict[str, int], reserved: int, tokens: int, *, is_short: bool
) -> None:
    count = ScopeCount("r-1", MIDNIGHT_S, reserved=reserved)
    count.merge(WindowUse("r-2", DAY, 40, MONTH, 50))
    assert count.is_short(AccessLimits(**limits), tokens, MIDNIGHT_S) == is_short


def test_a_report_is_news_by_its_number_or_after_a_silence() -> None:
    peers = Peers("r-1", LimiterParams(silent_s=2.5))
    heard = [(0, 0.0), (0, 0.1), (2, 0.2), (1, 2.6), (1, 2.7), (2, 2.7), (2, 5.1)]
    assert [peers.hear("r-2", *one) for one in heard] == [True, False, True, False, True, True, False]
    assert peers.hear("r-2", 0, 5.2)


def test_a_router_that_is_not_heard_is_silent_and_then_gone() -> None:
    peers = Peers("r-1", LimiterParams(silent_s=2.5, gone_s=15.0))
    peers.hear("r-2", 7, 0.0)
    seen = []
    for now_s in (0.0, 2.5, 2.6, 15.0, 15.1):
        peers.hear("r-1", int(now_s * 1000), now_s)
        seen.append((peers.refresh(now_s), peers.silent, "r-2" in peers, peers.part({})))
    assert seen == [
        *2 * [(False, (), True, 1.0)],
        *2 * [(False, ("r-2",), True, 0.5)],
        (True, (), False, 1.0),
    ]
    assert peers.hear("r-2", 0, 15.2) and peers.others() == ["r-2"]


def test_a_router_is_cut_off_while_it_does_not_hear_itself_and_assumes_nobody_gone() -> None:
    peers = Peers("r-1", LimiterParams(silent_s=2.5, gone_s=15.0))
    for router_id in ("r-2", "r-3"):
        peers.hear(router_id, 1, 0.0)
    seen = [(peers.refresh(now_s), peers.is_cut, peers.silent) for now_s in (0.0, 2.5, 2.6, 99.0)]
    assert seen == [*2 * [(False, False, ())], *2 * [(False, True, ("r-2", "r-3"))]]
    peers.hear("r-2", 2, 100.0)
    assert not peers.refresh(100.0) and peers.is_cut
    peers.hear("r-1", 1, 101.0)
    assert not peers.refresh(103.0) and not peers.is_cut and not peers.silent
    peers.hear("r-1", 2, 103.0)
    peers.refresh(103.6)
    assert peers.silent == ("r-2", "r-3"), "none was heard since"
    alone = Peers("r-1", LimiterParams())
    alone.refresh(0.0)
    alone.refresh(99.0)
    assert not alone.is_cut
    alone.hear("r-2", 1, 99.0)
    alone.refresh(99.0)
    assert alone.is_cut


def test_the_part_of_a_silent_router_is_by_its_faded_demand() -> None:
    peers = Peers("r-1", LimiterParams(silent_s=2.5, floor=0.1, demand_s=10.0))
    peers.hear("r-2", 1, 10.0)
    peers.hear("r-1", 1, 20.0)
    peers.refresh(20.0)
    asked = {"r-1": Heard(1.0, 2, 3, 20.0), "r-2": Heard(math.e, 4, 5, 0.0), "gone": Heard(9.0, 6, 7, 0.0)}
    assert peers.part(asked) == pytest.approx(0.5)
    assert peers.part({"r-1": Heard(1.0, 0, 0, 20.0)}) == pytest.approx(0.95)
    assert peers.part({"r-1": Heard(1.0, 0, 0, 20.0), "r-2": Heard(0.01, 0, 0, 10.0)}) == pytest.approx(0.95)
    assert peers.part({}) == pytest.approx(0.5)
    assert running_at(peers, asked) == (4, 5)


def kept_left_s(limiter: Limiter, now_s: float = START_S) -> tuple[float, float]:
    row = kept_of(limiter, now_s)["tenant/acme"]
    return row.requests_left_s, row.tokens_left_s


@pytest.mark.parametrize(
    ("theirs_s", "left_s"),
    [(20.0, 38.1), (38.0, 39.9), (39.0, 39.98), (39.5, 39.99), (40.5, 40.01), (41.0, 40.0), (60.0, 40.0)],
)
def test_a_copy_with_more_left_moves_towards_the_other_and_close_ones_towards_each_other(
    theirs_s: float, left_s: float
) -> None:
    for kind in ("requests_left_s", "tokens_left_s"):
        limiter = Limiter("r-1")
        limiter.restore([], {"tenant/acme": ScopeUse(requests_left_s=40, tokens_left_s=40)}, START_S, START_S)
        left: Any = {"requests_left_s": 40.0, "tokens_left_s": 40.0} | {kind: theirs_s}
        limiter.take("r-2", 1, {"tenant/acme": ScopeUse(**left)}, START_S)
        wanted = {"requests_left_s": 40.0, "tokens_left_s": 40.0} | {kind: left_s}
        assert kept_left_s(limiter) == pytest.approx((wanted["requests_left_s"], wanted["tokens_left_s"]))


def test_what_another_router_admitted_is_taken_here_and_ones_own_report_is_not() -> None:
    limiter = Limiter("r-1")
    limiter.restore([], {"tenant/acme": ScopeUse(requests_left_s=40, tokens_left_s=30)}, START_S, START_S)
    row = ScopeUse(requests_s=10, tokens_s=5, requests_left_s=60, tokens_left_s=60, windows=(WindowUse("r-9", 1, 2),))
    limiter.take("r-1", 1, {"tenant/acme": row}, START_S)
    assert kept_left_s(limiter) == (40, 30)
    limiter.take("r-2", 1, {"tenant/acme": row}, START_S + 1)
    assert kept_left_s(limiter, START_S + 1) == (31, 26)
    limiter.take("r-2", 2, {"key/new": ScopeUse(requests_left_s=7, tokens_left_s=8)}, START_S + 1)
    new = kept_of(limiter, START_S + 1)["key/new"]
    assert (new.requests_left_s, new.tokens_left_s) == (7, 8)


def test_a_report_tells_what_was_taken_since_the_last_one() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60, tokens_per_minute=600)
    limiter.take("r-2", 1, {}, START_S)
    first, second = (expect_admitted(limiter.admit(asked, tokens, START_S)) for tokens in (50, 5))
    assert limiter.hold(second) is None
    assert limiter.report(START_S + 1)[1]["tenant/acme"] == ScopeUse(
        requests_s=2.0,
        tokens_s=5.5,
        requests_left_s=59.0,
        tokens_left_s=55.5,
        asked_s=6.0,
        num_running=2,
        num_held=1,
    )
    limiter.end(first, 30, START_S + 1)
    limiter.end(second, 5, START_S + 1)
    row = limiter.report(START_S + 1)[1]["tenant/acme"]
    assert (row.requests_s, row.tokens_s, row.tokens_left_s) == (0.0, -2.0, 57.5)
    assert (row.asked_s, row.num_running, row.num_held) == (6.0, 0, 0)
    assert limiter.report(START_S + 1)[1] == {}


@pytest.mark.parametrize(
    ("limits", "tokens", "asked_s"),
    [
        ({"requests_per_minute": 30, "tokens_per_minute": 600}, 10, 2.0),
        ({"requests_per_minute": 30, "tokens_per_minute": 600}, 40, 4.0),
        ({"tokens_per_minute": 600}, 600, 60.0),
        ({"concurrent": 5}, 10, 1.0),
    ],
)
def test_demand_is_the_larger_share_of_a_minute_and_counts_refused_requests(
    limits: dict[str, int], tokens: int, asked_s: float
) -> None:
    limiter = Limiter("r-1")
    limiter.take("r-2", 1, {}, START_S)
    for _ in range(2):
        limiter.admit(scopes("tenant/acme", **limits), tokens, START_S)
    assert limiter.report(START_S)[1]["tenant/acme"].asked_s == 2 * asked_s


def test_reports_are_numbered_by_the_clock_and_the_number_always_rises() -> None:
    limiter, first = Limiter("r-1"), int(START_S * 1000)
    assert [limiter.report(at)[0] for at in (START_S, START_S, START_S - 9)] == [first, first + 1, first + 2]
    assert [limiter.report_urgent(at)[0] for at in (START_S, START_S + 1)] == [first + 3, first + 1000]


def test_an_empty_scope_is_forgotten_two_minutes_after_its_last_request_and_one_in_use_is_not() -> None:
    limiter, forget_s = Limiter("r-1"), LimiterParams().forget_s
    for scope_id, limits in (("a", {"requests_per_minute": 60}), ("b", {"tokens_per_minute": 60}), ("c", {})):
        reserved = expect_admitted(limiter.admit(scopes(scope_id, **limits), 1, START_S))
        if scope_id != "c":
            limiter.end(reserved, 500 if scope_id == "b" else 1, START_S)
    named = []
    for at in (forget_s - 0.1, forget_s, 600.0):
        limiter.report(START_S + at)
        named.append(len(limiter))
    assert named == [3, 2, 1], "one owes for minutes, and one runs"


def test_scopes_are_reviewed_in_turn_a_few_per_report() -> None:
    limiter, num = Limiter("r-1"), LimiterParams().num_reviewed
    for n in range(2 * num + 1):
        limiter.end(expect_admitted(limiter.admit(scopes(f"key/{n}", concurrent=1), 1, START_S)), 1, START_S)
    assert [(limiter.report(START_S + 200), len(limiter))[1] for _ in range(3)] == [num + 1, 1, 0]


def with_left(requests_left_s: float = 60.0, tokens_left_s: float = 60.0, **of_windows: int) -> Limiter:
    limiter = Limiter("r-1")
    windows = (WindowUse("r-2", **of_windows),) if of_windows else ()
    row = ScopeUse(requests_left_s=requests_left_s, tokens_left_s=tokens_left_s, windows=windows)
    limiter.restore([], {"tenant/acme": row}, START_S, START_S)
    return limiter


@pytest.mark.parametrize(
    ("left_s", "tokens", "wanted"),
    [
        ((1.0, 5.0), 50, None),
        ((0.5, 5.0), 50, (Limit.REQUESTS, 0.5)),
        ((1.0, 5.0), 51, (Limit.TOKENS, 0.1)),
        ((0.0, 5.0), 60, (Limit.REQUESTS, 1.0)),
        ((0.0, 5.0), 61, (Limit.TOKENS, 1.1)),
        ((-9.0, 5.0), 600, (Limit.TOKENS, 55.0)),
        ((-99.0, 5.0), 600, (Limit.REQUESTS, 100.0)),
        ((1.0, 60.0), 600, None),
        ((1.0, 60.0), 601, (Limit.TOKENS, math.inf)),
    ],
)
def test_of_the_minutes_limits_the_longer_wait_is_named(
    left_s: tuple[float, float], tokens: int, wanted: tuple[Limit, float] | None
) -> None:
    answer = with_left(*left_s).admit(scopes(requests_per_minute=60, tokens_per_minute=600), tokens, START_S)
    if wanted is None:
        expect_admitted(answer)
        return
    why = expect_refused(answer)
    assert why.limit is wanted[0] and why.wait_s == pytest.approx(wanted[1])
    assert why.amount == (60 if wanted[0] is Limit.REQUESTS else 600)


def test_a_bucket_that_owes_refuses_nothing_once_its_limit_is_gone() -> None:
    assert expect_refused(with_left(0.0, -50.0).admit(scopes(requests_per_minute=60), 5, START_S)).wait_s == 1.0
    assert expect_refused(with_left(-50.0, 0.0).admit(scopes(tokens_per_minute=60), 5, START_S)).wait_s == 5.0


def test_a_minutes_limit_is_named_before_too_many_at_once_and_a_window_before_both() -> None:
    limits: dict[str, int] = {"concurrent": 1}
    limiter = with_left(1.0, 60.0, day=day_of(START_S), day_tokens=95, month=month_of(START_S), month_tokens=495)
    expect_admitted(limiter.admit(scopes("tenant/acme", **limits), 1, START_S))
    named = [expect_refused(limiter.admit(scopes("tenant/acme", **limits), 10, START_S))]
    for more in ({"requests_per_minute": 30}, {"tokens_per_day": 100}, {"tokens_per_month": 500}):
        limits |= more
        named.append(expect_refused(limiter.admit(scopes("tenant/acme", **limits), 10, START_S)))
    assert [why.limit for why in named] == [Limit.CONCURRENT, Limit.REQUESTS, Limit.DAY, Limit.MONTH]
    assert [why.amount for why in named] == [1, 30, 100, 500]
    assert [why.wait_s for why in named] == [1.0, 1.0, until_next_day_s(START_S), until_next_month_s(START_S)]
    assert expect_refused(limiter.admit((*scopes("a", tokens_per_minute=1), *scopes()), 2, START_S)).is_for_ever
    asked = scopes("b", requests_per_minute=1, tokens_per_day=100)
    expect_admitted(limiter.admit(asked, 1, START_S))
    assert expect_refused(limiter.admit(asked, 1, START_S)).limit is Limit.REQUESTS, "the day has room"


@pytest.mark.parametrize("window", ["tokens_per_day", "tokens_per_month"])
def test_a_window_admits_up_to_its_last_token_with_those_reserved(window: str) -> None:
    limiter = with_left(day=day_of(START_S), day_tokens=50, month=month_of(START_S), month_tokens=50)
    asked = scopes("tenant/acme", **{window: 100})
    expect_admitted(limiter.admit(asked, 20, START_S))
    expect_refused(limiter.admit(asked, 31, START_S))
    expect_admitted(limiter.admit(asked, 30, START_S))


def test_of_equal_waits_the_first_scope_is_named() -> None:
    limiter, asked = Limiter("r-1"), (*scopes("tenant/a", concurrent=1), *scopes("key/b", concurrent=1))
    expect_admitted(limiter.admit(asked, 0, START_S))
    assert expect_refused(limiter.admit(asked, 0, START_S)).scope_id == "tenant/a"
    assert expect_refused(limiter.admit(asked[::-1], 0, START_S)).scope_id == "key/b"


def test_what_is_left_is_that_of_the_scope_with_the_least() -> None:
    limiter, rows = Limiter("r-1"), {"a": (10.0, 30.0), "b": (20.0, -5.0), "c": (60.0, 0.0)}
    kept = {name: ScopeUse(requests_left_s=one, tokens_left_s=other) for name, (one, other) in rows.items()}
    limiter.restore([], kept, START_S, START_S)
    a = scopes("a", requests_per_minute=60, tokens_per_minute=60)
    b = scopes("b", requests_per_minute=30, tokens_per_minute=120)
    c = scopes("c", tokens_per_minute=600)
    assert limiter.left((*a, *b), START_S) == ((60, 10, 50.0), (120, 0, 65.0))
    assert limiter.left((*b, *a), START_S) == ((30, 10, 40.0), (120, 0, 65.0)), "of equals the first"
    assert limiter.left((*c, *a, *scopes("d", concurrent=1)), START_S) == ((60, 10, 50.0), (600, 0, 60.0))
    assert limiter.left((*b, *a), START_S + 7) == ((30, 13, 33.0), (120, 4, 58.0))
    assert limiter.left((*a, *scopes("f", tokens_per_minute=30)), START_S + 7)[1] == (30, 30, 0.0)
    assert limiter.left((*scopes("f", tokens_per_minute=30), *scopes("c", tokens_per_minute=30)), START_S + 99) == (
        None,
        (30, 30, 0.0),
    )
    assert len(limiter) == 4, "nothing is kept of limits of other kinds"
    assert limiter.left(scopes("e", requests_per_minute=7), START_S) == ((7, 7, 0.0), None)
    assert with_left(-9.0, 60.0).left(scopes(requests_per_minute=7), START_S) == ((7, 0, 69.0), None)
    equal = (*scopes("g", tokens_per_minute=60), *scopes("h", tokens_per_minute=120))
    limiter.restore([], {"g": ScopeUse(tokens_left_s=40), "h": ScopeUse(tokens_left_s=20)}, START_S, START_S)
    assert limiter.left(equal, START_S)[1] == (60, 40, 20.0)
    assert limiter.left(equal[::-1], START_S)[1] == (120, 40, 40.0)


def cut_off(num_others: int = 1, scope: ScopeUse | None = None) -> Limiter:
    """A router that knows of others and hears nobody."""
    limiter = Limiter("r-1")
    others = [f"r-{number + 2}" for number in range(num_others)]
    limiter.restore(others, {"tenant/acme": scope} if scope is not None else {}, START_S, START_S)
    for half in range(-20, 1):
        limiter.report(START_S + half / 2)
    assert limiter.peers.is_cut
    return limiter


@pytest.mark.parametrize(("most", "num_others", "wanted"), [(5, 1, 2), (4, 1, 2), (1, 1, 1), (9, 2, 3), (1, 4, 1)])
def test_a_router_that_is_cut_off_runs_and_holds_its_share_and_at_least_one(
    most: int, num_others: int, wanted: int
) -> None:
    limiter, asked = cut_off(num_others), scopes(concurrent=most)
    for _ in range(wanted):
        expect_admitted(limiter.admit(asked, 0, START_S))
    assert expect_refused(limiter.admit(asked, 0, START_S)).limit is Limit.CONCURRENT
    asked = scopes("key/b", queued=most)
    for _ in range(wanted):
        assert limiter.hold(expect_admitted(limiter.admit(asked, 0, START_S))) is None
    why = expect_refused(limiter.hold(expect_admitted(limiter.admit(asked, 0, START_S))))
    assert (why.limit, why.amount, why.wait_s) == (Limit.QUEUED, most, 1.0)


@pytest.mark.parametrize(("window", "amount", "used"), [("tokens_per_day", 1000, 300), ("tokens_per_month", 1600, 500)])
def test_a_router_that_is_cut_off_assumes_that_the_others_use_their_share_of_a_window(
    window: str, amount: int, used: int
) -> None:
    limiter, asked = cut_off(2), scopes("tenant/acme", **{window: amount})
    for tokens, at in ((200, START_S - DAYS_S), (300, START_S)):
        limiter.end(expect_admitted(limiter.admit(asked, tokens, at)), tokens, at)
    limiter.report(START_S)  # nobody hears it
    expect_refused(limiter.admit(asked, 101, START_S))
    limiter.end(expect_admitted(limiter.admit(asked, 100, START_S)), 0, START_S)
    for number in range(3):  # heard again: they would have told of theirs
        limiter.take(f"r-{number + 1}", 10**13, {}, START_S)
    limiter.report(START_S)
    expect_admitted(limiter.admit(asked, amount - used, START_S))
    expect_refused(limiter.admit(asked, 1, START_S))


def test_a_router_that_hears_itself_assumes_nothing_of_a_silent_ones_windows() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_day=1000)
    limiter.take("r-2", 1, {}, START_S)
    for half in range(9):
        limiter.take("r-1", *limiter.report(START_S + half / 2), START_S + half / 2)
    assert limiter.peers.silent == ("r-2",)
    limiter.end(expect_admitted(limiter.admit(asked, 300, START_S + 4)), 300, START_S + 4)
    expect_admitted(limiter.admit(asked, 700, START_S + 4))


def test_what_is_left_to_a_router_that_is_cut_off_is_its_share() -> None:
    approx: Any = pytest.approx
    limiter, asked = cut_off(2), scopes(requests_per_minute=60, tokens_per_minute=600)
    requests, tokens = limiter.left(asked, START_S)
    assert (requests, tokens) == ((60, 20, approx(0.0)), (600, 200, approx(0.0)))
    limiter.end(expect_admitted(limiter.admit(asked, 100, START_S)), 50, START_S)
    requests, tokens = limiter.left(asked, START_S)
    assert (requests, tokens) == ((60, 19, approx(3.0)), (600, 150, approx(15.0)))
    assert expect_refused(limiter.admit(asked, 200, START_S)).wait_s == pytest.approx(15.0)


def test_a_router_that_is_gone_runs_nothing() -> None:
    limiter, asked = Limiter("r-1"), scopes(concurrent=3)
    limiter.take("r-2", 1, {"tenant/acme": ScopeUse(num_running=3)}, START_S)
    for half in range(32):
        at = START_S + half / 2
        limiter.take("r-1", *limiter.report(at), at)
        assert isinstance(limiter.admit(asked, 0, at), Reservation) == (half > 30)


def test_a_request_that_came_back_is_held_whatever_the_limit_and_one_that_is_over_is_not() -> None:
    limiter, asked = Limiter("r-1"), (*scopes("tenant/a", queued=9), *scopes("key/b", queued=1))
    first, second, third = (expect_admitted(limiter.admit(asked, 0, START_S)) for _ in range(3))
    limiter.release(second)
    assert limiter.hold(first) is None and limiter.hold(second) is None
    assert expect_refused(limiter.hold(third)).scope_id == "key/b"
    limiter.take("r-2", 1, {}, START_S)

    def num_held() -> list[int]:
        return [row.num_held for row in limiter.report(START_S)[1].values()]

    assert num_held() == [2, 2], "one that is refused is held nowhere"
    limiter.end(third, 0, START_S)
    assert limiter.hold(third) is None and not third.is_held
    limiter.release(first)
    limiter.release(first)
    assert num_held() == [1, 1]
    limiter.end(second, 0, START_S)
    assert num_held() == [0, 0]


def test_other_routers_held_requests_count_as_reported() -> None:
    limiter, asked = Limiter("r-1"), scopes(queued=3)
    limiter.take("r-2", 1, {"tenant/acme": ScopeUse(num_running=9, num_held=2)}, START_S)
    first, second = (expect_admitted(limiter.admit(asked, 0, START_S)) for _ in range(2))
    assert limiter.hold(first) is None
    assert expect_refused(limiter.hold(second)).limit is Limit.QUEUED


@pytest.mark.parametrize(
    ("limits", "tokens", "elsewhere", "num_calm"),
    [
        ({"requests_per_minute": 60}, 0, 0, 3),
        ({"tokens_per_minute": 600}, 10, 0, 3),
        ({"concurrent": 8}, 0, 0, 3),
        ({"concurrent": 8}, 0, 6, 1),
        ({"concurrent": 9}, 0, 0, 4),
    ],
)
def test_what_is_reported_soon(limits: dict[str, int], tokens: int, elsewhere: int, num_calm: int) -> None:
    limiter, asked = Limiter("r-1"), scopes("tenant/acme", **limits)
    limiter.take("r-2", 1, {"tenant/acme": ScopeUse(num_running=elsewhere)}, START_S)
    limiter.report(START_S)
    for _ in range(num_calm):
        expect_admitted(limiter.admit(asked, tokens, START_S))
    assert not limiter.urgent
    expect_admitted(limiter.admit(asked, tokens, START_S))
    assert list(limiter.urgent) == ["tenant/acme"]
    limiter.report_urgent(START_S)
    assert not limiter.report(START_S)[1], "it was told"
    limiter.admit(asked, tokens, START_S)
    limiter.report(START_S)
    assert not limiter.urgent


@pytest.mark.parametrize("limits", [{"requests_per_minute": 60}, {"concurrent": 3}, {}])
def test_an_end_far_from_the_limit_is_no_hurry(limits: dict[str, int]) -> None:
    limiter, asked = Limiter("r-1"), scopes("tenant/acme", **limits)
    limiter.take("r-2", 1, {}, START_S)
    limiter.report(START_S)
    limiter.end(expect_admitted(limiter.admit(asked, 0, START_S)), 0, START_S)
    assert not limiter.urgent


def test_a_router_that_knows_of_no_other_hurries_with_nothing() -> None:
    limiter, asked = Limiter("r-1"), scopes(requests_per_minute=60, concurrent=9)
    for at in (START_S, START_S + 1):
        for _ in range(4):
            expect_admitted(limiter.admit(asked, 0, at))
        assert not limiter.urgent
        limiter.report(at)


def test_a_request_without_tokens_leaves_no_window() -> None:
    limiter = Limiter("r-1")
    limiter.end(expect_admitted(limiter.admit(scopes(tokens_per_day=9), 5, START_S)), 0, START_S)
    limiter.report(START_S + 200)
    assert len(limiter) == 0


def test_a_copy_has_what_is_not_full_or_has_windows_and_fills_from_when_it_was_made() -> None:
    limiter = with_left(40.0, 60.0)
    limiter.end(expect_admitted(limiter.admit(scopes("key/b", tokens_per_day=9), 5, START_S)), 5, START_S)
    limiter.end(expect_admitted(limiter.admit(scopes("key/c", concurrent=9), 5, START_S)), 5, START_S)
    copied = dict(limiter.copy(START_S + 1))
    assert copied["key/c"] is None and copied["key/b"] is not None and len(copied["key/b"].windows) == 1
    assert copied["tenant/acme"] == ScopeUse(requests_left_s=41.0)
    for copied_s, left_s in ((1, 45.0), (50, 41.0)):
        again = Limiter("r-1")
        kept = {scope_id: use for scope_id, use in copied.items() if use is not None}
        again.restore([], kept, START_S + copied_s, START_S + 5)
        assert kept_left_s(again, START_S + 5) == (left_s, 60.0)
        assert again.left(scopes("tenant/acme", requests_per_minute=60), START_S + 5)[0] == (60, left_s, 60 - left_s)
    later = Limiter("r-1")
    later.restore([], kept, START_S, START_S + 40 * DAYS_S)
    assert dict(later.copy(START_S + 40 * DAYS_S)) == {"tenant/acme": None, "key/b": None}, "its month is over"


def test_a_scope_of_which_another_router_reports_is_not_forgotten() -> None:
    limiter = with_left()
    for at, router_id, wanted in ((100, "r-2", 1), (130, "r-1", 1), (219, "r-1", 1), (220, "r-1", 0)):
        limiter.take(router_id, at, {"tenant/acme": ScopeUse(requests_left_s=60)} if at < 200 else {}, START_S + at)
        limiter.report(START_S + at)
        assert len(limiter) == wanted


def test_a_report_is_of_so_many_scopes_and_the_next_has_the_others() -> None:
    limiter = Limiter("r-1", LimiterParams(most_rows=2))
    limiter.take("r-2", 1, {}, START_S)
    for number in range(5):
        limiter.admit(scopes(f"key/{number}", requests_per_minute=60, tokens_per_day=9), 0, START_S)
    assert [list(limiter.report(START_S)[1]) for _ in range(4)] == [
        ["key/0", "key/1"],
        ["key/2", "key/3"],
        ["key/4"],
        [],
    ]
    for number in range(5):
        reserved = limiter.admit(scopes(f"key/{number}", requests_per_minute=10, tokens_per_day=9), 1, START_S)
        limiter.end(expect_admitted(reserved), 1, START_S)
    assert list(limiter.urgent) == [f"key/{number}" for number in range(5)]
    told = [limiter.report_urgent(START_S)[1] for _ in range(3)]
    assert [list(rows) for rows in told] == [["key/0", "key/1"], ["key/2", "key/3"], ["key/4"]]
    assert told[0]["key/0"].windows[0].month_tokens == 1
    seen = [list(limiter.report(START_S)[1]) for _ in range(2)]
    assert [len(names) for names in seen] == [2, 2], "windows are repeated"


def test_the_first_report_that_another_may_hear_names_all_scopes() -> None:
    limiter = Limiter("r-1")
    for number in range(3):
        limiter.end(expect_admitted(limiter.admit(scopes(f"key/{number}", concurrent=1), 1, START_S)), 1, START_S)
    named = [len(limiter.report(START_S + at)[1]) for at in (0.0, 5.0)]
    limiter.take("r-2", 1, {}, START_S + 6)
    named += [len(limiter.report(START_S + at)[1]) for at in (6.0, 6.5)]
    assert named == [3, 0, 3, 0]
    limiter.take("r-1", 10**13, {}, START_S + 30)
    limiter.report(START_S + 30)  # r-2 is gone
    limiter.admit(scopes("key/0", concurrent=1), 1, START_S + 30)
    assert [len(limiter.report(START_S + at)[1]) for at in (32.4, 32.6)] == [1, 0]


def test_a_report_takes_from_the_bucket_as_it_is_by_then() -> None:
    limiter = with_left()
    row = ScopeUse(requests_s=5.0, tokens_s=6.0, requests_left_s=55.0, tokens_left_s=54.0)
    limiter.take("r-2", 1, {"tenant/acme": row}, START_S + 10)
    assert kept_left_s(limiter, START_S + 10) == (55.0, 54.0)


def test_news_of_a_scope_has_this_routers_windows_alone_and_a_repeated_row_all() -> None:
    limiter, asked = with_left(day=1, month=month_of(START_S), month_tokens=7), scopes(tokens_per_day=9)
    limiter.end(expect_admitted(limiter.admit(asked, 5, START_S)), 5, START_S)
    rows = [limiter.report(START_S)[1]["tenant/acme"] for _ in range(2)]
    assert [[use.router_id for use in row.windows] for row in rows] == [["r-1"], ["r-1", "r-2"]]


def test_what_was_reported_before_a_router_was_cut_off_is_known_to_the_others() -> None:
    limiter, asked = Limiter("r-1"), scopes(tokens_per_day=1000)
    limiter.take("r-2", 1, {}, START_S)
    limiter.end(expect_admitted(limiter.admit(asked, 300, START_S)), 300, START_S)
    for half in range(8):
        limiter.report(START_S + half / 2)
    assert limiter.peers.is_cut
    expect_admitted(limiter.admit(asked, 700, START_S + 4))
