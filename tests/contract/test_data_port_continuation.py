"""A lost engine's streams continue on another."""

import json
from typing import Any

import pytest

from glowplug.engines.apis import CHAT, COMPLETIONS, MESSAGES
from tests.contract.continuation_rig import (
    ASKED,
    WORDS,
    Story,
    a_real_model,
    as_first,
    asked_of,
    asking,
    decoded,
    rig_of,
    sse,
)
from tests.contract.data_port_rig import DONE, a_model, a_rig, die_at_once, streaming

BEFORE_ITS_END = {CHAT: 7, COMPLETIONS: 6, MESSAGES: 8}  # events before the engine's end


@pytest.mark.parametrize(
    ("path", "cut"), [(path, cut) for path, most in BEFORE_ITS_END.items() for cut in range(1, most + 1)]
)
@pytest.mark.parametrize("torn", [False, True])
async def test_a_stream_goes_on_wherever_its_engine_is_lost(path: str, cut: int, torn: bool) -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        later = Story("2")
        await rig_of(rig, Story("1", cut, torn=torn), later)
        answer = await rig.ask(asking(path))
    assert answer.complete and decoded(answer.body) == decoded(as_first(path))
    ended = rig.endings[0]
    assert (ended.status, ended.error_code, rig.finished[0].num_continued) == (200, "", 1)
    assert rig.reported[0].num_continued == 1 and rig.reported[0].response_tokens == len(WORDS)
    assert rig.reported[0].instance_id == "i-2"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("cut", [2, 7, 8, 9])
async def test_usage_is_that_of_the_whole_answer(path: str, cut: int) -> None:
    """The prompt counts once, the tokens of both engines add up."""
    cut -= path == COMPLETIONS
    options = {"stream_options": {"include_usage": True}}
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig_of(rig, Story("1", cut), Story("2"))
        answer = await rig.ask(asking(path, **options))
    assert answer.complete and decoded(answer.body) == decoded(as_first(path, **options))
    assert (rig.reported[0].prompt_tokens, rig.reported[0].response_tokens) == (5 if path == CHAT else 2, len(WORDS))


async def test_what_lacks_its_end_alone_needs_no_other_engine() -> None:
    for path, cut in ((CHAT, 8), (COMPLETIONS, 7), (MESSAGES, 10)):
        async with a_rig(models=(a_real_model(),)) as rig:
            (engine,) = await rig_of(rig, Story("1", cut))
            answer = await rig.ask(asking(path))
        assert len(engine.served) == 1 and rig.endings[0].status == 200
        assert answer.complete and decoded(answer.body) == decoded(as_first(path))


UP_TO_A_WORD = {CHAT: 2, COMPLETIONS: 1, MESSAGES: 3}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_a_stream_outlives_several_engines(path: str) -> None:
    """The third dies before its first byte, the fourth within an event."""
    few = UP_TO_A_WORD[path]
    async with a_rig(models=(a_real_model(),), params={"max_continuations": 4}) as rig:
        last = Story("5")
        await rig_of(rig, Story("1", few), Story("2", few), die_at_once, Story("4", few, torn=True), last)
        answer = await rig.ask(asking(path))
    assert answer.complete and decoded(answer.body) == decoded(as_first(path))
    assert rig.finished[0].num_continued == 3 and len(last.asked) == 1


async def test_the_number_of_engines_is_bounded() -> None:
    async with a_rig(models=(a_real_model(),), params={"max_continuations": 2}) as rig:
        engines = await rig_of(rig, *(Story(str(n), 2) for n in range(1, 6)))
        answer = await rig.ask(asking(CHAT))
    *told, error = decoded(answer.body)
    assert [one["choices"][0]["delta"].get("content") for one in told] == [None, *WORDS[:3]]
    assert error["error"]["code"] == "engine_failed" and "continued 2 times already" in error["error"]["message"]
    assert answer.complete and rig.endings[0].status == 502
    assert sum(len(engine.served) for engine in engines) == 3


@pytest.mark.parametrize(("most", "why"), [(0, "the engine closed the connection"), (3, "cannot continue an answer")])
async def test_where_it_is_off_or_the_engine_cannot_the_stream_ends_with_an_error(most: int, why: str) -> None:
    model = a_real_model() if not most else a_model()
    async with a_rig(models=(model,), params={"max_continuations": most}) as rig:
        _, other = await rig_of(rig, Story("1", 3), Story("2"))
        answer = await rig.ask(asking(CHAT))
    error = decoded(answer.body)[-1]["error"]
    assert error["code"] == "engine_failed" and why in error["message"] and not other.served
    assert ("cannot be continued" in error["message"]) is bool(most)
    assert rig.finished[0].num_continued == 0


def delta(**fields: Any) -> bytes:
    return sse({"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


JSON_FORMAT = {"response_format": {"type": "json_object"}}
ROLE = delta(role="assistant", content=None)
TOOL = delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "{"}}])
SECOND = sse({"id": "x", "choices": [{"index": 1, "delta": {"content": "a"}, "finish_reason": None}]})


@pytest.mark.parametrize(
    ("path", "more", "told", "why"),
    [
        (CHAT, {"n": 2}, (ROLE, delta(content="a")), "several answers"),
        (CHAT, {}, (ROLE, SECOND), "several answers"),
        (CHAT, {}, (ROLE, delta(content="a"), TOOL), "it is calling a tool"),
        (CHAT, {}, (ROLE, delta(reasoning_content="hm")), "reasoning"),
        (CHAT, JSON_FORMAT, (ROLE, delta(content="{")), "structured output"),
        (COMPLETIONS, JSON_FORMAT, (b'data: {"choices":[{"text":"{"}]}\n\n',), "structured output"),
        (CHAT, {}, (ROLE, b"data: {no json\n\n"), "not JSON"),
        (CHAT, {}, (ROLE, b'data: {"choices":[{"delta":5}]}\n\n'), "not match its API"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, (b'data: {"choices":[{"text":"a"}]}\n\n',), "more than one prompt"),
        (
            MESSAGES,
            {"thinking": {"type": "enabled"}},
            tuple(Story("1").events(MESSAGES, asked_of(MESSAGES))[:3]),
            "think",
        ),
        (MESSAGES, {}, tuple(Story("1").events(MESSAGES, asked_of(MESSAGES))[:9]), "its end was under way"),
    ],
)
async def test_what_no_other_engine_can_go_on_with_ends_as_it_did(
    path: str, more: dict[str, Any], told: tuple[bytes, ...], why: str
) -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        _, other = await rig_of(rig, streaming(*told, then="die"), Story("2"))
        answer = await rig.ask(asking(path, **more))
    assert answer.complete and answer.body.startswith(b"".join(told)) and not other.served
    assert why in json.dumps(decoded(answer.body[len(b"".join(told)) :])[-1]), answer.body
    assert rig.endings[0].status == 502


async def test_before_its_first_word_any_answer_is_begun_anew() -> None:
    """Tools and formats do not matter yet."""
    async with a_rig(models=(a_real_model(),)) as rig:
        later = Story("2")
        await rig_of(rig, Story("1", 1), later)
        answer = await rig.ask(asking(CHAT, **JSON_FORMAT))
    assert answer.complete and answer.body.count(b'"role"') == 1 and answer.body.endswith(DONE)
    assert later.asked[0]["messages"] == ASKED[CHAT]["messages"] and later.asked[0]["max_tokens"] == len(WORDS)


async def test_a_message_of_which_only_an_effort_was_asked_is_gone_on_with() -> None:
    more = {"output_config": {"effort": "low", "format": None}}
    async with a_rig(models=(a_real_model(),)) as rig:
        later = Story("2")
        await rig_of(rig, Story("1", 3), later)
        answer = await rig.ask(asking(MESSAGES, **more))
    assert later.asked[0]["messages"][-1]["role"] == "assistant" and rig.finished[0].num_continued == 1
    assert answer.complete and decoded(answer.body) == decoded(as_first(MESSAGES, **more))


async def test_the_request_that_goes_on_has_the_bounds_that_are_left() -> None:
    async with a_rig(models=(a_model(engine="vllm"),)) as rig:
        later = Story("2")
        await rig_of(rig, Story("1", 3), later)
        await rig.ask(asking(CHAT, min_tokens=3, stop=["END"], seed=7, temperature=0))
    asked = later.asked[0]
    assert asked["messages"][-1] == {"role": "assistant", "content": "The sea"}
    assert (asked["max_tokens"], asked["min_tokens"], asked["stop"], asked["seed"]) == (4, 1, ["END"], 7)
    assert asked["continue_final_message"] and not asked["add_generation_prompt"]


async def test_a_message_that_the_client_began_is_gone_on_with() -> None:
    """llama.cpp itself continues a final assistant message."""
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The sea"}]
    for path, few in ((CHAT, 2), (MESSAGES, 3)):
        async with a_rig(models=(a_real_model(),)) as rig:
            later = Story("2")
            await rig_of(rig, Story("1", few), later)
            answer = await rig.ask(asking(path, messages=begun, max_tokens=4))
        assert later.asked[0]["messages"][-1] == {"role": "assistant", "content": "The sea is"}
        assert answer.complete and decoded(answer.body) == decoded(as_first(path, messages=begun, max_tokens=4))


async def test_a_long_stream_is_kept_as_its_text() -> None:
    words = [delta(content=f" {n}" + "." * 300) for n in range(600)]
    text = "".join(json.loads(word[6:])["choices"][0]["delta"]["content"] for word in words)
    async with a_rig(models=(a_real_model(context_tokens=100_000),)) as rig:
        later = streaming(delta(content="!"), DONE)
        _, other = await rig_of(rig, streaming(ROLE, *words, then="die", every_s=0.0), later)
        client = await rig.sent(asking(CHAT, max_tokens=1000))
        answer = await client.answer()
    asked = json.loads(other.served[0].body)
    assert asked["messages"][-1]["content"] == text and asked["max_tokens"] == 400
    assert answer.complete and len(decoded(answer.body)) == 603


IDS = {"prompt_token_ids": [1, 2, 3]}


@pytest.mark.parametrize(
    ("more", "by_ids"), [({}, True), ({"stop": ["x"]}, False), ({"tools": [], "logprobs": True}, False)]
)
async def test_vllm_goes_on_behind_the_tokens_themselves(more: dict[str, Any], by_ids: bool) -> None:
    """A chat continues as a completion of its tokens."""

    def chunk(choice: dict[str, Any], **over: Any) -> bytes:
        return sse({"id": "x", "model": "v", "choices": [{"index": 0, "finish_reason": None, **choice}], **over})

    told = (
        chunk({"delta": {"role": "assistant", "content": ""}}, **IDS),
        chunk({"delta": {"content": "The sea"}, "token_ids": [4, 5]}),
        chunk({"delta": {}, "token_ids": [6]}),  # part of a character
    )
    end = {"finish_reason": "stop", "token_ids": [8]}
    if by_ids:
        rest = (chunk({"text": " is", "token_ids": [6, 7]}, **IDS), chunk({"text": "", **end}), DONE)
    else:
        rest = (
            chunk({"delta": {"role": "assistant"}}),
            chunk({"delta": {"content": " is"}}),
            chunk({"delta": {}, **end}),
            DONE,
        )
    async with a_rig(models=(a_model(engine="vllm"),)) as rig:
        first, second = await rig_of(rig, streaming(*told, then="die"), streaming(*rest))
        answer = await rig.ask(asking(CHAT, max_tokens=9, **more))
    assert json.loads(first.served[0].body)["return_token_ids"] is True
    asked, path = json.loads(second.served[0].body), second.served[0].head.split(b" ", 2)[1].decode()
    if by_ids:
        assert (path, asked["prompt"], asked["max_tokens"], "messages" in asked) == (
            COMPLETIONS,
            [1, 2, 3, 4, 5],
            7,
            False,
        )
    else:
        assert path == CHAT and asked["messages"][-1]["content"] == "The sea"
    chunks = [one for one in decoded(answer.body) if one != "[DONE]"]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks) == "The sea is"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop" and answer.complete
    assert {one["id"] for one in chunks} == {"x"} and all("text" not in one["choices"][0] for one in chunks)
