"""The part of a stream kept for the next engine, that engine's request, and its events as the client gets them."""

import json
from typing import Any

import pytest

from glowplug.engines.apis import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, EngineApi
from glowplug.services.router import resumption
from glowplug.services.router.continuation import DONE_EVENT, Continuation, NotContinuable, events
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.resumption import Resumption
from tests.contract.continuation_rig import ASKED, a_real_model, asked_of, decoded, sse

API = EngineApi(continues=frozenset((CHAT, COMPLETIONS, MESSAGES)))
IDS = EngineApi(continues=API.continues, token_ids=True)
MIXED = EngineApi(continues=API.continues, mixed_prompts=True, completion_tokens=16)


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


def test_what_an_engine_said_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "TEXT_CHARS", 10)
    kept = of_a_chat()
    kept.read(said("1234567890"))
    assert not kept.why_not
    kept.read(said("1"))
    with pytest.raises(NotContinuable, match="too long"):
        kept.prepare()


def test_nothing_goes_on_while_the_client_has_half_an_event_and_the_next_engines_halves_are_kept() -> None:
    kept = of_a_chat()
    kept.read(said("one") + said("two")[:9])
    with pytest.raises(NotContinuable, match="part of an event"):
        kept.prepare()
    kept.read(said("two")[9:])
    assert kept.prepare() == b"" and json.loads(kept.body)["messages"][-1]["content"] == "onetwo"
    kept.lost(resumption.LOST)
    assert kept.splice(said("three") + said("four")[:9], 1000) == (kept_as(said("three")), "")
    assert kept.splice(said("four")[9:], 1000) == (kept_as(said("four")), "")
    kept.splice(said("five")[:9], 1000)
    kept.lost(resumption.ERROR)
    assert kept.splice(said("six"), 1000)[0] == kept_as(said("six")), "a lost engine's half is not the next one's"


def kept_as(event: bytes) -> bytes:
    return b"data: " + json.dumps(decoded(event)[0], separators=(",", ":")).encode() + b"\n\n"


def test_a_copy_goes_its_own_way() -> None:
    kept = of_a_chat()
    assert kept.num_tokens == 0 and kept.usage is None
    kept.read(said("one"))
    other = kept.fork()
    kept.read(said("two"))
    other.prepare()
    assert (kept.num_tokens, other.num_tokens) == (2, 1)
    assert json.loads(other.body)["messages"][-1]["content"] == "one" and kept.body == b""


def begun(path: str, *told: dict[str, Any], api: EngineApi = API, **asked: Any) -> Continuation:
    made = resumption.begin(path.encode(), json.dumps(asked_of(path, **asked)).encode(), api, 100)
    made.take(b"".join(map(sse, told)))
    return made


def next_of(kept: Continuation) -> dict[str, Any]:
    asked: dict[str, Any] = json.loads(kept.request())
    return asked


def rewritten(kept: Continuation, *told: dict[str, Any] | None) -> list[Any]:
    return decoded(kept.rewrite(b"".join(b"data: null\n\n" if one is None else sse(one) for one in told)))


def word(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, **more}]}


def text_of(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": text, **more}]}


A_PIECE = {"type": "content_block_delta", "delta": {"text": "a"}}


@pytest.mark.parametrize(
    ("path", "asked", "told"),
    [
        (CHAT, {"n": 2}, ()),
        (COMPLETIONS, {"best_of": 2}, ()),
        (COMPLETIONS, {"echo": True}, ()),
        (COMPLETIONS, {"suffix": "x"}, ()),
        (COMPLETIONS, {"prompt": ["a", "b"]}, (text_of("x"),)),
        (COMPLETIONS, {"prompt": [1, 2]}, (text_of("x"),)),
        (CHAT, {}, (word("a"), {"choices": [{"delta": {"tool_calls": [{}]}}]})),
        (
            CHAT,
            {},
            ({"choices": [{"delta": {"function_call": {}}}]}, {"choices": [{"delta": {"function_call": {"a": 1}}}]}),
        ),
        (CHAT, {}, ({"choices": [{"delta": {"reasoning": "a"}}]},)),
        (CHAT, {}, ({"choices": [{"delta": {"reasoning_content": "a"}}]},)),
        (CHAT, {"response_format": {"type": "json_object"}}, (word("a"),)),
        (
            MESSAGES,
            {"output_format": {"type": "json_schema"}},
            (A_PIECE,),
        ),
        (MESSAGES, {"output_config": {"format": {"a": 1}}}, (A_PIECE,)),
        (MESSAGES, {"thinking": {"type": "enabled"}}, (A_PIECE,)),
        (MESSAGES, {}, ({"type": "content_block_start", "content_block": {"type": "tool_use"}},)),
        (MESSAGES, {}, ({"type": "content_block_start", "content_block": None},)),
        (MESSAGES, {}, ({"type": "content_block_stop"},)),
    ],
)
def test_what_no_engine_goes_on_with(path: str, asked: dict[str, Any], told: tuple[dict[str, Any], ...]) -> None:
    with pytest.raises(NotContinuable):
        begun(path, *told, **{"prompt": "a", **asked}).request()


def test_a_path_goes_on_where_the_router_and_the_engine_can() -> None:
    for path, continues in ((EMBEDDINGS, {EMBEDDINGS}), (CHAT, {COMPLETIONS})):
        with pytest.raises(NotContinuable):
            resumption.begin(path.encode(), b"{}", EngineApi(continues=frozenset(continues)), 100)


@pytest.mark.parametrize(
    ("path", "asked", "told", "expected"),
    [
        (CHAT, {"n": 1, "best_of": 1}, word("a"), {}),
        (CHAT, {"n": None, "best_of": None, "response_format": {"type": "text"}}, word("a"), {}),
        (CHAT, {}, {"choices": [{"delta": {"tool_calls": [], "function_call": None}}]}, {"max_tokens": 6}),
        (CHAT, {"stream_options": {"x": 1}}, word("a"), {"stream_options": {"x": 1, "include_usage": True}}),
        (CHAT, {}, word("a"), {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 5}),
        (CHAT, {"max_completion_tokens": 9}, word("a"), {"max_completion_tokens": 8, "max_tokens": 5}),
        (CHAT, {"max_tokens": 2, "min_tokens": 3}, word("a"), {"max_tokens": 1, "min_tokens": 2}),
        (CHAT, {"max_tokens": 1, "min_tokens": 0}, word("a"), {"max_tokens": 1, "min_tokens": 0}),
        (CHAT, {"max_tokens": None}, word("a"), {"max_tokens": None}),
        (
            CHAT,
            {"max_tokens": None, "max_completion_tokens": 1},
            word("a"),
            {"max_tokens": None, "max_completion_tokens": 1},
        ),
        (
            CHAT,
            {"response_format": {"type": "json_object"}},
            word(""),
            {"messages": ASKED[CHAT]["messages"], "max_tokens": 6},
        ),
        (MESSAGES, {}, {"type": "content_block_delta", "delta": {"text": ""}}, {"max_tokens": 6}),
        (CHAT, {"max_tokens": None}, word("a", finish_reason="stop"), {"max_tokens": 1}),
        (COMPLETIONS, {"prompt": "ab"}, text_of("c"), {"prompt": "abc", "max_tokens": 5}),
        (COMPLETIONS, {"prompt": ["ab"], "max_tokens": None}, text_of("c"), {"prompt": "abc", "max_tokens": None}),
        (CHAT, {}, {"choices": [{"index": 0, "delta": None}]}, {"max_tokens": 6}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, A_PIECE, {"max_tokens": 5}),
        (
            MESSAGES,
            {"thinking": None},
            {"type": "content_block_start", "content_block": {"type": "text"}},
            {"max_tokens": 6},
        ),
    ],
)
def test_what_the_next_engine_is_asked_for(
    path: str, asked: dict[str, Any], told: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = next_of(begun(path, told, **asked))
    assert {name: found.get(name) for name in expected} == expected and "return_token_ids" not in found


def test_structured_output_goes_on_where_a_grammar_takes_the_answer_so_far() -> None:
    api = EngineApi(continues=API.continues, continues_schemas=True)
    found = next_of(begun(CHAT, word("{"), api=api, response_format={"type": "json_object"}))
    assert found["messages"][-1] == {"role": "assistant", "content": "{"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 2], [1, 2, "x"]), ([[1, 2]], [1, 2, "x"]), ([1], [1, "x"]), (["a"], "ax"), ("a", "ax")],
)
def test_a_prompt_of_tokens_goes_on_with_text_where_the_engine_takes_both(prompt: Any, expected: Any) -> None:
    found = next_of(begun(COMPLETIONS, text_of("x"), api=MIXED, prompt=prompt, max_tokens=None))
    assert (found["prompt"], found["max_tokens"]) == (expected, 15)
    assert next_of(begun(COMPLETIONS, text_of("x"), api=MIXED, prompt=prompt, max_tokens=5))["max_tokens"] == 4
    for several in (["a", "b"], [1, "a"]):
        with pytest.raises(NotContinuable):
            begun(COMPLETIONS, text_of("x"), api=MIXED, prompt=several).request()


@pytest.mark.parametrize(
    ("last", "asked", "expected"),
    [
        (
            {"role": "assistant", "content": "T"},
            {},
            [{"role": "assistant", "content": "T"}, {"role": "assistant", "content": "a"}],
        ),
        (
            {"role": "assistant", "content": "T"},
            {"continue_final_message": True},
            [{"role": "assistant", "content": "Ta"}],
        ),
        (
            {"role": "user", "content": "T"},
            {"continue_final_message": True},
            [{"role": "user", "content": "T"}, {"role": "assistant", "content": "a"}],
        ),
        (5, {"continue_final_message": True}, [5, {"role": "assistant", "content": "a"}]),
    ],
)
def test_an_answer_extends_a_last_message_only_where_the_first_engine_did(
    last: Any, asked: dict[str, Any], expected: list[Any]
) -> None:
    assert next_of(begun(CHAT, word("a"), messages=[last], **asked))["messages"] == expected
    with pytest.raises(NotContinuable):
        begun(CHAT, word("a"), messages=[{"role": "assistant", "content": []}], continue_final_message=True).request()
    for none in list[Any](([], None)):
        assert next_of(begun(CHAT, word("a"), messages=none))["messages"] == [{"role": "assistant", "content": "a"}]


def with_ids(*ids: int, **choice: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "token_ids": list(ids), **choice}]}


PROMPT = {"id": "c", "prompt_token_ids": [1, 2], "choices": []}


@pytest.mark.parametrize(
    ("told", "asked", "expected"),
    [
        ((PROMPT, with_ids(3, 4, delta={"content": "a"})), {"max_tokens": 9}, ([1, 2, 3, 4], 7)),
        ((PROMPT, with_ids(3, 4, delta={"content": "a"})), {"max_tokens": None}, ([1, 2, 3, 4], 96)),
        ((PROMPT, with_ids(*range(98), delta={"content": "a"})), {"max_tokens": None}, ([1, 2, *range(98)], 1)),
        (
            (PROMPT, with_ids(3, delta={"content": "a"})),
            {"max_tokens": None, "max_completion_tokens": 5},
            ([1, 2, 3], 4),
        ),
        ((PROMPT, with_ids(3, delta={}), with_ids(4, delta={"content": "a"})), {"max_tokens": 9}, ([1, 2, 3, 4], 7)),
        (
            (PROMPT, PROMPT | {"prompt_token_ids": [7]}, with_ids(3, delta={"content": "a"})),
            {"max_tokens": 9},
            ([1, 2, 3], 8),
        ),
        (
            (with_ids(3, delta={"content": "a"}, prompt_token_ids=[1, 2]),),
            {"max_tokens": 9, "tools": None},
            ([1, 2, 3], 8),
        ),
        ((PROMPT, with_ids(3, delta={"content": "a"}), with_ids(4, delta={})), {"max_tokens": 9}, ([1, 2, 3], 8)),
        ((PROMPT, with_ids(3, delta={"content": "a"}), word("b")), {"max_tokens": 9}, None),
        ((PROMPT, word("b"), with_ids(3, delta={"content": "a"})), {"max_tokens": 9}, None),
        ((PROMPT, with_ids(3, delta={"content": "a"})), {"max_tokens": 9, "tools": []}, None),
        ((PROMPT, with_ids(3, delta={"content": "a"})), {"max_tokens": 9, "stop": "x"}, None),
        ((with_ids(3, delta={"content": "a"}),), {"max_tokens": 9}, None),
        ((PROMPT,), {"max_tokens": 9}, None),
    ],
)
def test_a_chat_goes_on_behind_its_tokens_where_all_are_known(
    told: tuple[dict[str, Any], ...], asked: dict[str, Any], expected: tuple[list[int], int] | None
) -> None:
    kept = begun(CHAT, *told, api=IDS, metadata={}, **asked)
    found = next_of(kept)
    assert found["return_token_ids"] is True
    if expected is None:
        assert kept.path == CHAT.encode() and "prompt" not in found and "messages" in found
        return
    assert (found["prompt"], found["max_tokens"]) == expected and kept.path == COMPLETIONS.encode()
    assert not {"messages", "metadata", "max_completion_tokens", "tools"} & set(found)


def test_a_completion_goes_on_behind_its_tokens_and_forgets_those_without_text() -> None:
    kept = begun(COMPLETIONS, PROMPT, with_ids(3, text="a"), with_ids(4, text=""), api=IDS)
    assert (next_of(kept)["prompt"], kept.num_tokens) == ([1, 2, 3], 1)
    rewritten(kept, with_ids(5, text="b"))
    assert (next_of(kept)["prompt"], kept.num_tokens) == ([1, 2, 3, 5], 2)
    kept = begun(COMPLETIONS, PROMPT, with_ids(3, text="a"), api=IDS, stop="x")
    assert next_of(kept)["prompt"] == "Once:a", "with stop strings text lags behind its tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_only_the_end_is_missing_once_there_is_a_reason_and_the_usage_that_was_asked_for(path: str) -> None:
    end = word("", finish_reason="stop") if path == CHAT else text_of("", finish_reason="stop")
    counted = {"choices": [], "usage": {"prompt_tokens": 1}}
    wanted: dict[str, Any] = {"stream_options": {"include_usage": True}}
    assert begun(path).ending() == begun(path, counted).ending() == b""
    assert begun(path, end).ending() == begun(path, end, stream_options=None).ending() == DONE_EVENT
    assert begun(path, end, **wanted).ending() == begun(path, end | {"usage": {"a": 1}}, **wanted).ending() == b""
    assert begun(path, end, counted, **wanted).ending() == DONE_EVENT
    assert begun(path, end, {"choices": [], "usage": None}, **wanted).ending() == b""


HEAD = {"id": "c", "created": 1, "model": "v", "system_fingerprint": "f", "object": "o"}
LATER = {"id": "d", "created": 2, "model": "w", "timings": {}, "prompt_token_ids": [1]}  # of the next engine alone
TOTAL = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 7}
ROLE = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
END = word("", finish_reason="stop")


def test_the_client_sees_one_stream_of_chunks() -> None:
    kept = begun(CHAT, {"id": "x"}, {**ROLE, **HEAD, "x": 1}, word("a"), stream_options={"include_usage": True})
    kept.request()
    late = word("b", finish_reason=None, prompt_token_ids=[1], logprobs={"text_offset": [0, 2]})
    usage = {**LATER, "choices": [], "usage": TOTAL}
    told = (
        None,
        {"error": "x"},
        ROLE | LATER,
        late | LATER,
        word("c", logprobs={"x": 1}),
        END,
        word("d"),
        usage,
        usage,
    )
    shown = {"index": 0, "delta": {"content": "b"}, "finish_reason": None, "logprobs": {"text_offset": [1, 3]}}
    assert rewritten(kept, *told) == [
        {"error": "x"},
        {**HEAD, "choices": [shown]},
        {**word("c", logprobs={"x": 1}), **HEAD},
        {**END, **HEAD},
        {**HEAD, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}},
    ]
    assert kept.usage == (3, 3)


def test_usage_comes_only_to_who_asked_for_it_or_with_the_last_words() -> None:
    kept = begun(CHAT, ROLE, word("a"))
    kept.request()
    assert rewritten(kept, {"choices": None}, {"choices": [], "usage": TOTAL}) == [] and kept.usage == (3, 3)
    (found,) = rewritten(kept, END | {"usage": {"prompt_tokens": 4}})
    assert found["usage"] == {"prompt_tokens": 3} and kept.usage == (3, 0)
    kept = begun(CHAT, ROLE, stream_options={"include_usage": True})
    kept.request()
    assert len(rewritten(kept, END | {"usage": TOTAL}, {"choices": [], "usage": TOTAL})) == 2


def test_who_has_seen_only_comments_gets_the_next_engines_head_and_one_role() -> None:
    kept = begun(CHAT)
    kept.request()
    first, *rest = rewritten(kept, ROLE | LATER, ROLE, word("a") | {"id": "e"}, word("b", delta={"role": "tool"}))
    assert first == {"id": "d", "created": 2, "model": "w", "choices": ROLE["choices"]}
    assert [(one["id"], one["choices"][0]["delta"]) for one in rest] == [("d", {"content": "a"})]


@pytest.mark.parametrize(
    ("told", "finish_reason"), [((ROLE, word("a"), END), ""), ((ROLE, *map(word, "abcdef")), "length")]
)
def test_where_only_the_end_is_missing_the_next_engines_one_token_is_dropped(
    told: tuple[dict[str, Any], ...], finish_reason: str
) -> None:
    kept = begun(CHAT, *told, stream_options={"include_usage": True})
    num_tokens = kept.num_tokens
    assert next_of(kept)["max_tokens"] == 1
    *ends, usage = rewritten(kept, ROLE, word("more"), END, {"choices": [], "usage": TOTAL})
    assert [one["choices"][0]["finish_reason"] for one in ends] == [finish_reason][: bool(finish_reason)]
    assert usage["usage"]["completion_tokens"] == kept.num_tokens == num_tokens


def test_a_chat_that_goes_on_as_a_completion_stays_a_chat() -> None:
    kept = begun(CHAT, PROMPT, ROLE, with_ids(3, delta={"content": "a"}), api=IDS)
    kept.request()
    found = rewritten(kept, with_ids(4, text="b"), with_ids(5, text="", finish_reason="stop"))
    assert [one["choices"][0]["delta"] for one in found] == [{"content": "b"}, {}]
    assert all("text" not in one["choices"][0] for one in found)
    kept = begun(COMPLETIONS, *map(text_of, "abcdef"))
    kept.request()
    (end,) = rewritten(kept, text_of("g"), text_of("h", finish_reason="stop"))
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "length")


def test_several_answers_are_noticed_within_the_stream() -> None:
    with pytest.raises(NotContinuable):
        begun(CHAT, {"choices": [{"index": 1, "delta": {}}]})


# -- messages ------------------------------------------------------------------------------------------------------

START = {"type": "message_start", "message": {"id": "c"}}
BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}
USED = {"input_tokens": 4, "output_tokens": 2}


def piece(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def stopped(reason: str, **usage: int) -> dict[str, Any]:
    delta = {"stop_reason": reason, "stop_sequence": "x" if reason == "stop" else None}
    return {"type": "message_delta", "delta": delta, "usage": usage}


def test_the_client_sees_one_message() -> None:
    kept = begun(MESSAGES, START, BLOCK, piece("a"))
    assert kept.ending() == b""
    kept.request()
    second, late = BLOCK | {"index": 1}, [piece("b"), stopped("stop", **USED), {"type": "message_stop"}]
    assert rewritten(kept, START, None, BLOCK, second, *late) == [
        second, late[0], stopped("stop", input_tokens=3, output_tokens=3), late[2]
    ]  # fmt: skip
    assert kept.usage == (3, 3) and kept.num_tokens == 2
    assert kept.ending() == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    kept = begun(MESSAGES)
    kept.request()
    assert rewritten(kept, START, BLOCK, START, BLOCK) == [START, BLOCK], "each once"


def test_a_message_of_all_its_tokens_only_ends() -> None:
    kept = begun(MESSAGES, START, BLOCK, *map(piece, "abcdef"))
    assert next_of(kept)["max_tokens"] == 1
    end = [{"type": "content_block_stop", "index": 0}, stopped("stop", output_tokens=1)]
    assert rewritten(kept, START, BLOCK, piece("g"), *end) == [end[0], stopped("max_tokens", output_tokens=6)]
    assert kept.text == "abcdef"


# -- events --------------------------------------------------------------------------------------------------------


def test_an_event_has_a_name_and_lines_of_data() -> None:
    sent = b": a comment\n\nevent:a \r\nid: 1234\r\ndata: 1\r\ndata:2\r\n\r\ndata:  3\n\nevent: b\n\n"
    assert [*events(sent)] == [(b"a", b"1\n2"), (b"", b" 3")]


def test_an_event_that_is_no_object_is_passed_over_and_one_that_is_no_json_ends_it() -> None:
    kept = begun(CHAT)
    kept.take(b"data: [1]\n\ndata: [DONE]\n\n")
    for raw in (b"data: {\n\n", b"data: " + b"[" * 100_000 + b"\n\n"):
        with pytest.raises(NotContinuable, match="not JSON"):
            kept.take(raw)
    assert kept.rewrite(b"data: [DONE]\n\n") == DONE_EVENT


def test_numbers_of_other_types_are_left_as_they_are() -> None:
    kept = begun(CHAT, word("a"), max_tokens="x", min_tokens="y", stream_options={"include_usage": True})
    found = next_of(kept)
    assert (found["max_tokens"], found["min_tokens"]) == ("x", "y")
    kept.request()
    less = {"prompt_tokens": 0, "total_tokens": 5}
    assert rewritten(kept, {"choices": [], "usage": less})[0]["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    kept = begun(CHAT, stream_options={"include_usage": True})
    odd = {"prompt_tokens": None, "completion_tokens": "3", "total_tokens": 5}
    (event,) = rewritten(kept, {"choices": [], "usage": odd})
    assert event["usage"] == odd and kept.usage is None
    (event,) = rewritten(begun(CHAT), word("a") | {"usage": TOTAL | {"total_tokens": 1.5}})
    assert event["usage"]["total_tokens"] == 1.5
