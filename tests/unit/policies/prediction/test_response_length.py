"""Expected response lengths, in place of PreServe's section 4.2 where no predictor is trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.prediction.response_length import LengthParams, ResponseLengths


def test_before_anything_is_known_a_default_bounded_by_what_is_asked_for() -> None:
    lengths = ResponseLengths(LengthParams(default_tokens=200))
    assert (lengths.expect(10), lengths.expect(10, 50), lengths.expect(10, 500)) == (200, 50, 200)


def test_prompts_about_as_long_are_answered_about_as_long() -> None:
    lengths = ResponseLengths()
    for _ in range(200):
        lengths.learn(20, 30)
        lengths.learn(2000, 600)
    assert 30 <= lengths.expect(25) < 60 and 550 < lengths.expect(1500) <= 600


def test_a_bucket_that_saw_little_leans_on_the_model() -> None:
    lengths = ResponseLengths()
    for _ in range(50):
        lengths.learn(20, 100)
    lengths.learn(2000, 1000)
    assert 100 < lengths.expect(2000) < 300
    assert lengths.expect(7) == pytest.approx(145, abs=5), "never seen: the mean of all"


def test_it_follows_a_change() -> None:
    lengths = ResponseLengths()
    for tokens in [100] * 200 + [400] * 100:
        lengths.learn(50, tokens)
    assert lengths.expect(50) > 380


def test_a_quantile_is_expected_where_one_is_asked_for() -> None:
    lengths = ResponseLengths(LengthParams(quantile=0.9, weight=0.02))
    for n in range(20_000):
        lengths.learn(50, 1 + (n * 37) % 100)  # 1 .. 100, each as often
    assert 80 < lengths.expect(50) < 98


def test_an_answer_without_tokens_teaches_nothing() -> None:
    lengths = ResponseLengths()
    lengths.learn(50, 0)
    assert lengths.expect(50) == LengthParams().default_tokens


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 5_000))), st.integers(0, 10_000), st.integers(0, 300))
def test_it_stays_among_what_was_seen(seen: list[tuple[int, int]], prompt: int, most: int) -> None:
    lengths = ResponseLengths()
    for one in seen:
        lengths.learn(*one)
    real = [tokens for _, tokens in seen if tokens] or [LengthParams().default_tokens]
    expected = lengths.expect(prompt)
    assert min(real) - 1 <= expected <= max(real) + 1
    assert 1 <= lengths.expect(prompt, most) <= (most or expected)


def test_a_text_is_believed_until_earlier_answers_are_nearer() -> None:
    lengths = ResponseLengths()
    assert lengths.expect(100, text_tokens=60) == 60, "before any answer the text is all there is"
    for _ in range(30):
        lengths.learn(100, 500, text_tokens=60)
        lengths.learn(100, 500, text_tokens=900)
    assert abs(lengths.expect(100, text_tokens=60) - 500) < 25, "its texts say nothing of this model's answers"


def test_a_model_that_says_twice_as_much_is_learned() -> None:
    lengths, truth = ResponseLengths(), [20, 400, 90, 700, 150]
    for _ in range(40):
        for said in truth:
            lengths.learn(100, 2 * said, text_tokens=said)
    for said in truth:
        assert abs(lengths.expect(100, text_tokens=said) - 2 * said) < 0.15 * said
    assert lengths.expect(100, 300, text_tokens=700) == 300
