"""Eviction orders on hand-worked sequences."""

import math

import pytest

from glowplug.policies.caching.mcache_importance import CacheFacts, Importance, ImportanceParams, ranks, request_counter
from glowplug.policies.caching.ordering import Resident
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
