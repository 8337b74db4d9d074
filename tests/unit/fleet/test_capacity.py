"""The placer's record of bytes and rows."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from glowplug.domain.hardware import SharedWeights
from glowplug.domain.instance import InstanceState
from glowplug.fleet.capacity import FleetCapacity, LongestUnused
from tests.fleet_builder import MIB, a_node, an_instance

GPU = "node-1/0"
CLAIM = {GPU: 100 * MIB}


def capacity(**fields):
    kept = FleetCapacity()
    kept.put_node(a_node(**fields))
    return kept


def test_only_a_beat_that_frees_something_is_worth_a_look():
    kept = capacity(grants={0: [("i-1", 100)]})
    assert not kept.put_node(a_node(revision=2, grants={0: [("i-1", 150)]}))
    assert kept.put_node(a_node(revision=3, grants={0: [("i-1", 100)]}))
    assert not kept.put_node(a_node(revision=4, grants={0: [("i-1", 100)]}))
    assert kept.put_node(a_node(revision=5, grants={0: [("i-1", 100)]}, abilities=("emulated:stages",)))


def test_a_claim_counts_until_the_ledger_shows_it():
    kept = capacity()
    kept.claim("i-1", CLAIM)
    assert kept.free_bytes(GPU) == 200 * MIB
    kept.put_node(a_node(revision=2, grants={0: [("i-1", 100)]}))
    assert kept.free_bytes(GPU) == 200 * MIB and kept.reserved == {}


def test_setting_a_claim_aside_and_back_makes_nobody_look_again():
    kept = capacity()
    kept.claim("i-1", CLAIM)
    version = kept.version
    with kept.without("i-1"):
        assert kept.free_bytes(GPU) == 300 * MIB
    assert (kept.free_bytes(GPU), kept.version) == (200 * MIB, version)
    with pytest.raises(ZeroDivisionError), kept.without("i-1"):
        raise ZeroDivisionError
    assert (kept.free_bytes(GPU), kept.version) == (200 * MIB, version), "a policy that fails costs nobody its claim"


def shared_by(*holders, revision=1):
    node = a_node(revision=revision, grants={0: [(holder, 0 if len(holders) > 1 else 100) for holder in holders]})
    shared = SharedWeights(key="k", num_bytes=100 * MIB, holders=holders)
    return replace(node, gpus=tuple(replace(gpu, shared=(shared,)) for gpu in node.gpus))


def test_a_claim_is_for_what_others_do_not_hold_already():
    kept = capacity(grants={0: [("i-1", 100)]})
    kept.claim("i-2", {GPU: 140 * MIB}, "k")
    assert kept.free_bytes(GPU) == 60 * MIB
    version = kept.version
    assert kept.put_node(shared_by("i-1", revision=2)) and kept.version > version, "a further copy may fit now"
    assert kept.free_bytes(GPU) == 160 * MIB
    kept.put_node(shared_by("i-1", "i-2", revision=3))
    assert kept.free_bytes(GPU) == 200 * MIB
    kept.claim("i-3", {GPU: 140 * MIB}, "other")
    assert kept.free_bytes(GPU) == 60 * MIB


def test_within_a_view_what_would_be_shared_is_free():
    kept = FleetCapacity()
    kept.put_node(shared_by("i-1", "i-2"))
    for key, free in (("k", 300), ("other", 200), ("", 200)):
        with kept.seen_by(key):
            assert kept.nodes.node("node-1").gpus[0].free_bytes == free * MIB, key
    assert kept.nodes.node("node-1") == shared_by("i-1", "i-2")
    assert kept.bytes_of(GPU, ("i-1",)) == 0 and kept.counted_twice(GPU, {"i-1"}) == 100 * MIB
    assert kept.counted_twice(GPU, {"i-1", "i-2"}) == 100 * MIB
    kept.put_node(shared_by("i-1", revision=2))
    assert (kept.bytes_of(GPU, ("i-1",)), kept.bytes_of(GPU, ("i-1",), "k")) == (100 * MIB, 0)
    kept.drop_node("node-1")
    assert kept.shared(GPU, "k") is None and kept.counted_twice(GPU, {"i-1"}) == 0


def test_a_row_that_says_the_same_twice_is_taken_in_and_goes():
    node = shared_by("i-1", "i-2")
    twice = replace(node, gpus=tuple(replace(gpu, shared=gpu.shared * 2) for gpu in node.gpus))
    kept = capacity()
    kept.put_node(twice)
    kept.put_node(replace(twice, node_id="node-2"))  # lists another's GPU
    kept.put_node(shared_by("i-1", revision=2))
    kept.drop_node("node-2")
    kept.drop_node("node-1")
    assert kept.free_bytes(GPU) == 0


def test_a_row_that_starts_is_promised_its_bytes_and_one_that_drains_is_not():
    kept = capacity()
    kept.put_row(an_instance("i-1", state=InstanceState.STARTING))
    assert kept.reserved == {GPU: 100 * MIB}
    assert kept.put_row(an_instance("i-1", state=InstanceState.DRAINING, revision=2))
    assert kept.reserved == {}


def test_a_dormant_row_that_is_taken_is_nobody_elses_until_its_taker_is_gone():
    kept = capacity()
    kept.put_row(an_instance("r-1", state=InstanceState.PREWARMED, replica=True))
    kept.take("r-1", "x")
    assert kept.dormant == {}
    kept.put_row(an_instance("x", state=InstanceState.STARTING))
    kept.put_row(an_instance("x", state=InstanceState.FAILED, revision=2))
    assert [r.instance_id for r in kept.dormant["node-1"]] == ["r-1"]


def test_indices_follow_a_row_through_its_life():
    kept = capacity()
    row = an_instance("x.1", state=InstanceState.READY, part_of="x", num_stages=2)
    kept.put_row(row)
    assert set(kept.stages["x"]) == set(kept.on_gpu[GPU]) == set(kept.on_node["node-1"]) == {"x.1"}
    kept.put_row(replace(row, part_of="", num_stages=1, revision=2))
    assert kept.stages == {} and set(kept.on_gpu[GPU]) == {"x.1"}
    kept.put_row(replace(row, part_of="", state=InstanceState.STOPPED, revision=3, changed_at=5.0))
    assert kept.on_gpu == kept.on_node == {}
    assert kept.gone_before(5.0) == [] and [r.instance_id for r in kept.gone_before(6.0)] == ["x.1"]
    kept.forget("x.1")
    assert kept.gone_before(99.0) == []


def test_a_node_that_left_offers_nothing_and_is_news_when_it_is_back():
    kept = capacity()
    kept.drop_node("node-1")
    assert kept.free_bytes(GPU) == 0
    assert kept.put_node(a_node(revision=9)) and kept.free_bytes(GPU) == 300 * MIB


def test_nodes_come_by_their_last_use_and_those_without_instances_not_at_all() -> None:
    order, used = LongestUnused(), {"a": 5.0, "b": 7.0, "c": 5.5}
    for node_id, at in (("a", 5.0), ("b", 3.0), ("gone", 1.0), ("c", 6.0), ("c", 5.5), ("b", 9.0), ("a", 5.0)):
        order.note(node_id, at)
    with closing(order.in_order(used.get)) as found:
        assert next(found) == (5.0, "a/")
    for _ in range(2):
        assert list(order.in_order(used.get)) == [(5.0, "a/"), (5.5, "c/"), (7.0, "b/")]
    used |= {"gone": 4.0, "b": 8.0, "c": 1.0}
    order.note("gone", 4.0)
    order.note("c", 1.0)
    assert list(order.in_order(used.get)) == [(1.0, "c/"), (4.0, "gone/"), (5.0, "a/"), (8.0, "b/")]


S = InstanceState
PIPELINE = {"num_stages": 2}


@pytest.mark.parametrize(
    ("state", "fields", "listed"),
    [
        (S.STARTING, {}, {"active", "reserved", "used"}),
        (S.READY, {}, {"active", "reserved", "used"}),
        (S.READY, PIPELINE, {"active", "reserved", "used", "pipeline"}),
        (S.READY, PIPELINE | {"part_of": "p"}, {"reserved", "used", "stage"}),
        (S.READY, {"replica": True}, {"reserved", "used"}),
        (S.LOADING, {"replica": True}, {"reserved", "used", "dormant"}),
        (S.PREWARMED, {"replica": True}, {"used", "dormant"}),
        (S.SWAPPED_OUT, {}, {"leaving", "dormant"}),
        (S.DRAINING, {}, {"leaving"}),
    ],
)
def test_a_row_is_listed_by_what_it_does(state: InstanceState, fields: dict[str, Any], listed: set[str]) -> None:
    kept = capacity()
    for instance_id in ("i-1", "i-2"):
        kept.put_row(an_instance(instance_id, state=state, mib=10, **fields))
    found = {
        "active": kept.num_active["m"] == 2,
        "reserved": kept.reserved == {GPU: 20 * MIB},
        "used": len(list(kept.longest_unused.in_order(lambda _: 0.0))) == 1,
        "pipeline": kept.pipelines.keys() == {"i-1", "i-2"},
        "stage": len(kept.stages.get("p", ())) == 2,
        "leaving": len(kept.leaving.get("node-1", ())) == 2,
        "dormant": len(kept.dormant.get("node-1", ())) == 2,
    }
    assert {name for name, is_there in found.items() if is_there} == listed
    for num_left, instance_id in enumerate(("i-2", "i-1")):
        assert kept.num_active["m"] == (2 - num_left if "active" in listed else 0)
        kept.forget(instance_id)
        kept.forget(instance_id)
    empty = (kept.reserved, kept.pipelines, kept.stages, kept.leaving, kept.dormant, kept.on_gpu, kept.on_node)
    assert not any(empty) and kept.num_active == {} == kept.rows


@pytest.mark.parametrize(
    ("before", "after", "mib", "is_worth_a_look"),
    [
        (None, S.STARTING, 100, False),
        (None, S.READY, 100, True),
        (S.STARTING, S.LOADING, 100, False),
        (S.LOADING, S.READY, 100, True),
        (S.READY, S.READY, 100, False),
        (S.READY, S.READY, 99, True),
        (S.READY, S.READY, 101, False),
        (S.STARTING, S.FAILED, 100, True),
        (S.DRAINING, S.STOPPED, 100, True),
    ],
)
def test_a_row_that_frees_bytes_or_changes_its_state_is_worth_a_look_unless_it_starts(
    before: InstanceState | None, after: InstanceState, mib: int, is_worth_a_look: bool
) -> None:
    kept = capacity()
    if before is not None:
        kept.put_row(an_instance(state=before))
    assert kept.put_row(an_instance(state=after, mib=mib, revision=2)) is is_worth_a_look


def test_a_row_claims_what_its_workers_hold_on_its_own_node() -> None:
    kept = capacity(gpus_mib=(300, 300))
    row = an_instance(mib=50)
    (one,) = row.workers
    there = [replace(one, node_id="node-2", gpu_id="node-2/0"), one, replace(one, gpu_id="node-1/1")]
    kept.put_row(replace(row, workers=(one, *there)))
    assert kept.reserved == {GPU: 100 * MIB, "node-1/1": 50 * MIB}
    assert kept.on_gpu.keys() == {GPU, "node-1/1"} and kept.on_node.keys() == {"node-1"}


def test_a_claim_is_replaced_by_the_next_and_what_it_frees_is_worth_a_look() -> None:
    kept, other = capacity(gpus_mib=(300, 300)), {"node-1/1": 50 * MIB}
    for claim, reserved, is_freed in ((CLAIM, CLAIM, 0), (CLAIM | other, CLAIM | other, 0), (other, other, 1)):
        version = kept.version
        kept.claim("i-1", claim)
        assert (kept.reserved, kept.version - version) == (reserved, is_freed)
    kept.claim("i-2", other)
    assert kept.bytes_of("node-1/1", ("i-1", "i-2", "nobody")) == 100 * MIB == kept.reserved["node-1/1"]
    version = kept.version
    kept.claim("i-1", {})
    assert (kept.reserved, kept.version - version) == (other, 1)


def test_bytes_are_by_the_ledger_where_it_knows_the_holder() -> None:
    grants = {0: [("i-1", 10), ("i-1", 20), ("i-2", 5)]}
    kept = capacity(grants=grants)
    kept.claim("i-1", {GPU: 100 * MIB})
    kept.claim("i-3", {GPU: 7 * MIB})
    assert kept.granted(GPU) == {"i-1": 30 * MIB, "i-2": 5 * MIB}
    assert kept.bytes_of(GPU, ("i-1", "i-3")) == 37 * MIB and kept.reserved == {GPU: 7 * MIB}
    kept.drop_node("node-1")
    assert kept.granted(GPU) == {} and kept.reserved == {GPU: 107 * MIB} and kept.bytes_of(GPU, ("i-2",)) == 0


def test_a_gpu_that_its_node_has_no_longer_offers_nothing() -> None:
    kept = capacity(gpus_mib=(300, 300))
    assert not kept.put_node(a_node(gpus_mib=(300,), revision=2))
    assert (kept.free_bytes(GPU), kept.free_bytes("node-1/1")) == (300 * MIB, 0)
    assert kept.put_node(a_node(gpus_mib=(300, 100), revision=3)) and kept.free_bytes("node-1/1") == 100 * MIB


def test_weights_are_shared_while_a_gpu_has_them_and_a_claim_is_not_for_more_than_it_asks() -> None:
    kept = FleetCapacity()
    kept.put_node(shared_by("i-1", "i-2"))
    kept.claim("i-3", {GPU: 40 * MIB}, "k")
    assert kept.is_shared("k") and not kept.is_shared("other") and not kept.is_shared("")
    assert kept.free_bytes(GPU) == 200 * MIB and kept.reserved == {}
    with kept.without("i-3"):
        pass
    assert kept.reserved == {}, "its weights are shared as before"
    kept.put_row(an_instance("i-3", state=S.LOADING))
    assert kept.reserved == {}, "a row claims for the same weights"
    assert (kept.counted_twice(GPU, {"i-1", "i-2", "i-3"}), kept.counted_twice(GPU, ())) == (100 * MIB, 0)
    three = shared_by("i-1", "i-2", "i-4", revision=2)
    assert not kept.put_node(three) and kept.counted_twice(GPU, {"i-1", "i-2"}) == 200 * MIB
    assert kept.counted_twice(GPU, {"i-1", "i-2", "i-4"}) == 200 * MIB
    kept.claim("i-5", {GPU: 40 * MIB}, "k")
    kept.claim("i-5", {GPU: 40 * MIB})
    assert kept.reserved == {GPU: 40 * MIB}, "now it shares nothing"
    kept.claim("i-5", {})
    there = [replace(three.gpus[0], gpu_id="node-2/0")]
    kept.put_node(replace(three, node_id="node-2", gpus=tuple(there)))
    kept.drop_node("node-2")
    assert kept.is_shared("k"), "on the other GPU"
    kept.put_node(a_node(revision=3))
    assert not kept.is_shared("k") and kept.reserved == {GPU: 100 * MIB}
    with kept.seen_by("k"):
        assert list(kept.nodes) == [a_node(revision=3)]


def test_a_cordoned_node_is_draining_until_it_is_not_and_a_silent_one_stays_away() -> None:
    kept = capacity()
    for is_cordoned in (True, False):
        version = kept.version
        kept.cordon("node-1", is_cordoned=is_cordoned)
        (node,) = kept.nodes
        assert node.draining is is_cordoned and kept.version == version + 1
        kept.put_node(a_node(revision=2))
        assert [node.draining for node in kept.nodes] == [is_cordoned]
    kept.withdraw("node-1")
    kept.cordon("node-1", is_cordoned=True)
    assert list(kept.nodes) == [] and kept.free_bytes(GPU) == 300 * MIB
    with kept.seen_by("k"):
        assert list(kept.nodes) == []


def test_a_dormant_row_is_promised_to_one_and_given_back_once() -> None:
    kept = capacity()
    kept.put_row(an_instance("r-1", state=S.PREWARMED, replica=True))
    kept.put_row(an_instance("r-2", state=S.PREWARMED, replica=True))
    kept.take("r-1", "x")
    kept.take("unknown", "x")
    assert [row.instance_id for row in kept.dormant["node-1"]] == ["r-2"] and kept.num_promises == 2
    kept.put_row(an_instance("r-1", state=S.PREWARMED, replica=True, revision=2))
    assert [row.instance_id for row in kept.dormant["node-1"]] == ["r-2"], "it is promised"
    for freed in (1, 0):
        version, num = kept.version, kept.num_promises
        kept.give_back("r-1")
        assert (kept.version - version, kept.num_promises - num) == (freed, 1)
        assert [row.instance_id for row in kept.dormant["node-1"]] == ["r-2", "r-1"]
    kept.give_back("unknown")
    kept.take("r-1", "y")
    kept.put_row(an_instance("y", state=S.READY))
    assert [row.instance_id for row in kept.dormant["node-1"]] == ["r-2", "r-1"], "it was not needed"
    kept.take("r-1", "y")
    kept.forget("y")
    assert len(kept.dormant["node-1"]) == 2 and kept.taken == {}
    kept.take("r-1", "z")
    kept.put_row(an_instance("r-1", state=S.STOPPED, replica=True, revision=3))
    assert kept.taken == {}
    kept.take("r-2", "z")
    kept.forget("r-2")
    assert kept.taken == kept.dormant == {}


def test_rows_are_gone_since_the_change_that_the_last_of_them_tells() -> None:
    kept = capacity()
    for number, at in enumerate((5.0, 3.0, 4.0, 2.0)):
        kept.put_row(an_instance(f"i-{number}", state=S.STOPPED, changed_at=at))
    kept.put_row(an_instance("i-2", state=S.FAILED, changed_at=8.0, revision=2))
    kept.put_row(an_instance("i-3", state=S.FAILED, changed_at=6.0, revision=2))
    kept.put_row(an_instance("i-1", state=S.READY, revision=2))
    assert [row.instance_id for row in kept.gone_before(6.0)] == ["i-0"]
    assert [[row.instance_id for row in kept.gone_before(at)] for at in (8.0, 9.0)] == [["i-3"], ["i-2"]]
    kept.keep_only(["i-2"])
    assert kept.rows.keys() == {"i-2"}


def test_what_is_answered_of_a_node_is_asked_anew_after_each_change_on_it() -> None:
    kept, asked = capacity(grants={0: [("i-1", 100)]}), count()
    row, replica = an_instance(), an_instance("r", state=S.PREWARMED, replica=True)
    changes: list[tuple[Callable[[], object], bool]] = [
        (lambda: kept.put_node(a_node(revision=2, grants={0: [("i-1", 100)]})), False),
        (lambda: kept.put_row(row), True),
        (lambda: kept.claim("i-1", {GPU: 50}), False),
        (lambda: kept.put_row(replace(row, state=S.DRAINING)), True),
        (lambda: kept.put_row(replace(row, state=S.STOPPED)), True),
        (lambda: kept.forget("i-1"), False),
        (lambda: kept.put_row(replica), True),
        (lambda: kept.take("r", "x"), True),
        (lambda: kept.give_back("r"), True),
        (lambda: kept.give_back("r"), False),
        (lambda: kept.claim("x", {GPU: 50}), True),
        (lambda: kept.claim("x", {GPU: 50}), False),
        (lambda: kept.claim("x", {}), True),
        (lambda: kept.cordon("node-1", is_cordoned=True), True),
        (lambda: kept.put_row(an_instance("elsewhere", gpu_id="node-2/0")), False),
    ]
    for number, (change, is_news) in enumerate(changes):
        (before,) = kept.nodes.answers("which", lambda known: next(asked))
        change()
        (after,) = kept.nodes.answers("which", lambda known: next(asked))
        assert (after != before) is is_news, number
