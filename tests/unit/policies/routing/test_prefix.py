"""Prefix-aware routing: the block index, and the choice between a cache and a queue. Fast lane, below a second."""

from random import Random

import pytest

from glowplug.domain.snapshot import Target
from glowplug.policies.registry import choose
from glowplug.policies.routing.port import NONE_FREE, BalancerParams
from glowplug.policies.routing.prefix import NUM_GONE, PrefixAware
from glowplug.policies.routing.prefix_index import Prefix, PrefixIndex, Slots, num_alike

PARAMS = BalancerParams(block_tokens=100)
CHAT = tuple(range(1, 11))


def balancer(num: int = 2, kv_tokens: int = 100_000) -> PrefixAware:
    made = PrefixAware(PARAMS)
    for number in range(num):
        made.put(Target(f"i{number}", 0, 8, kv_tokens, ready_at=1.0), 0.0)
    return made


def test_the_end_of_a_prompt_leaves_before_its_beginning_and_old_prompts_before_new_ones() -> None:
    index = PrefixIndex()
    index.add("a", (1, 2, 3), most=4)
    index.add("a", (7, 8), most=4)
    assert index.num_held("a", (1, 2, 3)) == 2, "3 has left"
    index.add("a", (1, 2), most=4)
    index.add("a", (9, 10), most=4)
    assert (index.num_held("a", (1, 2)), index.num_held("a", (7, 8)), len(index)) == (2, 0, 4)


def test_holders_come_with_the_most_first_and_each_once() -> None:
    index = PrefixIndex()
    index.add("a", (1, 2), most=9)
    index.add("b", (1, 2, 3, 4), most=9)
    index.add("c", (5,), most=9)
    assert list(index.holders((1, 2, 3, 9))) == ["b", "a"]
    index.forget("b")
    assert (list(index.holders((1, 2, 3))), list(index.holders((3,)))) == (["a"], [])


def test_the_index_agrees_with_plain_sets_over_random_traffic() -> None:
    chance, index, most = Random(7), PrefixIndex(), 30
    for _ in range(2000):
        name, length, root = chance.choice("abc"), chance.randint(1, 12), chance.randint(0, 5)
        prefix = tuple(root * 100 + n for n in range(length))
        if chance.random() < 0.02:
            index.forget(name)
        else:
            index.add(name, prefix, most)
        for one in "abc":
            held = index.num_held(one, prefix)
            assert all(one in index._holders[block] for block in prefix[:held])
            assert held == length or prefix[held] not in index._held.get(one, ())
        assert len(index) == sum(map(len, index._holders.values())) <= 3 * most


def test_a_conversation_returns_to_its_cache_until_that_instance_has_more_to_compute() -> None:
    made = balancer()
    made.sent(1, "i0", 1000, 50, 0.0, CHAT)
    made.first_token(1, 0.5)
    made.ended(1, 50, 1.0)
    assert made.choose(1050, 50, 1.0, CHAT).instance_id == "i0"
    for ticket in range(2, 5):
        made.sent(ticket, "i0", 500, 50, 1.0)
    assert made.choose(1050, 50, 1.0, CHAT).instance_id == "i1", "1,650 tokens wait there, and 1,000 are saved"
    assert made.choose(1050, 50, 1.0, tuple(range(50, 60))).instance_id == "i1", "another beginning has no cache"


def test_a_prompt_counts_as_queued_by_what_is_left_to_read() -> None:
    made = balancer()
    for ticket in (1, 2):
        made.sent(ticket, "i0", 1000, 50, 0.0, CHAT)
    assert made.instances["i0"].queued_tokens == 1000 + 1
    made.ended(1, 0, 0.1)
    made.first_token(2, 0.2)
    assert made.instances["i0"].queued_tokens == 0


def test_an_engine_that_keeps_nothing_is_soon_trusted_with_nothing() -> None:
    made = balancer()
    for ticket in range(1, 60):
        made.sent(ticket, "i0", 1000, 50, 0.0, CHAT)
        made.first_token(ticket, 0.1)
        made.ended(ticket, 50, 0.2, cached_tokens=0)
    assert made.trust < 0.01
    made.sent(99, "i0", 100, 50, 0.3)
    assert made.choose(1000, 50, 0.3, CHAT).instance_id == "i1"


def test_an_engine_that_starts_again_has_an_empty_cache_and_one_that_drains_for_a_moment_keeps_it() -> None:
    made = balancer()
    made.sent(1, "i0", 1000, 50, 0.0, CHAT)
    made.ended(1, 50, 0.2)
    made.gone("i0")
    made.put(Target("i0", 0, 8, 100_000, ready_at=1.0), 0.3)
    assert made.index.num_held("i0", CHAT) == 10
    made.gone("i0")
    made.put(Target("i0", 0, 8, 100_000, ready_at=9.0), 9.0)
    assert made.index.num_held("i0", CHAT) == 0


def test_what_is_known_of_instances_that_are_gone_is_bounded() -> None:
    made = balancer(3 * NUM_GONE)
    for number in range(3 * NUM_GONE):
        made.sent(number, f"i{number}", 1000, 50, 0.0, CHAT)
        made.ended(number, 50, 0.2)
        made.gone(f"i{number}")
    assert len(list(made.index.instances())) == NUM_GONE


def test_the_blocks_of_all_instances_together_are_bounded() -> None:
    made = PrefixAware(BalancerParams(block_tokens=100, most_blocks=50))
    for number in range(5):
        made.put(Target(f"i{number}", 0, 8, 100_000), 0.0)
        made.sent(number, f"i{number}", 9000, 50, 0.0, tuple(range(number * 1000, number * 1000 + 90)))
    for number in range(5, 10):
        made.sent(number, f"i{number - 5}", 9000, 50, 0.0, tuple(range(number * 1000, number * 1000 + 90)))
    assert len(made.index) <= 50


def of_slots(num: int = 2, num_slots: int = 2) -> PrefixAware:
    made = PrefixAware(PARAMS)
    for number in range(num):
        made.put(Target(f"i{number}", 0, num_slots, 100_000, ready_at=1.0, num_sequences=num_slots), 0.0)
    return made


def chat(number: int, num_blocks: int = 10) -> Prefix:
    return tuple(range(number * 1000, number * 1000 + num_blocks))


def test_a_slot_goes_on_from_the_sequence_most_alike_and_the_oldest_is_overwritten_where_none_is() -> None:
    slots = Slots(2)
    assert (slots.take(1, chat(1), 1.0), slots.take(2, chat(2), 1.0)) == ((), ())
    assert (slots.free(2), slots.free(1)) == (chat(2), chat(1))
    assert slots.take(3, (*chat(1), 9), 1.0) == chat(1)
    assert slots.take(4, chat(4), 1.0) == chat(2)
    assert slots.take(5, chat(5), 1.0) == (), "it waits for a slot"
    assert slots.free(3) == (), "which that one takes over"
    assert (slots.free(4), slots.free(5)) == (chat(4), chat(5))
    assert slots.take(6, (*chat(4, 1), 1, 2, 3), 1.0) == chat(4), "one block is not more than one: the oldest goes"


def test_a_conversation_is_expected_where_its_slot_is_idle_and_not_where_another_one_overwrote_it() -> None:
    made = of_slots()
    for ticket, number in enumerate((1, 2)):
        made.sent(ticket, "i0", 1000, 50, 0.0, chat(number))
        assert made.index.num_held("i0", chat(number)) == 0, "a busy slot is of no use to others"
    for ticket in (0, 1):
        made.ended(ticket, 50, 1.0, cached_tokens=0)
    assert made.choose(1000, 50, 1.0, chat(1)).instance_id == "i0"
    made.sent(3, "i0", 1000, 50, 1.0, chat(3))
    made.ended(3, 50, 2.0)
    assert [made.index.num_held("i0", chat(number)) for number in (1, 2, 3)] == [0, 10, 10]
    made.sent(4, "i0", 30, 50, 2.0)
    made.ended(4, 50, 3.0)
    assert made.index.num_held("i0", chat(2)) == 0, "a prompt too short for a block overwrites a slot all the same"
    made.put(Target("i0", 0, 2, 100_000, ready_at=9.0, num_sequences=2), 9.0)
    assert (len(made.index), made.index.num_held("i0", chat(3))) == (0, 0), "it has started again"
    assert made.trust == 1.0


def test_the_index_of_slots_agrees_with_their_sequences_over_random_traffic() -> None:
    chance, made, open_tickets = Random(5), of_slots(1, 3), list[int]()
    for ticket in range(2000):
        said, last = (*range(chance.randint(1, 4)), *chat(chance.randint(1, 6), chance.randint(0, 8))), 0
        prefix = tuple(last := hash((last, one)) for one in said)
        made.sent(ticket, "i0", 100 * len(prefix), 50, 0.0, prefix)
        open_tickets.append(ticket)
        while len(open_tickets) > 4 or (open_tickets and chance.random() < 0.5):
            made.ended(open_tickets.pop(chance.randrange(len(open_tickets))), 50, 0.0)
        idle = list(made._slots["i0"]._idle.values())
        assert made.index.num_held("i0", prefix) == max((num_alike(one, prefix) for one in idle), default=0)
        assert len(made.index) == len({block for one in idle for block in one})
        assert len(idle) + min(len(open_tickets), 3) <= 3


@pytest.mark.parametrize("policy", ["sticky", "llmd_like", "prefix", "union"])
def test_each_returns_a_conversation_and_waits_where_all_are_full(policy: str) -> None:
    made = choose("routing", policy)(PARAMS)
    for number in range(3):
        made.put(Target(f"i{number}", 0, 1, 100_000), 0.0)
    first = made.choose(1000, 50, 0.0, CHAT).instance_id
    made.sent(1, first, 1000, 50, 0.0, CHAT)
    made.filled(first, 1)
    assert made.choose(1000, 50, 0.0, CHAT).instance_id not in ("", first), "it is full"
    made.ended(1, 50, 1.0)
    made.filled(first, 0)
    assert made.choose(1100, 50, 1.0, (*CHAT, 11)).instance_id == first
    for number in range(3):
        made.filled(f"i{number}", 1)
    assert made.choose(1000, 50, 2.0, CHAT).instance_id == ""


def test_a_block_of_two_sequences_is_held_until_both_are_dropped() -> None:
    index = PrefixIndex()
    for prefix in ((1, 2), (1, 3)):
        index.keep("a", prefix)
    index.keep("b", (1,))
    assert (len(index), list(index.holders((1, 3)))) == (4, ["a", "b"])
    index.drop("a", (1, 2))
    assert [index.num_held("a", prefix) for prefix in ((1, 2), (1, 3))] == [1, 2]
    index.drop("a", (1, 3))
    index.drop("nobody", ())
    assert (len(index), list(index.holders((1,))), set(index._holders)) == (1, ["b"], {1})
    index.forget("b")
    assert (len(index), index.num_held("b", (1,)), len(index._holders)) == (0, 0, 0)


def test_a_free_slot_is_taken_before_an_idle_one_is_overwritten() -> None:
    slots = Slots(2)
    slots.take(1, chat(1), 1.0)
    assert (slots.free(1), slots.free(9)) == (chat(1), ())
    assert slots.take(2, chat(2), 1.0) == ()
    assert slots.take(3, chat(3), 1.0) == chat(1), "both are in use"
    slots.take(4, (), 1.0)
    assert (slots.free(2), slots.free(4), slots.free(3)) == ((), (), chat(3)), "no slot is left to keep the first"


@pytest.mark.parametrize(
    ("prompt", "cached", "trust"),
    [(1050, 500, 0.95), (1050, 0, 0.9), (1050, 1000, 1.0), (1050, 1040, 1.0), (1050, -1, 1.0), (801, 400, 0.95)],
)
def test_trust_moves_by_a_tenth_towards_what_the_engine_found(prompt: int, cached: int, trust: float) -> None:
    made = balancer()
    made.sent(1, "i0", 1000, 50, 0.0, CHAT)
    made.ended(1, 50, 1.0, cached_tokens=700)
    assert made.trust == 1.0, "nothing was expected of the first"
    made.sent(2, "i0", prompt, 50, 1.0, CHAT)
    made.ended(2, 50, 2.0, cached_tokens=cached)
    assert made.trust == pytest.approx(trust)
    made.sent(3, "i0", 1100, 50, 2.0, CHAT)
    assert made.instances["i0"].queued_tokens == 1100 - int(1000 * made.trust)


@pytest.mark.parametrize(
    ("kv_tokens", "most_blocks", "num_sequences", "num"),
    [(100_000, 100_000, 0, 10), (499, 100_000, 0, 4), (100_000, 7, 0, 3), (999, 100_000, 2, 4), (100_000, 13, 2, 3)],
)
def test_an_instance_holds_as_many_blocks_as_its_cache_and_its_part_of_the_most(
    kv_tokens: int, most_blocks: int, num_sequences: int, num: int
) -> None:
    made = PrefixAware(BalancerParams(block_tokens=100, most_blocks=most_blocks))
    for name in ("i0", "i1"):
        made.put(Target(name, 0, 8, kv_tokens, num_sequences=num_sequences), 0.0)
    made.sent(1, "i0", 1000, 50, 0.0, CHAT)
    made.ended(1, 50, 1.0)
    assert (made.index.num_held("i0", CHAT), made.num_blocks) == (num, num)


def test_the_cache_and_the_queue_are_weighed_token_by_token() -> None:
    for queued, wanted in ((998, "i0"), (999, "i0"), (1000, "i1")):
        made = balancer()
        made.sent(1, "i0", 1000, 1, 0.0, CHAT)
        made.ended(1, 1, 0.0)
        made.sent(2, "i0", queued - 1, 1, 0.0)
        assert made.choose(1000, 50, 0.0, CHAT).instance_id == wanted


def test_a_prompt_is_sent_where_least_is_to_be_computed_of_holders_and_others() -> None:
    made = balancer(4)
    for number, num_blocks in ((0, 2), (1, 6), (2, 10)):
        made.sent(number, f"i{number}", 1000, 1, 0.0, CHAT[:num_blocks])
        made.ended(number, 1, 0.0)
    queued = {"i0": 301, "i1": 650, "i2": 1100, "i3": 0}
    wanted = []
    for number, name in enumerate(("i2", "i1", "i0", "i3")):
        made.sent(10 + number, name, queued[name], 0, 0.0)
        wanted.append(made.choose(1001, 50, 0.0, CHAT).instance_id)
    assert wanted == ["i1", "i0", "i3", "i3"]
    made.gone("i3")
    assert made.choose(1001, 50, 0.0, CHAT).instance_id == "i1"
    made.filled("i1", 8)
    assert made.choose(1001, 50, 0.0, CHAT).instance_id == "i2"
    for name in ("i0", "i2"):
        made.filled(name, 8)
    assert made.choose(1001, 50, 0.0, CHAT) == NONE_FREE


def test_the_number_of_slots_may_change_and_a_newer_start_empties_the_cache_of_one_instance_alone() -> None:
    made = of_slots(2, 2)
    for ticket, name in enumerate(("i0", "i1")):
        made.sent(ticket, name, 1000, 50, 0.0, CHAT)
        made.ended(ticket, 50, 1.0)
    made.put(Target("i0", 0, 3, 100_000, ready_at=1.0, num_sequences=3), 1.0)
    assert made._slots["i0"].num_slots == 3 and made.index.num_held("i0", CHAT) == 10
    made.put(Target("i0", 0, 3, 100_000, ready_at=2.0, num_sequences=3), 1.0)
    assert [made.index.num_held(name, CHAT) for name in ("i0", "i1")] == [0, 10]
    for ticket in (2, 3, 4):
        made.sent(ticket, "i0", 1000, 50, 2.0, CHAT)
    for ticket in (2, 3, 4, 99):
        made.ended(ticket, 50, 3.0)
    assert made.index.num_held("i0", CHAT) == 10


def test_the_instances_that_have_gone_first_are_forgotten_first() -> None:
    made = balancer(NUM_GONE + 2)
    for number in range(NUM_GONE + 2):
        made.sent(number, f"i{number}", 1000, 50, 0.0, CHAT)
        made.ended(number, 50, 0.2)
    for number in (*range(NUM_GONE), 0):
        made.gone(f"i{number}")
    made.gone("nobody")
    assert len(list(made.index.instances())) == NUM_GONE + 2
    made.gone(f"i{NUM_GONE}")
    assert "i1" not in made.index.instances() and "i0" in made.index.instances()
    made.put(Target("i2", 0, 8, 100_000, ready_at=1.0), 1.0)
    made.gone(f"i{NUM_GONE + 1}")
    assert [name in made.index.instances() for name in ("i2", "i3")] == [True, True], "one has come back"


@pytest.mark.parametrize(("prompt_tokens", "num_held"), [(2000, 10), (1999, 0)])
def test_a_slot_is_continued_by_a_prompt_of_which_it_has_more_than_a_tenth(prompt_tokens: int, num_held: int) -> None:
    made = of_slots(1)
    made.sent(1, "i0", 1000, 50, 0.0, chat(1))
    made.ended(1, 50, 1.0)
    made.sent(2, "i0", prompt_tokens, 50, 1.0, (*chat(1, 2), *chat(2, 8)))
    assert made.index.num_held("i0", chat(1)) == num_held
