"""The rate of requests in the cache order."""

import pytest

from glowplug.controllers.prefetcher import messages as msg
from glowplug.controllers.prefetcher.controller import ROUTER_KEPT_S, Arrivals, PrefetcherController
from glowplug.controllers.prefetcher.params import IMPORTANCE, PrefetcherParams
from glowplug.controllers.prefetcher.reads import reads_of
from glowplug.domain.model import WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import ModelDeployed, RouterLoadReported
from glowplug.weights.region import region_digest
from tests.fleet_builder import a_model, an_event
from tests.unit.controllers.prefetcher.test_prefetcher import bring, fetch, only

A, B, C = (WeightsRef(uri=f"http://w/{name}") for name in "abc")


def report(router_id: str = "router-1", num_parts: int = 1, **num_arrived: int) -> RouterLoadReported:
    loads = {key: ModelLoad(num_arrived=num) for key, num in num_arrived.items()}
    return RouterLoadReported(router_id=router_id, loads=loads, num_parts=num_parts)


def test_only_what_has_come_since_the_last_report_counts() -> None:
    arrivals = Arrivals()
    assert arrivals.take(report(a=7), 1.0) == {}, "whenever that was"
    assert arrivals.take(report(a=9, b=2), 2.0) == {"a": 2, "b": 2}
    assert arrivals.take(report(a=9, b=2), 3.0) == {}
    assert arrivals.take(report("router-2", a=5), 3.0) == {}
    assert arrivals.take(report("router-2", a=6), 3.0) == {"a": 1}


def test_a_lost_report_loses_no_request_and_a_router_that_began_anew_adds_none() -> None:
    arrivals = Arrivals()
    arrivals.take(report(a=1), 1.0)
    assert arrivals.take(report(a=9), 5.0) == {"a": 8}
    assert arrivals.take(report(a=2), 6.0) == {}
    assert arrivals.take(report(a=4), 7.0) == {"a": 2}


def test_a_part_says_nothing_of_models_that_were_not_reported_before() -> None:
    arrivals = Arrivals()
    assert arrivals.take(report(num_parts=0, a=3), 1.0) == {}
    assert arrivals.take(report(num_parts=0, a=4, b=9), 2.0) == {"a": 1}


def test_no_weights_are_kept_for_batch() -> None:
    arrivals = Arrivals()
    for num, num_batch in ((5, 0), (105, 100), (106, 100)):
        loads = {"a": ModelLoad(num_arrived=num, num_batch_arrived=num_batch)}
        found = arrivals.take(RouterLoadReported(router_id="router-1", loads=loads), 1.0)
    assert found == {"a": 1}


def test_a_router_that_is_silent_for_long_is_forgotten() -> None:
    arrivals = Arrivals()
    arrivals.take(report(a=1), 0.0)
    arrivals.expire(ROUTER_KEPT_S)
    assert arrivals.take(report(a=2), ROUTER_KEPT_S) == {"a": 1}
    arrivals.expire(2 * ROUTER_KEPT_S + 1)
    assert arrivals.take(report(a=3), 2 * ROUTER_KEPT_S + 1) == {}


@pytest.mark.parametrize(("caching", "victim"), [("mcache", "b"), ("mcache:counts=uses", "a"), ("lru", "a")])
def test_weights_with_requests_stay_though_they_were_started_once(caching: str, victim: str) -> None:
    params = PrefetcherParams(capacity_bytes=100, caching=caching)
    prefetcher = PrefetcherController("node-1", params, digest_of=region_digest)
    for name, ref in (("a", A), ("b", B), ("c", C)):
        prefetcher.handle(an_event(ModelDeployed(model=a_model(name, weights=ref))), 0.0)
    prefetcher.handle(an_event(report(a=0, b=0, c=0)), 0.5)
    bring(prefetcher, A, 50, 1.0)
    bring(prefetcher, B, 50, 2.0)
    for at in (3.0, 4.0):
        prefetcher.handle(fetch(B), at)
    prefetcher.handle(an_event(report(a=100, b=3, c=1)), 5.0)
    dropped = only(bring(prefetcher, C, 50, 6.0), msg.DropRegion)
    assert dropped.digest == region_digest({"a": A, "b": B}[victim])


def test_reports_are_read_only_by_an_order_that_counts_requests() -> None:
    for caching, is_read in (("mcache", True), ("mcache:counts=uses", False), ("lru", False)):
        assert (RouterLoadReported in reads_of(caching, IMPORTANCE).telemetry) is is_read, caching
