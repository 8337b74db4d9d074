"""The index of the fleet's nodes, on fleets small enough to say each answer."""

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from glowplug.domain.hardware import CachedWeights, Gpu, Grant, GrantOwner, Link, Node, SharedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import WeightsRef
from glowplug.fleet.node_index import FleetView, NodeIndex, NodeMemory
from tests.fleet_builder import MIB, a_model, a_node, an_instance


def node(node_id: str, *free_mib: int, size: int = 100, **fields: Any) -> Node:
    """GPUs of one size with these bytes free."""
    grants = {gpu: [(f"x-{node_id}-{gpu}", size - free)] for gpu, free in enumerate(free_mib) if free < size}
    return a_node(node_id, gpus_mib=(size,) * len(free_mib), grants=grants, **fields)


def found(index: NodeIndex, *needs_mib: int, num_gpus: int = 1, num: int = 1, **asked: Any) -> list[str]:
    needs = [need * MIB for need in needs_mib]
    return [one.node_id for one in index.candidates(needs, num_gpus, "emulated", num, **asked)]


@pytest.mark.parametrize(
    ("needs", "asked", "expected"),
    [
        ([50], {}, ["b"]),
        ([50], {"num": 2}, ["b", "d"]),
        ([50], {"num": 9}, ["b", "d", "e"]),
        ([51], {"num": 9}, ["d", "e"]),
        ([60, 10], {}, ["a", "d"]),
        ([0], {"num": 9}, ["a", "b", "c", "d", "e"]),
        ([-1], {"num": 9}, ["a", "b", "c", "d", "e"]),
        ([101], {"num": 9}, []),
        ([10], {"num": 9, "num_gpus": 2}, ["b", "d"]),
        ([20], {"num": 9, "num_gpus": 2}, ["d"]),
        ([10], {"num": 9, "num_gpus": 3}, []),
        ([50], {"besides": {"b"}}, ["d"]),
        ([50], {"num": 9, "only": {"a", "b", "e"}}, ["b", "e"]),
        ([50], {"num": 9, "only": {"b", "e"}, "besides": {"b"}}, ["e"]),
        ([50], {"busy": {"b"}}, ["b", "d"]),
        ([50], {"busy": {"a"}}, ["b"]),
        ([50], {"busy": {"e"}, "besides": {"e"}}, ["b"]),
        ([50], {"busy": {"e"}, "only": {"b", "d"}}, ["b"]),
    ],
)
def test_of_nodes_alike_the_first_with_the_bytes_stand_for_all(
    needs: list[int], asked: dict[str, Any], expected: list[str]
) -> None:
    nodes = [node("a", 10, 5), node("b", 50, 10), node("c", 0, 0), node("d", 60, 60), node("e", 100, 0)]
    nodes += [node("f", 100, engines=("other",)), node("g", 100, draining=True), node("none")]
    assert found(NodeIndex(nodes), *needs, **asked) == expected


def test_each_kind_of_node_has_its_own_first_ones() -> None:
    link = Link(link_id="b/nic", bytes_per_s=1e9)
    nodes = [node(name, 50) for name in ("a", "a-2")] + [node(name, 50, links=(link,)) for name in ("b", "b-2")]
    nodes += [node("c", 50, size=200), node("d", 50, abilities=("emulated:swap",))]
    nodes += [a_node(f"mixed-{n}", gpus_mib=(100, 200)) for n in range(2)]
    assert found(NodeIndex(nodes), 50) == ["a", "b", "c", "d", "mixed-0", "mixed-1"]
    assert found(NodeIndex(nodes), 101) == ["mixed-0", "mixed-1"]


@pytest.mark.parametrize(("num_nodes", "expected"), [(17, ["n01", "n02"]), (16, ["n01"])])
def test_a_few_named_nodes_are_all_looked_at(num_nodes: int, expected: list[str]) -> None:
    index = NodeIndex([node(f"n{number:02}", 50) for number in range(num_nodes)])
    assert found(index, 50, only={"n01", "n02"}) == expected
    assert found(index, 50, only={"n01", "n02"}, besides={"n01"}) == ["n02"]


def a_copy(name: str, node_id: str, mib: int, state: InstanceState = InstanceState.PREWARMED) -> Any:
    return an_instance(name, state=state, gpu_id=f"{node_id}/0", mib=mib, replica=True)


def with_copies() -> NodeIndex:
    """Each node has a copy of 40 MiB on its first GPU of 100 MiB: of "d" it sleeps, of "e" its worth is 0."""
    grants = {0: [("x", 50)], 1: [("y", 90)]}
    nodes = [a_node(n, gpus_mib=(100, 100), grants={0: [*grants[0], (n, 40)], 1: grants[1]}) for n in "abcde"]
    asleep = InstanceState.SWAPPED_OUT
    dormant = {n: [a_copy(n, n, 40, asleep if n == "d" else InstanceState.PREWARMED)] for n in "abcde"}
    return NodeIndex(nodes, {"b/0": 10 * MIB}, dormant, {"a": 3.0, "b": 1.0, "c": 2.0, "d": 5.0})


@pytest.mark.parametrize(
    ("need", "asked", "expected"),
    [
        (50, {"num": 9}, []),
        (10, {}, ["a"]),
        (50, {"drops": "free", "num": 9}, ["e"]),
        (50, {"drops": "free", "loses": 1}, ["c", "e"]),
        (50, {"drops": "free", "loses": 2}, ["a", "c", "e"]),
        (51, {"drops": "free", "loses": 9}, []),
        (40, {"drops": "free", "loses": 1}, ["b", "e"]),
        (40, {"drops": "free", "loses": 1, "busy": {"b"}}, ["b", "c", "e"]),
        (40, {"drops": "free", "loses": 1, "besides": {"b", "e"}}, ["c"]),
        (40, {"drops": "free", "loses": 1, "only": {"a", "d", "e"}}, ["a", "e"]),
        (10, {"drops": "bare", "num": 9}, ["a", "b", "c", "d", "e"]),
        (10, {"drops": "bare", "num": 1}, ["a", "e"]),
        (10, {"drops": "free", "loses": 5}, ["a", "b", "c", "d", "e"]),
        (10, {"drops": "free", "loses": 1}, ["a", "e"]),
        (11, {"drops": "bare", "loses": 1}, ["b", "e"]),
    ],
)
def test_where_copies_may_go_the_nodes_that_lose_least_come_too(
    need: int, asked: dict[str, Any], expected: list[str]
) -> None:
    index, num = with_copies(), asked.pop("loses", 0)
    losses = {"b": 1.0, "c": 2.0, "a": 3.0, "e": 4.0, "d": 5.0}
    loses = (lambda known: losses[known.node.node_id]) if num else None
    assert found(index, need, num=asked.pop("num", num or 1), loses=loses, **asked) == expected


def test_bytes_are_counted_with_promises_and_without_copies_that_may_be_dropped() -> None:
    def memory(known: NodeMemory) -> tuple[list[int], ...]:
        return tuple([num // MIB for num in has] for has in (known.free, known.bare, known.cleared))

    answers = dict(zip("abcde", with_copies().answers("memory", memory), strict=True))
    assert answers["a"] == answers["e"] == ([10, 10], [10], [50, 10])
    assert answers["b"] == ([10, 0], [10], [40, 10])
    assert answers["d"] == ([10, 10], [10, 10], [10, 10])
    index = with_copies()
    assert [one.node_id for one in index.among(None, 50 * MIB, 1, "emulated")] == ["a", "c", "e"]
    assert [one.node_id for one in index.among({"c", "b", "?"}, 10 * MIB, 2, "emulated")] == ["b", "c"]
    assert index.among(None, 0, 1, "other") == []


def test_copies_of_shared_weights_free_their_bytes_once_all_are_dropped() -> None:
    shared = SharedWeights(key="k", num_bytes=60 * MIB, holders=("r-1", "r-2"))
    grants = tuple(Grant(holder=holder, owner=GrantOwner.PREWARM, num_bytes=10 * MIB) for holder in ("r-1", "r-2"))
    gpu = Gpu(gpu_id="n/0", total_bytes=100 * MIB, grants=grants, shared=(shared,))
    for holders, cleared in ((("r-1",), 30), (("r-1", "r-2"), 100)):
        rows = {"n": [a_copy(holder, "n", 70) for holder in holders]}
        index = NodeIndex([replace(a_node("n"), gpus=(gpu,))], {}, rows)
        assert index.among(None, cleared * MIB, 1, "emulated") and not index.among(
            None, cleared * MIB + 1, 1, "emulated"
        )


def weights(digest: str, *keys: str) -> tuple[CachedWeights, ...]:
    return (CachedWeights(digest=digest, num_bytes=1, model_keys=keys),)


def test_the_nodes_with_weights_are_known_as_they_come_and_go() -> None:
    m = a_model("m", weights=WeightsRef(uri="file:/m", sha256="d" * 8))
    index = NodeIndex([a_node(name, gpus_mib=()) for name in "abc"])
    states: list[tuple[str, tuple[CachedWeights, ...], Collection[str]]] = [
        ("a", weights("d" * 8), {"a"}),
        ("b", weights("d" * 8, "other"), {"a", "b"}),
        ("c", weights("of before", "m"), {"a", "b"}),
        ("a", (), {"b"}),
        ("c", weights("d" * 8, "m"), {"b", "c"}),
        ("b", weights("of before", "m"), {"c"}),
        ("c", (), set()),
    ]
    for node_id, cached, holders in states:
        index.put(a_node(node_id, gpus_mib=(), cached=cached, on_disk=cached))
        assert index.holders(m) == holders
        on_disk = {n for n in "abc" for one in index.node(n).on_disk if one.digest == "d" * 8}
        assert index.disk_holders(m) == on_disk
    index.put(a_node("a", gpus_mib=(), cached=weights("d" * 8), on_disk=weights("d" * 8)))
    assert index.holders(m) == index.disk_holders(m) == {"a"}
    nothing = a_model("m", weights=WeightsRef(uri="", sha256="d" * 8))
    assert index.holders(nothing) is None and index.disk_holders(nothing) == set()
    index.drop("a")
    index.drop("a")
    assert index.holders(m) == index.disk_holders(m) == set() and index.node("a") is None and len(index) == 2


def test_kinds_are_counted_as_nodes_come_change_and_go() -> None:
    able = ("emulated:swap",)
    index = NodeIndex([node("a", 50, abilities=able), node("b", 50, 50, abilities=able), node("c", 50, size=200)])
    assert index.num_able("emulated", "swap") == 2 and index.num_able("emulated", "stream") == 0
    assert index.num_able("other", "swap") == 0 and len(index.kinds()) == 3

    def holds(mib: int, num_gpus: int = 1, **asked: bool) -> bool:
        return index.could_hold(mib * MIB, num_gpus, "emulated", **asked)

    assert holds(100, 2) and not holds(101, 2) and not holds(100, 3) and holds(200) and not holds(201)
    assert not index.could_hold(1, 1, "other")
    index.put(node("c", 50, size=200, draining=True))
    assert holds(200) and not holds(200, even_draining=False) and holds(100, even_draining=False)
    index.put(node("a", 50))
    assert index.num_able("emulated", "swap") == 1 and len(index.kinds()) == 3
    index.drop("b")
    index.drop("c")
    assert (len(index.kinds()), holds(200), holds(100, 2)) == (1, False, False)


def test_a_change_is_seen_by_the_next_question_and_an_answer_is_kept_until_then() -> None:
    dormant: dict[str, list[Any]] = {}
    reserved: dict[str, int] = {}
    asked, index = count(), NodeIndex([node(name, 50) for name in "abc"], reserved, dormant)
    assert found(index, 50, num=9) == ["a", "b", "c"]
    index.put(node("b", 20))
    assert found(index, 50, num=9) == ["a", "c"]
    index.put(node("b", 60))
    index.put(node("a", 50, draining=True))
    assert found(index, 50) == ["b"] and found(index, 50, num=9) == ["b", "c"]
    index.put(node("0", 100))
    assert found(index, 50, num=9) == ["0", "b", "c"]
    reserved["c/0"] = MIB
    index.touch("c")
    assert found(index, 50, num=9) == ["0", "b"]
    index.drop("0")
    assert found(index, 50, num=9) == ["b"]

    def answers() -> list[int]:
        return list(index.answers("number", lambda known: next(asked)))

    assert answers() == answers() == [0, 1, 2]
    assert list(index.answers("number", lambda known: -1, [node("c", 0), node("a", 0)])) == [2, 0]
    index.put(node("b", 60, revision=9, on_disk=weights("x")))
    assert answers() == [0, 1, 2], "nothing has changed for a start"
    index.put(node("b", 60, cached=weights("x")))
    assert answers() == [0, 3, 2]
    dormant["c"] = [a_copy("r", "c", 10)]
    index.touch("c")
    assert index.models_with_copies() == {"m"} and answers() == [0, 3, 4]
    assert index.copies(a_model()) == (dormant["c"][0],) and index.copies(a_model("n")) == ()
    index.score({"r": 0.5})
    assert answers() == [0, 3, 5]
    dormant |= {"a": [a_copy("r-1", "a", 10)], "c": [an_instance("r-2", "n", gpu_id="c/0")]}
    for node_id in "ac":
        index.touch(node_id)
        assert index.models_with_copies() == ({"m"} if node_id == "a" else {"m", "n"})
    assert index.copies(a_model()) == (dormant["a"][0],)
    del dormant["a"]
    index.touch("a")
    assert index.copies(a_model()) == () and index.models_with_copies() == {"n"}


def test_a_node_with_a_worthless_copy_is_looked_at_wherever_copies_may_go() -> None:
    dormant = {name: [a_copy(name, name, 40)] for name in "bc"}
    index = NodeIndex([a_node(n, gpus_mib=(100,), grants={0: [(n, 40)]}) for n in "abc"], {}, dormant, {"b": 1.0})
    for scores, expected in (({"b": 1.0, "c": 0.0}, ["a", "c"]), ({"b": 0.0, "c": 1.0}, ["a", "b"])):
        index.score(scores)
        assert found(index, 50, drops="free") == expected
    dormant["b"] = []
    index.touch("b")
    assert found(index, 50, drops="free") == ["a"] and found(index, 50) == ["a"]


def test_nodes_are_found_like_in_a_list_however_their_bytes_change() -> None:
    chance = random.Random(5)
    for size in range(1, 18):
        free = {f"n{number:02}": chance.randrange(5) for number in range(size)}
        index = NodeIndex([node(name, mib) for name, mib in free.items()])
        for _ in range(8):
            need, num = chance.randrange(6), chance.randrange(1, 4)
            assert found(index, need, num=num) == [name for name, mib in free.items() if mib >= need][:num]
            name = chance.choice(list(free))
            free[name] = chance.randrange(5)
            index.put(node(name, free[name]))


def test_of_each_kind_of_node_the_one_that_loses_least_comes_and_a_silent_one_does_not() -> None:
    kinds = {"a": (), "b": (), "c": ("emulated:swap",), "d": ("emulated:swap",)}
    nodes = [
        a_node(name, gpus_mib=(100,), grants={0: [(name, 100)]}, abilities=able) for name, able in kinds.items()
    ]  # fmt: skip
    rows = {name: [a_copy(name, name, 100)] for name in (*kinds, "silent")}
    index = NodeIndex(nodes, {}, rows, dict.fromkeys(rows, 1.0))
    losses = {"a": 2.0, "b": 1.0, "c": 4.0, "d": 3.0}
    assert found(index, 50, drops="free", loses=lambda known: losses[known.node.node_id]) == ["b", "d"]
    assert {row.instance_id for row in index.copies(a_model())} == rows.keys()
    index.drop("d")
    assert found(index, 50, drops="free", loses=lambda known: losses[known.node.node_id]) == ["b", "c"]


def test_a_view_makes_its_index_of_a_list_once() -> None:
    nodes = [node("a", 50), node("b", 100)]
    view = FleetView(now_s=0.0, nodes=nodes, reserved={"b/0": 60 * MIB}, dormant={"a": [a_copy("r", "a", 10)]})
    assert view.fleet is view.fleet and list(view.fleet) == nodes
    assert [one.node_id for one in view.fleet.candidates([50 * MIB], 1, "emulated", 9)] == ["a"]
    assert view.fleet.copies(a_model()) and FleetView(now_s=0.0, nodes=view.fleet).fleet is view.fleet
