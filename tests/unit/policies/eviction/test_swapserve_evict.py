"""SwapServeLLM section 4 as a policy of the kind eviction: shortest queue, then oldest access."""

from glowplug.policies.caching.ordering import Resident
from glowplug.policies.eviction.swapserve import evict


def engine(name, *, waiting=0, used_at=1.0, num_bytes=10, **fields):
    return Resident(name=name, num_bytes=num_bytes, last_used_at=used_at, num_waiting=waiting, **fields)


def test_the_shortest_queue_goes_whatever_was_used_last():
    decision = evict([engine("old", waiting=3, used_at=1.0), engine("new", waiting=0, used_at=9.0)], 10)
    assert decision.victims == ("new",)


def test_of_equal_queues_the_one_used_longest_ago():
    assert evict([engine("b", used_at=2.0), engine("a", used_at=1.0)], 10).victims == ("a",)


def test_who_is_held_stays_and_too_little_is_nothing():
    decision = evict([engine("a", held="2 requests in flight"), engine("b", num_bytes=5)], 10)
    assert decision.victims == () and decision.rivals[0].why


def test_a_lower_priority_goes_first_whatever_its_queue():
    decision = evict([engine("low", waiting=9), engine("high", priority=1)], 10)
    assert decision.victims == ("low",)
    assert set(evict([engine("low", waiting=9), engine("high", priority=1)], 20).victims) == {"low", "high"}
