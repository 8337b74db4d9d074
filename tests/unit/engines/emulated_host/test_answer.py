"""Stop strings across token borders, and text that depends on its input alone."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.engines.emulated_host.answer import StopCutter
from glowplug.engines.emulated_host.text import LABEL, answer_tokens, count_tokens, embedding, token_ids


def cut(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    cutter, shown = StopCutter(stops), ""
    for piece in pieces:
        shown += cutter.feed(piece)
        if cutter.found:
            break
    return shown + cutter.rest(), cutter.found


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "found"),
    [
        (["one", " two", " three"], (), "one two three", False),
        (["one", " two", " three"], ("two",), "one ", True),
        (["a<", "e", "nd>b"], ("<end>",), "a", True),
        (["a<", "e", "lse"], ("<end>",), "a<else", False),
        (["xx yy"], ("yy", "xx"), "", True),
    ],
)
def test_text_ends_before_the_first_stop_string(
    pieces: list[str], stops: tuple[str, ...], shown: str, found: bool
) -> None:
    assert cut(pieces, stops) == (shown, found)


@given(st.lists(st.text("ab<", max_size=4), max_size=12), st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3))
def test_cutting_piecewise_is_cutting_whole(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, found = cut(pieces, tuple(stops))
    assert found == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert found or shown == text


def test_answers_are_labelled_and_depend_on_prompt_and_seed_alone() -> None:
    def first(prompt: str, seed: int) -> str:
        return "".join(itertools.islice(answer_tokens(prompt, seed), 30))

    assert first("x", 1) == first("x", 1)
    assert first("x", 1) != first("x", 2)
    assert first("x", 1) != first("y", 1)
    assert first("x", 1).startswith(LABEL)


def test_vectors_are_unit_length_and_tokens_count_what_they_are() -> None:
    assert sum(value * value for value in embedding("a", 64)) == pytest.approx(1.0)
    assert len(token_ids("hello world")) == count_tokens("hello world") == 3
