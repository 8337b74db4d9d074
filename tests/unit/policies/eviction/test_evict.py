"""Eviction: LRU, mCache's baseline, and SwapServeLLM's demand-aware preemption (section 3.5)."""

import pytest

from glowplug.policies.caching.ordering import Resident
from glowplug.policies.registry import choose


def resident(name, size=10, used=0.0, **fields):
    return Resident(name=name, num_bytes=size, last_used_at=used, **fields)


def engine(name, waiting=0, used=1.0, **fields):
    return resident(name, used=used, num_waiting=waiting, **fields)


AGED = [resident("c", used=3), resident("a", used=1), resident("b", used=2)]
LARGE_AFTER_SMALL = [resident("small", 5, 1.0), resident("large", 50, 2.0), resident("new", 50, 3.0)]
ONE_HELD = [
    resident("a", used=1, held="2 requests in flight"),
    resident("b", used=2, priority=1),
    resident("c", used=3),
]
QUEUES = [engine("busy", 5, 0.0), engine("new", 0, 9.0), engine("old", 0, 1.0)]
ONE_WORKS = [engine("working", held="1 request in flight"), engine("pinned", held="pinned"), engine("free")]
PRIORITIES = [engine("low", waiting=9), engine("high", priority=1)]


SMALL_THEN_LARGE = [resident("small", 3, 1.0), resident("large", 30, 2.0)]
CASES = {
    "the oldest first until it is enough": ("lru", AGED, 15, "a b"),
    "priority before age, ties by name": (
        "lru",
        [resident("old", used=1, priority=1), resident("z", used=5), resident("y", used=5)],
        10,
        "y",
    ),
    "a large victim spares the small ones before it (E26)": ("lru", LARGE_AFTER_SMALL, 50, "large"),
    "who is held stays": ("lru", ONE_HELD, 10, "c"),
    "a higher priority goes last": ("lru", ONE_HELD, 20, "c b"),
    "only with the one held it would be enough": ("lru", ONE_HELD, 30, ""),
    "the shortest queue and the oldest access": ("swapserve", QUEUES, 10, "old"),
    "then the oldest access": ("swapserve", QUEUES, 20, "old new"),
    "then the longer queue": ("swapserve", QUEUES, 30, "old new busy"),
    "the shortest queue whatever was used last": ("swapserve", [engine("old", 3), engine("new", 0, 9.0)], 10, "new"),
    "of equal queues the longest unused": ("swapserve", [engine("b", 0, 2.0), engine("a", 0, 1.0)], 10, "a"),
    "who is at work or pinned stays": ("swapserve", ONE_WORKS, 10, "free"),
    "the fewest go (E29)": ("swapserve", SMALL_THEN_LARGE, 20, "large"),
    "a lower priority goes whatever its queue": ("swapserve", PRIORITIES, 10, "low"),
    "the least worth a byte": (
        "union",
        [resident("dear", 10, saves_s=2.0), resident("large", 40, saves_s=4.0), resident("cheap", 10, saves_s=1.5)],
        10,
        "large",
    ),
    "of equal worth the longest unused, then by name": (
        "union",
        [resident("b", used=1), resident("c", used=2), resident("a", used=1)],
        20,
        "a b",
    ),
    "a lower priority goes whatever its worth": (
        "union",
        [resident("low", saves_s=9.0), resident("high", priority=1)],
        10,
        "low",
    ),
    "with the next priority the order is by worth alone": (
        "union",
        [resident("low", saves_s=9.0), resident("high", 15, priority=1), resident("higher", priority=2)],
        15,
        "high",
    ),
    "then the next priority beside it": ("swapserve", PRIORITIES, 20, "high low"),
}


@pytest.mark.parametrize(("policy", "residents", "need_bytes", "victims"), CASES.values(), ids=CASES)
def test_who_leaves(policy, residents, need_bytes, victims):
    decision = choose("eviction", policy)(residents, need_bytes)
    assert decision.victims == tuple(victims.split())
    assert decision.freed_bytes == sum(r.num_bytes for r in residents if r.name in decision.victims)


def test_a_score_is_what_the_rule_goes_by():
    waits = [engine("b", 3, saves_s=2.0), engine("a", 1, saves_s=5.0)]
    scores = {name: [r.score for r in choose("eviction", name)(waits, 10).rivals] for name in ("swapserve", "union")}
    assert scores == {"swapserve": [1.0, 3.0], "union": [2.0, 5.0]}
    empty = [resident("empty", 0, saves_s=3.0), resident("full", 2, saves_s=4.0)]
    assert [r.name for r in choose("eviction", "union")(empty, 1).rivals] == ["full", "empty"]
    nothing = choose("eviction", "union")([], 5)
    assert nothing.victims == () and choose("eviction", "union")(empty, 0).reason == "nothing needs to be freed"


def test_a_decision_says_why_each_leaves_or_stays():
    lru, swapserve = choose("eviction", "lru"), choose("eviction", "swapserve")
    assert lru(AGED, 0).reason == "nothing needs to be freed"
    one_pinned = [resident("a", used=1, held="pinned"), resident("b", used=2)]
    assert [r.why for r in lru(one_pinned, 10).rivals] == ["pinned", "it leaves"]
    refused = lru(one_pinned, 11)
    assert "11 B are missing, and only 10 B may be freed" in refused.reason
    assert {r.why for r in refused.rivals} == {"pinned", "it might leave, and that would not be enough"}
    refused = swapserve(ONE_WORKS, 20)
    assert refused.victims == ()
    assert {r.name: r.why for r in refused.rivals if r.name != "free"} == {
        "working": "1 request in flight",
        "pinned": "pinned",
    }
