"""The console's log of requests."""

from dataclasses import replace

from glowplug.domain.snapshot import LiveRequest
from glowplug.events.facts import RequestRejected, RouterRequestsReported
from glowplug.services.console.request_log import REPORT_LEASE_S, RequestLog
from tests import console_story as story

HELD = LiveRequest(
    request_id="r-held", model_key="chat", state="held", arrived_at=90.0, position=3, eta_s=4.5, trace_id="a" * 32
)
RUNNING = LiveRequest(
    request_id="r-run", model_key="code", state="streaming", arrived_at=80.0, instance_id="i-1", emulated=True
)
DONE = replace(
    story.request_finished(0, 94.0), model_key="chat", request_id="r-done", instance_id="i-1", ttft_s=1.0, e2e_s=4.0,
    response_tokens=31, stream=True,
)  # fmt: skip


def log_of(*payloads: object, num_kept: int = 100, now_s: float = 100.0) -> RequestLog:
    log = RequestLog(num_kept)
    for payload in payloads:
        log.take(story.fact(payload, now_s), now_s)
    return log


def report(*rows: LiveRequest, router: str = "router-1", num_live: int = 0) -> RouterRequestsReported:
    return RouterRequestsReported(router_id=router, num_live=num_live or len(rows), requests=rows)


def test_live_ones_stand_first_and_oldest_first_then_the_ended_newest_first() -> None:
    older = replace(DONE, request_id="r-older")
    log = log_of(report(HELD, RUNNING), older, DONE)
    page = log.page(100.0)
    assert [line.request_id for line in page.requests] == ["r-run", "r-held", "r-done", "r-older"]
    assert page.states == {"streaming": 1, "held": 1, "finished": 2}
    held = page.requests[1]
    assert (held.state, held.position, held.eta_s, held.trace_id) == ("held", 3, 4.5, "a" * 32)
    assert page.requests[0].emulated and page.requests[0].instance_id == "i-1"


def test_time_per_token_counts_the_gaps_after_the_first_token() -> None:
    [line] = log_of(DONE).page(100.0).requests
    assert line.tpot_s == (4.0 - 1.0) / 30
    whole = replace(DONE, stream=False)
    [line] = log_of(whole).page(100.0).requests
    assert line.tpot_s == 0.0, "an answer that came in one piece has no times between tokens"
    assert (line.ttft_s, line.e2e_s) == (0.0, 4.0), "nor a first token: its first byte is all of it"
    [line] = log_of(report(replace(RUNNING, ttft_s=2.0))).page(100.0).requests
    assert line.ttft_s == 0.0
    [line] = log_of(report(replace(RUNNING, ttft_s=2.0, stream=True))).page(100.0).requests
    assert line.ttft_s == 2.0
    [line] = log_of(replace(DONE, response_tokens=1)).page(100.0).requests
    assert line.tpot_s == 0.0


def test_a_refusal_and_its_end_are_one_line_whichever_comes_first() -> None:
    ended = replace(DONE, status=503, instance_id="", ttft_s=0.0, response_tokens=0, error_code="no_capacity")
    refused = RequestRejected(
        model_key="chat", request_id="r-done", router_id="router-1", status=503, code="no_capacity", retry_after_s=7.0
    )
    for order in ((ended, refused), (refused, ended)):
        [line] = log_of(*order).page(100.0).requests
        assert (line.state, line.code, line.status, line.retry_after_s) == ("refused", "no_capacity", 503, 7.0)
        assert line.e2e_s == 4.0
    [alone] = log_of(refused).page(100.0).requests
    assert (alone.state, alone.arrived_at) == ("refused", 100.0)
    [flood] = log_of(replace(refused, model_key="", status=401, num_unlisted=30)).page(100.0, state="refused").requests
    assert (flood.model_key, flood.status, flood.num_unlisted) == ("", 401, 30)


def test_what_has_ended_is_no_longer_shown_as_live() -> None:
    stale = report(replace(HELD, request_id="r-done"), HELD)
    page = log_of(DONE, stale).page(100.0)
    assert [(line.request_id, line.state) for line in page.requests] == [("r-held", "held"), ("r-done", "finished")]


def test_two_routers_may_hold_the_same_client_id() -> None:
    page = log_of(report(HELD), report(HELD, router="router-2")).page(100.0)
    assert [line.router_id for line in page.requests] == ["router-1", "router-2"] and page.num_live == 2


def test_a_silent_router_holds_nothing() -> None:
    log = log_of(report(HELD))
    assert log.page(100.0 + REPORT_LEASE_S).num_live == 1
    assert log.page(100.1 + REPORT_LEASE_S).requests == []
    log = log_of(report(HELD), report())
    assert log.page(100.0).requests == []


def test_filters_by_model_state_group_and_words() -> None:
    failed = replace(DONE, request_id="r-bad", status=502, error_code="engine_failed")
    left = replace(DONE, request_id="r-left", status=499, error_code="client_left")
    log = log_of(report(HELD, RUNNING), DONE, failed, left)

    def ids(**asked: str) -> list[str]:
        return [line.request_id for line in log.page(100.0, **asked).requests]  # type: ignore[arg-type]

    assert ids(model="code") == ["r-run"]
    assert ids(state="held") == ["r-held"]
    assert ids(state="live") == ["r-run", "r-held"]
    assert ids(state="ended") == ["r-left", "r-bad", "r-done"]
    assert ids(text="ENGINE_failed 502") == ["r-bad"]
    assert ids(text="i-1 chat", state="finished") == ["r-done"]
    assert ids(state="left") == ["r-left"] and ids(text="nothing like it") == []
    counted = log.page(100.0, model="chat", state="held").states
    assert counted == {"held": 1, "finished": 1, "failed": 1, "left": 1}, "other states are counted for their buttons"


def test_it_is_bounded_and_says_how_many_there_are() -> None:
    many = [replace(DONE, request_id=f"r-{i}") for i in range(50)]
    log = log_of(report(HELD, num_live=900), *many, num_kept=20)
    page = log.page(100.0, limit=5)
    assert (len(page.requests), page.num_matching, page.num_kept, page.num_live) == (5, 21, 20, 900)
    assert page.requests[1].request_id == "r-49"


def test_reports_of_routers_that_are_gone_are_not_kept_until_a_page_opens() -> None:
    log = RequestLog(10)
    for number in range(5):
        now_s = 100.0 + number * (REPORT_LEASE_S + 1)
        log.take(story.fact(report(HELD, router=f"router-{number}"), now_s), now_s)
    assert list(log._reports) == ["router-4"]


def test_a_request_leads_to_a_trace_that_is_kept() -> None:
    """An unsampled request has no spans."""
    for flags, shown in (("01", "b" * 32), ("00", "")):
        finished = story.fact(DONE, 100.0, traceparent=f"00-{'b' * 32}-{'c' * 16}-{flags}")
        log = RequestLog(10)
        log.take(finished, 100.0)
        assert log.page(100.0).requests[0].trace_id == shown
