"""Batch lines are their callers' requests, in the class of batches."""

import asyncio
import json
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits, Priority, Tenant
from glowplug.domain.model import Slo
from glowplug.engines import apis
from glowplug.events.facts import RequestFinished
from glowplug.services.router.batches.sender import IntakeSender
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
        sender = sender_of(rig)
        await rig.engine(answering({"error": {"message": "no"}}, "400 Bad Request"))
        assert (await sender.send("acme", "bbbbbbb1", apis.CHAT, BODY)).status == 404
        assert (await sender.send("acme", KEY, apis.CHAT, b'{"model": "m"')).status == 400
        assert (await sender.send("acme", KEY, apis.CHAT, BODY)).status == 400
        limited = await sender.send("acme", KEY, apis.CHAT, BODY)
        assert limited.status == 429 and limited.retry_after_s and limited.may_retry
        assert json.loads(limited.body)["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("over", [{"revoked_at": 1.0}, {"expires_at": 1.0}, {"surfaces": ("read",)}])
async def test_a_line_of_a_key_that_opens_the_port_no_longer_fails(over: dict[str, Any]) -> None:
    async with a_rig() as rig:
        tell(rig.table.keys, Tenant(name="acme"), a_key())
        await rig.engine(answering(ANSWER))
        sender = sender_of(rig)
        assert (await sender.send("acme", KEY, apis.CHAT, BODY)).is_whole
        tell(rig.table.keys, a_key(revision=1, **over), at=1.0)
        assert (await sender.send("acme", KEY, apis.CHAT, BODY)).status in (401, 403)
        assert (await sender.send("acme", "zzzzzzz9", apis.CHAT, BODY)).status == 401


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
