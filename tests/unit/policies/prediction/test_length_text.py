"""Text features: bounded work, and no way back to the text."""

import math
import time
from zlib import crc32

import pytest

from glowplug.policies.prediction.length_text import CHARS_PER_TOKEN, NUM_BUCKETS, NUM_NUMBERS, Turn, describe

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
        assert all(0 <= word < NUM_BUCKETS for word in said.words | said.around)
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


def test_amounts_are_read_however_they_are_written() -> None:
    wish = describe([Turn("a text of 2000 words")]).numbers
    for same in ("a text of 2,000 words", "a text of 2k words", "a text of 2000-word"):
        assert max(describe([Turn(same)]).numbers) == pytest.approx(max(wish)), same
    assert max(wish) > max(describe([Turn("a text of 200 words")]).numbers)
    assert describe([Turn("give me five of them")]).numbers != describe([Turn("give me many of them")]).numbers


def test_the_answer_to_a_text_that_began_alike_is_found() -> None:
    asked = ("Translate: good day", "Who are you?", "Translate: good night")
    answers = ("bon jour " * 50, "I am a model.")
    talk = [Turn(asked[0]), Turn(answers[0], True), Turn(asked[1]), Turn(answers[1], True), Turn(asked[2])]
    other = [*talk[:-1], Turn("Say good night")]
    of_alike = math.log1p(len(answers[0]) / CHARS_PER_TOKEN)
    assert describe(talk).numbers.count(of_alike) == describe(other).numbers.count(of_alike) + 1
    assert describe([Turn("Hi", True), Turn("Hi"), Turn("Hi")]).numbers, "without pairs there is none"


def test_signs_without_spaces_are_words_each_and_first_texts_have_hashes_of_their_own() -> None:
    both = describe([Turn("\u8bf7\u89e3\u91ca")]).words & describe([Turn("\u89e3")]).words
    assert len(both) >= 2, "the sign itself, as a word of any text and of a first one"
    later = [Turn("Hi"), Turn("Hello", True), Turn("salt")]
    assert describe([Turn("salt")]).words > describe(later).words


def test_numbers_and_hashes_are_those_that_the_shipped_file_was_trained_on() -> None:
    """Changed features require a trained file, a higher version, and new values here."""
    talk = [
        Turn("You write 3 drafts."),
        Turn("Explain GPT4 in 2,000 words, then \u65e5\u672c\u8a9e as five steps"),
        Turn("Sure. Is that all?", answers=True),
        Turn("Now v2 of it: 10 ideas, 1k words; don't stop!"),
    ]
    first, later = describe(talk[:2]), describe(talk)
    hashes = [crc32(repr(sorted(words)).encode()) for said in (first, later) for words in (said.words, said.around)]
    assert hashes == [1083543646, 3673746453, 1335571111, 1856985753]
    wishes = [[round(number, 3) for number in said.numbers if number][-6:] for said in (first, later)]
    assert wishes == [[-1.0, 2.849, 7.864, 1.792, 1.0, 1.0], [-1.0, 3.464, 7.171, 2.485, 1.0, 1.0]]


PAIRS = [Turn(f"Tell me {number}: {'x' * number}", number % 2 == 1) for number in range(70)]
ALIKE = [Turn("Translate: sea"), Turn("mer", True), Turn("Tran"), Turn("four", True), Turn("Tra"), Turn("three?", True)]
TALKS = {
    "nothing": [Turn("")],
    "signs": [Turn('Why? (a) {b}; c = "d":\n\n```x```\n')],
    "a small letter, and a colon": [Turn("all of it: ")],
    "a question": [Turn("Is it?  ")],
    "read whole": [Turn("ab" * 650)],
    "too long to be read whole": [Turn("ab" * 650 + "c")],
    "as many words as are looked at": [Turn("list " * 90 + "poem " * 90)],
    "one more, and an amount in the middle": [Turn("list " * 90 + "hundred " + "poem " * 90)],
    "other scripts": [Turn("Gr\u00fc\u00dfe \u65e5\u672c 'n' x"), Turn("\u00e9 " * 120, True), Turn("\u00e9\u65e5")],
    "three words": [Turn("b a c")],
    "two words": [Turn("b a")],
    "amounts": [Turn("3 items, 199 things, 200 more, 10 words or 2 pages, 1,500 chars and 1k lines")],
    "no amounts": [Turn("0 x 1000 y v2")],
    "two answers": [Turn("Hi"), Turn("So?\n", True), Turn("Hi"), Turn("b" * 70 + "!", True), Turn("Hi there")],
    "three answers": [Turn("a"), *(Turn("y" * number, True) for number in (400, 9, 90)), Turn("a")],
    "only answers": [Turn("```a\nb``` is it?", True), Turn("yes")],
    "ends of what was said": [Turn("A" * 260), Turn("B" * 120 + "C" * 120, True), Turn("D" * 251), Turn("e")],
    "many turns": [*PAIRS[:17], Turn("Tell me 9")],
    "more turns than are looked at": [*PAIRS[:18], Turn("Tell me 9")],
    "more turns than count": [*PAIRS, Turn("Tell me 9")],
    "a question long before its end": [Turn("Is it?   ")],
    "a small letter before a large one": [Turn("iP")],
    "one sign of another script": [Turn("\u00e9")],
    "two amounts spelled out": [Turn("two or fifty or ten")],
    "an answer with a long tail": [Turn("Hi"), Turn("Yes." + " " * 60, True), Turn("Hi")],
    "two texts, one answer": [Turn("Tell me ab"), Turn("Tell us"), Turn("yes", True), Turn("Tell me ac")],
    "two answers to one text": [Turn("Hi"), Turn("Tell me ab", True), Turn("second", True), Turn("Tell me ac")],
    "six pairs": [*PAIRS[:12], Turn("Tell me 0")],
    "seven pairs": [*PAIRS[:14], Turn("Tell me 0")],
    "alike": [*ALIKE, Turn("Translate: salt")],
    "alike in four letters": [*ALIKE, Turn("Tranquil")],
    "alike in three": [*ALIKE, Turn("Tra")],
    "the same": [*ALIKE, Turn("Translate: sea")],
    "the same for long": [Turn("z" * 70), Turn("long", True), Turn("z" * 64 + "y"), Turn("!", True), Turn("z" * 66)],
}
TRAINED_ON = (
    1285846051, 418849484, 1092684154, 2559992611, 258000348, 3458583685, 1125582359, 2714495155, 467014934,
    3910820911, 3901921049, 3333881647, 3124651219, 2683407575, 3537415811, 4276428263, 1251175553, 2777952421,
    160744881, 2213894874, 685879690, 4156518543, 3696136355, 3070696694, 3680453512, 2134806922, 2036163928,
    3457289890, 4294227520, 3410449183, 2825484042, 3123832122, 2532137084, 1365811360,
)  # fmt: skip


def read_of(talk: list[Turn]) -> int:
    said = describe(talk)
    numbers = [round(number, 3) + 0.0 for number in said.numbers]
    return crc32(repr((numbers, sorted(said.words), sorted(said.around), said.has_answers)).encode())


@pytest.mark.parametrize(("name", "read"), list(zip(TALKS, TRAINED_ON, strict=True)), ids=TALKS)
def test_what_is_read_of_a_talk_is_what_the_shipped_file_was_trained_on(name: str, read: int) -> None:
    assert read_of(TALKS[name]) == read
