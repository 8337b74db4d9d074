"""The prefetcher: one fetch per digest, host memory by policy."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.effects import Publish, Record, Tick
from glowplug.controllers.prefetcher import messages as msg
from glowplug.controllers.prefetcher.cache import FetchSeconds
from glowplug.controllers.prefetcher.controller import Holds, PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams, SecondsParams
from glowplug.domain.errors import BadRequest, Conflict, InvalidModelFile, NotFound, StaleEpoch
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import KeptAt, WeightsRef
from glowplug.events.commands import DropWeights, FetchWeights
from glowplug.events.envelope import Event
from glowplug.events.facts import InstancePrewarmed, InstanceStarting, InstanceStopped, ModelDeployed
from glowplug.weights.region import region_digest
from tests.fleet_builder import a_model, an_event, an_instance

A, B, C = (WeightsRef(uri=f"file:/w/{name}") for name in "abc")


def controller(**params: Any) -> PrefetcherController:
    given = {"capacity_bytes": 100, "max_fetches": 2, "room_wait_s": 10.0} | params
    return PrefetcherController("node-1", PrefetcherParams(**given), digest_of=region_digest)


def fetch(ref: WeightsRef, instance_id: str = "", model_key: str = "m", epoch: int = 1, **more: Any) -> Event:
    command = FetchWeights(target="node-1", model_key=model_key, weights=ref, instance_id=instance_id, **more)
    return an_event(command, issuer="placer-1", epoch=epoch, traceparent="00-1-2-01")


def kinds(effects: list[Any]) -> list[str]:
    return [e.payload.TYPE if isinstance(e, Publish) else type(e).__name__ for e in effects]


def only(effects: list[Any], kind: type[Any]) -> Any:
    (found,) = [e for e in effects if isinstance(e, kind)]
    return found


def drop(ref: WeightsRef, reason: str = "r") -> Event:
    command = DropWeights(target="node-1", digest=region_digest(ref), reason=reason)
    return an_event(command, issuer="placer-1", epoch=1)


def sized(prefetcher: PrefetcherController, ref: WeightsRef, num_bytes: int, now_s: float, *user: str) -> list[Any]:
    prefetcher.handle(fetch(ref, *user), now_s)
    return prefetcher.handle(msg.FetchSized(region_digest(ref), num_bytes), now_s)


def ended(prefetcher: PrefetcherController, ref: WeightsRef, now_s: float, num_bytes: int = 0, **how: Any) -> list[Any]:
    return prefetcher.handle(msg.FetchEnded(digest=region_digest(ref), num_bytes=num_bytes, **how), now_s)


def bring(
    prefetcher: PrefetcherController, ref: WeightsRef, num_bytes: int, now_s: float, *user: str, seconds: float = 1.0
) -> list[Any]:
    effects = sized(prefetcher, ref, num_bytes, now_s, *user)
    ended(prefetcher, ref, now_s, num_bytes, whole=True, seconds=seconds, source="file")
    return effects


def test_a_cold_fetch_from_command_to_fact() -> None:
    prefetcher, digest = controller(), region_digest(A)
    command = fetch(A, "i-1")
    start = only(prefetcher.handle(command, 1.0), msg.StartFetch)
    assert (start.digest, start.want) == (digest, msg.Want(command.data, command))
    assert prefetcher.handle(msg.FetchSized(digest, 60), 1.1) == [msg.GrantRoom(digest, 60)]
    assert kinds(prefetcher.handle(msg.FetchProgressed(digest, 30, 60), 1.2)) == ["weights.progressed"]
    effects = ended(prefetcher, A, 1.5, 60, whole=True, seconds=0.4, source="file")
    assert kinds(effects) == ["NameRegion", "weights.fetched"]
    fact = only(effects, Publish)
    assert (fact.payload.num_bytes, fact.payload.source, fact.cause) == (60, "file", command)
    assert prefetcher.cache.used_bytes == 60 and prefetcher.jobs == {}


def test_what_a_person_asks_for_is_fetched_as_if_it_had_been_commanded() -> None:
    prefetcher, digest = controller(), region_digest(A)
    start = only(prefetcher.handle(msg.FetchAsked(A, "mine"), 1.0), msg.StartFetch)
    assert (start.digest, start.want.command.model_key, start.want.cause) == (digest, "mine", None)
    assert prefetcher.handle(msg.FetchAsked(A, "mine"), 1.1) == []
    prefetcher.handle(msg.FetchSized(digest, 60), 1.1)
    assert only(ended(prefetcher, A, 1.5, 60, whole=True), Publish).payload.model_key == "mine"
    assert prefetcher.held(digest, 2.0) == "", "nothing keeps it from leaving for what an instance needs"
    assert kinds(prefetcher.handle(msg.FetchAsked(A, "mine"), 3.0)) == ["UseRegion", "weights.fetched"]
    with pytest.raises(InvalidModelFile, match="sha256"):
        prefetcher.handle(msg.FetchAsked(WeightsRef(uri="file:/w", sha256="../x"), "mine"), 4.0)


def test_a_hit_fetches_nothing() -> None:
    prefetcher = controller()
    bring(prefetcher, A, 60, 1.0)
    effects = prefetcher.handle(fetch(A, "i-1", "other"), 5.0)
    assert kinds(effects) == ["UseRegion", "weights.fetched"]
    assert only(effects, Publish).payload.source == "cache"
    assert prefetcher.cache.entries[region_digest(A)].model_keys == {"m", "other"}


def test_a_lost_region_is_fetched_again() -> None:
    prefetcher = controller()
    bring(prefetcher, A, 60, 1.0)
    use = only(prefetcher.handle(fetch(A), 2.0), msg.UseRegion)
    assert kinds(prefetcher.handle(msg.RegionLost(use.digest, use.want), 2.1)) == ["StartFetch"]


def test_joiners_share_one_fetch_and_all_hear_of_it() -> None:
    prefetcher, digest = controller(), region_digest(A)
    prefetcher.handle(fetch(A, "", "one"), 1.0)
    raised = only(prefetcher.handle(fetch(A, "i-2", "two"), 1.0), msg.RaiseUrgency)
    assert raised.urgency > 0
    assert prefetcher.handle(fetch(A, "i-3", "two"), 1.0) == []
    prefetcher.handle(msg.FetchSized(digest, 10), 1.0)
    end = ended(prefetcher, A, 2.0, 10, whole=True)
    assert {e.payload.model_key for e in end if isinstance(e, Publish)} == {"one", "two"}
    assert {e.model_key for e in end if isinstance(e, msg.NameRegion)} == {"one", "two"}


def test_one_command_delivered_twice_is_one_command() -> None:
    prefetcher = controller()
    command = fetch(A)
    assert kinds(prefetcher.handle(command, 1.0)) == ["StartFetch"]
    assert prefetcher.handle(command, 1.0) == []
    assert len(prefetcher.jobs[region_digest(A)].wants) == 1


def test_commands_of_an_old_epoch_and_of_other_nodes_do_nothing() -> None:
    prefetcher = controller()
    prefetcher.handle(fetch(A, epoch=5), 1.0)
    with pytest.raises(StaleEpoch):
        prefetcher.handle(fetch(B, epoch=4), 1.0)
    other = FetchWeights(target="node-2", model_key="m", weights=B)
    assert prefetcher.handle(an_event(other, issuer="placer-1", epoch=5), 1.0) == []


def test_a_fetch_whose_instance_is_gone_already_is_not_begun() -> None:
    prefetcher = controller()
    gone = an_instance("i-1", state=InstanceState.STOPPED)
    prefetcher.handle(an_event(InstanceStopped(instance=gone)), 1.0)
    assert prefetcher.handle(fetch(A, "i-1"), 1.1) == []


def test_the_urgent_pass_by_and_the_number_at_once_is_bounded() -> None:
    prefetcher = controller(max_fetches=1)
    assert kinds(prefetcher.handle(fetch(A), 1.0)) == ["StartFetch"]
    assert prefetcher.handle(fetch(B, priority=9), 1.0) == []
    assert prefetcher.handle(fetch(C, "i-1"), 1.0) == []
    digest = region_digest(A)
    prefetcher.handle(msg.FetchSized(digest, 10), 1.0)
    end = ended(prefetcher, A, 2.0, 10, whole=True)
    assert only(end, msg.StartFetch).want.command.weights == C


def test_a_full_queue_refuses() -> None:
    prefetcher = controller(max_fetches=1, max_queue=1)
    prefetcher.handle(fetch(A), 1.0)
    assert only(prefetcher.handle(fetch(B, "i-2"), 1.0), msg.MarkFailed).instance_ids == ("i-2",)


def test_room_is_made_by_the_least_recently_used() -> None:
    prefetcher = controller()
    bring(prefetcher, A, 60, 1.0)
    bring(prefetcher, B, 40, 2.0)
    prefetcher.handle(fetch(A), 3.0)
    effects = sized(prefetcher, C, 30, 4.0)
    assert kinds(effects) == ["DropRegion", "weights.evicted", "Record", "GrantRoom"]
    assert only(effects, msg.DropRegion).digest == region_digest(B)
    record = only(effects, Record).decision
    assert (record.kind, record.policy, record.model_key) == ("evict", "lru", "m")
    assert {r.name: r.why for r in record.rivals} == {
        region_digest(B): "it leaves",
        region_digest(A): "it stays: enough is free without it",
    }


@pytest.mark.parametrize("learned_by", ["command", "fact", "table"])
def test_weights_in_use_stay_and_the_wait_for_room_is_bounded(learned_by: str) -> None:
    prefetcher = controller()
    user = an_instance("i-1", gpu_id="node-1/0")
    model = a_model("m", weights=A)
    if learned_by == "table":
        prefetcher.restore("models", {"m": model}, 0.0)
        prefetcher.restore("instances", {"i-1": user}, 0.0)
    elif learned_by == "fact":
        prefetcher.handle(an_event(ModelDeployed(model=model)), 0.0)
        prefetcher.handle(an_event(InstanceStarting(instance=user)), 0.0)
    bring(prefetcher, A, 60, 1.0, "i-1" if learned_by == "command" else "")
    assert sized(prefetcher, B, 50, 2.0, "i-2") == []
    assert prefetcher.handle(Tick(), 11.9) == []
    effects = prefetcher.handle(Tick(), 12.0)
    assert kinds(effects) == ["StopFetch", "MarkFailed", "weights.fetch_failed"]
    failed = only(effects, msg.MarkFailed)
    assert failed.code == "no_space" and "i-1 uses it" in failed.message and failed.instance_ids == ("i-2",)
    assert ended(prefetcher, B, 12.1, code=msg.CANCELLED) == []
    assert prefetcher.jobs == {}


def test_room_that_opens_in_time_is_taken() -> None:
    prefetcher = controller()
    bring(prefetcher, A, 60, 1.0, "i-1")
    prefetcher.handle(an_event(InstanceStarting(instance=an_instance("i-1", state=InstanceState.STARTING))), 1.0)
    sized(prefetcher, B, 50, 2.0, "i-2")
    gone = an_instance("i-1", state=InstanceState.STOPPED, revision=2)
    effects = prefetcher.handle(an_event(InstanceStopped(instance=gone)), 3.0)
    assert kinds(effects) == ["DropRegion", "weights.evicted", "Record", "GrantRoom"]


def test_weights_larger_than_the_cache_fail_at_once() -> None:
    prefetcher = controller()
    effects = sized(prefetcher, A, 101, 1.0, "i-1")
    assert only(effects, msg.MarkFailed).code == "no_space"
    assert "the weights take 101 B" in only(effects, msg.MarkFailed).message


def test_unknown_size_gets_what_is_free() -> None:
    prefetcher = controller()
    bring(prefetcher, A, 60, 1.0)
    assert sized(prefetcher, B, 0, 2.0) == [msg.GrantRoom(region_digest(B), 40)]
    assert prefetcher.cache.used_bytes == 100


def test_a_failure_reaches_everybody_who_waits_and_the_next_command_tries_again() -> None:
    prefetcher = controller()
    prefetcher.handle(fetch(A, "i-1"), 1.0)
    sized(prefetcher, A, 10, 1.0, "i-2")
    failed = only(ended(prefetcher, A, 2.0, code="weights_corrupt", message="sha256 differs"), msg.MarkFailed)
    assert (failed.instance_ids, failed.keep, failed.message) == (("i-1", "i-2"), False, "sha256 differs")
    assert prefetcher.cache.used_bytes == 0
    assert kinds(prefetcher.handle(fetch(A, "i-3"), 3.0)) == ["StartFetch"]


def test_what_landed_before_a_failure_is_kept_and_counted() -> None:
    prefetcher, digest = controller(), region_digest(A)
    sized(prefetcher, A, 60, 1.0)
    assert only(ended(prefetcher, A, 2.0, 60, code="weights_unavailable", message="cut"), msg.MarkFailed).keep
    assert prefetcher.cache.used_bytes == 60
    assert sized(prefetcher, A, 60, 3.0) == [msg.GrantRoom(digest, 60)]


def test_a_byte_range_then_the_rest_for_who_wants_it() -> None:
    prefetcher, digest = controller(), region_digest(A)
    start = only(prefetcher.handle(fetch(A, first_byte=10, last_byte=20), 1.0), msg.StartFetch)
    assert (start.want.command.first_byte, start.want.command.last_byte) == (10, 20)
    prefetcher.handle(fetch(A, model_key="whole"), 1.0)
    prefetcher.handle(msg.FetchSized(digest, 60), 1.0)
    again = only(ended(prefetcher, A, 2.0, 60), msg.StartFetch).want.command
    assert (again.first_byte, again.last_byte, again.model_key) == (0, 0, "whole")
    prefetcher.handle(msg.FetchSized(digest, 60), 2.0)
    end = ended(prefetcher, A, 3.0, 60, whole=True)
    assert only(end, Publish).payload.model_key == "whole"


def test_a_stages_part_is_answered_by_a_fact_of_its_own() -> None:
    prefetcher, digest = controller(), region_digest(A)
    prefetcher.handle(fetch(A, "i-1.1", first_byte=20, last_byte=0), 1.0)
    prefetcher.handle(msg.FetchSized(digest, 60), 1.0)
    fact = only(ended(prefetcher, A, 3.0, 60, seconds=2.0, source="file"), Publish).payload
    assert (fact.TYPE, fact.instance_id, fact.num_bytes) == ("weights.part_fetched", "i-1.1", 40)
    assert digest not in prefetcher.jobs and not prefetcher.cache.entries[digest].complete


def test_what_a_stage_lacks_comes_after_whatever_a_request_waits_for() -> None:
    prefetcher = controller(max_fetches=1)
    prefetcher.handle(fetch(B, "i-2"), 1.0)
    for again in range(3):
        prefetcher.handle(fetch(A, "i-1", background=True), 2.0 + again)
    prefetcher.handle(fetch(C, "i-3"), 6.0)
    assert len(prefetcher.jobs[region_digest(A)].wants) == 1
    assert only(ended(prefetcher, B, 7.0, 1, whole=True), msg.StartFetch).digest == region_digest(C)
    last = only(ended(prefetcher, C, 8.0, 1, whole=True), msg.StartFetch)
    assert last.digest == region_digest(A) and last.want.urgency == 0


def test_a_drop_cancels_a_running_fetch() -> None:
    prefetcher = controller()
    sized(prefetcher, A, 60, 1.0, "i-1")
    effects = prefetcher.handle(drop(A), 1.5)
    assert kinds(effects) == ["StopFetch", "MarkFailed", "weights.fetch_failed"]
    ended(prefetcher, A, 1.6, 60, code=msg.CANCELLED)
    assert prefetcher.cache.used_bytes == 0 and prefetcher.jobs == {}


def test_a_fetch_asked_for_while_it_is_being_dropped_runs_afterwards() -> None:
    prefetcher = controller()
    prefetcher.handle(fetch(A), 1.0)
    prefetcher.handle(drop(A), 1.1)
    prefetcher.handle(fetch(A, "i-2"), 1.2)
    end = ended(prefetcher, A, 1.3, code=msg.CANCELLED)
    assert kinds(end) == ["StartFetch"]


def test_a_drop_spares_what_is_in_use() -> None:
    prefetcher, digest = controller(), region_digest(A)
    bring(prefetcher, A, 60, 1.0, "i-1")
    assert prefetcher.handle(drop(A), 2.0) == []
    with pytest.raises(Conflict, match="i-1 uses it"):
        prefetcher.handle(msg.DropAsked(digest, "r"), 2.0)
    with pytest.raises(NotFound):
        prefetcher.handle(msg.DropAsked("0" * 64, "r"), 2.0)


def test_weights_that_an_operator_has_pinned_stay_when_others_need_the_memory() -> None:
    prefetcher = controller()
    pinned = a_model("pinned", weights=A, kept_at=KeptAt.HOST)
    prefetcher.handle(an_event(ModelDeployed(model=pinned)), 0.5)
    bring(prefetcher, A, 40, 1.0)
    bring(prefetcher, B, 40, 2.0)
    evicted = only(bring(prefetcher, C, 40, 3.0), msg.DropRegion)
    assert evicted.digest == region_digest(B)
    assert prefetcher.held(region_digest(A), 3.0) == "pinned is pinned in host memory"
    assert prefetcher.handle(drop(A), 4.0) == []
    prefetcher.handle(an_event(ModelDeployed(model=replace(pinned, kept_at=KeptAt.NOWHERE, revision=2))), 5.0)
    assert prefetcher.held(region_digest(A), 5.0) == ""


def test_a_hold_for_an_instance_nobody_sees_ends() -> None:
    prefetcher = controller(hold_s=120.0)
    bring(prefetcher, A, 60, 1.0, "i-1")
    assert prefetcher.held(region_digest(A), 120.0) == "i-1 uses it"
    prefetcher.handle(Tick(), 122.0)
    assert prefetcher.held(region_digest(A), 122.0) == ""


def test_a_starting_instance_whose_fetch_was_lost_is_helped_once() -> None:
    prefetcher = controller(heal_s=2.0)
    model = a_model("m", weights=A)
    starting = an_instance("i-1", state=InstanceState.STARTING, created_at=10.0)
    prefetcher.restore("models", {"m": model}, 10.0)
    prefetcher.restore("instances", {"i-1": starting}, 10.0)
    assert prefetcher.handle(Tick(), 12.0) == []
    start = only(prefetcher.handle(Tick(), 12.1), msg.StartFetch)
    assert (start.want.command.weights, start.want.cause) == (A, None)
    assert prefetcher.handle(Tick(), 12.2) == []
    assert only(ended(prefetcher, A, 12.3, code="weights_unavailable", message="404"), msg.MarkFailed).instance_ids == (
        "i-1",
    )
    assert prefetcher.handle(Tick(), 20.0) == []


def test_a_stage_whose_fetch_was_lost_is_helped_to_its_own_part_until_it_loads() -> None:
    prefetcher = controller(heal_s=2.0)
    model = a_model("m", weights=replace(A, num_bytes=90))
    row = an_instance("i-1.1", state=InstanceState.STARTING, created_at=10.0, num_stages=3, part_of="i-1")
    prefetcher.restore("models", {"m": model}, 10.0)
    prefetcher.restore("instances", {"i-1.1": row}, 10.0)
    start = only(prefetcher.handle(Tick(), 12.1), msg.StartFetch).want.command
    assert (start.stage, start.num_stages, start.first_byte, start.last_byte) == (1, 3, 30, 60)
    fact = only(ended(prefetcher, model.weights, 13.0, 30), Publish).payload
    assert (fact.TYPE, fact.instance_id) == ("weights.part_fetched", "i-1.1")
    assert prefetcher.handle(Tick(), 16.0) == [], "its process takes long to start"
    later = controller(heal_s=2.0)
    later.restore("models", {"m": model}, 13.0)
    later.restore("instances", {"i-1.1": replace(row, state=InstanceState.LOADING, revision=2)}, 13.0)
    assert later.handle(Tick(), 16.0) == []


def test_regions_of_an_earlier_process_are_adopted_and_a_lowered_capacity_enforced() -> None:
    prefetcher = controller(capacity_bytes=70)
    found = msg.RegionsFound(
        (
            CachedWeights(digest=region_digest(A), num_bytes=60, model_keys=("m",), last_used_at=1.0),
            CachedWeights(digest=region_digest(B), num_bytes=50, last_used_at=2.0),
        ),
        partial=((region_digest(C), 10, 3.0),),
    )
    assert prefetcher.handle(found, 5.0) == []
    prefetcher.restore("models", {"m": a_model("m", weights=A)}, 5.0)
    prefetcher.restore("instances", {"i-1": an_instance("i-1")}, 5.0)
    assert only(prefetcher.handle(Tick(), 5.5), msg.DropRegion).digest == region_digest(B)
    assert prefetcher.cache.used_bytes == 70


def test_a_bad_checksum_in_a_command_is_answered_not_raised() -> None:
    effects = controller().handle(fetch(WeightsRef(uri="file:/x", sha256="../../etc")), 1.0)
    assert only(effects, Publish).payload.code == "invalid_model_file"


def test_a_fetch_nobody_knows_is_stopped() -> None:
    assert controller().handle(msg.FetchSized("d", 1), 1.0) == [msg.StopFetch("d")]


def test_weights_whose_source_changed_leave_as_soon_as_nobody_uses_them() -> None:
    prefetcher = controller()
    bring(prefetcher, A, 60, 1.0, "i-1")
    bring(prefetcher, B, 30, 1.0)
    assert kinds(prefetcher.handle(msg.RegionChanged(region_digest(B)), 2.0)) == ["DropRegion", "weights.evicted"]
    assert prefetcher.handle(msg.RegionChanged(region_digest(A)), 2.0) == []
    gone = an_instance("i-1", state=InstanceState.FAILED, revision=2)
    effects = prefetcher.handle(an_event(InstanceStopped(instance=gone)), 3.0)
    assert only(effects, Publish).payload.reason == "its source has changed"
    assert prefetcher.cache.used_bytes == 0


def test_memory_fuller_than_it_seems_makes_idle_weights_leave_once() -> None:
    prefetcher, digest = controller(), region_digest(A)
    bring(prefetcher, B, 30, 1.0)
    bring(prefetcher, C, 20, 1.0, "i-c")
    sized(prefetcher, A, 40, 2.0, "i-1")
    full = msg.FetchEnded(digest=digest, num_bytes=0, code="no_space", message="host memory is full")
    effects = prefetcher.handle(full, 2.1)
    assert kinds(effects) == ["DropRegion", "weights.evicted", "Record", "StartFetch"]
    assert only(effects, msg.DropRegion).digest == region_digest(B)
    prefetcher.handle(msg.FetchSized(digest, 40), 2.2)
    assert kinds(prefetcher.handle(full, 2.3)) == ["MarkFailed", "weights.fetch_failed"]


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(BadRequest, match="no caching policy named 'fifo'") as caught:
        controller(caching="fifo")
    assert caught.value.param == "policy_caching"


def test_mcache_keeps_what_was_slow_to_come() -> None:
    """mCache Eq. 1; LRU takes the older."""
    for caching, loser in (("mcache", B), ("lru", A)):
        prefetcher = controller(caching=caching)
        bring(prefetcher, A, 50, 1.0, seconds=9.0)
        bring(prefetcher, B, 50, 1.0 + 1e-9, seconds=1.0)
        effects = bring(prefetcher, C, 50, 2.0, seconds=1.0)
        assert only(effects, msg.DropRegion).digest == region_digest(loser)
        record = only(effects, Record).decision
        assert (record.policy, len(record.rivals)) == (caching, 2)


def test_often_asked_for_stays_under_lfu_and_is_told_of_every_use() -> None:
    prefetcher = controller(caching="lfu")
    bring(prefetcher, A, 50, 1.0)
    prefetcher.handle(fetch(A), 2.0)
    bring(prefetcher, B, 50, 3.0)
    effects = bring(prefetcher, C, 50, 4.0)
    assert only(effects, msg.DropRegion).digest == region_digest(B)


def test_what_an_earlier_process_left_is_in_the_order() -> None:
    prefetcher = controller(caching="lfu")
    found = (CachedWeights(digest="new", num_bytes=50, last_used_at=9.0), CachedWeights(digest="old", num_bytes=50))
    prefetcher.handle(msg.RegionsFound(found), 10.0)
    assert only(bring(prefetcher, C, 50, 11.0), msg.DropRegion).digest == "old"


# mCache Eq. 1's P on a node


@pytest.mark.parametrize(
    ("awake", "dormant"),
    [(InstanceState.LOADING, InstanceState.PREWARMED), (InstanceState.READY, InstanceState.SWAPPED_OUT)],
)
def test_a_replica_and_an_engine_asleep_need_no_cached_weights(awake: InstanceState, dormant: InstanceState) -> None:
    """Theirs are on its GPUs or in host memory of its own (`snapshot_ratio`); a second copy would leave no room for a
    start.
    """
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    holds.set_model(a_model("m"))
    holds.hold("i-1", "digest", 0.0)
    for revision, state in enumerate((awake, dormant), start=1):
        replica = dormant is InstanceState.PREWARMED
        holds.set_instance(an_instance("i-1", "m", state, replica=replica, revision=revision), 1.0)
        assert holds.reason("digest", {"m"}, 2.0) == ("i-1 uses it" if state is awake else "")


def test_a_replica_that_was_seen_to_share_its_weights_reads_them_there() -> None:
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    holds.set_model(a_model("m"))
    holds.hold("i-1", "digest", 0.0)
    holds.set_instance(an_instance("i-1", "m", InstanceState.PREWARMED, replica=True, shared_bytes=1), 1.0)
    assert holds.reason("digest", {"m"}, 2.0) == "i-1 uses it"
    holds.set_instance(an_instance("i-1", "m", InstanceState.SWAPPED_OUT, revision=2), 3.0)
    assert holds.reason("digest", {"m"}, 4.0) == "", "it has given its pages back"


@pytest.mark.parametrize("dormant", [InstanceState.PREWARMED, InstanceState.SWAPPED_OUT])
def test_one_that_shares_its_weights_maps_them_asleep_too(dormant: InstanceState) -> None:
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    holds.set_model(a_model("m", weights_shared=True))
    holds.hold("i-1", "digest", 0.0)
    replica = dormant is InstanceState.PREWARMED
    holds.set_instance(an_instance("i-1", "m", dormant, replica=replica), 1.0)
    assert holds.reason("digest", {"m"}, 2.0) == "i-1 uses it"


def test_a_replica_on_a_gpu_is_a_copy_once_it_is_whole() -> None:
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    seen = {}
    states = (InstanceState.LOADING, InstanceState.PREWARMED, InstanceState.STOPPED)
    for revision, state in enumerate(states, start=1):
        holds.set_instance(an_instance("r-1", "m", state, replica=True, revision=revision), 1.0)
        seen[state] = holds.has_copy({"m", "n"})
        assert not holds.has_copy({"n"})
    assert seen == dict(zip(states, (False, True, False), strict=True))


def test_the_measured_first_then_the_pace_of_its_source_then_a_guess() -> None:
    seconds = FetchSeconds(SecondsParams(newest=0.5, bytes_per_s=100.0))
    assert seconds.expected("a", 500) == pytest.approx(5.0)
    seconds.measured("a", 100, 4.0, "http")
    assert seconds.expected("a", 100) == pytest.approx(4.0)
    assert seconds.expected("a", 200) == pytest.approx(8.0), "its source gives 25 bytes a second"
    assert seconds.expected("b", 200) == pytest.approx(8.0)
    seconds.measured("a", 100, 2.0, "http")
    assert seconds.expected("a", 100) == pytest.approx(3.0)


def test_no_time_is_no_measurement_and_memory_is_bounded() -> None:
    seconds = FetchSeconds(SecondsParams(max_digests=2, bytes_per_s=100.0))
    seconds.measured("a", 100, 0.0, "file")
    assert seconds.expected("a", 100) == pytest.approx(1.0)
    for at, name in enumerate("abc"):
        seconds.measured(name, 100, 1.0 + at, "file")
    assert seconds.expected("c", 100) == pytest.approx(3.0)
    assert seconds.expected("a", 100) == seconds.expected("unseen", 100) != pytest.approx(1.0)


def test_a_stage_and_what_is_asked_of_peers_go_on_to_the_fetch_and_the_rest_follows() -> None:
    prefetcher = controller()
    asked = {"stage": 1, "num_stages": 2, "peers": ("http://a", "http://b")}
    start = only(prefetcher.handle(fetch(A, "i-1", **asked), 1.0), msg.StartFetch)
    command = start.want.command
    assert (command.stage, command.num_stages, command.peers) == (1, 2, ("http://a", "http://b"))
    assert prefetcher.handle(fetch(A, "i-2", peers=("http://c",)), 1.5) == []
    prefetcher.handle(msg.FetchSized(start.digest, 100), 1.6)
    again = only(prefetcher.handle(msg.FetchEnded(digest=start.digest, num_bytes=100), 2.0), msg.StartFetch)
    again = again.want.command
    assert (again.stage, again.num_stages, again.peers) == (0, 1, ("http://c",))
    done = prefetcher.handle(msg.FetchEnded(digest=start.digest, num_bytes=100, whole=True), 3.0)
    assert kinds(done)[-1] == "weights.fetched"


def test_a_replica_that_gives_way_is_no_copy_unless_it_stays_after_all() -> None:
    prefetcher = controller(hold_s=5.0)
    replica = an_instance("r-1", "m", InstanceState.PREWARMED, replica=True)
    prefetcher.restore("instances", {"r-1": replica}, 1.0)
    assert prefetcher.holds.has_copy({"m"})
    prefetcher.handle(fetch(B, "i-1", "n", drops=("r-1",)), 2.0)
    assert not prefetcher.holds.has_copy({"m"})
    prefetcher.handle(Tick(), 8.0)
    assert prefetcher.holds.has_copy({"m"}), "the start came to nothing"


def test_weights_whose_replica_gives_way_leave_after_those_whose_replica_stays() -> None:
    """Otherwise both copies could leave for one start, each because of the other."""
    prefetcher = controller(caching="union", hold_s=5.0)
    for name, model_key, ref in (("r-a", "m", A), ("r-b", "n", B)):
        prefetcher.handle(fetch(ref, model_key=model_key), 1.0)
        sized(prefetcher, ref, 50, 1.0)
        ended(prefetcher, ref, 1.5, 50, whole=True, seconds=1.0, source="file")
        row = an_instance(name, model_key, InstanceState.PREWARMED, replica=True)
        prefetcher.handle(an_event(InstancePrewarmed(instance=row)), 1.5)
    prefetcher.handle(fetch(C, "i-1", "o", drops=("r-a",)), 2.0)
    effects = prefetcher.handle(msg.FetchSized(region_digest(C), 50), 2.0)
    assert only(effects, msg.DropRegion).digest == region_digest(B)
