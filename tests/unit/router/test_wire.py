"""Bytes to clients, and what an answer's bytes tell without being parsed."""

import socket
from typing import Any

import pytest

from glowplug.domain.instance import Phase, PhaseName
from glowplug.services.router import wire
from glowplug.services.router.wire import asking_for_ids, before_failure, cached_tokens, count_tokens
from glowplug.telemetry.semconv import HEADER_EMULATED

BEGIN = b'{"message":{"usage":{"cache_read_input_tokens":30,"input_tokens":1,"output_tokens":0}}}'
BOTH = b'{"timings":{"prompt_n":1,"predicted_n":2},"usage":{"prompt_tokens":24,"completion_tokens":8}}'
COUNTS = {
    "usage wins over timings": (BOTH, 3, (24, 8, True)),
    "timings and what the cache spared": (
        b'data: {"timings":{"cache_n":23,"prompt_n":1,"predicted_n":8}}\n\n',
        9,
        (24, 8, True),
    ),
    "a null usage is none": (b'data: {"usage":null,"choices":[]}\n\ndata: [DONE]\n\n', 5, (0, 5, False)),
    "embeddings": (b'"usage": {"prompt_tokens": 5, "total_tokens": 5}}', 0, (5, 0, True)),
    "a rerank": (b'{"usage":{"prompt_tokens":12,"total_tokens":12},"results":[]}', 0, (12, 0, True)),
    "names of the Responses API": (b'"usage":{"input_tokens":3,"output_tokens":4}', 0, (3, 4, True)),
    "Anthropic: the cache's beside the rest, the answer's at the end": (
        BEGIN + b'{"type":"message_delta","usage":{"output_tokens":4}}',
        9,
        (31, 4, True),
    ),
    "Anthropic: what the end says again is counted once": (
        BEGIN + b'{"usage":{"input_tokens":31,"cache_read_input_tokens":30,"output_tokens":4}}',
        9,
        (61, 4, True),
    ),
}


@pytest.mark.parametrize("what", COUNTS)
def test_tokens_are_counted_by_the_end_of_an_answer(what: str) -> None:
    tail, num_events, counted = COUNTS[what]
    assert count_tokens(tail, num_events) == counted


TOLD = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DIED = b'data: {"error":{"message":"EngineCore died","code":500}}\n\n'


@pytest.mark.parametrize(
    ("body", "before", "why"),
    [
        (TOLD, TOLD, ""),
        (TOLD + DIED + b"data: [DONE]\n\n", TOLD, "the engine failed: EngineCore died"),
        (DIED.replace(b"500", b"400"), DIED.replace(b"500", b"400"), ""),
        (b"event: error\n" + DIED, b"", "the engine failed: EngineCore died"),
        (b'data: {"choices":[{"finish_reason": "abort"}]}\r\n\r\n', b"", "the engine stopped its answers"),
        (b'data: {"choices":[{"delta":{"content":"abort"},"finish_reason":null}]}\n\n', None, ""),
        (b'data: {"choices":[{"delta":{"content":"say \\"abort\\""}}]}\n\n', None, ""),
        (b'data: {"error":no json\n\n', None, ""),
    ],
)
def test_an_event_in_which_an_engine_says_that_it_has_failed(body: bytes, before: bytes | None, why: str) -> None:
    assert before_failure(body) == (body if before is None else before, why)


def test_a_stream_is_asked_for_its_tokens_once() -> None:
    asked = asking_for_ids(b"/v1/chat/completions", b'{"model":"m","stream":true} \n')
    assert asked == b'{"model":"m","stream":true,"return_token_ids":true}'
    assert asking_for_ids(b"/v1/chat/completions", asked) == asked
    assert asking_for_ids(b"/v1/messages", b"{}") == b"{}"


def test_heads_say_the_status_and_whether_the_connection_stays() -> None:
    assert wire.head(200, b"a: b\r\n", keep_alive=True) == b"HTTP/1.1 200 OK\r\na: b\r\n\r\n"
    assert wire.head(499, b"", keep_alive=False) == b"HTTP/1.1 499 Client Closed Request\r\nconnection: close\r\n\r\n"
    assert wire.head(299, b"", keep_alive=True) == b"HTTP/1.1 299 Unknown\r\n\r\n"
    assert wire.instance_headers("i-1", False) == b"x-glowplug-instance: i-1\r\n"
    emulated = f"x-glowplug-instance: i-1\r\n{HEADER_EMULATED}: 1\r\n".encode()
    assert wire.instance_headers("i-1", True) == emulated
    phases = (Phase(name=PhaseName.FETCH, started_at=1.0, ended_at=1.5),)
    assert wire.server_timing(0.25, phases, 0.5) == b"queue;dur=250.0, fetch;dur=500.0, router;dur=500.00"


class Transport:
    """Keeps what it is given, beside a real socket."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.given, self.num_buffered, self.closing = b"", 0, False

    def get_extra_info(self, name: str) -> socket.socket:
        return self.ours

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.given += data


def test_bytes_go_to_the_kernel_and_only_the_rest_to_the_transport() -> None:
    made: Any = Transport()
    write = wire.writer(made)
    write(b"abc")
    assert (made.theirs.recv(10), made.given) == (b"abc", b"")
    made.num_buffered = 1
    write(b"def")
    assert made.given == b"def", "behind what is buffered"
    made.num_buffered, made.given, big = 0, b"", bytes(range(256)) * 40_000
    write(big)
    sent = len(big) - len(made.given)
    assert 0 < sent < len(big) and made.given == big[sent:]
    made.given = b""
    write(b"ghi")
    assert made.given == b"ghi", "the kernel takes no more"
    made.closing = True
    write(b"jkl")
    assert made.given == b"ghi"
    made.ours.close()
    made.theirs.close()


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (b"", 0),
        (b"ab\n\n", 4),
        (b"data: a\n\ndata: b", 9),
        (b"data: a\r\n\r\ndata: b", 11),
        (b"data: a\n\ndata: b\r\n\r\nc", 20),
        (b"data: a\r\n\r\nb\n\nc", 14),
        (b"x" * 20, 0),
        (b"x" * 21, 21),
    ],
)
def test_whole_events_end_with_an_empty_line_or_are_too_long(body: bytes, end: int) -> None:
    assert wire.whole_events(body, 20) == end


def test_paths_of_anthropic_are_messages_and_below() -> None:
    assert wire.is_anthropic(b"/v1/messages") and wire.is_anthropic(b"/v1/messages/count_tokens")
    assert not wire.is_anthropic(b"/v1/messages2") and not wire.is_anthropic(b"/v1/chat/completions")


CHAT_ID = b'{"id":"chatcmpl-1","x":{"id":"chatcmpl-2"}}'


def test_the_first_id_of_a_message_is_anthropics_and_no_other() -> None:
    made = CHAT_ID.replace(b"chatcmpl-1", b"msg_1")
    assert wire.with_message_id(CHAT_ID) == made
    assert wire.with_message_id(b"event: message_start\ndata: " + CHAT_ID) == b"event: message_start\ndata: " + made
    assert wire.with_message_id(b"event: ping\ndata: " + CHAT_ID) == b"event: ping\ndata: " + CHAT_ID
    assert b'"input_tokens":1,"output_tokens":0' in wire.message_start("r", "m", 0)
    assert b'"input_tokens":7,"output_tokens":0' in wire.message_start("r", "m", 7)


@pytest.mark.parametrize(
    ("path", "last", "is_over"),
    [
        (b"/v1/chat/completions", b"data: [DONE]\n\n", True),
        (b"/v1/chat/completions", b"data: [DONE]\r\n\r\n", True),
        (b"/v1/chat/completions", b"data: [DONE]\n", False),
        (b"/v1/chat/completions", b"data: [DONE]\n\ndata: x\n\n", False),
        (b"/v1/chat/completions", b"event: message_stop\ndata: x\n\n", False),
        (b"/v1/messages", b"event: message_stop\ndata: x\n\n", True),
        (b"/v1/messages", b"event: message_stop\ndata: x", False),
        (b"/v1/messages", b"event: ping\ndata: x\n\n", False),
    ],
)
def test_a_stream_is_over_with_its_last_event_whole(path: bytes, last: bytes, is_over: bool) -> None:
    assert wire.is_over(path, last) is is_over


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ('{"message":"no","code":500}', "the engine failed: no"),
        ('{"message":"no","code":499}', ""),
        ('{"message":"no","code":"500"}', ""),
        ('"no"', ""),
        ('{"code":503}', "the engine failed: "),
    ],
)
def test_an_engines_failure_has_a_code_from_500(error: str, why: str) -> None:
    body = f'data: {{"error":{error}}}\n\n'.encode()
    assert before_failure(TOLD + body) == (TOLD if why else TOLD + body, why)


def test_an_abort_is_that_of_a_choice() -> None:
    body = b'data: {"finish_reason":"abort"}\n\n'
    assert before_failure(body) == (body, "")


def test_cached_tokens_are_those_of_the_last_count() -> None:
    assert cached_tokens(b'{"cached_tokens": 3}{"cache_n":4}') == 4
    assert cached_tokens(b'{"cache_read_input_tokens":0}') == 0 and cached_tokens(b"{}") == -1
    assert count_tokens(
        b'{"usage":{"input_tokens":1,"cache_creation_input_tokens":2,"cache_read_input_tokens":4}}', 0
    ) == ((7, 0, True))
    assert count_tokens(b'{"timings":{"predicted_n":8}}', 3) == (0, 8, True)
    assert count_tokens(b'{"timings":{},"usage":{}}', 3) == (0, 3, False)
