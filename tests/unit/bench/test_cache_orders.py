"""Eviction by the orders of row M, worked by hand."""

from bench.papers.cache_orders import Arc, Belady, Srrip
from tests.unit.policies.caching.test_orderings import order


def came(memory, names, *, hit=False):
    """Ask for each: present, or brought in now."""
    for name in names:
        memory.used(name, 10, 0.0, hit=hit)


def test_srrip_keeps_what_was_hit_before_what_only_came():
    """2 bits: a newcomer waits at 2, a hit at 0; to evict, all age until one is at 3."""
    srrip = Srrip()
    came(srrip, "abc")
    came(srrip, "a", hit=True)
    assert order(srrip, "abc") == ["b", "c", "a"]
    srrip.left("b")  # a is now at 1, c at 3
    came(srrip, "d")
    assert order(srrip, "acd") == ["c", "d", "a"]
    srrip.left("c")
    came(srrip, "a", hit=True)
    srrip.left("d")
    assert order(srrip, "a") == ["a"]


def test_srrip_forgets_a_hit_as_others_leave():
    srrip = Srrip()
    came(srrip, "a")
    came(srrip, "a", hit=True)
    for name in "bc":
        srrip.used(name, 10, 2.0, hit=False)
        assert order(srrip, f"a{name}") == [name, "a"]
        srrip.left(name)
    came(srrip, "d")
    assert order(srrip, "ad") == ["a", "d"]


def test_arc_moves_its_target_by_how_many_more_ghosts_the_other_side_has():
    arc = Arc(capacity_bytes=40)
    came(arc, "ab")
    came(arc, "ab", hit=True)
    came(arc, "x")
    for name in "abx":
        arc.left(name)
    came(arc, "x")  # two often-used ghosts to one: twice the size
    came(arc, "cd")
    assert order(arc, "xcd") == ["x", "c", "d"], "20 bytes of once-used are within the target"


def test_arc_learns_from_its_ghosts():
    arc = Arc(capacity_bytes=30)
    came(arc, "abc")
    came(arc, "a", hit=True)
    assert order(arc, "abc") == ["b", "c", "a"], "once-used first"
    arc.left("b")
    came(arc, "d")
    arc.left("c")
    came(arc, "b")  # a once-used ghost: they may hold 10 now
    assert order(arc, "abd") == ["a", "b", "d"]
    arc.left("a")
    came(arc, "a")  # an often-used ghost: the target goes back
    assert order(arc, "abd")[0] == "d"


def test_arc_remembers_as_many_of_the_once_used_as_still_fit_the_cache_with_them():
    """|T1| + |B1| <= c: any after that is new."""
    arc = Arc(capacity_bytes=30)
    came(arc, "abc")
    arc.left("b")
    came(arc, "d")  # three used once fill it: no ghosts
    came(arc, "b")
    came(arc, "a", hit=True)
    assert order(arc, "abcd") == ["c", "d", "b", "a"]


def test_belady_knows():
    belady = Belady({"a": [1.0, 9.0], "b": [2.0, 5.0], "c": [3.0]})
    assert order(belady, "abc", now_s=3.0) == ["c", "a", "b"]
    assert order(belady, "abc", now_s=6.0) == ["b", "c", "a"]
