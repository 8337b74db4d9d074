"""Request ids, trace contexts and head sampling."""

import pytest

from glowplug.events.facts import STAYS, StreamMove
from glowplug.services.router import tracing
from glowplug.services.router.tracing import Way
from glowplug.telemetry.tracing import parse_traceparent
from tests.contract.data_port_rig import an_instance

GOOD = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_safe_id_is_kept_and_an_unsafe_one_is_replaced() -> None:
    assert tracing.request_id(b"abc-1.2:3") == "abc-1.2:3"
    for given in (None, b"", b"a b", b"a\r\nx: y", b"x" * 129, "é".encode()):
        assert tracing.request_id(given).startswith("req-")
    assert tracing.request_id(None) != tracing.request_id(None)


@pytest.mark.parametrize(
    "given",
    [
        *(None, b"", b"x", GOOD.upper(), GOOD[:-1], GOOD.replace(b"00-", b"ff-"), b"00-" + b"0" * 32 + GOOD[35:]),
        *(GOOD + b"-more", b"01" + GOOD[2:] + b"more"),
    ],
)
def test_a_malformed_context_is_none(given: bytes | None) -> None:
    assert tracing.parent_context(given) is None


def test_a_good_context_is_taken_with_its_flag() -> None:
    assert tracing.parent_context(GOOD) == (GOOD.decode(), True)
    assert tracing.parent_context(GOOD[:-1] + b"0") == (GOOD[:-1].decode() + "0", False)
    for later in (b"01" + GOOD[2:], b"cc" + GOOD[2:] + b"-of the next version"):
        assert tracing.parent_context(later) == (GOOD.decode(), True)


def test_a_new_context_is_valid_and_not_sampled() -> None:
    made = parse_traceparent(tracing.new_context())
    assert made is not None and not made.sampled


def test_a_sampled_request_has_a_span_of_its_own_in_its_clients_trace() -> None:
    made, theirs = parse_traceparent(tracing.new_context(GOOD.decode(), sampled=True)), parse_traceparent(GOOD.decode())
    assert made is not None and theirs is not None and made.sampled
    assert made.trace_id == theirs.trace_id and made.span_id != theirs.span_id


def test_the_sampler_takes_a_burst_and_then_its_rate() -> None:
    sampler = tracing.Sampler(ratio=1.0, per_s=10.0)
    assert sum(sampler.root(100.0) for _ in range(50)) == 10
    assert sum(sampler.root(100.5) for _ in range(50)) == 5


def test_a_ratio_of_zero_samples_nothing() -> None:
    sampler = tracing.Sampler(ratio=0.0, per_s=1000.0)
    assert not any(sampler.root(100.0 + i) for i in range(100))


def test_a_sampler_fills_up_to_its_rate_and_to_one_at_least() -> None:
    slow = tracing.Sampler(ratio=1.0, per_s=0.5)
    assert [slow.root(100.0 + after) for after in (0.0, 0.0, 1.0, 2.0, 2.5)] == [True, False, False, True, False]
    some = tracing.Sampler(ratio=0.5, per_s=1e9)
    assert 300 < sum(some.root(100.0) for _ in range(1000)) < 700


def test_new_contexts_differ_and_have_no_zero_ids() -> None:
    made = [parse_traceparent(tracing.new_context()) for _ in range(20)]
    assert len({(one.trace_id, one.span_id) for one in made if one is not None}) == 20
    assert len({tracing.event_id() for _ in range(20)}) == 20 and len(tracing.event_id()) == 32
    assert tracing.parent_context(GOOD[:-2] + b"fe") == (GOOD[:-2].decode() + "fe", False)


def test_a_way_tells_of_its_first_wait_and_its_first_engine() -> None:
    way = Way("chat", "")
    way.hold(3.0)
    way.hold(5.0)
    way.send(1.0)
    way.send(2.0)
    assert (way.held, way.eta_s, way.dispatched_s) == (True, 3.0, 1.0) and way.ended(9.0) == ()
    way = Way("chat", "")
    way.send(1.0)
    way.hold(5.0)
    assert (way.held, way.eta_s) == (False, 0.0), "it has had an engine"


def test_a_way_tells_where_each_stream_went() -> None:
    way, one, two = Way("chat", ""), an_instance("i-1", ""), an_instance("i-2", "")
    way.leave(1.0, "engine_lost", "it died", 4, one)
    way.leave(2.0, "drained", "it drains", 5, None)
    way.go_on(3.0, two)
    way.go_on(4.0, one)
    way.stay(5.0, "too late")
    way.leave(6.0, "drained", "it drains", 6, two)
    way.stay_put(7.0, "moved", "it cannot", two)
    way.leave(8.0, "drained", "", 0, one)
    way.stay(9.0, "too late")
    way.leave(9.5, "drained", "", 0, one)
    assert way.ended(10.0) == (
        StreamMove(at=1.0, until=2.0, reason="engine_lost", message="it died", num_tokens=4, from_instance="i-1"),
        StreamMove(at=2.0, until=3.0, reason="drained", message="it drains", num_tokens=5, to_instance="i-2"),
        StreamMove(at=6.0, until=7.0, reason="drained", message="it drains", num_tokens=6, from_instance="i-2"),
        StreamMove(at=7.0, until=7.0, reason="moved", message="it cannot", from_instance="i-2", outcome=STAYS),
        StreamMove(at=8.0, until=9.0, reason="drained", message="", from_instance="i-1", outcome="too late"),
        StreamMove(at=9.5, until=10.0, reason="drained", message="", from_instance="i-1"),
    )
