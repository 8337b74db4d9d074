"""Every client error gets its own answer, in OpenAI's shape."""

import asyncio
import json
from typing import Any

import pytest

from glowplug.domain.model import OnCold
from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import CHUNKED, GET, Rig, a_model, a_rig, assert_error, chat, chunk, get, post

FINE = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BAD_BODIES: dict[str, tuple[bytes | dict[str, Any], str | None]] = {
    "malformed JSON": (b'{"model": "m", ', None),
    "not UTF-8": (b'{"model": "\xff\xfe", "messages": []}', None),
    "empty": (b"", None),
    "no object": (b"[1, 2]", None),
    "nested too deeply": (b'{"model":"m","messages":[],"x":' + b"[" * 100_000, None),
    "NaN is no JSON": (b'{"model":"m","messages":[],"temperature":NaN}', None),
    "no model": ({"messages": []}, "model"),
    "a model of another type": (FINE | {"model": 7}, "model"),
    "messages of another type": (FINE | {"messages": "hi"}, "messages"),
    "a role of another type": (FINE | {"messages": [{"role": 1}]}, "messages[0].role"),
    "a flag of another type": (FINE | {"stream": "yes"}, "stream"),
    "a count of another type": (FINE | {"max_tokens": "many"}, "max_tokens"),
    "a number of another type": (FINE | {"temperature": []}, "temperature"),
}


@pytest.mark.parametrize("what", BAD_BODIES)
async def test_a_body_that_cannot_be_read_and_the_field_that_is_wrong(rig: Rig, what: str) -> None:
    body, param = BAD_BODIES[what]
    answer = await rig.ask(chat(body=body if isinstance(body, bytes) else json.dumps(body).encode()))
    assert_error(answer, 400, "bad_request")
    assert answer.json()["error"]["param"] == param


UNANSWERED = {
    "a GET of an engine's path": (get("/v1/chat/completions"), 405, "method_not_allowed"),
    "a DELETE of our own": (get("/v1/models", method="DELETE"), 405, "method_not_allowed"),
    "unknown model": (chat("nobody"), 404, "model_not_found"),
    "unknown path": (get("/v2/x"), 404, "not_found"),
    "unknown expectation": (chat(extra=b"expect: miracles\r\n"), 417, "bad_request"),
    "large headers": (get("/health", extra=b"x-long: %b\r\n" % (b"a" * 40_000)), 431, "headers_too_large"),
    "huge headers": (get("/health", extra=b"x-long: %b\r\n" % (b"a" * 400_000)), 431, "headers_too_large"),
}
ALLOWED = {"a GET of an engine's path": "POST", "a DELETE of our own": "GET, HEAD"}


@pytest.mark.parametrize("what", UNANSWERED)
async def test_what_nobody_can_answer(rig: Rig, what: str) -> None:
    request, status, code = UNANSWERED[what]
    answer = await rig.ask(request)
    assert_error(answer, status, code)
    assert answer.headers.get("allow") == ALLOWED.get(what)


async def test_head_has_the_length_and_no_body(rig: Rig) -> None:
    client = await rig.sent(GET.replace(b"GET", b"HEAD"))
    head = await client.answer(method="HEAD")
    await client.send(GET)
    whole = await client.answer()
    await client.send(get("/nowhere", method="HEAD"))
    missing = await client.answer(method="HEAD")
    assert head.status == 200 and int(head.headers["content-length"]) == len(whole.body)
    assert missing.status == 404


async def test_a_missing_or_wrong_api_key() -> None:
    async with a_rig(api_key="right") as rig:
        assert_error(await rig.ask(chat()), 401, "invalid_api_key")
        assert_error(await rig.ask(chat(extra=b"authorization: Bearer wrong\r\n")), 401, "invalid_api_key")
        assert_error(await rig.ask(GET), 401, "invalid_api_key")
        assert (await rig.ask(get("/health"))).status == 200


TOO_LARGE = {
    "100 MB, not read at all": [CHUNKED.replace(b"transfer-encoding: chunked", b"content-length: 100000000") % b""],
    "whose client goes on sending": [chat(body=b"x" * 5_000_000)],
    "that grows": [CHUNKED % b"", *[chunk(b"x" * 512)] * 3],
}


@pytest.mark.parametrize("what", TOO_LARGE)
async def test_a_body_that_is_too_large(what: str) -> None:
    async with a_rig(Limits(max_body_bytes=1000)) as rig:
        client = await rig.client()
        for part in TOO_LARGE[what]:
            await client.send(part)
        assert_error(await client.answer(), 413, "request_too_large")
        assert await client.at_end()


async def test_bodies_beyond_what_the_process_may_hold() -> None:
    async with a_rig(Limits(buffered_bytes=1000)) as rig:
        answer = await rig.ask(chat(body=b"x" * 2000))
    assert_error(answer, 503, "overloaded")
    assert answer.headers["retry-after"] == "1"


async def test_expect_100_continue() -> None:
    async with a_rig(Limits(max_body_bytes=1000)) as rig:
        await rig.engine()
        request = chat(extra=b"expect: 100-continue\r\n")
        head, _, body = request.partition(b"\r\n\r\n")
        client = await rig.sent(head + b"\r\n\r\n")
        assert (await client.answer()).status == 100
        await client.send(body)
        assert (await client.answer()).status == 200
        client = await rig.sent(head.replace(b"length: ", b"length: 9999") + b"\r\n\r\n")
        assert_error(await client.answer(), 413, "request_too_large")


async def test_headers_that_never_end() -> None:
    async with a_rig(Limits(header_bytes=2000)) as rig:
        client = await rig.sent(b"GET /health HTTP/1.1\r\n")
        for i in range(60):
            await client.send(b"x-%d: %b\r\n" % (i, b"a" * 50))
            await asyncio.sleep(0)
        assert_error(await client.answer(), 431, "headers_too_large")


@pytest.mark.parametrize("part", [b"POST /v1/chat/completions HTTP/1.1\r\nho", chat()[:-5]], ids=["head", "body"])
async def test_slowloris(part: bytes) -> None:
    async with a_rig(Limits(header_s=0.05, body_s=0.05)) as rig:
        client = await rig.sent(part)
        assert_error(await client.answer(), 408, "request_timeout")
        assert await client.at_end()


async def test_an_idle_connection_is_closed() -> None:
    async with a_rig(Limits(header_s=0.05, client_idle_s=0.05)) as rig:
        client = await rig.sent(GET)
        assert (await client.answer()).status == 200
        assert await client.at_end()


async def test_too_many_connections() -> None:
    async with a_rig(Limits(max_connections=1)) as rig:
        first = await rig.client()
        await rig.until(lambda: len(rig.port.connections) == 1)
        second = await rig.client()
        assert_error(await second.answer(), 503, "overloaded")
        await first.send(GET)
        assert (await first.answer()).status == 200


async def test_a_request_split_at_every_byte(rig: Rig) -> None:
    engine = await rig.engine()
    client = await rig.client()
    request = chat(stream=True)
    for i in range(len(request)):
        await client.send(request[i : i + 1])
        await asyncio.sleep(0)
    assert (await client.answer()).status == 200
    assert engine.served[0].body == request.partition(b"\r\n\r\n")[2]


async def test_a_chunked_request_body_reaches_the_engine_whole(rig: Rig) -> None:
    body = chat().partition(b"\r\n\r\n")[2]
    engine = await rig.engine()
    parts = b"".join(chunk(body[i : i + 7]) for i in range(0, len(body), 7))
    answer = await rig.ask(CHUNKED % b"" + parts + b"0\r\n\r\n")
    assert answer.status == 200 and engine.served[0].body == body
    assert engine.served[0].header("content-length") == str(len(body))


async def test_thousands_of_pipelined_requests_that_are_refused_at_once() -> None:
    """Without a depth limit, the last of them would be too deep."""
    async with a_rig(models=(a_model(on_cold=OnCold.REFUSE),)) as rig:
        client = await rig.sent(chat() * 2000)
        answers = [await client.answer() for _ in range(2000)]
        assert {a.status for a in answers} == {503}
        assert rig.port.context.buffered_bytes == 0 and rig.table.exchanges == {}


@pytest.mark.parametrize(
    ("path", "reader", "told"),
    [
        ("/v1/chat/completions", "read_body", {"error"}),
        ("/v1/messages", "read_body", {"type", "error", "request_id"}),
        ("/api/chat", "ollama.read", {"error"}),
    ],
)
async def test_a_fault_of_ours_is_a_500_after_which_everything_goes_on(
    path: str, reader: str, told: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception here once left its request's bytes counted as held: after some hundred, every body was refused."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault of ours")

    body = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}'
    async with a_rig() as rig:
        await rig.engine()
        client = await rig.client()
        with monkeypatch.context() as patched:
            patched.setattr(f"glowplug.services.router.intake.{reader}", fail)
            await client.send(post(path, body))
            answer = await client.answer()
        assert answer.status == 500 and set(answer.json()) >= told - {"request_id"}, answer.body
        assert b"a fault of ours" not in answer.body and rig.port.context.buffered_bytes == 0
        await client.send(chat())
        assert (await client.answer()).status == 200
