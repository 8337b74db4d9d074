"""The client of a translated request, between its exchange and its connection."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.services.router import wire
from glowplug.services.router.continuation import decode
from glowplug.services.router.exchange_states import Ending
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.settings import Limits
from glowplug.services.router.translated import SameApi, TranslatedClient, inner_request

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nx-own: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\nx-own: 1\r\n\r\n"
EVENT = b'data: {"a":1}\n\n'
FAILED = b'data: {"error":{"message":"no"}}\n\n'


class Upper(SameApi):
    """It shouts."""

    def __init__(self, streams: bool = True) -> None:
        super().__init__(streams)
        self.began_after: list[float] = []

    def began(self, queue_s: float) -> None:
        self.began_after.append(queue_s)

    def events(self, events: bytes) -> bytes:
        return events.upper()

    def end(self) -> bytes:
        return b"END"

    def whole(self, answer: bytes) -> bytes:
        return json.dumps({"said": int(decode(answer)["a"])}).encode()

    def error(self, error: bytes) -> bytes:
        return b"!" + error


class Connection:
    def __init__(self) -> None:
        self.exchange: Any = None
        self.write_paused, self.counts_all = False, False
        self.parts, self.kept_alive = list[bytes](), list[bool]()
        self.write: wire.Write = self.parts.append
        self.responded: list[tuple[int, bytes]] = []

    @property
    def written(self) -> bytes:
        return b"".join(self.parts)

    def respond(self, request: HttpRequest, status: int, body: bytes, headers: bytes = b"", more: bytes = b"") -> bool:
        self.responded.append((status, body))
        return request.keep_alive

    def exchange_over(self, keep_alive: bool) -> None:
        self.kept_alive.append(keep_alive)


class Rig:
    def __init__(
        self,
        translation: Upper | None = None,
        stage: PortStage = PortStage.SERVING,
        event_bytes: int = 100,
        **request: Any,
    ) -> None:
        self.translation, self.connection = translation or Upper(), Connection()
        self.request = HttpRequest(**request)
        context: Any = SimpleNamespace(limits=Limits(event_bytes=event_bytes), table=SimpleNamespace(stage=stage))
        self.client = TranslatedClient(self.connection, self.request, self.translation, context)
        self.noted: list[Any] = []
        self.left: list[Any] = []
        self.exchange: Any = SimpleNamespace(
            queue_s=0.5,
            answer=SimpleNamespace(counted=None),
            ending=Ending(0.0, 200),
            note_counts=lambda: self.noted.append(self.exchange.answer.counted),
            client_left=lambda: self.left.append("left"),
            client_paused=self.left.append,
        )
        self.client.exchange = self.exchange

    def over(self, *pieces: bytes, status: int = 200, code: str = "") -> bytes:
        """The client's bytes after the answer's pieces and its end."""
        for piece in pieces:
            self.client.write(piece)
        self.exchange.ending = Ending(0.0, status, code)
        self.client.exchange_over(False)
        return self.connection.written


def chunks(head: bytes, *parts: bytes, ends: bool = True) -> bytes:
    return head + b"".join(wire.chunk(part) for part in parts) + (wire.LAST_CHUNK if ends else b"")


def head_of(
    streams: bool, more: bytes = b"x-own: 1\r\n", framing: bytes = wire.CHUNKED, *, keeps: bool = True
) -> bytes:
    headers = wire.EVENT_STREAM_HEADERS if streams else wire.JSON_HEADERS
    return wire.head(200, headers + more + framing, keep_alive=keeps)


def test_an_inner_request_is_json_in_http_1_0_without_the_bodys_headers() -> None:
    headers = {
        b"content-type": b"x",
        b"content-length": b"5",
        b"accept": b"y",
        b"accept-encoding": b"z",
        b"x-own": b"1",
    }
    outer = HttpRequest(path=b"/api/chat", target=b"/api/chat?a", headers=headers, request_id="r", body=b"o")
    inner = inner_request(outer, b"/v1/chat/completions", b"{}")
    assert inner.headers == {b"x-own": b"1", b"content-type": b"application/json"} and outer.headers == headers
    assert (inner.path, inner.target, inner.body, inner.is_http11) == (
        b"/v1/chat/completions", b"/v1/chat/completions", b"{}", False
    )  # fmt: skip
    assert (inner.request_id, inner.first_path) == ("r", b"/api/chat")
    assert inner_request(inner, b"/x", b"").first_path == b"/api/chat"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_stream_is_translated_event_by_event_however_its_bytes_come(step: int) -> None:
    data = SSE + EVENT + EVENT + b": ping\n\n"
    rig = Rig()
    for at in range(0, len(data), step):
        rig.client.write(data[at : at + step])
    written = rig.over()
    body = written.removeprefix(head_of(True))
    assert body.replace(b":\n\n", b"").count(EVENT.upper()) == 2 and body.endswith(chunks(b"", b"END"))
    assert (b":\n\n" in body) is (step < 1000), "a comment alone keeps the connection alive"
    assert (rig.translation.began_after, rig.connection.kept_alive) == ([0.5], [True])
    assert rig.connection.exchange is rig.client and rig.client.exchange is rig.exchange


def test_an_event_that_is_too_long_is_passed_on_in_parts() -> None:
    rig = Rig(event_bytes=20)
    rig.client.write(SSE + b"data: " + b"x" * 14)
    assert b"XXXX" not in rig.connection.written
    rig.client.write(b"y")
    assert b"XXXXY" in rig.connection.written


@pytest.mark.parametrize(
    ("request_", "stage", "framing", "keeps"),
    [
        ({}, PortStage.SERVING, wire.CHUNKED, True),
        ({}, PortStage.LEAVING, wire.CHUNKED, False),
        ({"keep_alive": False}, PortStage.SERVING, wire.CHUNKED, False),
        ({"is_http11": False}, PortStage.SERVING, b"", False),
    ],
)
def test_an_answer_has_the_framing_of_its_clients_request(
    request_: dict[str, Any], stage: PortStage, framing: bytes, keeps: bool
) -> None:
    rig = Rig(None, stage, **request_)
    parts = [EVENT.upper(), b"END"]
    expected = chunks(b"", *parts) if framing else b"".join(parts)
    assert rig.over(SSE, EVENT) == head_of(True, framing=framing, keeps=keeps) + expected
    assert rig.connection.kept_alive == [keeps]
    rig = Rig(Upper(streams=False), stage, **request_)
    body, keeps = b'{"said": 1}', keeps or bool(request_.get("is_http11") is False)
    length = wire.content_length(len(body))
    assert rig.over(WHOLE, b'{"a"', b":1}") == head_of(False, framing=length, keeps=keeps) + body
    assert rig.connection.kept_alive == [keeps]


def test_a_client_that_wants_one_piece_gets_it_at_the_end_of_the_engines_stream() -> None:
    rig = Rig(Upper(streams=False))
    rig.client.write(SSE + EVENT)
    assert rig.connection.written == b"" and not rig.client.probe()
    assert rig.over() == head_of(False, framing=wire.content_length(3)) + b"END"


def test_a_client_that_wants_a_stream_gets_an_unstreamed_answer_in_one_piece() -> None:
    rig = Rig()
    assert rig.over(WHOLE, b'{"a":1}').endswith(b'{"said": 1}') and not rig.connection.responded


@pytest.mark.parametrize("code", ["", "engine_failed"])
def test_an_error_within_a_stream_is_its_last_event(code: str) -> None:
    rig = Rig()
    written = rig.over(SSE, EVENT + FAILED, code=code)
    found = b'data: {"error":{"message":"no"}}\n\n'
    assert written == chunks(head_of(True), EVENT.upper(), found)
    lost = Rig()
    written = lost.over(SSE, EVENT, code="engine_failed")
    assert b"END" not in written and b"engine_failed" in written and written.endswith(wire.LAST_CHUNK)


@pytest.mark.parametrize(
    ("pieces", "status", "code", "expected"),
    [
        ((SSE, EVENT, FAILED), 200, "", 502),
        ((SSE, EVENT, FAILED), 503, "x", 503),
        ((SSE, EVENT), 400, "x", 400),
        ((SSE, EVENT), 399, "x", 502),
        ((WHOLE, b"{"), 200, "", 502),
        ((WHOLE, b"{}"), 200, "", 502),
        ((WHOLE, b"5"), 200, "", 502),
        ((WHOLE, b'{"a":"x"}'), 200, "", 502),
        ((WHOLE, b"[" * 100_000), 200, "", 502),
        ((WHOLE, b'{"a":1}'), 502, "engine_failed", 502),
    ],
)
def test_an_answer_in_one_piece_that_fails_is_an_error(
    pieces: tuple[bytes, ...], status: int, code: str, expected: int
) -> None:
    rig = Rig(Upper(streams=False))
    assert rig.over(*pieces, status=status, code=code) == b""
    ((found, body),) = rig.connection.responded
    assert found == expected and body.startswith(b'!{"error":') and rig.connection.kept_alive == [True]


def test_an_error_of_the_routers_own_is_the_only_answer() -> None:
    rig = Rig()
    error = b'{"error":{"message":"no"}}'
    inner = HttpRequest(notes=b"x-note: 1\r\n")
    assert rig.client.respond(inner, 429, error) is True
    assert rig.over() == b"" and rig.connection.responded == [(429, b"!" + error)]
    assert rig.request.notes == b"x-note: 1\r\n" and rig.connection.kept_alive == [True]
    closing = Rig(keep_alive=False)
    assert closing.client.respond(inner, 429, error) is False
    closing.over()
    assert closing.connection.kept_alive == [False]


@pytest.mark.parametrize(
    ("events", "counts", "before", "counted"),
    [
        (EVENT, None, None, None),
        (EVENT, (3, 4), None, (3, 4, True, -1)),
        (EVENT, (3, 4), (1, 1, False, 2), (3, 4, True, 2)),
        (b'data: {"cached_tokens":7}\n\n', (3, 4), (1, 1, False, 2), (3, 4, True, 7)),
    ],
)
def test_counts_of_a_translation_replace_those_of_the_exchange(
    events: bytes, counts: tuple[int, int] | None, before: Any, counted: Any
) -> None:
    rig = Rig()
    rig.translation.counts = counts
    rig.exchange.answer.counted = before
    rig.client.write(SSE + events)
    assert rig.exchange.answer.counted == counted and rig.noted == ([counted] if counted else [])


def test_what_an_engine_says_is_renamed_before_its_translation() -> None:
    for pieces, streams, said in (((SSE, EVENT), True, b'{"A":2}'), ((WHOLE, b'{"a":', b"1}"), False, b'{"said": 2}')):
        rig = Rig(Upper(streams))
        rig.client.renaming = lambda data: data.replace(b'{"a":1}', b'{"a":2}')
        assert said in rig.over(*pieces)


def test_harmless_bytes_are_written_to_a_client_that_has_the_head_and_reads() -> None:
    rig = Rig()
    assert not rig.client.probe() and rig.connection.written == b""
    rig.client.write(SSE)
    assert not rig.client.probe()
    rig.client.write(EVENT)
    before = rig.connection.written
    assert rig.client.probe() and rig.connection.written == before + wire.chunk(b":\n\n")
    rig.client.write_paused = True
    assert rig.client.probe() and rig.connection.write_paused and len(rig.connection.written) == len(before) + 8


@pytest.mark.parametrize("leaves", [True, False])
def test_whoever_waits_for_the_end_is_told_once(leaves: bool) -> None:
    rig, ends = Rig(), list[str]()
    rig.client.at_end = lambda: ends.append("end")
    rig.client.client_paused(True)
    if leaves:
        rig.client.client_left()
    assert ends == ["end"] * leaves and rig.left == [True, *["left"] * leaves]
    rig.over(SSE, EVENT)
    assert ends == ["end"]


def test_a_translation_that_counts_all_says_so() -> None:
    made = Upper()
    assert not Rig(made).client.counts_all
    made.counts_all = True
    assert Rig(made).client.counts_all
