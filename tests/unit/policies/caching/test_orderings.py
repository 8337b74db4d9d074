"""Eviction orders on hand-worked sequences."""

import math

import pytest

from glowplug.policies.caching.mcache_importance import (
    CacheFacts,
    Importance,
    ImportanceParams,
    mcache,
    ranks,
    request_counter,
)
from glowplug.policies.caching.ordering import ONLY_ONE, STAYS, Resident, evict, first_enough, without_needless
from glowplug.policies.caching.recency import Lfu, Lru
from glowplug.policies.caching.union import union


def a_resident(name, size=10, used=0.0, **fields):
    return Resident(name=name, num_bytes=size, last_used_at=used, **fields)


def order(memory, names, now_s=100.0, size=10):
    return [r.name for _, r in memory.order([a_resident(n, size) for n in names], now_s)]


def test_lru_lfu():
    lru = Lru()
    assert [r.name for _, r in lru.order([a_resident("b", used=2.0), a_resident("a", used=3.0)], 9.0)] == ["b", "a"]
    lfu = Lfu()
    for name in "aabbbc":
        lfu.used(name, 10, 0.0, hit=name in lfu._uses)
    assert order(lfu, "abc") == ["c", "a", "b"]
    lfu.left("b")
    lfu.used("b", 10, 1.0, hit=False)
    assert order(lfu, "ab") == ["b", "a"], "who comes back begins anew"


# mCache section 4.3


def test_utility_is_penalty_per_byte_and_rate():
    """Eq. 1; the rate of n requests at once is n ln 2 / half-life."""
    memory = Importance(
        lambda name, size: {"slow": 8.0, "fast": 2.0}[name], ImportanceParams(half_life_s=100.0, spread=1.0)
    )
    for name in ("slow", "fast", "fast"):
        memory.used(name, 10, 0.0, hit=True)
    per_request = math.log(2) / 100
    assert memory.utility(a_resident("slow", 10), 0.0) == pytest.approx(8 / 10 * per_request)
    assert memory.utility(a_resident("fast", 40), 0.0) == pytest.approx(2 / 40 * 2 * per_request)
    assert memory.rate_per_s("fast", 100.0) == pytest.approx(per_request)
    assert memory.rate_per_s("never", 0.0) == 0.0
    assert order(memory, ["slow", "fast"]) == ["fast", "slow"]


def test_the_rate_is_that_of_requests_where_they_are_counted():
    """Section 4.3.2: uses count until the first request."""
    params = ImportanceParams(half_life_s=100.0, spread=1.0, counts="requests")
    memory = Importance(lambda name, size: 1.0, params)
    per_request = math.log(2) / 100
    for _ in range(5):
        memory.used("started", 10, 0.0, hit=True)
    assert memory.rate_per_s("started", 0.0) == pytest.approx(per_request)
    memory.requested("started", 3, 0.0)
    assert memory.rate_per_s("started", 0.0) == pytest.approx(3 * per_request), "the floor is no request"
    memory.used("started", 10, 100.0, hit=False)
    assert memory.rate_per_s("started", 100.0) == pytest.approx(1.5 * per_request)
    memory.requested("hot", 4, 100.0)
    assert memory.rate_per_s("hot", 100.0) == 0.0, "it was never here"
    memory.used("hot", 10, 100.0, hit=False)
    memory.requested("hot", 4, 100.0)
    assert order(memory, ["hot", "started"]) == ["started", "hot"]


def test_three_half_lives_keep_who_is_asked_for_now_and_who_is_asked_for_always():
    """Erratum E25: the mean of a short, a middle and a long memory."""

    def memory(half_life_s, spread):
        made = Importance(lambda name, size: 1.0, ImportanceParams(half_life_s=half_life_s, spread=spread))
        for at in range(100):  # every 100 s forever
            made.used("always", 10, at * 100.0, hit=True)
        made.used("now", 10, 9_990.0, hit=False)
        for at in range(40):  # a burst, long ago
            made.used("then", 10, 3_000.0 + at, hit=True)
        return made

    three = memory(300.0, 10.0)
    alone = [memory(300.0 * f, 1.0).rate_per_s("always", 9_995.0) for f in (0.1, 1.0, 10.0)]
    assert three.rate_per_s("always", 9_995.0) == pytest.approx(sum(alone) / 3)
    assert order(three, ["then", "now", "always"], now_s=9_995.0) == ["then", "always", "now"]
    assert order(memory(3000.0, 1.0), ["then", "always", "now"], now_s=9_995.0)[0] == "now", "a long memory alone"


def test_ranks_are_the_log_of_those_below():
    """Eq. 2 with b0 = 1; equal utilities share a rank."""
    assert ranks([1.0, 2.0, 2.0, 5.0]) == pytest.approx([0.0, math.log(2), math.log(2), math.log(4)])


def test_scores_may_be_stale_until_they_are_renewed():
    """Section 4.3.3: periodic updates."""
    memory = Importance(lambda name, size: 1.0, ImportanceParams(half_life_s=10.0, spread=1.0, renew_s=60.0))
    memory.used("a", 10, 0.0, hit=False)
    memory.used("b", 10, 0.0, hit=False)
    memory.used("b", 10, 1.0, hit=True)
    assert order(memory, "ab", now_s=1.0) == ["a", "b"]
    for now_s in (2.0, 3.0, 4.0, 5.0):
        memory.used("a", 10, now_s, hit=True)
    assert order(memory, "ab", now_s=30.0) == ["a", "b"]
    assert order(memory, "ab", now_s=61.0) == ["b", "a"]


def test_the_unions_order_is_by_worth_a_byte_and_by_recency_where_all_cost_the_same():
    seconds = {"slow": 8.0}
    memory = union(CacheFacts(penalty_s=lambda name, size: seconds.get(name, 1.0)))
    assert request_counter(memory) is None, "what counts is who asks this memory, not each request"
    old, new, slow, copied = (
        a_resident(name, used=at, has_copy=name == "copied")
        for name, at in (("old", 0.0), ("new", 50.0), ("slow", 0.0), ("copied", 50.0))
    )
    for resident in (old, new, slow, copied):
        memory.used(resident.name, resident.num_bytes, resident.last_used_at, hit=False)
    ordered = [resident.name for _, resident in memory.order([new, slow, copied, old], 60.0)]
    assert ordered.index("old") < ordered.index("new") < ordered.index("slow")
    assert ordered.index("copied") < ordered.index("new"), "the first who asks grows from the replica"
    copy, alone = (memory.holding(a_resident("slow", used=0.0, has_copy=has), 60.0) for has in (True, False))
    assert 0 < copy.asked < alone.asked < 1 and copy.climb_s == alone.climb_s == 8.0
    half = memory.holding(a_resident("slow", 5), 60.0)
    assert half.worth == 2 * alone.worth


def test_of_equals_the_one_used_longest_ago_leaves_first_and_then_by_name():
    alike = [a_resident("b", used=1.0), a_resident("a", used=1.0), a_resident("c", used=0.0)]
    facts = CacheFacts(penalty_s=lambda name, size: 1.0)
    for memory in (Lru(), Lfu(), mcache(facts), union(facts)):
        assert [r.name for _, r in memory.order(alike, 9.0)] == ["c", "a", "b"]
    assert [score for score, _ in Lru().order(alike, 9.0)] == [0.0, 1.0, 1.0]


def test_a_use_of_what_is_not_here_begins_a_count_of_one():
    lfu = Lfu()
    for hit in (True, True, False, True):
        lfu.used("a", 10, 0.0, hit=hit)
    assert [score for score, _ in lfu.order([a_resident("a"), a_resident("never")], 9.0)] == [0.0, 2.0]
    lfu.used("hit", 10, 0.0, hit=True)
    lfu.left("a")
    lfu.left("nobody")
    assert [score for score, _ in lfu.order([a_resident("hit"), a_resident("a")], 9.0)] == [0.0, 1.0]


def test_beyond_the_names_kept_the_one_used_longest_ago_is_forgotten():
    memory = Importance(lambda name, size: 1.0, ImportanceParams(max_names=2))
    for at, name in enumerate(("a", "b", "a", "c")):
        memory.used(name, 10, float(at), hit=False)
    assert [memory.rate_per_s(name, 3.0) > 0 for name in "abc"] == [True, False, True]


def test_rates_are_means_over_a_tenth_the_half_life_and_ten_times_it():
    rate = Importance(lambda name, size: 1.0, ImportanceParams(half_life_s=100.0, spread=10.0))
    single = Importance(lambda name, size: 1.0, ImportanceParams(half_life_s=100.0, spread=1.0))
    for memory in (rate, single):
        memory.used("a", 10, 0.0, hit=False)
        memory.used("a", 10, 100.0, hit=False)
    in_each = [(1 + 0.5 ** (100 / half_life_s)) / half_life_s for half_life_s in (10.0, 100.0, 1000.0)]
    assert rate.rate_per_s("a", 100.0) == pytest.approx(sum(in_each) / 3 * math.log(2))
    assert single.rate_per_s("a", 100.0) == pytest.approx(1.5 / 100 * math.log(2))
    assert single.rate_per_s("a", 0.0) == single.rate_per_s("a", 100.0), "a clock that steps back adds nothing"
    assert single.utility(a_resident("a", 0), 100.0) == single.utility(a_resident("a", 1), 100.0)
    assert single.utility(a_resident("a", 1), 100.0) == single.rate_per_s("a", 100.0)
    twice = Importance(lambda name, size: 1.0, ImportanceParams(half_life_s=100.0, spread=2.0))
    twice.used("a", 10, 0.0, hit=False)
    assert twice.rate_per_s("a", 0.0) == pytest.approx((1 / 50 + 1 / 100 + 1 / 200) / 3 * math.log(2))


def test_old_scores_hold_until_the_moment_of_the_renewal_and_who_came_since_has_its_own():
    memory = Importance(lambda name, size: 1.0, ImportanceParams(half_life_s=10.0, spread=1.0, renew_s=60.0))
    for name in "aab":
        memory.used(name, 10, 0.0, hit=False)
    assert order(memory, "ab", now_s=0.0) == ["b", "a"]
    for _ in range(9):
        memory.used("b", 10, 1.0, hit=True)
    memory.used("new", 10, 1.0, hit=False)
    assert order(memory, ["a", "b", "new"], now_s=59.9) == ["new", "b", "a"]
    assert order(memory, ["a", "b", "new"], now_s=60.0) == ["new", "a", "b"]


def test_only_an_order_that_counts_requests_is_told_of_them():
    for policy in (mcache, union):
        asked, uses = (
            policy(CacheFacts(penalty_s=lambda name, size: 1.0, importance=ImportanceParams(counts=counts)))
            for counts in ("requests", "uses")
        )
        assert request_counter(uses) is None
        assert request_counter(asked) is (asked if policy is mcache else None)
    assert request_counter(Lru()) is None


def test_as_many_leave_as_it_takes_and_those_made_needless_stay():
    sizes = [a_resident(str(size), size) for size in (10, 20, 30)]
    assert [len(first_enough(sizes, need)) for need in (0, 1, 10, 11, 30, 31, 99)] == [0, 1, 1, 2, 2, 3, 3]
    for need, kept in ((60, "10 20 30"), (50, "20 30"), (31, "30 10"), (40, "10 30"), (39, "10 30"), (1, "10")):
        assert {r.name for r in without_needless(sizes, need)} == set(kept.split()), need
    assert [r.name for r in without_needless(sizes, 60)] == ["10", "20", "30"]


def test_a_decision_names_its_rule_where_there_was_a_choice_and_says_who_stays():
    one, two = a_resident("one", 10, 1.0), a_resident("two", 10, 2.0)
    for need, reason in ((10, Lru.rule), (11, ONLY_ONE), (20, ONLY_ONE)):
        assert evict(Lru(), [two, one], need, 0.0).reason == reason
    decision = evict(Lru(), [two, one, a_resident("empty", 0)], 1, 0.0)
    assert decision.victims == ("one",) and (decision.freed_bytes, decision.need_bytes) == (10, 1)
    assert [(rival.name, rival.why) for rival in decision.rivals] == [
        ("empty", STAYS),
        ("one", "it leaves"),
        ("two", STAYS),
    ]
    assert evict(Lru(), [one, a_resident("empty", 0)], 10, 0.0).reason == ONLY_ONE, "who frees nothing is no choice"
    assert evict(Lru(), [a_resident("tiny", 1)], 1, 0.0).victims == ("tiny",)
    assert "none may leave" in evict(Lru(), [a_resident("a", held="pinned")], 1, 0.0).reason
    assert evict(Lru(), [one], 0, 0.0).reason == "nothing needs to be freed" != evict(Lru(), [], 1, 0.0).reason
