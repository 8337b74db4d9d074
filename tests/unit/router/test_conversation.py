"""Which texts of a request are turns of a conversation."""

import json
import time
from pathlib import Path

import pytest

from glowplug.controllers.router.messages import TextRead
from glowplug.domain.errors import BadRequest
from glowplug.policies.prediction.length_model import Length
from glowplug.policies.prediction.length_text import Turn
from glowplug.services.router.conversation import (
    LATE_AT_ONCE,
    NUM_TURNS,
    TEACH_AT_ONCE,
    TEACH_EVERY,
    TEACH_FIRST,
    TextReader,
    open_lengths,
    text_tokens,
    turns_of,
)
from glowplug.services.router.request_body import read_body, readers

READERS = readers()


def turns(path: bytes, **body: object) -> list[Turn]:
    return turns_of(read_body(path, json.dumps({"model": "m", **body}).encode(), READERS))


def test_turns_of_each_api() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    expected = [Turn("a"), Turn("b", True), Turn("c")]
    assert turns(b"/v1/chat/completions", messages=talk) == expected
    assert turns(b"/v1/messages", messages=talk, max_tokens=5) == expected
    assert turns(b"/v1/messages", messages=talk, max_tokens=5, system="s") == [Turn("s"), *expected]
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
    assert turns(b"/v1/chat/completions", messages=talk[:NUM_TURNS])[1].text == "1"
    two = turns(b"/v1/chat/completions", messages=talk[: NUM_TURNS + 1])
    assert [turn.text for turn in two] == [str(number) for number in range(NUM_TURNS + 1)]


CHAT = b"/v1/chat/completions"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + 100_000 * "A"}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ODD = {
    "nothing": [{"role": "user", "content": ""}],
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
    took_s = []
    for _ in range(5):  # a garbage collection may fall into one
        began = time.thread_time()
        assert text_tokens(asked, lengths) >= 1
        took_s.append(time.thread_time() - began)
    assert min(took_s) < 0.05, "its work grows with the length of the text"


def test_the_setting_names_a_file_or_none(tmp_path: Path) -> None:
    assert open_lengths("none") is None
    lengths = open_lengths("")
    assert lengths is not None
    asked = read_body(b"/v1/completions", b'{"model":"m","prompt":"Tell me a story"}', READERS)
    assert text_tokens(asked, lengths) > 10
    with pytest.raises(BadRequest, match=r"other\.npz"):
        open_lengths(str(tmp_path / "other.npz"))


class Table:
    def __init__(self) -> None:
        self.took: list[TextRead] = []

    def take(self, stimulus: TextRead) -> None:
        self.took.append(stimulus)


class Sent:
    def __init__(self, ticket: int) -> None:
        self.ticket, self.unread = ticket, None


class Lengths:
    """Answers are as long as their texts."""

    num_read = 0

    def of(self, turns: object) -> Length:
        self.num_read += 1
        return Length(7, 1, 20)


def asked() -> object:
    return read_body(CHAT, json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}).encode(), READERS)


def test_a_text_is_read_before_a_choice_and_not_again() -> None:
    lengths = Lengths()
    assert TextReader(lengths, Table()).before(asked()) == 7
    assert lengths.num_read == 1


def test_without_a_choice_a_models_first_texts_are_read_and_then_few_and_these_teach() -> None:
    table, lengths = Table(), Lengths()
    reader, sent = TextReader(lengths, table), [Sent(ticket) for ticket in range(1, TEACH_FIRST + 2 * TEACH_EVERY + 1)]
    for one in sent:
        reader.later(one, asked(), "m")
    read = [*range(1, TEACH_FIRST + 1), TEACH_FIRST + TEACH_EVERY, TEACH_FIRST + 2 * TEACH_EVERY]
    assert table.took == [TextRead(ticket, 7, True) for ticket in read]
    assert [one.ticket for one in sent if one.unread is None] == read
    other = Sent(1000)
    reader.later(other, asked(), "another")
    assert other.unread is None


def test_many_requests_between_two_reports_teach_no_more_than_some() -> None:
    table = Table()
    reader = TextReader(Lengths(), table)
    for _ in range(2):
        for ticket in range(TEACH_FIRST + (TEACH_AT_ONCE + 5) * TEACH_EVERY):
            reader.later(Sent(ticket), asked(), "m")
        reader.late([])
    assert len(table.took) == TEACH_FIRST + 2 * TEACH_AT_ONCE


def test_those_that_run_for_long_are_read_for_the_reports_once_and_teach_nothing() -> None:
    table = Table()
    reader, sent = TextReader(Lengths(), table), [Sent(ticket) for ticket in range(1, LATE_AT_ONCE + 6)]
    for one in sent:
        one.unread = asked()
    reader.late(sent)
    assert table.took == [TextRead(one.ticket, 7, False) for one in sent[:LATE_AT_ONCE]]
    reader.late(sent)
    reader.late(sent)
    assert table.took == [TextRead(one.ticket, 7, False) for one in sent]


def test_what_has_no_text_tells_nothing() -> None:
    table, lengths = Table(), Lengths()
    reader, sent = TextReader(lengths, table), Sent(1)
    nothing = read_body(b"/v1/completions", b'{"model":"m","prompt":[1]}', READERS)
    reader.later(sent, nothing, "m")
    assert (table.took, lengths.num_read, reader.before(nothing)) == ([], 0, 0)
