"""What a text says of its answer's length: bounded work, and nothing that a text could be had back from."""

import time

import pytest

from glowplug.policies.prediction.length_text import NUM_BUCKETS, NUM_NUMBERS, Turn, describe

LONG = "lorem ipsum dolor (sit) amet? 500 words\n" * 25_000  # 1 MB


def test_there_are_as_many_numbers_whatever_the_conversation() -> None:
    talks = (
        [Turn("")],
        [Turn("Hi")],
        [Turn("Hi"), Turn("Hello!", answers=True), Turn("Write 500 words about the sea, as 3 bullet points.")],
        [Turn("\ud800 日本語 \0")],
        [Turn("a", answers=True)] * 300,
    )
    for talk in talks:
        said = describe(talk)
        assert len(said.numbers) == NUM_NUMBERS and all(number == number for number in said.numbers), talk[-1]
        assert all(0 <= word < NUM_BUCKETS for word in said.words)
    with pytest.raises(ValueError, match="at least one turn"):
        describe([])


def test_a_long_text_is_read_at_its_ends_alone() -> None:
    assert describe([Turn("begin " + LONG + " end")]).words == describe([Turn("begin " + 2 * LONG + " end")]).words
    began = time.thread_time()
    describe([Turn(LONG, answers=number % 2 == 1) for number in range(41)])
    assert time.thread_time() - began < 0.5, "its work grows with the length of the texts"


def test_answers_words_and_wishes_count() -> None:
    one = [Turn("Hi"), Turn("short", answers=True), Turn("go on")]
    other = [Turn("Hi"), Turn("a much longer answer than that " * 20, answers=True), Turn("go on")]
    assert describe(one).has_answers and not describe(one[:1]).has_answers
    assert describe(one).numbers != describe(other).numbers
    assert describe([Turn("tell me of salt")]).words != describe([Turn("tell me of iron")]).words
    assert describe([Turn("a text of 500 words")]).numbers != describe([Turn("a text of 50 words")]).numbers
