"""The journal of usage: once a client has the end of an answer, its counts survive a kill of the router. Fast lane, a
second."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from glowplug.services.router.usage_journal import SUFFIX, Journal, left_in
from tests.contract.data_port_rig import DONE, TOKEN, a_rig, chat, chunk, post, sending, streaming

COUNTED = {"prompt_tokens": 20, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}}
USAGE = b"data: " + json.dumps({"choices": [], "usage": COUNTED}).encode() + b"\n\n"
TIMED = b'data: {"choices":[],"timings":{"cache_n":4,"prompt_n":16,"predicted_n":6}}\n\n'
BEGUN = {"type": "message_start", "message": {"usage": {"input_tokens": 16, "cache_read_input_tokens": 4}}}
MESSAGE = b"event: message_start\ndata: " + json.dumps(BEGUN).encode() + b"\n\n"
DELTA = b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":6}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
ASKED = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = json.dumps({"choices": [{"text": "a"}], "usage": COUNTED}).encode()


@pytest.mark.parametrize(
    ("request_", "reply", "end"),
    [
        (chat(stream=True), streaming(TOKEN, TOKEN, USAGE, DONE, then="hang"), DONE),
        (chat(stream=True), streaming(TOKEN, TOKEN, TIMED, DONE, then="hang"), DONE),
        (chat(stream=True), streaming(TOKEN, USAGE + DONE, then="hang"), DONE),
        (post("/v1/messages", json.dumps(ASKED).encode()), streaming(MESSAGE, DELTA, STOP, then="hang"), STOP),
        (chat(), sending(JSON_HEAD, chunk(WHOLE[:40]), chunk(WHOLE[40:]), then="hang"), WHOLE[-20:]),
    ],
    ids=["usage", "timings", "in one piece", "message", "json"],
)
async def test_who_has_the_end_of_an_answer_is_counted_to_the_token(
    tmp_path: Path, request_: bytes, reply: Any, end: bytes
) -> None:
    journal = Journal(tmp_path, 4)
    async with a_rig(journal=journal) as rig:
        await rig.engine(reply)
        client = await rig.sent(request_)
        await client.reader.readuntil(end)
        (path,) = tmp_path.glob(f"*{SUFFIX}")
        killed = tmp_path / "killed"
        killed.write_bytes(path.read_bytes())
        with left_in(killed) as (records, num_bad):
            ((one,), zero) = records, num_bad
        assert (one.prompt_tokens, one.cached_tokens, one.response_tokens, one.tokens_exact) == (20, 4, 6, True)
        assert (one.instance_id, one.error_code, zero) == ("i-1", "router_lost", 0)
        rig.exchange.stop()


async def test_a_held_request_is_noted_and_a_stream_is_counted_as_it_passes(tmp_path: Path) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    killed = tmp_path / "killed"

    def noted() -> tuple[str, int, bool]:
        (path,) = tmp_path.glob(f"*{SUFFIX}")
        killed.write_bytes(path.read_bytes())
        with left_in(killed) as (records, _):
            (one,) = records
        return one.instance_id, one.response_tokens, one.tokens_exact

    async with a_rig(journal=Journal(tmp_path, 4)) as rig:
        client = await rig.held(chat(stream=True))
        assert noted() == ("", 0, False)
        await rig.engine(streaming(TOKEN, gates[0], TOKEN, gates[1], TOKEN + TOKEN, then="hang"))
        await client.head()
        for gate, num_events in zip((*gates, None), (1, 2, 4), strict=True):
            assert (await client.chunk()).endswith(TOKEN) and noted() == ("i-1", num_events, False)
            if gate is not None:
                gate.set()
        rig.exchange.stop()
