"""One streamed chat: text, timings from headers and comments, and every way it can fail."""

import httpx
import pytest

from glowplug.cli.talk import Answer, streamed
from glowplug.cli.terminal import CliError

HEADERS = {"content-type": "text/event-stream", "x-request-id": "r-1", "x-glowplug-instance": "i-1"}


def event(text: str) -> str:
    return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


async def ask(status: int, body: str, **headers: str) -> tuple[str, Answer]:
    """Every piece joined, and the answer."""

    def respond(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=body, headers=HEADERS | {k.replace("_", "-"): v for k, v in headers.items()})

    answer = Answer()
    async with httpx.AsyncClient(base_url="http://fleet", transport=httpx.MockTransport(respond)) as client:
        pieces = [piece async for piece in streamed(client, "m", [{"role": "user", "content": "x"}], answer)]
    return "".join(pieces), answer


async def test_text_ids_and_server_timing() -> None:
    text, answer = await ask(
        200, event("a") + event("b") + "data: [DONE]\n\n", server_timing="queue;dur=1500, router;dur=2"
    )
    assert text == answer.text == "ab"
    assert (answer.request_id, answer.instance_id, answer.emulated) == ("r-1", "i-1", False)
    assert answer.timings_s == {"queue": 1.5, "router": 0.002}
    assert answer.ttft_s is not None and answer.total_s >= answer.ttft_s


async def test_a_held_stream_tells_its_timings_in_a_comment() -> None:
    body = ": glowplug waiting model=m eta_s=3.0\n\n: glowplug ready queue;dur=2000.0, load;dur=900\n\n" + event("a")
    _, answer = await ask(200, body + "data: [DONE]\n\n", x_glowplug_emulated="true")
    assert answer.timings_s == {"queue": 2.0, "load": 0.9}
    assert answer.emulated


async def test_events_without_text_are_no_first_token() -> None:
    _, answer = await ask(200, 'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
    assert answer.text == "" and answer.ttft_s is None


async def test_an_answer_without_its_end_is_a_failure() -> None:
    with pytest.raises(CliError, match="no \\[DONE\\]"):
        await ask(200, event("a"))


async def test_an_error_in_the_stream_is_a_failure_in_its_words() -> None:
    with pytest.raises(CliError, match="the engine went away"):
        await ask(200, event("a") + 'data: {"error": {"message": "the engine went away"}}\n\n')


async def test_a_refusal_shows_message_code_and_when_to_come_back() -> None:
    body = '{"error": {"message": "the queue is full", "type": "rate_limit_error", "code": "queue_full"}}'
    with pytest.raises(CliError, match=r"the queue is full \(queue_full\); try again in 7 s"):
        await ask(429, body, retry_after="7")


async def test_an_error_of_another_shape_names_the_address() -> None:
    with pytest.raises(CliError, match=r"http://fleet/v1/chat/completions answered 502"):
        await ask(502, "<html>")
