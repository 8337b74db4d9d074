"""What must hold of every policy of the kind `caching`, whatever is asked of a cache in whatever sequence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.caching.mcache_importance import CacheFacts
from glowplug.policies.caching.ordering import Resident, evict
from glowplug.policies.registry import KINDS, choose

CAPACITY = 100
NAMES = "abcdefgh"
SIZES = dict(zip(NAMES, (10, 20, 30, 40, 50, 60, 100, 1), strict=True))

asks = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 100)), max_size=60)
holds = st.frozensets(st.sampled_from(NAMES), max_size=3)


@pytest.mark.parametrize("caching", sorted(KINDS["caching"]))
@given(asks=asks, held=holds, dropped=st.sets(st.integers(0, 59), max_size=5))
def test_held_stay_bytes_fit_and_the_same_asks_give_the_same_victims(
    caching: str, asks: list[tuple[str, float]], held: frozenset[str], dropped: set[int]
) -> None:
    assert play(caching, asks, held, dropped) == play(caching, asks, held, dropped)


def play(caching: str, asks: list[tuple[str, float]], held: frozenset[str], dropped: set[int]) -> list[str]:
    """A cache over those asks; the victims in order."""
    facts = CacheFacts(capacity_bytes=CAPACITY, penalty_s=lambda name, num_bytes: 1.0 + ord(name) % 3)
    memory = choose("caching", caching)(facts)
    present: dict[str, float] = {}
    victims: list[str] = []
    now_s = 0.0
    for at, (name, later_s) in enumerate(asks):
        now_s += later_s
        if at in dropped and present:
            gone = min(present)
            del present[gone]
            memory.left(gone, evicted=False)
        memory.used(name, SIZES[name], now_s, hit=name in present)
        if name not in present:
            residents = [
                Resident(name=n, num_bytes=SIZES[n], last_used_at=used, held="in use" if n in held else "")
                for n, used in present.items()
            ]
            need_bytes = SIZES[name] - (CAPACITY - sum(r.num_bytes for r in residents))
            decision = evict(memory, residents, need_bytes, now_s)
            assert not set(decision.victims) & held
            assert evict(memory, residents[::-1], need_bytes, now_s) == decision, "whatever order they are listed in"
            assert {r.name for r in decision.rivals} in (set(), set(present))
            if need_bytes > 0 and not decision.victims:
                memory.left(name, evicted=False)
                continue
            for victim in decision.victims:
                del present[victim]
                memory.left(victim)
            victims += decision.victims
        present[name] = now_s
        assert sum(SIZES[n] for n in present) <= CAPACITY
    return victims
