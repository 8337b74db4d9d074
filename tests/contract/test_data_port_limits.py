"""Limits on the data port: refusals, headers and settlement."""

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from glowplug.domain.access import AccessLimits, Tenant
from glowplug.events.facts import RouterUsageReported
from glowplug.policies.limits.limiter import Limiter
from tests.contract.data_port_rig import Answer, Rig, a_model, a_rig, answering, assert_error, chat, hang, post
from tests.contract.keys_rig import a_key, bearer, secret_of, tell

WHOLE = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}


def tenant(**over: Any) -> Tenant:
    return Tenant(**({"name": "acme"} | over))


def of_requests(answer: Answer) -> tuple[str, str, str]:
    names = ("limit", "remaining", "reset")
    return tuple(answer.headers[f"x-ratelimit-{name}-requests"] for name in names)  # type: ignore[return-value]


async def ask(rig: Rig, **over: Any) -> Answer:
    return await rig.ask(chat(extra=bearer(), **over))


def stopped() -> float:
    return 1_800_000_000.0


async def test_an_answer_says_what_is_left_and_the_next_one_too_many_is_refused() -> None:
    async with a_rig(clock=stopped) as rig:
        await rig.engine()
        tell(rig.table.keys, tenant(limits=AccessLimits(requests_per_minute=2)), a_key())
        first = await ask(rig)
        assert (first.status, of_requests(first)) == (200, ("2", "1", "30s"))
        assert "x-ratelimit-limit-tokens" not in first.headers
        assert (await ask(rig, stream=True)).status == 200
        refused = await ask(rig)
        assert_error(refused, 429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "requests"
        assert refused.headers["retry-after"] == "30"
        assert of_requests(refused)[:2] == ("2", "0")
        assert "2 requests per minute" in refused.json()["error"]["message"]
        assert secret_of() not in refused.body.decode()


async def test_a_caller_without_limits_gets_no_header_and_counts_nothing() -> None:
    async with a_rig() as rig:
        await rig.engine()
        tell(rig.table.keys, tenant(), a_key())
        assert not [name for name in (await ask(rig)).headers if "ratelimit" in name]
        assert len(rig.table.limits.limiter) == 0


async def test_tokens_are_settled_by_what_the_engine_counted() -> None:
    async with a_rig() as rig:
        await rig.engine(answering(WHOLE))
        tell(rig.table.keys, tenant(limits=AccessLimits(tokens_per_minute=1000)), a_key())
        reserved = await ask(rig)
        assert int(reserved.headers["x-ratelimit-remaining-tokens"]) < 900
        assert not rig.table.limits.reserved
        after = await ask(rig, body=b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":90}')
        # 10 were taken, then at most 90 reserved
        assert 895 <= int(after.headers["x-ratelimit-remaining-tokens"]) <= 990


@pytest.mark.parametrize(("fields", "taken"), [({}, 90), ({"n": 6}, 540), ({"n": 6, "max_tokens": 10}, 60)])
async def test_each_of_several_answers_is_reserved(fields: dict[str, Any], taken: int) -> None:
    async with a_rig() as rig:
        await rig.engine(answering(WHOLE))
        tell(rig.table.keys, tenant(limits=AccessLimits(tokens_per_minute=1000)), a_key())
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 90}
        assert_error(await ask(rig, body=json.dumps(asked | {"n": 12}).encode()), 429, "rate_limit_exceeded")
        answer = await ask(rig, body=json.dumps(asked | fields).encode())
        assert taken <= 1000 - int(answer.headers["x-ratelimit-remaining-tokens"]) <= taken + 1


async def test_a_request_larger_than_the_limit_is_not_to_be_tried_again() -> None:
    async with a_rig() as rig:
        tell(rig.table.keys, tenant(limits=AccessLimits(tokens_per_minute=50)), a_key())
        refused = await ask(rig)
        assert_error(refused, 429, "rate_limit_exceeded")
        assert refused.json()["error"]["type"] == "tokens"
        assert "retry-after" not in refused.headers
        assert refused.headers["x-should-retry"] == "false"


async def test_a_day_that_is_used_up_is_a_quota() -> None:
    async with a_rig() as rig:
        await rig.engine(answering(WHOLE))
        tell(rig.table.keys, tenant(), a_key(limits=AccessLimits(tokens_per_day=10)))
        small = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":3}'
        assert (await ask(rig, body=small)).status == 200
        refused = await ask(rig, body=small)
        assert_error(refused, 429, "insufficient_quota")
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        assert "key gp-aaaaaaa1" in refused.json()["error"]["message"]


async def test_a_limit_at_one_model_leaves_the_others_alone() -> None:
    async with a_rig() as rig:
        await rig.engine()
        limits = AccessLimits(requests_per_minute=1)
        tell(rig.table.keys, tenant(model_limits={"other": limits}), a_key())
        assert [(await ask(rig)).status for _ in range(3)] == [200, 200, 200]
        tell(rig.table.keys, tenant(model_limits={"m*": limits}, revision=1), a_key())
        assert [(await ask(rig)).status for _ in range(2)] == [200, 429]


async def test_anthropics_clients_read_their_own_headers_and_error() -> None:
    async with a_rig() as rig:
        tell(rig.table.keys, tenant(limits=AccessLimits(requests_per_minute=1)), a_key())
        key = b"x-api-key: %b\r\nanthropic-version: 2023-06-01\r\n" % secret_of().encode()
        body = json.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}).encode()
        held = await rig.held(post("/v1/messages", body, key))
        refused = await rig.ask(post("/v1/messages", body, key))
        assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert refused.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        assert not [name for name in refused.headers if name.startswith("x-ratelimit")]
        held.close()


async def test_a_message_that_goes_to_its_engine_as_a_chat_is_limited_in_anthropics_words() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "output_config": form}
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        tell(rig.table.keys, tenant(limits=AccessLimits(requests_per_minute=1)), a_key())
        extra = bearer() + b"anthropic-version: 2023-06-01\r\n"
        held = await rig.held(post("/v1/messages", json.dumps(asked).encode(), extra))
        refused = await rig.ask(post("/v1/messages", json.dumps(asked).encode(), extra))
        assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
        held.close()


async def test_ollamas_clients_get_their_own_error() -> None:
    async with a_rig(clock=stopped) as rig:
        tell(rig.table.keys, tenant(limits=AccessLimits(requests_per_minute=1)), a_key())
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        held = await rig.held(post("/api/chat", body, bearer()))
        refused = await rig.ask(post("/api/chat", body, bearer()))
        assert (refused.status, set(refused.json())) == (429, {"error"})
        assert "1 requests per minute" in refused.json()["error"]
        assert refused.headers["retry-after"] == "60"
        held.close()


async def test_requests_at_once_and_held() -> None:
    async with a_rig() as rig:
        tell(rig.table.keys, tenant(limits=AccessLimits(concurrent=3, queued=1)), a_key())
        held = await rig.held(chat(extra=bearer()))
        refused = await ask(rig)
        assert_error(refused, 429, "rate_limit_exceeded")
        assert "1 held requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert rig.num_held == 1
        await rig.engine(hang)
        running = [held, await rig.sent(chat(extra=bearer())), await rig.sent(chat(extra=bearer()))]
        await rig.until(lambda: rig.num_in_flight == 3)
        refused = await ask(rig)
        assert_error(refused, 429, "rate_limit_exceeded")
        assert "3 requests at once" in refused.json()["error"]["message"]
        for client in running:
            client.close()
        await rig.until(lambda: not rig.table.exchanges)
        rig.engines[0].reply = answering(WHOLE)
        assert (await ask(rig)).status == 200


async def test_what_other_routers_admit_counts_here() -> None:
    async with a_rig() as rig:
        await rig.engine()
        tell(rig.table.keys, tenant(limits=AccessLimits(requests_per_minute=10)), a_key())
        first, other = rig.table.limits.limiter, Limiter("router-2")
        caller = rig.table.keys.find(secret_of().encode())
        (model,) = rig.table.models()
        for _ in range(9):
            other.admit(caller.scopes_at(model), 0, time.time())
        number, scopes = other.report(time.time())
        rig.table.limits.take(RouterUsageReported(router_id="router-2", number=number, scopes=scopes))
        assert len(first) == 1
        assert [(await ask(rig)).status for _ in range(2)] == [200, 429]


async def test_openais_client_waits_as_told() -> None:
    async with a_rig() as rig:
        await rig.engine(answering(WHOLE))
        tell(rig.table.keys, tenant(limits=AccessLimits(requests_per_minute=60)), a_key())
        host, port = rig.host_port
        async with openai.AsyncOpenAI(
            base_url=f"http://{host}:{port}/v1", api_key=secret_of(), max_retries=3
        ) as client:

            async def one() -> Any:
                return await client.chat.completions.with_raw_response.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=3
                )

            await asyncio.gather(*(one() for _ in range(60)))
            for _ in range(60):  # a slow machine has been given more meanwhile
                began = time.monotonic()
                if (answer := await one()).retries_taken:
                    break
            assert answer.retries_taken and time.monotonic() - began >= 0.8
            assert answer.headers["x-ratelimit-limit-requests"] == "60"
