"""Expected response lengths, in place of PreServe's section 4.2 where no predictor is trained."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.bounds import OutOfBounds
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


def learned(params: LengthParams, *answers: int, prompt: int = 50, text_tokens: int = 0) -> ResponseLengths:
    lengths = ResponseLengths(params)
    for tokens in answers:
        lengths.learn(prompt, tokens, text_tokens)
    return lengths


@pytest.mark.parametrize(
    ("fields", "answers", "expected"),
    [
        ({}, [1000], 1000),
        ({}, [1000, 2000], 1500),
        ({"weight": 0.8}, [1000, 2000], 1800),
        ({}, [1000] * 24 + [2000], 1050),  # more than 20 answers: the newest has a twentieth
        ({"quantile": 0.9}, [1000, 2000], 1450),
        ({"quantile": 0.9}, [1000, 1000], 950),  # not longer than expected
        ({"quantile": 0.9, "weight": 0.8}, [1000, 2000], 1720),
        ({"quantile": 0.9}, [1000, 1451, 1000, 2000], round(1000 * 1.45 * (1 - 0.1 / 3) * (1 + 0.9 / 4))),
        ({"quantile": 0.5}, [1] * 9, 1),
    ],
)
def test_an_estimate_is_the_mean_or_takes_a_step_towards_its_quantile(
    fields: dict[str, float], answers: list[int], expected: int
) -> None:
    assert learned(LengthParams(**fields), *answers).expect(50) == expected


def test_answers_to_a_prompt_of_its_length_count_half_once_there_are_as_many_as_it_takes_to_trust_them() -> None:
    lengths = learned(LengthParams(weight=0.001), *[100] * 10, prompt=1)
    for _ in range(10):
        lengths.learn(2, 300)
    assert [lengths.expect(prompt) for prompt in (1, 2, 3, 4)] == [150, 250, 250, 200]


def test_a_quantile_is_below_one_and_no_number_is_negative() -> None:
    assert LengthParams(quantile=0.99).quantile == 0.99
    for wrong in ({"quantile": 1.0}, {"quantile": -0.1}, {"weight": -1.0}):
        with pytest.raises(OutOfBounds):
            LengthParams(**wrong)


def test_a_text_counts_as_long_as_its_error_is_no_larger_and_by_the_ratio_it_had() -> None:
    """Expected 100 of the text, and 200 before any answer; steps of 1/n halves of the logarithm."""
    even = learned(LengthParams(), 150, text_tokens=100)
    assert even.expect(50, text_tokens=100) == round(100 * math.exp(0.5)), "both were wrong by fifty"
    worse = learned(LengthParams(), 151, text_tokens=100)
    assert worse.expect(50, text_tokens=100) == 151
    for answers, log in (([120], 0.5), ([100], -0.5), ([120, 120], 0.5 - 0.25), ([120, 400], 0.5 + 0.25)):
        lengths = learned(LengthParams(default_tokens=5000), *answers, text_tokens=100)
        lengths._text.error = 0.0
        assert lengths.expect(50, text_tokens=1000) == round(1000 * math.exp(log))
    untold = learned(LengthParams(), 500)
    assert untold.expect(50, text_tokens=100) == 100, "answers without a text say nothing of texts"
    high = learned(LengthParams(quantile=0.9), 120, text_tokens=100)
    assert high.expect(50, text_tokens=1000) == round(1000 * math.exp(0.9))


def test_the_errors_of_text_and_history_are_recent_means() -> None:
    """200 expected by the default, then 300, then 250; the text says 100, then e^0.5 and e^0.75 of it."""
    text = learned(LengthParams(weight=0.4), 300, 200, 200, text_tokens=100)._text
    errors = 200.0, 200 - 100 * math.exp(0.5), 200 - 100 * math.exp(0.75)
    assert text.error == pytest.approx((errors[0] + errors[1]) / 2 * 0.6 + abs(errors[2]) * 0.4)
    assert text.history_error == pytest.approx(100 * 0.6 + 50 * 0.4)


def test_one_token_is_an_answer_and_an_answer_has_one_at_least() -> None:
    assert learned(LengthParams(), 1).expect(50) == 1
    assert ResponseLengths(LengthParams(default_tokens=0)).expect(50) == 1
    assert ResponseLengths().expect(50, 1) == 1
