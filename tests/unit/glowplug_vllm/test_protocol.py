"""The words on the zygote's socket."""

import json

import pytest

from glowplug_vllm.parked import protocol


def test_a_start_carries_its_directory_log_and_environment() -> None:
    sent = {"op": "start", "run_dir": "/r", "log": "/r/log", "env": {"A": "1", "B": None}}
    question = protocol.decode(protocol.encode(sent))
    assert (question.run_dir, question.log, question.env) == ("/r", "/r/log", {"A": "1", "B": None})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON"),
        (b"[]", "op must be one of"),
        (b'{"op": "dance"}', "op must be one of"),
        (b'{"op": "hello", "colour": 1}', "unknown field 'colour'"),
        (b'{"op": "start", "run_dir": "rel", "log": "/l"}', "absolute paths"),
        (b'{"op": "start", "run_dir": "/r", "log": 5}', "are strings"),
        (b'{"op": "start", "run_dir": "/r", "log": "/l", "env": {"A": 5}}', "every value is a string or null"),
    ],
)
def test_a_bad_line_is_refused_with_the_reason(line: bytes, why: str) -> None:
    with pytest.raises(protocol.BadQuestion, match=why):
        protocol.decode(line)


def test_a_message_is_one_line() -> None:
    assert protocol.encode({"error": "two\nlines"}).count(b"\n") == 1
    assert json.loads(protocol.encode({"ok": True})) == {"ok": True}
