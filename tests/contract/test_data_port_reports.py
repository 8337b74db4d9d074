"""A data port's reports to the bus, to policies and to people."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits, Tenant
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.domain.snapshot import Outlook
from glowplug.events.facts import (
    STAYS,
    RequestFinished,
    RequestRejected,
    RouterLoadReported,
    RouterRequestsFinished,
    RouterRequestsReported,
)
from glowplug.services.router import reports
from glowplug.services.router.settings import Limits
from glowplug.services.router.tracing import MOVES_TOLD, Sampler, Way
from tests.contract.data_port_rig import (
    DONE,
    TOKEN,
    Rig,
    a_model,
    a_rig,
    an_instance,
    answering,
    chat,
    die_at_once,
    hang,
    post,
    sending,
    stream_three,
    streaming,
)
from tests.contract.keys_rig import a_key, bearer, tell

# -- live requests -------------------------------------------------------------------------------------------------


async def test_held_sent_and_streaming_ones_stand_where_they_are() -> None:
    go_on, end = asyncio.Event(), asyncio.Event()
    async with a_rig(models=(a_model(), a_model("other"))) as rig:
        assert rig.reports.live(10) == RouterRequestsReported(router_id="router-1", num_live=0)
        clients = [
            await rig.held(chat(model, stream=True, extra=b"x-request-id: r-%d\r\n" % number))
            for number, model in enumerate(("m", "other", "m", "m"))
        ]
        report = rig.reports.live(10)
        assert [(r.request_id, r.model_key, r.state, r.position) for r in report.requests] == [
            ("r-0", "m", "held", 1),
            ("r-1", "other", "held", 1),
            ("r-2", "m", "held", 2),
            ("r-3", "m", "held", 3),
        ]
        assert all(r.eta_s > 0 and r.stream and not r.instance_id for r in report.requests)

        await rig.engine(streaming(go_on, TOKEN, end, DONE), max_concurrency=2)
        await rig.until(lambda: rig.num_in_flight == 2)
        sent = rig.reports.live(10)
        assert [(r.state, r.position) for r in sent.requests] == [
            ("dispatched", 0),
            ("held", 1),
            ("dispatched", 0),
            ("held", 1),
        ]
        assert sent.requests[0].instance_id == "i-1" and sent.requests[0].cold and sent.requests[0].eta_s == 0
        go_on.set()
        await rig.until(lambda: [r.state for r in rig.reports.live(10).requests].count("streaming") == 2)
        begun = rig.reports.live(10).requests[0]
        assert begun.ttft_s > 0 and begun.response_tokens == 1

        assert len(rig.reports.live(2).requests) == 2 and rig.reports.live(2).num_live == 4
        end.set()
        clients[1].close()
        await rig.until(lambda: not rig.table.exchanges)
        ended = [p for p in rig.reported if isinstance(p, RequestFinished)]
        assert {(f.request_id, f.status, f.error_code, f.stream) for f in ended} == {
            ("r-0", 200, "", True),
            ("r-1", 499, "client_left", True),
            ("r-2", 200, "", True),
            ("r-3", 200, "", True),
        }
        for _ in range(2):
            rig.reports.report_ended()
        (ends,) = [p for p in rig.reported if isinstance(p, RouterRequestsFinished)]
        assert list(ends.requests) == ended, "each once, for those who add up"


async def test_reports_come_while_there_are_requests_and_once_more(rig: Rig) -> None:
    told = rig.reported
    reporting = asyncio.create_task(rig.reports.report_requests(0.01, 10))
    await asyncio.sleep(0.05)
    assert told == [], "a quiet router says nothing"
    client = await rig.sent(chat(stream=True))
    await rig.until(lambda: len(told) > 2)
    client.close()
    await rig.until(lambda: not rig.table.exchanges)
    reports = [p for p in told if isinstance(p, RouterRequestsReported)]
    await rig.until(lambda: isinstance(told[-1], RouterRequestsReported) and told[-1].num_live == 0)
    num_told = len(told)
    await asyncio.sleep(0.05)
    assert len(told) == num_told and reports[0].num_live == 1
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)


# -- what a policy is notified of ----------------------------------------------------------------------------------

LOOKS_AHEAD = {"policy": "preserve_load_aware"}
BODY = json.dumps(
    {"model": "m", "stream": True, "max_tokens": 50, "messages": [{"role": "user", "content": "x" * 400}]}
).encode()


def ahead(rig: Rig) -> Outlook:
    return rig.table.controller.loads()["m"].outlook_by_instance["i-1"]


async def test_a_prompt_is_queued_until_the_first_chunk_and_the_answer_expected_until_its_end() -> None:
    begin, finish = asyncio.Event(), asyncio.Event()
    async with a_rig(params=LOOKS_AHEAD) as rig:
        await rig.engine(streaming(begin, TOKEN, finish, DONE))
        asked = asyncio.create_task(rig.ask(chat(body=BODY)))
        await rig.until(lambda: rig.num_in_flight == 1)
        assert (ahead(rig).queued_tokens, ahead(rig).current_tokens) == (100, 50)
        begin.set()
        await rig.until(lambda: ahead(rig).queued_tokens == 0)
        assert ahead(rig).current_tokens > 0
        finish.set()
        assert (await asked).status == 200
        await rig.until(lambda: rig.num_in_flight == 0)
        assert ahead(rig) == Outlook(peak_ratio=0.0, over_share=0.0)


async def test_lengths_are_learned_from_what_the_engine_reports() -> None:
    async with a_rig(params=LOOKS_AHEAD) as rig:
        await rig.engine(answering({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 33}}))
        for _ in range(3):
            await rig.ask(chat())
        assert rig.table.controller.balances.lengths_of("m").expect(1, 0) == 33


async def test_an_answer_that_breaks_off_teaches_nothing_and_leaves_nothing() -> None:
    async with a_rig(params=LOOKS_AHEAD) as rig:
        await rig.engine(streaming(TOKEN, then="die"))
        before = rig.table.controller.balances.lengths_of("m").expect(100, 0)
        await rig.ask(chat(body=BODY))
        assert ahead(rig) == Outlook(peak_ratio=0.0, over_share=0.0)
        assert rig.table.controller.balances.lengths_of("m").expect(100, 0) == before


async def test_a_policy_that_only_counts_is_told_no_tokens(rig: Rig) -> None:
    asked = asyncio.create_task(rig.ask(chat(body=BODY)))
    await rig.until(lambda: bool(rig.table.controller.requests))
    assert [one.prompt_tokens for one in rig.table.controller.requests.values()] == [0]
    await rig.engine()
    await asked


async def test_a_prompt_whose_length_no_engine_told_is_estimated_and_said_to_be(rig: Rig) -> None:
    """A recording had it as 0 tokens, and its replay as one."""
    await rig.engine(stream_three)
    await rig.ask(chat(body=BODY))
    await rig.until(lambda: len(rig.finished) == 1)
    assert rig.finished[0].token_counts()[:3] == (100, 3, False)


# -- ends and rows -------------------------------------------------------------------------------------------------

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"traceparent: 00-{TRACE}-b7ad6b7169203331-01\r\n".encode()
UNSAMPLED = SAMPLED.replace(b"-01\r", b"-00\r")


async def ended(rig: Rig) -> tuple[RequestFinished, str]:
    """Return the report of the only request, and its traceparent."""
    await rig.until(lambda: len(rig.finished) == 1)
    rig.reports.report_ended()
    (report,) = (payload for payload in rig.reported if isinstance(payload, RouterRequestsFinished))
    ((fact, traceparent),) = report.traced()
    return fact, traceparent


async def test_a_warm_request_names_its_client_and_the_span_its_engine_was_given(rig: Rig) -> None:
    engine = await rig.engine()
    answer = await rig.ask(chat(stream=True, extra=SAMPLED))
    fact, traceparent = await ended(rig)
    assert engine.served[0].header("traceparent") == traceparent == answer.headers["traceparent"]
    assert (traceparent[3:35], traceparent[-2:]) == (TRACE, "01") and traceparent[36:52] != fact.parent_span
    assert (fact.parent_span, fact.operation, fact.instance_id) == ("b7ad6b7169203331", "chat", "i-1")
    assert not fact.held and not fact.moves and 0 < fact.dispatched_s < fact.ttft_s <= fact.e2e_s


async def test_a_held_request_says_what_was_expected_and_its_cause_carries_the_trace(rig: Rig) -> None:
    client = await rig.held(chat(extra=SAMPLED))
    await rig.engine()
    assert (await client.answer()).status == 200
    fact, traceparent = await ended(rig)
    assert fact.held and fact.eta_s > 0 and fact.dispatched_s >= fact.queue_s > 0
    waiting = next(p for p in rig.published if p.payload.TYPE == "request.waiting")
    assert waiting.cause is not None and waiting.cause.traceparent == traceparent


async def test_a_stream_that_lost_its_engine_tells_of_the_gap() -> None:
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        engine = await rig.engine(streaming(TOKEN, then="die"))
        client = await rig.sent(chat(stream=True))
        await rig.until(lambda: rig.num_held == 1)
        rig.tell(an_instance("i-1", engine.url, InstanceState.FAILED, revision=2, reason="killed"))
        await rig.engine(instance_id="i-2")
        assert (await client.answer()).complete
        fact, _ = await ended(rig)
    (move,) = fact.moves
    assert (move.reason, move.message) == ("engine_lost", "the engine closed the connection")
    assert (move.num_tokens, move.from_instance, move.to_instance, move.outcome) == (1, "i-1", "i-2", "")
    assert fact.arrived_at < move.at < move.until < fact.finished_at and not fact.held


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_stream_that_leaves_a_draining_instance_tells_of_that(is_taken: bool) -> None:
    go_on = asyncio.Event()
    given: dict[str, Any] = {"models": (a_model(engine="llamacpp"),), "params": {"move_within_s": 5.0}}
    async with a_rig(**given) as rig:
        engine = await rig.engine(streaming(TOKEN, go_on, TOKEN, DONE))
        client = await rig.sent(chat(stream=True))
        await client.head()
        assert await client.chunk() == TOKEN
        await rig.engine(stream_three if is_taken else die_at_once, instance_id="i-2")
        ends_at = time.time()
        rig.tell(an_instance("i-1", engine.url, InstanceState.DRAINING, revision=2, drain_ends_at=ends_at))
        if not is_taken:
            await rig.until(lambda: rig.exchange.moving is None)
            go_on.set()
        await client.rest()
        fact, _ = await ended(rig)
    move = fact.moves[0]
    assert move.reason == "drained" and move.message.startswith("i-1 drains and ends in ")
    assert move.to_instance == ("i-2" if is_taken else "")
    assert move.outcome.startswith("" if is_taken else "the engine closed") and bool(move.outcome) is not is_taken


async def test_what_has_to_leave_and_cannot_be_continued_says_so() -> None:
    go_on = asyncio.Event()
    async with a_rig(models=(a_model(engine="llamacpp"),), params={"move_within_s": 5.0}) as rig:
        engine = await rig.engine(streaming(TOKEN, go_on, DONE))
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 2}
        client = await rig.sent(chat(body=json.dumps(body).encode()))
        await client.head()
        assert await client.chunk() == TOKEN
        await rig.engine(instance_id="i-2")
        rig.tell(an_instance("i-1", engine.url, InstanceState.DRAINING, revision=2, drain_ends_at=time.time()))
        go_on.set()
        await client.rest()
        fact, _ = await ended(rig)
    (move,) = fact.moves
    assert move.outcome == STAYS and "several answers were asked for" in move.message


async def test_moves_are_bounded_and_one_that_the_end_cuts_short_ends_then() -> None:
    way, one = Way("chat", ""), an_instance("i-1", "http://e")
    for number in range(2 * MOVES_TOLD):
        way.leave(float(number), "drained", "", 0, one)
        way.stay(number + 0.5, "too late")
    way.leave(99.0, "engine_lost", "", 0, one)
    *_, last = moves = way.ended(100.0)
    assert len(moves) == MOVES_TOLD and (last.until, last.outcome, last.to_instance) == (100.0, "", "")


async def test_an_unsampled_request_passes_on_its_clients_context_and_is_told_too() -> None:
    async with a_rig(sampler=Sampler(ratio=0.0)) as rig:
        await rig.engine()
        await rig.ask(chat(extra=UNSAMPLED))
        await rig.ask(chat())
        await rig.until(lambda: len(rig.finished) == 2)
        rig.reports.report_ended()
        (report,) = (payload for payload in rig.reported if isinstance(payload, RouterRequestsFinished))
    theirs, own = report.traceparents
    assert theirs == UNSAMPLED.decode().strip().removeprefix("traceparent: ")
    assert own.endswith("-00") and own[3:35] != TRACE


async def test_rows_show_live_then_finished_requests_and_no_prompt(rig: Rig) -> None:
    engine = await rig.engine(max_concurrency=1)
    await rig.ask(chat(stream=True, extra=b"x-request-id: done-1\r\n"))
    await rig.until(lambda: not rig.table.exchanges)
    rig.tell(an_instance("i-1", engine.url, InstanceState.DRAINING, revision=2))
    await rig.sent(chat("m", extra=b"x-request-id: held-1\r\n"))
    await rig.until(lambda: len(rig.table.exchanges) == 1)
    rows = rig.reports.rows(10)
    assert [row["request_id"] for row in rows] == ["held-1", "done-1"]
    assert rows[1]["state"] == "finished" and rows[1]["response_tokens"] == 3 and not rows[1]["tokens_exact"]
    assert "hi" not in {str(v) for row in rows for v in row.values()}


async def test_only_a_streamed_answer_has_a_first_token(rig: Rig) -> None:
    """The first byte of any other answer is the whole."""
    await rig.engine(answering({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}))
    await rig.ask(chat())
    await rig.engine(stream_three)
    await rig.ask(chat(stream=True))
    await rig.until(lambda: not rig.table.exchanges)
    first, whole = rig.reports.rows(10)
    assert (whole["stream"], whole["ttft_s"]) == (False, None) and whole["e2e_s"] > 0
    assert first["stream"] and 0 < first["ttft_s"] <= first["e2e_s"]


# -- refusals ------------------------------------------------------------------------------------------------------


async def test_what_is_refused_at_the_door_is_listed_with_its_reason_and_nothing_of_its_body() -> None:
    secret = "nobody else should read this"
    key = b"authorization: Bearer k\r\n"
    asked = [
        (chat(body=json.dumps({"model": "m", "messages": secret}).encode()), 401, "invalid_api_key"),
        (chat(secret, extra=key), 404, "model_not_found"),
        (chat(body=secret.encode(), extra=key), 400, "bad_request"),
        (chat(body=secret.encode() * 1000, extra=key), 413, "request_too_large"),
        (post("/v1/nothing", secret.encode(), key), 404, "not_found"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "bad_request"),
    ]
    async with a_rig(Limits(max_body_bytes=10_000), api_key="k") as rig:
        for request, status, _ in asked:
            assert (await rig.ask(request)).status == status
        rows, facts = rig.reports.rows(10), list(rig.reported)
        await rig.engine()
        assert (await rig.ask(chat(extra=key + b"x-request-id: good\r\n"))).status == 200
        await rig.until(lambda: not rig.table.exchanges)
        assert [row["state"] for row in rig.reports.rows(2)] == ["finished", "refused"]
    expected = [(status, code) for _, status, code in asked]
    assert [(row["status"], row["error_code"]) for row in reversed(rows)] == expected
    assert [(fact.status, fact.code) for fact in facts if isinstance(fact, RequestRejected)] == expected
    assert all(row["request_id"] and row["state"] == "refused" for row in rows)
    assert secret not in f"{rows} {facts}"


async def test_what_the_controller_refuses_is_listed_once() -> None:
    async with a_rig(models=(a_model(max_queue=1),)) as rig:
        await rig.held(chat())
        assert (await rig.ask(chat())).status == 429
        states = [row["state"] for row in rig.reports.rows(10)]
    assert states == ["held", "failed"]


# -- what a report says ----------------------------------------------------------------------------------------------


async def facts_of(rig: Rig, num: int) -> list[RequestFinished]:
    await rig.until(lambda: len(rig.finished) == num)
    return [payload for payload in rig.reported if isinstance(payload, RequestFinished)]


async def test_a_report_counts_its_times_from_the_complete_request(rig: Rig) -> None:
    began = time.monotonic()
    client = await rig.held(chat(stream=True))
    (exchange,) = rig.table.exchanges.values()
    exchange.request.complete_at = 5000.0
    (row,) = rig.reports.rows(1)
    assert row["age_s"] == pytest.approx(rig.table.clock() - 5000.0, abs=60) and row["ttft_s"] is None
    await rig.engine(streaming(TOKEN, DONE), emulated=True)
    await client.answer()
    (fact,) = await facts_of(rig, 1)
    assert fact.arrived_at == 5000.0 and fact.finished_at == 5000.0 + fact.e2e_s
    assert 0 < fact.queue_s <= fact.ttft_s <= fact.e2e_s <= time.monotonic() - began and fact.cold and fact.emulated
    assert fact.priority == "" and not fact.moves


async def test_a_request_without_an_instance_waited_all_its_time(rig: Rig) -> None:
    client = await rig.held(chat())
    client.close()
    (fact,) = await facts_of(rig, 1)
    assert fact.queue_s == fact.e2e_s > 0 and (fact.ttft_s, fact.instance_id, fact.emulated) == (0.0, "", False)
    (row,) = rig.reports.rows(1)
    assert (row["state"], row["ttft_s"], row["model"]) == ("left", None, "m")


@pytest.mark.parametrize(("status", "state"), [("399 Odd", "finished"), ("400 Bad", "failed"), ("502 Bad", "failed")])
async def test_a_row_says_how_its_request_ended(rig: Rig, status: str, state: str) -> None:
    await rig.engine(answering({"error": {"message": "no"}}, status))
    await rig.ask(chat(extra=SAMPLED))
    await facts_of(rig, 1)
    (row,) = rig.reports.rows(1)
    assert (row["state"], row["trace_id"], row["key"]) == (state, TRACE, "")


async def test_a_live_row_says_where_its_request_is(rig: Rig) -> None:
    go_on = asyncio.Event()
    await rig.engine(streaming(TOKEN, go_on, DONE), emulated=True)
    client = await rig.sent(chat(stream=True, extra=SAMPLED))
    await client.head()
    await client.chunk()
    (row,) = rig.reports.rows(5)
    assert (row["state"], row["instance_id"], row["emulated"], row["position"]) == ("streaming", "i-1", True, 0)
    assert 0 < row["ttft_s"] < 60 and row["trace_id"] == TRACE and not row["tokens_exact"] and row["model"] == "m"
    go_on.set()
    await client.rest()


async def test_an_unstreamed_answer_that_has_begun_has_no_first_token(rig: Rig) -> None:
    go_on = asyncio.Event()
    await rig.engine(sending(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{", go_on, b"}"))
    client = await rig.sent(chat())
    await rig.until(lambda: bool(rig.table.exchanges) and rig.exchange.answer is not None)
    assert [row["ttft_s"] for row in rig.reports.rows(5)] == [None]
    go_on.set()
    assert (await client.answer()).body == b"{}"


async def test_ends_are_reported_in_parts_with_their_traces(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "ENDS_REPORTED", 2)
    await rig.engine()
    for _ in range(3):
        await rig.ask(chat())
    facts = await facts_of(rig, 3)
    rig.reports.report_ended()
    parts = [payload for payload in rig.reported if isinstance(payload, RouterRequestsFinished)]
    assert [list(part.requests) for part in parts] == [facts[:2], facts[2:]]
    assert [len(part.traceparents) for part in parts] == [2, 1] and {part.router_id for part in parts} == {"router-1"}


async def test_loads_are_reported_at_a_change_or_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LOAD_SOONEST_S", 0.001)
    async with a_rig() as rig:
        read: list[int] = []
        texts: Any = SimpleNamespace(late=lambda running: read.append(len(list(running))))
        monkeypatch.setattr(reports, "LOAD_EVERY_S", 60.0)
        reporting = asyncio.create_task(rig.reports.report_loads(texts))
        client = await rig.held(chat())

        def waits() -> bool:
            loads = [p.loads.values() for p in rig.reported if isinstance(p, RouterLoadReported)]
            return any(load.num_waiting == 1 for row in loads for load in row)

        await rig.until(waits)
        client.close()
        await rig.until(lambda: any(isinstance(p, RouterRequestsFinished) for p in rig.reported))
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        assert 1 in read
        monkeypatch.setattr(reports, "LOAD_EVERY_S", 0.002)
        num, rig.table.changed = len(read), asyncio.Event()
        reporting = asyncio.create_task(rig.reports.report_loads(texts))
        await rig.until(lambda: len(read) >= num + 4)
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


async def test_slow_lines_are_of_waits_for_a_start_of_failures_and_of_lost_engines(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "glowplug.services.router.reports")
    engine = await rig.engine()
    await rig.ask(chat())
    await facts_of(rig, 1)
    assert not caplog.records
    for number, status in enumerate(("499 Odd", "500 Bad"), start=2):
        engine.reply = answering({"error": {"message": "no"}}, status)
        await rig.ask(chat(extra=UNSAMPLED if number == 3 else SAMPLED))
        await facts_of(rig, number)
    (record,) = caplog.records
    assert record.trace_id is None  # type: ignore[attr-defined]


async def test_limits_and_usage_are_settled_with_the_tokens_of_the_answer() -> None:
    async with a_rig() as rig:
        ends: list[Any] = []

        def end(*given: Any, is_whole: bool) -> None:
            ends.append((*given[1:], is_whole))

        rig.table.limits.end = end  # type: ignore[assignment]
        engine = await rig.engine(answering({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}))
        tell(rig.table.keys, Tenant(name="acme", limits=AccessLimits(tokens_per_minute=1000)), a_key())
        await rig.ask(chat(extra=bearer()))
        await facts_of(rig, 1)
        engine.reply = answering({"error": {"message": "no"}}, "400 Bad")
        await rig.ask(chat(extra=bearer()))
        await facts_of(rig, 2)
        engine.reply = hang
        client = await rig.sent(chat(extra=bearer()))
        await rig.until(lambda: len(engine.served) == 3)
        client.close()
        await facts_of(rig, 3)
        rig.table.limits.reserved.clear()
    assert ends[0] == ("m", 5, 7, True) and ends[2] == ("m", 0, 0, False) and ends[1][3] is False


async def test_each_end_is_counted_and_levels_of_service_are_not_those_of_batches() -> None:
    async with a_rig(models=(a_model(slo=Slo(ttft_s=60.0)),)) as rig:
        await rig.engine()
        levels = rig.port.context.metrics.slo.counts
        for number, (tier, counts) in enumerate((("flex", False), ("default", True)), start=1):
            asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "service_tier": tier}
            assert (await rig.ask(chat(body=json.dumps(asked | {"stream": True}).encode()))).status == 200
            await facts_of(rig, number)
            assert bool(levels) is counts
