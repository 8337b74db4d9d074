"""Prompt blocks, alike as far as the prompts. Fast lane, below a second."""

import json
from typing import Any

import pytest

from glowplug.services.router.intake import MOST_BLOCKS, blocks, prefix_of
from glowplug.services.router.request_body import READERS, read_body

LONG = "one two three " * 40


def of(path: str, **fields: Any) -> tuple[int, ...]:
    return prefix_of(read_body(path.encode(), json.dumps({"model": "m", **fields}).encode(), READERS), 16)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_only_whole_blocks_count_and_a_block_depends_on_all_before_it() -> None:
    assert blocks("abcdefg", 4) == blocks("abcdxyz", 4)[:1] and len(blocks("abcdefgh", 4)) == 2
    assert blocks("abcdefgh", 4)[1] != blocks("xxxxefgh", 4)[1]
    assert len(blocks("a" * 10_000, 1)) == MOST_BLOCKS


@pytest.mark.parametrize(
    ("path", "first", "then"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": LONG}]},
            {"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": LONG},
                          {"role": "user", "content": [{"type": "text", "text": "more"}]}]},
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "system": LONG, "messages": [{"role": "user", "content": "a"}]},
            {"max_tokens": 9, "system": LONG, "messages": [{"role": "user", "content": "b"}]},
        ),
        ("/v1/completions", {"prompt": LONG}, {"prompt": [LONG + LONG]}),
        ("/v1/completions", {"prompt": [list(range(160))]}, {"prompt": list(range(170))}),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": LONG}]}]}]},
            {"max_tokens": 9, "messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": LONG}]}, {"role": "user", "content": "go on"}]},
        ),
    ],
)  # fmt: skip
def test_a_prompt_that_goes_on_from_another_has_all_of_its_blocks(path: str, first: Any, then: Any) -> None:
    one, other = of(path, **first), of(path, **then)
    assert common(one, other) >= len(one) - 1 >= 7


def test_several_prompts_have_no_beginning_in_common_that_is_known() -> None:
    assert of("/v1/completions", prompt=[LONG, LONG]) == of("/v1/completions", prompt=[[1] * 99, [1] * 99]) == ()


def test_other_tools_make_another_prompt_and_an_embedding_has_none() -> None:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]}
    tool = {"type": "function", "function": {"name": "look"}}
    chat = "/v1/chat/completions"
    assert common(of(chat, **said), of(chat, **said, tools=[tool])) == 0
    assert of("/v1/embeddings", input=LONG) == ()
