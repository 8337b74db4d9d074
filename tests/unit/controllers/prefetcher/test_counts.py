"""Requests and seconds as a prefetcher counts them, for the order of its cache."""

import pytest

from glowplug.controllers.prefetcher.cache import FetchSeconds
from glowplug.controllers.prefetcher.controller import ROUTER_KEPT_S, Arrivals, PrefetcherController
from glowplug.controllers.prefetcher.params import IMPORTANCE, PrefetcherParams, SecondsParams
from glowplug.controllers.prefetcher.reads import reads_of
from glowplug.domain.errors import BadRequest
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RouterLoadReported
from glowplug.weights.region import region_digest


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


def test_reports_are_read_only_by_an_order_that_counts_requests() -> None:
    for caching, is_read in (("mcache", True), ("mcache:counts=uses", False), ("lru", False)):
        assert (RouterLoadReported in reads_of(caching, IMPORTANCE).telemetry) is is_read, caching


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(BadRequest, match="no caching policy named 'fifo'") as caught:
        PrefetcherController("node-1", PrefetcherParams(capacity_bytes=1, caching="fifo"), digest_of=region_digest)
    assert caught.value.param == "policy_caching"


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
