"""The disk tier, healthy and failing."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.effects import Publish, Record, Tick
from glowplug.controllers.prefetcher import messages as msg
from glowplug.controllers.prefetcher.controller import PrefetcherController, Stage, Tier
from glowplug.domain.errors import Conflict, NotFound
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.model import WeightsRef
from glowplug.events.facts import InstanceStarting, ModelDeployed, RouterLoadReported
from glowplug.weights.region import region_digest
from tests.fleet_builder import a_model, an_event, an_instance
from tests.unit.controllers.prefetcher.test_prefetcher import controller, drop, ended, fetch, kinds, only, sized
from tests.unit.controllers.prefetcher.test_requests import report

A, B, C, D = (WeightsRef(uri=f"http://w/{name}") for name in "abcd")
SLOW_S, READ_S = 10.0, 1.0


def with_disk(disk_bytes: int = 100, **params: Any) -> PrefetcherController:
    """Host memory for two 50-byte weights, and a disk that writes each in a second."""
    return controller(**{"disk_bytes": disk_bytes, "copy_after_s": 0.0, "disk_retry_s": 60.0, **params})


def bring(prefetcher: PrefetcherController, ref: WeightsRef, now_s: float, *user: str, **how: Any) -> list[Any]:
    """A whole 50-byte fetch, slow unless `how` says otherwise."""
    effects = sized(prefetcher, ref, 50, now_s, *user)
    given = {"whole": True, "seconds": SLOW_S, "source": "http"} | how
    return [*effects, *ended(prefetcher, ref, now_s, 50, **given)]


def written(prefetcher: PrefetcherController, ref: WeightsRef, now_s: float, seconds: float = READ_S) -> list[Any]:
    done = msg.CopyEnded(digest=region_digest(ref), num_bytes=50, seconds=seconds)
    return prefetcher.handle(done, now_s)


def copies(prefetcher: PrefetcherController) -> set[str]:
    names = {region_digest(ref): name for name, ref in zip("abcd", (A, B, C, D), strict=True)}
    return {names[digest] for digest in prefetcher.disk.copies if prefetcher.disk.has(digest)}


def test_weights_that_were_slow_to_fetch_are_written_beside_everything_else() -> None:
    prefetcher = with_disk(copy_after_s=2.0)
    assert "WriteCopy" not in kinds(bring(prefetcher, A, 1.0))
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 2.0)), "the start of their engine goes first"
    assert only(prefetcher.handle(Tick(), 3.0), msg.WriteCopy) == msg.WriteCopy(region_digest(A), 50)
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 4.0)), "it is being written"
    written(prefetcher, A, 5.0)
    assert copies(prefetcher) == {"a"} and prefetcher.disk.used_bytes == 50


def test_without_a_disk_nothing_is_written() -> None:
    prefetcher = with_disk(disk_bytes=0)
    bring(prefetcher, A, 1.0)
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 9.0))
    assert prefetcher.placed()[0].why_not_on_disk == "50 B of weights, and the disk tier has 0 B"


def test_what_is_fetched_as_fast_as_it_is_read_is_not_written() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 2.0)
    written(prefetcher, A, 3.0, seconds=1.0)
    bring(prefetcher, B, 4.0, seconds=1.2)
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 5.0))
    (why,) = [one.why_not_on_disk for one in prefetcher.placed() if one.digest == region_digest(B)]
    assert why == "a fetch takes 1.20 s, and to read it from disk 1.00 s"


def test_a_fetch_reads_the_copy_and_its_seconds_are_those_of_the_disk() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 2.0)
    written(prefetcher, A, 3.0)
    bring(prefetcher, B, 4.0, "i-1")
    effects = bring(prefetcher, C, 5.0)
    assert only(effects, msg.DropRegion).digest == region_digest(A)
    reasons = [e.payload.reason for e in effects if isinstance(e, Publish) and e.payload.TYPE == "weights.evicted"]
    assert "a copy stays on disk" in reasons[0]
    start = only(prefetcher.handle(fetch(A), 6.0), msg.StartFetch)
    assert start.from_disk
    prefetcher.handle(msg.FetchSized(region_digest(A), 50), 6.1)
    end = ended(prefetcher, A, 6.5, 50, whole=True, seconds=0.5, source="disk")
    assert only([e for e in end if isinstance(e, Publish)], Publish).payload.source == "disk"
    (row,) = [one for one in prefetcher.placed() if one.digest == region_digest(A)]
    assert row.tiers == (Tier.MEMORY, Tier.DISK) and row.expected_s == {"remote": SLOW_S, "disk": 0.5}
    moved = [(m.source, m.target, m.seconds) for m in row.moves]
    assert moved == [
        (Tier.DISK, Tier.MEMORY, 0.5), (Tier.MEMORY, Tier.DISK, READ_S), (Tier.REMOTE, Tier.MEMORY, SLOW_S)
    ]  # fmt: skip


def test_a_lost_copy_is_dropped_and_the_fetch_goes_on() -> None:
    prefetcher = with_disk()
    prefetcher.handle(msg.RegionsFound((), on_disk=(CachedWeights(digest=region_digest(A), num_bytes=50),)), 0.0)
    assert only(prefetcher.handle(fetch(A, "i-1"), 1.0), msg.StartFetch).from_disk
    lost = prefetcher.handle(msg.CopyLost(region_digest(A), "sha256 differs"), 1.1)
    assert lost == [msg.DropCopy(region_digest(A), num_bytes=50)]
    prefetcher.handle(msg.FetchSized(region_digest(A), 50), 1.2)
    end = ended(prefetcher, A, 2.0, 50, whole=True, seconds=SLOW_S, source="http")
    assert "weights.fetched" in kinds(end)


@pytest.mark.parametrize("caching", ["lru", "lfu"])
def test_disk_takes_what_leaves_host_memory_next_and_keeps_what_has_left(caching: str) -> None:
    prefetcher = with_disk(50, caching=caching)
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 1.5)
    written(prefetcher, A, 2.0)
    bring(prefetcher, B, 3.0)
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 4.0)), f"{caching}: a leaves before b"
    bring(prefetcher, C, 5.0)
    effects = prefetcher.handle(Tick(), 6.0)
    assert kinds(effects)[:1] == ["Record"] and only(effects, msg.DropCopy).evicted, "b is next"
    assert only(effects, msg.WriteCopy).digest == region_digest(B)
    assert "leaves the disk of node-1 for" in only(effects, Record).decision.reason


def test_mcache_keeps_the_more_important_on_disk() -> None:
    """a has left host memory and is wanted often; b leaves next and hardly is."""
    prefetcher = with_disk(50, caching="mcache", capacity_bytes=50)
    for name, ref in (("a", A), ("b", B)):
        prefetcher.handle(an_event(ModelDeployed(model=a_model(name, weights=ref))), 0.0)
    prefetcher.handle(an_event(report(a=0, b=0)), 0.0)
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 1.5)
    written(prefetcher, A, 2.0)
    bring(prefetcher, B, 3.0)
    prefetcher.handle(an_event(report(a=50, b=1)), 20.0)
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 21.0))
    prefetcher.handle(an_event(report(a=50, b=900)), 40.0)
    assert only(prefetcher.handle(Tick(), 41.0), msg.WriteCopy).digest == region_digest(B)


def test_weights_on_disk_leave_host_memory_before_those_that_would_be_fetched() -> None:
    """mCache Eq. 1 over both tiers."""
    prefetcher = with_disk(caching="mcache", disk_gain=0.95)
    bring(prefetcher, A, 1.0, seconds=40.0)
    prefetcher.handle(Tick(), 1.5)
    written(prefetcher, A, 2.0)
    bring(prefetcher, B, 3.0, seconds=SLOW_S)
    assert copies(prefetcher) == {"a"}, "b saves too little"
    assert prefetcher.miss_s(region_digest(A), 50) == READ_S
    assert only(bring(prefetcher, C, 4.0), msg.DropRegion).digest == region_digest(A)


def test_a_copy_that_is_written_is_given_up_when_its_weights_have_to_leave() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 1.5)
    bring(prefetcher, B, 2.0, "i-1")
    effects = sized(prefetcher, C, 50, 3.0)
    stop, region = (next(i for i, e in enumerate(effects) if isinstance(e, k)) for k in (msg.StopCopy, msg.DropRegion))
    assert stop < region, "nothing reads what is removed"
    stopped = msg.CopyEnded(digest=region_digest(A), code=msg.CANCELLED)
    assert only(prefetcher.handle(stopped, 3.1), msg.WriteCopy).digest == region_digest(B)
    assert region_digest(A) not in prefetcher.disk.copies and prefetcher.disk.trouble == ""


def test_one_that_ended_before_it_could_be_given_up_is_removed() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 1.5)
    assert kinds(prefetcher.handle(drop(A), 2.0))[:2] == ["StopCopy", "DropRegion"]
    assert written(prefetcher, A, 2.1) == [msg.DropCopy(region_digest(A), num_bytes=50)]
    assert prefetcher.disk.used_bytes == 0


def test_a_full_disk_is_left_alone_for_a_while_and_nothing_else_changes() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 1.5)
    full = msg.CopyEnded(digest=region_digest(A), code="no_space", message="the disk at /d is full: No space left")
    prefetcher.handle(full, 2.0)
    assert prefetcher.disk.trouble == "the disk at /d is full: No space left" and prefetcher.disk.used_bytes == 0
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 61.0))
    assert kinds(prefetcher.handle(fetch(A), 61.5)) == ["UseRegion", "weights.fetched"]
    assert "WriteCopy" in kinds(prefetcher.handle(Tick(), 62.0))
    written(prefetcher, A, 63.0)
    assert prefetcher.disk.trouble == ""


def test_a_copy_of_what_lies_on_the_same_disk_is_not_tried_twice() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 1.5)
    why = "/w/a is on the same file system"
    needless = msg.CopyEnded(digest=region_digest(A), code="disk_failed", message=why, is_needless=True)
    prefetcher.handle(needless, 2.0)
    assert prefetcher.disk.trouble == "" and prefetcher.placed()[0].why_not_on_disk == why
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 500.0))


def test_weights_whose_source_has_changed_leave_the_disk_at_once_and_memory_once_unused() -> None:
    prefetcher = with_disk()
    bring(prefetcher, A, 1.0, "i-1")
    prefetcher.handle(an_event(InstanceStarting(instance=an_instance("i-1", gpu_id="node-1/0"))), 1.1)
    prefetcher.handle(Tick(), 1.5)
    written(prefetcher, A, 2.0)
    assert prefetcher.handle(msg.RegionChanged(region_digest(A)), 3.0) == [msg.DropCopy(region_digest(A), num_bytes=50)]
    assert "WriteCopy" not in kinds(prefetcher.handle(Tick(), 4.0)), "nor is it written again"


def test_a_copy_that_could_not_be_removed_counts_and_is_removed_later() -> None:
    prefetcher = with_disk(50)
    found = CachedWeights(digest=region_digest(A), num_bytes=50)
    prefetcher.handle(msg.RegionsFound((), on_disk=(found,)), 0.0)
    (dropped,) = prefetcher.handle(msg.DropAsked(region_digest(A), "r"), 1.0)
    prefetcher.handle(msg.DiskFailed("fails", dropped.digest, dropped.num_bytes), 2.0)
    assert prefetcher.disk.used_bytes == 50 and not copies(prefetcher)
    bring(prefetcher, B, 3.0)
    assert kinds(prefetcher.handle(Tick(), 30.0)) == []
    assert only(prefetcher.handle(Tick(), 62.0), msg.DropCopy).digest == region_digest(A)
    assert only(prefetcher.handle(Tick(), 63.0), msg.WriteCopy).digest == region_digest(B)


def test_a_queued_fetch_that_is_given_up_leaves_no_copy() -> None:
    prefetcher = with_disk(max_fetches=1)
    found = CachedWeights(digest=region_digest(A), num_bytes=50)
    prefetcher.handle(msg.RegionsFound((), on_disk=(found,)), 0.0)
    prefetcher.handle(fetch(B, "i-1"), 1.0)
    prefetcher.handle(fetch(A, ""), 2.0)
    assert prefetcher.jobs[region_digest(A)].stage is Stage.QUEUED
    assert only(prefetcher.handle(msg.DropAsked(region_digest(A), "r"), 3.0), msg.DropCopy).digest == region_digest(A)


def test_a_person_drops_a_copy_as_well() -> None:
    prefetcher = with_disk()
    found = CachedWeights(digest=region_digest(A), num_bytes=50)
    prefetcher.handle(msg.RegionsFound((), on_disk=(found,)), 0.0)
    with pytest.raises(NotFound):
        prefetcher.handle(msg.DropAsked(region_digest(B), "r"), 1.0)
    assert prefetcher.handle(msg.DropAsked(region_digest(A), "r"), 1.0) == [
        msg.DropCopy(region_digest(A), num_bytes=50)
    ]
    bring(prefetcher, B, 2.0, "i-1")
    with pytest.raises(Conflict):
        prefetcher.handle(msg.DropAsked(region_digest(B), "r"), 3.0)


def test_after_a_restart_copies_and_what_they_took_are_known() -> None:
    prefetcher = with_disk()
    on_disk = tuple(CachedWeights(digest=region_digest(ref), num_bytes=50, model_keys=("m",)) for ref in (A, B))
    measured = (msg.Measured(region_digest(A), 50, SLOW_S, "http"), msg.Measured(region_digest(C), 50, 2.0, "disk"))
    prefetcher.handle(msg.RegionsFound((), on_disk=on_disk, measured=measured), 0.0)
    assert copies(prefetcher) == {"a", "b"}
    assert prefetcher.disk.saved_s(region_digest(A), 50) == SLOW_S - 2.0


def test_a_smaller_capacity_is_kept_to_once_nothing_reads() -> None:
    prefetcher = with_disk(50)
    on_disk = tuple(CachedWeights(digest=region_digest(r), num_bytes=50, last_used_at=t) for t, r in ((1, A), (2, B)))
    prefetcher.handle(msg.RegionsFound((), on_disk=on_disk), 5.0)
    prefetcher.handle(fetch(A, "i-1"), 6.0)
    prefetcher.handle(msg.FetchSized(region_digest(A), 50), 6.0)
    assert only(prefetcher.handle(Tick(), 7.0), msg.DropCopy).digest == region_digest(B), "a is being read"
    assert prefetcher.disk.used_bytes == 50


def test_where_the_weights_of_every_model_lie() -> None:
    prefetcher = with_disk()
    for name, ref in (("one", A), ("two", A), ("far", replace(D, num_bytes=80))):
        prefetcher.handle(an_event(ModelDeployed(model=a_model(name, weights=ref))), 0.0)
    bring(prefetcher, A, 1.0)
    rows = {one.digest: one for one in prefetcher.placed()}
    assert rows[region_digest(A)].tiers == (Tier.MEMORY,) and rows[region_digest(A)].model_keys == ("m", "one", "two")
    far = rows[region_digest(D)]
    assert far.tiers == (Tier.REMOTE,) and far.num_bytes == 80 and far.moves == ()
    assert far.expected_s == {"remote": pytest.approx(80 * SLOW_S / 50)}


def test_requests_are_counted_for_both_tiers() -> None:
    prefetcher = with_disk(caching="mcache")
    prefetcher.handle(an_event(ModelDeployed(model=a_model("a", weights=A))), 0.0)
    bring(prefetcher, A, 1.0)
    assert RouterLoadReported in prefetcher.handlers and len(prefetcher._counters) == 2


def test_the_fleet_is_shown_whole_copies_and_the_rate_of_the_disk() -> None:
    prefetcher = with_disk()
    assert (prefetcher.disk.whole, prefetcher.disk.bytes_per_s) == ((), 0.0)
    bring(prefetcher, A, 1.0)
    prefetcher.handle(Tick(), 2.0)
    assert prefetcher.disk.whole == (), "it is being written"
    written(prefetcher, A, 3.0, seconds=2.0)
    (copy,) = prefetcher.disk.whole
    assert (copy.digest, copy.num_bytes, copy.model_keys) == (region_digest(A), 50, ("m",))
    assert prefetcher.disk.bytes_per_s == 25.0, "as it was written, until it is read"
    prefetcher.handle(msg.CopyLost(region_digest(A), "it is damaged"), 4.0)
    assert prefetcher.disk.whole == ()
