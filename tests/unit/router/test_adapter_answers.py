"""Adapters' names in answers. Fast lane, below a second."""

import json
from typing import Any

import pytest

from glowplug.services.router.intake import AsItIs, Renaming
from tests.contract.data_port_rig import DONE, a_model, a_rig, answering, post, streaming

FLEET = (a_model(engine="llamacpp"), a_model("tuned", engine="llamacpp", base="m"))
ON_HOST = {"model_key": "tuned", "host_id": "i-host"}


def test_an_answer_carries_the_adapters_name_and_its_text_stays() -> None:
    said = 'I am "model":"base"'
    answer = json.dumps({"choices": [{"text": said}], "model": "base"}, separators=(",", ":")).encode()
    assert json.loads(Renaming("base", 'tu"ned')(answer)) == {"choices": [{"text": said}], "model": 'tu"ned'}


def dumped(**fields: Any) -> bytes:
    """In llama.cpp's format."""
    return json.dumps({"model": "m", **fields}, separators=(",", ":")).encode()


def event(kind: str = "", **fields: Any) -> bytes:
    return (f"event: {kind}\n".encode() if kind else b"") + b"data: " + dumped(**fields) + b"\n\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
CHOICE = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}
CHAT = (event(object="chat.completion.chunk", choices=[CHOICE], usage=USAGE), DONE)
MESSAGE = (
    event("message_start", type="message_start", message={"model": "m"}),
    event("message_stop", type="message_stop"),
)
ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}


@pytest.mark.parametrize(
    ("path", "more", "events"),
    [
        ("/v1/chat/completions", {}, CHAT),
        ("/v1/chat/completions", {"n": 2}, CHAT),
        ("/api/chat", {}, CHAT),
        ("/v1/messages", {}, MESSAGE),
    ],
    ids=["chat", "several", "ollama", "messages"],
)
async def test_whatever_api_a_client_speaks_its_stream_names_the_adapter(
    path: str, more: dict[str, Any], events: tuple[bytes, ...]
) -> None:
    async with a_rig(models=FLEET) as rig:
        await rig.engine(streaming(*events), **ON_HOST)
        answer = await rig.ask(post(path, json.dumps({"model": "tuned", **ASKED, **more}).encode()))
    assert answer.status == 200 and answer.complete
    assert b'"model":"tuned"' in answer.body and b'"model":"m"' not in answer.body


async def test_an_answer_in_one_piece_names_it_too_and_a_failed_stream_has_one_error() -> None:
    asked = post("/v1/messages", json.dumps({"model": "tuned", **ASKED, "stream": False}).encode())
    streamed = post("/v1/messages", json.dumps({"model": "tuned", **ASKED}).encode())
    async with a_rig(models=FLEET) as rig:
        engine = await rig.engine(answering(dumped(type="message")), **ON_HOST)
        whole = await rig.ask(asked)
        engine.reply = answering({"error": {"code": 500, "message": "no"}}, "500 Error")
        refused = await rig.ask(asked)
        engine.reply = streaming(MESSAGE[0], b'data: {"error":{"code":500,"message":"no"}}\n\n', then="hang")
        broken = await rig.ask(streamed)
    assert whole.json()["model"] == "tuned"
    assert refused.status >= 500 and refused.json()["type"] == "error"
    assert broken.body.count(b"event: error") == 1 and b'"model":"tuned"' in broken.body


def test_a_stream_goes_through_with_its_own_end() -> None:
    made = AsItIs(b"/v1/chat/completions", streams=True)
    assert made.events(DONE) == DONE and made.end() == b""
