"""Actual beside expected answer lengths."""

import statistics
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.prediction.answer_lengths import _BEFORE, _BOUND, _EDGES, AnswerLengths
from glowplug.policies.prediction.preserve_anticipator import LookAhead

SHARES = [(2 * at + 1) / 400 for at in range(200)]


def learned(pairs):
    answers = AnswerLengths()
    for expected, tokens in pairs:
        answers.learn(expected, tokens)
    return answers


def off_by(sigma, num=4000):
    """Expected lengths with lognormal actual ones."""
    chance = Random(1)
    expected = [round(chance.lognormvariate(5.0, 0.5)) for _ in range(num)]
    return [(one, max(1, round(one * chance.lognormvariate(0.0, sigma)))) for one in expected]


def test_before_any_answer_all_are_as_long_as_expected():
    answers = AnswerLengths()
    assert {answers.draw(80, share) for share in SHARES} == {80} and answers.draw(1, 0.5) == 1
    assert {answers.draw(1000, share, 999) for share in SHARES} == {1000}
    assert all(answers.draw(80, share, 80) > 80 for share in SHARES)


def test_where_the_true_lengths_are_known_they_stay_the_lengths():
    answers = learned((expected, expected) for expected in range(1, 500))
    assert all(answers.draw(expected, share) == expected for expected in (2, 60, 400) for share in SHARES[::8])


@pytest.mark.parametrize("reached", [0, 80, 200, 500])
def test_of_those_that_came_as_far_it_draws_lengths_as_they_turned_out(reached):
    pairs = off_by(0.9)
    answers, near = learned(pairs), [p for p in pairs if 128 <= p[0] < 256]
    beyond = [tokens * 150 / expected for expected, tokens in near if tokens * 150 / expected > reached]
    drawn = [answers.draw(150, share, reached) for share in SHARES]
    assert all(one > reached for one in drawn)
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(beyond), rel=0.15)
    assert statistics.median(drawn) == pytest.approx(statistics.median(beyond), rel=0.1)


def test_answers_of_another_length_have_their_own_spread():
    answers = learned([(20, 60)] * 200 + [(400, 200)] * 200)
    assert answers.draw(20, 0.5) > 50 and answers.draw(400, 0.5) < 260  # the ratio's bands are no finer


def test_what_is_new_counts_more_than_what_was():
    answers = learned([(100, 50)] * 4000 + [(100, 300)] * 4000)
    assert sum(answers.draw(100, share) > 250 for share in SHARES) > 120


def test_a_client_that_left_says_that_the_answer_was_longer():
    answers = learned([(100, 100)] * 50)
    for _ in range(200):
        answers.learn(100, 150, has_ended=False)
    assert sum(answers.draw(100, share) > 150 for share in SHARES) > 140


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 10**6)), max_size=30),
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.integers(0, 10**5),
)
def test_a_draw_is_longer_than_what_has_come_and_grows_with_its_share(pairs, expected, share, reached):
    answers = learned(pairs)
    low, high = answers.draw(expected, share / 2, reached), answers.draw(expected, share, reached)
    assert reached < low <= high


@pytest.mark.parametrize("expected", [1, 100, _BOUND, 2 * _BOUND])
@pytest.mark.parametrize("reached", [0, _BOUND - 1, _BOUND, 4 * _BOUND])
def test_beyond_the_bound_a_draw_is_still_longer_than_what_has_come(expected, reached):
    """Otherwise one step would be drawn without end."""
    for answers in (AnswerLengths(), learned([(2 * _BOUND, 10**8)] * 50)):
        assert all(answers.draw(expected, share, reached) > reached for share in (0.0, 0.5, 0.999, 1.0))


def test_a_look_ahead_draws_by_evenly_spread_shares_what_answers_hold_beyond_what_has_come():
    answers = learned(off_by(0.9))
    shares = [number * 0.6180339887498949 % 1.0 for number in range(4)]
    look, first = LookAhead(10**6, answers=answers), answers.draw(150, shares[1])
    look.add("a", 10, 150)
    assert look.tokens_left == first
    look.advance(5)
    look.begin("a")
    assert look.tokens_left == first, "the prefill draws no other"
    look.advance(15)
    look.expect("a", 300)
    drawn = answers.draw(300, shares[2], 10)
    assert look.tokens_left == drawn - 10
    look.advance(20)
    look.begin("a")
    assert look.tokens_left == drawn
    look.advance(20 + drawn)
    assert look.tokens_left == answers.draw(300, shares[3], drawn) - drawn
    assert look.tokens(look.now_step) == look.at_most(1) == 10 + drawn


def test_a_look_ahead_passes_the_bound():
    look = LookAhead(10**5, answers=AnswerLengths())
    look.add(1, 10, 100)
    look.begin(1)
    look.advance(_BOUND - 2)
    assert look.answers is not None and look.answers.draw(100, 0.5, _BOUND + 2) > _BOUND + 2, "else it would not end"
    look.advance(_BOUND + 2)
    assert look.tokens_left >= 1


def test_a_look_ahead_expects_of_medians_what_the_answers_will_hold():
    """64 requests expected at their median: 100 steps on, the paper's reading lacks a third."""
    answers, chance = learned(off_by(1.0)), Random(7)
    by_rule = {"learned": LookAhead(10**6, answers=answers), "printed": LookAhead(10**6)}
    running: list[tuple[int, int, int]] = []
    held, seen = [], {name: [] for name in by_rule}
    for step in range(6000):
        running = [one for one in running if one[1] > step]
        for look in by_rule.values():
            for ticket in set(look.ramps) - {one[0] for one in running}:
                look.end(ticket)
            look.advance(step)
        while len(running) < 64:
            expected = round(chance.lognormvariate(5.0, 0.5))
            length = max(1, round(expected * chance.lognormvariate(0.0, 1.0)))
            ticket = step * 100 + len(running)
            running.append((ticket, step + length, step))
            for look in by_rule.values():
                look.add(ticket, 100, expected)
        if step % 200 == 199 and step > 1000:
            held.append(sum(100 + step + 60 - began for _, end, began in running if end > step + 60))
            for name, look in by_rule.items():
                seen[name].append(look.tokens(step + 60))
    mean = {name: statistics.fmean(values) / statistics.fmean(held) for name, values in seen.items()}
    assert mean["learned"] == pytest.approx(1.0, abs=0.06)
    assert mean["printed"] < 0.8


def longer_than_each_edge(answers, expected):
    """The life table as printed, band by band: answers of this length lean on all, and these on the prior."""

    def ending(table, lean_on):
        reached = [sum(table.ended[at:]) + sum(table.left[at + 1 :]) for at in range(len(lean_on))]
        return [(table.ended[at] + 5 * lean_on[at]) / (reached[at] + 5) for at in range(len(lean_on))]

    every = ending(answers._all, _BEFORE)
    table = answers._tables.get(expected.bit_length())
    shares = every if table is None else ending(table, every)
    return np.array([1.0, *np.cumprod([max(1e-6, 1 - one) for one in shares])])


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40_000), st.booleans()), max_size=40),
    st.integers(1, 300),
    st.floats(0.01, 0.99),
    st.integers(0, 5000),
)
def test_a_draw_is_the_length_that_its_share_of_the_life_table_falls_short_of(answered, expected, share, reached):
    answers = AnswerLengths()
    for one, tokens, has_ended in answered:
        answers.learn(one, tokens, has_ended=has_ended)
    drawn, longer = answers.draw(expected, share, reached), longer_than_each_edge(answers, expected)
    table = answers._tables.get(expected.bit_length(), answers._all)
    assert table.curve == pytest.approx((-longer).tolist())
    if reached >= _EDGES[-1] * expected:
        assert drawn == max(reached + 1, 2 * reached)
        return
    wanted = np.interp(reached / expected, _EDGES, longer) * (1 - share)
    ratio = np.interp(-wanted, -longer, _EDGES)
    if 0.9801 < ratio < 1.0199 and reached < expected:
        assert drawn == expected
    elif not 0.9799 < ratio < 1.0201:
        assert drawn == max(reached + 1, round(min(ratio, _EDGES[-1]) * expected))


def test_answers_fall_into_the_band_of_their_ratio():
    """From each edge on; beyond the last, and below nothing, into the outermost."""
    for expected, tokens, band in (
        (100, 5, 1),
        (100, 4, 0),
        (100, -7, 0),
        (100, 9999, 23),
        (1, 500, 23),
        (0, 1, 9),
        (1, 0, 0),
    ):
        for has_ended in (True, False):
            answers = AnswerLengths()
            answers.learn(expected, tokens, has_ended=has_ended)
            table = answers._all
            assert (table.ended if has_ended else table.left)[band] == sum(table.ended) + sum(table.left) == 1.0


def test_a_curve_holds_until_there_is_a_fiftieth_more_and_one_answer():
    answers = learned([(100, 100)] * 50)
    answers.draw(100, 0.5)
    curve = answers._tables[7].curve
    for is_held in (True, False):  # 50 x 1.02 + 1 = 52
        answers.learn(100, 300)
        answers.draw(100, 0.5)
        assert (answers._tables[7].curve is curve) is is_held


def test_counts_are_halved_beyond_four_thousand_answers_of_any_kind():
    answers = learned([(100, 50)] * 3999)
    answers.learn(100, 50, has_ended=False)
    answers.draw(100, 0.5)
    assert answers._all.num == sum(answers._all.ended) + sum(answers._all.left) == 4000
    curve = answers._tables[7].curve
    answers.learn(100, 300)
    assert answers._all.num == sum(answers._all.ended) + sum(answers._all.left) == 2000.5
    answers.draw(100, 0.5)
    assert answers._tables[7].curve is not curve, "it is computed anew at once"


@pytest.mark.parametrize(
    ("expected", "reached", "tokens"),
    [(100, 10_000, 20_000), (1, 100, 200), (1, _BOUND, _BOUND + 1), (1, _BOUND // 2 + 9, _BOUND), (0, 200, 400)],
)
def test_beyond_the_last_band_an_answer_doubles_up_to_the_bound(expected, reached, tokens):
    assert AnswerLengths().draw(expected, 0.5, reached) == tokens


def test_who_outlives_all_bands_is_as_long_as_the_last_edge():
    answers = learned([(10, 5000)] * 200)
    assert answers.draw(10, 1.0, 200) == 1000 and answers.draw(10, 1.0, 999) == 1000
    outlives = learned([(10, 5000)] * 200)
    assert outlives.draw(10, 0.5, 600) == 800, "halfway"
    assert learned([(2**18, 2**30)] * 200).draw(2**18, 1.0) == _BOUND
