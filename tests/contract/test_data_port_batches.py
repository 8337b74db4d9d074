"""Batch lines are their callers' requests, in the class of batches."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits, Priority, Tenant
from glowplug.domain.model import Slo
from glowplug.engines import apis
from glowplug.events.facts import RequestFinished
from glowplug.services.router.batches import sender
from glowplug.services.router.batches.sender import IntakeSender, _LineClient
from glowplug.services.router.exchange_states import Ending
from glowplug.services.router.http_request import HttpRequest
from tests.contract.data_port_rig import Rig, a_model, a_rig, answering, die_at_once, hang
from tests.contract.keys_rig import KEY, a_key, tell

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
ANSWER = {"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}


def sender_of(rig: Rig) -> IntakeSender:
    return IntakeSender(rig.port.intake, rig.port.context, rig.table.keys)


async def test_a_line_is_a_request_of_its_caller_in_the_class_of_batches() -> None:
    async with a_rig(models=(a_model(slo=Slo(ttft_s=1.0)),)) as rig:
        tell(rig.table.keys, Tenant(name="acme", priority=Priority.INTERACTIVE), a_key())
        task = asyncio.create_task(sender_of(rig).send("acme", KEY, apis.CHAT, BODY))
        await rig.until(lambda: rig.num_held == 1)
        (held,) = rig.table.controller.queues["m"].waiting.values()
        assert (held.arrival.tenant, held.arrival.priority) == ("acme", Priority.BATCH)
        await rig.engine(answering(ANSWER))
        answer = await task
        assert answer.is_whole and json.loads(answer.body) == ANSWER and answer.request_id and answer.held_s > 0
        assert rig.finished[0].request.caller.key_id == KEY
        (fact,) = [fact for fact in rig.reported if isinstance(fact, RequestFinished)]
        assert fact.priority == "batch" and not rig.port.context.metrics.slo.counts, "no service level counts it"


async def test_what_a_line_gets_is_what_a_request_would_get() -> None:
    async with a_rig() as rig:
        limits = AccessLimits(requests_per_minute=1)
        tell(rig.table.keys, Tenant(name="acme", limits=limits), a_key(), a_key("bbbbbbb1", models=("other",)))
        made = sender_of(rig)
        await rig.engine(answering({"error": {"message": "no"}}, "400 Bad Request"))
        assert (await made.send("acme", "bbbbbbb1", apis.CHAT, BODY)).status == 404
        assert (await made.send("acme", KEY, apis.CHAT, b'{"model": "m"')).status == 400
        assert (await made.send("acme", KEY, apis.CHAT, BODY)).status == 400
        limited = await made.send("acme", KEY, apis.CHAT, BODY)
        assert limited.status == 429 and limited.retry_after_s and limited.may_retry
        assert json.loads(limited.body)["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("over", [{"revoked_at": 1.0}, {"expires_at": 1.0}, {"surfaces": ("read",)}])
async def test_a_line_of_a_key_that_opens_the_port_no_longer_fails(over: dict[str, Any]) -> None:
    async with a_rig() as rig:
        tell(rig.table.keys, Tenant(name="acme"), a_key())
        await rig.engine(answering(ANSWER))
        made = sender_of(rig)
        assert (await made.send("acme", KEY, apis.CHAT, BODY)).is_whole
        tell(rig.table.keys, a_key(revision=1, **over), at=1.0)
        assert (await made.send("acme", KEY, apis.CHAT, BODY)).status in (401, 403)
        assert (await made.send("acme", "zzzzzzz9", apis.CHAT, BODY)).status == 401


async def test_a_line_that_is_taken_back_leaves_its_engine() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(hang)
        task = asyncio.create_task(sender_of(rig).send("default", "", apis.CHAT, BODY))
        await rig.until(lambda: bool(engine.served))
        task.cancel()
        await asyncio.wait_for(engine.served[0].left.wait(), 5)
        await rig.until(lambda: not rig.table.exchanges)
        assert rig.endings[0].status == 499


async def test_a_line_whose_engine_dies_is_the_engines_fault() -> None:
    async with a_rig() as rig:
        await rig.engine(die_at_once)
        async with rig.ticking():
            answer = await asyncio.wait_for(sender_of(rig).send("default", "", apis.CHAT, BODY), 10)
        assert answer.status in (502, 503)


@pytest.mark.parametrize(
    ("head", "body", "status", "after_s", "may_retry"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2", b"{}", 200, None, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3", b"{}", 502, None, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1", b"{}", 200, None, True),
        (b"HTTP/1.1 200 OK\r\nx: y", b"{}", 200, None, True),
        (b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nx-should-retry: false", b"{}", 429, 7.0, False),
        (b"HTTP/1.1 429 No\r\nretry-after: soon\r\nx-should-retry: true", b"{}", 429, None, True),
        (b"nonsense", b"{}", 502, None, True),
        (b"a b c", b"{}", 502, None, True),
        (b"", b"", 502, None, True),
    ],
)
async def test_a_lines_answer_is_read_from_its_bytes(
    head: bytes, body: bytes, status: int, after_s: float | None, may_retry: bool
) -> None:
    client = _LineClient(asyncio.get_running_loop())
    for part in (head + b"\r\nx-request-id: r-1\r\nserver-timing: queue;dur=1500.0\r\n\r\n", body):
        client.write(part)
    client.exchange_over(True)
    answer = await client.answer
    assert (answer.status, answer.retry_after_s, answer.may_retry) == (status, after_s, may_retry)
    assert (answer.request_id, answer.held_s) == ("r-1", 1.5)
    assert answer.body == body if status != 502 else b"engine_failed" in answer.body


async def test_a_lines_answer_counts_once_and_not_where_its_exchange_failed() -> None:
    client = _LineClient(asyncio.get_running_loop())
    client.write(b"HTTP/1.1 200 OK\r\n\r\n")
    request = HttpRequest(request_id="r-1", notes=b"retry-after: 3\r\n")
    assert not client.respond(request, 503, b"{}", b"", b"x-should-retry: false\r\n")
    client.exchange_over(True)
    answer = await client.answer
    assert (answer.status, answer.request_id, answer.retry_after_s, answer.may_retry) == (503, "r-1", 3.0, False)
    assert client.exchange is None
    for code, status in (("engine_failed", 502), ("", 200)):
        client = _LineClient(asyncio.get_running_loop())
        client.exchange = SimpleNamespace(ending=Ending(0.0, 200, code))
        client.write(b"HTTP/1.1 200 OK\r\n\r\n{}")
        client.exchange_over(True)
        assert (await client.answer).status == status


async def test_a_lines_caller_is_looked_up_again_when_keys_change_or_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_rig() as rig:
        tell(rig.table.keys, Tenant(name="acme"), a_key(expires_at=2000.0), a_key("bbbbbbb1"))
        rig.table.keys._clock = lambda: 1000.0
        now_s, made = 1000.0, sender_of(rig)
        monkeypatch.setattr("glowplug.services.router.batches.sender.time.time", lambda: now_s)
        first = made._caller("acme", KEY)
        assert (first.priority, first.key_id) == (Priority.BATCH, KEY) and made._caller("acme", KEY) is first
        now_s = 2000.0
        assert made._caller("acme", KEY) is not first
        now_s = 1000.0
        kept = made._caller("acme", "bbbbbbb1")
        assert made._caller("acme", "bbbbbbb1") is kept
        tell(rig.table.keys, a_key(revision=1))
        assert made._caller("acme", "bbbbbbb1") is not kept
        monkeypatch.setattr(sender, "MAX_CALLERS", 1)
        tell(rig.table.keys, a_key("ccccccc1"))
        for key_id, num in ((KEY, 1), ("ccccccc1", 2), ("bbbbbbb1", 1)):
            made._caller("acme", key_id)
            assert len(made._callers) == num


async def test_a_line_of_a_named_key_that_is_gone_is_told_which_request_it_was() -> None:
    async with a_rig() as rig:
        answer = await sender_of(rig).send("acme", KEY, apis.CHAT, BODY)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (401, "invalid_api_key")
        assert answer.request_id.startswith("req-") and rig.port.context.buffered_bytes == 0
