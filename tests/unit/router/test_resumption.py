"""The part of a stream kept for the next engine."""

import json

import pytest

from glowplug.engines.apis import CHAT, EngineApi
from glowplug.services.router import resumption
from glowplug.services.router.continuation import NotContinuable
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.resumption import Resumption
from tests.contract.continuation_rig import a_real_model, asked_of, sse

API = EngineApi(continues=frozenset((CHAT,)))


def of_a_chat() -> Resumption:
    request = HttpRequest(path=CHAT.encode(), body=json.dumps(asked_of(CHAT, max_tokens=100)).encode())
    return Resumption(request, a_real_model(context_tokens=1000), API)


def said(text: str) -> bytes:
    return sse({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def test_after_a_fault_nothing_is_read_and_none_goes_on_in_the_middle() -> None:
    kept = of_a_chat()
    kept.read(said("one") + b"data: no JSON\n\n")
    why = kept.why_not
    kept.read(said("two"))
    with pytest.raises(NotContinuable, match="not JSON"):
        kept.prepare()
    assert kept.why_not == why and kept.num_tokens == 0


def test_the_text_of_all_engines_together_is_bounded_and_the_answer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "TEXT_CHARS", 10)
    kept = of_a_chat()
    kept.read(said("12345"))
    kept.prepare()
    kept.lost(resumption.LOST)
    assert b"67890" in kept.splice(said("67890"), 1000)[0]
    kept.prepare()
    for text in ("more", "and more"):
        assert text.encode() in kept.splice(said(text), 1000)[0]
        assert kept._continuation is not None and kept._continuation.text == ""
    with pytest.raises(NotContinuable, match="too long"):
        kept.prepare()
    assert kept.num_tokens == 4
