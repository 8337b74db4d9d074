"""The placer's record of bytes and rows."""

from dataclasses import replace

import pytest

from glowplug.domain.hardware import SharedWeights
from glowplug.domain.instance import InstanceState
from glowplug.fleet.capacity import FleetCapacity
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
