"""Which of a request's texts are turns of a conversation, in every API that generates text."""

import json
import time
from pathlib import Path

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.policies.prediction.length_text import Turn
from services.router.conversation import NUM_TURNS, open_lengths, text_tokens, turns_of
from services.router.request_body import read_body, readers

READERS = readers(())


def turns(path: bytes, **body: object) -> list[Turn]:
    return turns_of(read_body(path, json.dumps({"model": "m", **body}).encode(), READERS))


def test_turns_of_each_api() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    expected = [Turn("a"), Turn("b", True), Turn("c")]
    assert turns(b"/v1/chat/completions", messages=talk) == expected
    assert turns(b"/v1/messages", messages=talk, max_tokens=5) == expected
    assert turns(b"/v1/messages", messages=talk, max_tokens=5, system="s") == [Turn("s"), *expected]
    assert turns(b"/v1/responses", input=talk) == expected
    assert turns(b"/v1/responses", input="a", instructions="s") == [Turn("s"), Turn("a")]
    assert turns(b"/v1/completions", prompt="a") == [Turn("a")]
    pieces = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turns(b"/v1/chat/completions", messages=[{"role": "user", "content": pieces}]) == [Turn("a\nb")]


def test_what_asks_for_no_one_text_has_no_turns() -> None:
    assert turns(b"/v1/completions", prompt=["a", "b"]) == [] == turns(b"/v1/completions", prompt=[1, 2])
    assert turns(b"/v1/embeddings", input="a") == []
    assert turns(b"/v1/rerank", query="q", documents=["a"]) == []


def test_of_a_long_conversation_its_first_and_last_turns_are_read() -> None:
    talk = [{"role": "user", "content": str(number)} for number in range(500)]
    found = turns(b"/v1/chat/completions", messages=talk)
    assert [found[0].text, found[1].text, found[-1].text] == ["0", str(500 - NUM_TURNS), "499"]
    assert len(found) == NUM_TURNS + 1


CHAT = b"/v1/chat/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + 100_000 * "A"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ODD = {
    "nothing": [{"role": "user", "content": ""}],
    "null": [{"role": "user", "content": None}],
    "no pieces": [{"role": "user", "content": []}],
    "a picture": [{"role": "user", "content": [PICTURE]}],
    "a picture and a text": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, PICTURE]}],
    "emoji": [{"role": "user", "content": "\U0001f3f3\ufe0f\u200d\U0001f308" * 100}],
    "zeros": [{"role": "user", "content": "\0\0"}],
    "digits of other scripts": [{"role": "user", "content": "\u0663\u0663 words, \u00b2\u00b3 pages, 9,,9k lines"}],
    "a system prompt alone": [{"role": "system", "content": "Be terse."}],
    "an answer to go on with": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}],
    "a tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ],
}


@pytest.mark.parametrize("messages", ODD.values(), ids=ODD)
def test_messages_of_any_content_are_expected_to_have_an_answer(messages: list[dict[str, object]]) -> None:
    lengths = open_lengths("")
    assert lengths is not None
    asked = read_body(CHAT, json.dumps({"model": "m", "messages": messages}).encode(), READERS)
    assert 1 <= text_tokens(asked, lengths) <= 160_000


@pytest.mark.parametrize("text", ["word ", "a", "9", "1,", "?", "a'", "\n", "\u6f22", "\U0001f600"])
def test_a_prompt_of_100_000_characters_takes_milliseconds(text: str) -> None:
    lengths = open_lengths("")
    assert lengths is not None
    content = text * (100_000 // len(text))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    asked = read_body(CHAT, body, READERS)
    began = time.thread_time()
    assert text_tokens(asked, lengths) >= 1
    assert time.thread_time() - began < 0.05, "its work grows with the length of the text"


def test_the_setting_names_a_file_or_none(tmp_path: Path) -> None:
    assert open_lengths("none") is None
    lengths = open_lengths("")
    assert lengths is not None
    asked = read_body(b"/v1/completions", b'{"model":"m","prompt":"Tell me a story"}', READERS)
    assert text_tokens(asked, lengths) > 10
    with pytest.raises(BadRequest, match=r"other\.npz"):
        open_lengths(str(tmp_path / "other.npz"))
