"""Texts read in C and in Python agree to the last bit."""

import shutil
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.prediction.length_model import LengthModel
from glowplug.policies.prediction.length_native import LIBRARY, NativeLengths
from glowplug.policies.prediction.length_text import FIRST_CHARS, LAST_CHARS, Turn

WORDS = st.sampled_from(
    [
        *("continue", "don't", "a'b'c", "x_y", "rock'n'roll", "twelve", "500", "words", "2k", "list", "hundred", "The"),
        *("WHY", "explain", "i'll", "c", "(", ")", "{}", ";", "=", "```", "``````", "?", "\n", "\n\n", "\n\n\n", "\0"),
        *("\t", "\x1c", "'", "''", "'9", '"', "\x7f", "two", "in", "one", "sentence"),
    ]
)
TEXTS = st.one_of(
    st.lists(WORDS, max_size=60).map(" ".join),
    st.lists(WORDS, min_size=200, max_size=400).map("".join),
    st.text(st.characters(max_codepoint=127), max_size=80),
    st.text(max_size=30),  # of any script: Python reads these
    st.sampled_from(["!" * (FIRST_CHARS + LAST_CHARS), "a " * 2000, "\u212a", "\u0130 words"]),
)
TURNS = st.lists(st.tuples(TEXTS, st.booleans()).map(lambda both: Turn(*both)), min_size=1, max_size=20)


@cache
def both() -> tuple[LengthModel, NativeLengths]:
    model = LengthModel.read()
    return model, NativeLengths(model)


def test_where_there_is_a_compiler_the_library_has_been_built() -> None:
    assert LIBRARY.exists() or not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"))


@pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler was here when Glowplug was installed")
@given(TURNS)
def test_both_say_the_same(turns: list[Turn]) -> None:
    model, native = both()
    assert native.of(turns) == model.of(turns)


@pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler was here when Glowplug was installed")
def test_a_conversation_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one turn"):
        both()[1].of([])
