"""Throughput of one instance (PreServe section 4.1, mu)."""

import math
from dataclasses import replace
from random import Random

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.fleet.throughput import (
    DECLARED,
    MEASURED,
    Capacity,
    CapacityParams,
    InstanceWindow,
    Served,
    Throughput,
    used_share,
)
from tests.fleet_builder import an_instance

PROMPT, ANSWER, ALONE_S, PER_REQUEST = 1000, 200, 0.03, 0.5  # a request a second adds half a step's time
MOST_PER_S = (1 - 1 / 3) / PER_REQUEST  # a step takes three times its time alone
ROW = an_instance(ready_at=1.0, max_concurrency=256, kv_tokens=1_000_000, step_s=ALONE_S)
PROFILE = Capacity(prompt_per_s=1.0, response_per_s=2.0, total_per_s=3.0)


def busy(made, rate, first, num, *, instance_id="i-1", per_request=PER_REQUEST, seed=1, row=ROW):
    """`num` minutes from `first` on at `rate` requests a second; a step slows with load."""
    chance, at_s = Random(f"{seed}/{rate}/{first}"), 60.0 * first
    step_s = ALONE_S / (1 - per_request * rate)
    while (at_s := at_s + chance.expovariate(rate)) < 60.0 * (first + num):
        answer = 2 + round(chance.expovariate(1 / (ANSWER - 2)))
        first_at = at_s + 0.3
        ended_at = first_at + (answer - 1) * step_s
        made.add(Served(instance_id, at_s, first_at, ended_at, PROMPT, answer))
        made.close(at_s, {"i-1": row, "i-2": replace(row, instance_id="i-2")}, {})


def closed(made, minute, row=ROW):
    made.close(60.0 * (minute + 5), {"i-1": row, "i-2": replace(row, instance_id="i-2")}, {})
    return made


@pytest.mark.parametrize("rates", [(0.8, 0.9, 1.0), (1.0, 1.3), (1.3, 1.5)])
def test_it_converges_to_what_the_objective_allows_whether_less_or_more_was_asked(rates):
    made = Throughput()
    for number, rate in enumerate(rates):
        busy(made, rate, 1 + 20 * number, 20)
    mu = closed(made, 61).capacity
    assert made.source == MEASURED
    assert mu.response_per_s == pytest.approx(MOST_PER_S * ANSWER, rel=0.08)
    assert mu.prompt_per_s == pytest.approx(MOST_PER_S * PROMPT, rel=0.08)
    assert mu.total_per_s == pytest.approx(mu.prompt_per_s + mu.response_per_s)


def test_it_does_not_grow_with_the_number_of_lucky_windows():
    few, many = Throughput(), Throughput()
    for made, minutes in ((few, 20), (many, 200)):
        for minute in range(1, minutes):
            busy(made, 1.2, minute, 1, seed=minute)
        closed(made, minutes)
    assert many.capacity.total_per_s == pytest.approx(few.capacity.total_per_s, rel=0.06)


def test_it_follows_an_engine_that_becomes_slower():
    made = Throughput()
    busy(made, 1.0, 1, 60)
    before = closed(made, 61).capacity.response_per_s
    busy(made, 1.0, 70, 120, per_request=0.8)
    assert closed(made, 190).capacity.response_per_s == pytest.approx(before * 0.5 / 0.8, rel=0.12)


def test_before_the_first_clean_window_the_declared_value_stands_and_says_so():
    made = Throughput(declared=PROFILE)
    assert (made.capacity, made.source) == (PROFILE, DECLARED)
    busy(made, 0.2, 1, 60)  # too little to do
    closed(made, 61)
    assert (made.capacity, made.source, made.num_windows) == (PROFILE, DECLARED, 0)
    assert (Throughput().capacity, Throughput().source) == (Capacity(), "")
    busy(made, 1.2, 70, 5)
    assert closed(made, 75).source == MEASURED and made.capacity.response_per_s > 100


@pytest.mark.parametrize(
    ("row", "unsteady_at"),
    [
        (replace(ROW, ready_at=10_000.0), {}),
        (replace(ROW, state=InstanceState.DRAINING), {}),
        (ROW, {"i-1": 10_000.0}),
        (replace(ROW, num_stages=2), {}),
        (None, {}),
    ],
    ids=["still starting", "draining", "taken back from a drain", "a pipeline", "gone"],
)
def test_who_starts_drains_or_is_gone_shows_nothing(row, unsteady_at):
    made = Throughput()
    for number in range(200):
        made.add(Served("i-1", 60.0 + number / 2, 60.3 + number / 2, 70.0 + number / 2, PROMPT, ANSWER))
    made.close(1000.0, {"i-1": row} if row else {}, unsteady_at)
    assert made.num_windows == 0 and made.source == ""


def test_each_instance_counts_by_itself_and_an_idle_one_takes_nothing_away():
    alone, beside = Throughput(), Throughput()
    for made in (alone, beside):
        busy(made, 1.2, 1, 20)
    busy(beside, 0.05, 1, 20, instance_id="i-2")
    assert closed(alone, 21).capacity == closed(beside, 21).capacity


def window(**fields):
    given = {"prompt_tokens": 1, "response_tokens": 1, "num_steps": 100.0, "step_s": 100 * ALONE_S, "num_ended": 100}
    given |= {"running_s": 60 * 10.0} if fields.get("step_s") else {}
    return InstanceWindow(**(given | fields))


@pytest.mark.parametrize(
    ("fields", "row", "slo", "used"),
    [
        ({}, {}, {}, 0.0),
        ({"step_s": 100 * ALONE_S * 3}, {}, {}, 1.0),  # section 5.1: three times as long as alone
        ({"step_s": 100 * ALONE_S * 2}, {}, {"tpot_s": 0.3}, 0.5 / 0.9),
        ({"step_s": 100 * ALONE_S * 2}, {}, {"tpot_s": 0.04}, 2.0),
        ({"step_s": 100 * ALONE_S * 2, "running_s": 60 * 0.25}, {}, {}, 0.3),  # its neighbours slow it
        ({"running_s": 60 * 2.0}, {"max_concurrency": 4}, {}, 0.5 / 0.8),  # the engine's slots
        ({"kv_token_s": 60 * 400.0}, {"kv_tokens": 500}, {}, 1.0),  # T_mem
        ({"kv_token_s": 60 * 4000.0}, {"kv_tokens": 500}, {}, 1.25),  # most of it waits
        ({"step_s": 100 * ALONE_S * 2, "running_s": 60 * 2.0}, {"max_concurrency": 4}, {}, 0.5 + 0.5 * 0.5 / 0.8),
        ({"step_s": 100 * ALONE_S * 2, "num_missed": 5}, {}, {"ttft_s": 1.0}, 0.75),
        ({"step_s": 100 * ALONE_S * 2, "num_missed": 6}, {}, {"ttft_s": 1.0}, 1.0),
        ({"step_s": 100 * ALONE_S * 2, "num_missed": 6}, {}, {}, 0.75),  # no objective, none missed
        ({"step_s": 100 * ALONE_S * 2, "num_missed": 6}, {}, {"tpot_s": 0.3}, 1.0),
        ({"step_s": 100 * ALONE_S * 2, "num_missed": 6}, {}, {"tpot_s": 0.04}, 2.0),
        ({"num_missed": 100}, {}, {"ttft_s": 1.0}, 0.0),  # next to nothing to do
        ({"running_s": 60 * 0.4}, {"max_concurrency": 1}, {}, 0.5),
        ({"running_s": 60 * 0.4}, {"max_concurrency": 0}, {}, 0.5),
    ],
)
def test_the_share_in_use_is_of_the_objective_the_cache_or_the_slots_whichever_is_nearest(fields, row, slo, used):
    given = replace(ROW, **row)
    found = used_share(window(**fields), given, ALONE_S, Slo(**slo), CapacityParams())
    assert found == pytest.approx(used)


def test_a_window_at_each_of_its_limits():
    params = CapacityParams(clean_share=0.75, full_ratio=1.0, busy_ratio=0.5)
    half, slo = {"running_s": 60 * 2.0, "num_ended": 4}, Slo(ttft_s=1.0)
    row = replace(ROW, max_concurrency=4)
    assert used_share(window(**half, num_missed=1), row, ALONE_S, slo, params) == 0.5
    assert used_share(window(**half, num_missed=2), row, ALONE_S, slo, params) == 1.0, "half used is busy"
    assert used_share(window(**half, step_s=9.0), row, 0.0, Slo(), params) == 0.5, "no step alone is known"


def test_an_engine_that_says_no_step_is_held_to_the_shortest_it_has_shown():
    silent, made = replace(ROW, step_s=0.0), Throughput()
    busy(made, 0.1, 1, 5, row=silent)
    busy(made, 1.2, 10, 20, row=silent)
    mu = closed(made, 30, silent).capacity
    assert mu.response_per_s == pytest.approx(MOST_PER_S * ANSWER, rel=0.15)


def test_answers_that_are_no_streams_count_with_their_tokens_but_show_no_steps():
    made = InstanceWindow()
    made.add(Served("i-1", 0.0, 5.0, 5.001, 10, 101), 0.0, 60.0)
    assert (made.prompt_tokens, made.response_tokens, made.num_steps) == (10, 101, 0)
    assert made.tau_s == 0.0 and made.num_ended == 1


@pytest.mark.parametrize("took_s", [100.0, 600.0])
def test_a_long_answer_does_not_lose_its_prompt(took_s):
    made = Throughput(CapacityParams(busy_ratio=0.0, enough_s=0.0))
    made.add(Served("i-1", 61.0, 62.0, 62.0 + took_s, 1000, 1001))
    mu = closed(made, 20).capacity
    assert made.source == MEASURED and mu.prompt_per_s * made.used_s > 900


@pytest.mark.parametrize("took_s", [0.05, 0.0005], ids=["no stream", "a short one"])
def test_one_quick_answer_does_not_make_an_idle_instance_look_full(took_s):
    silent, made = replace(ROW, step_s=0.0), Throughput()
    made.add(Served("i-1", 61.0, 61.3, 61.3 + took_s, 10, 101 if took_s > 0.01 else 2))
    busy(made, 0.1, 2, 60, row=silent)
    closed(made, 62, silent)
    assert (made.num_windows, made.source) == (0, "")


def test_an_answer_over_two_windows_counts_in_each_for_its_part():
    first, second = InstanceWindow(), InstanceWindow()
    one = Served("i-1", 50.0, 55.0, 65.0, 10, 101)
    first.add(one, 0.0, 60.0)
    second.add(one, 60.0, 120.0)
    assert (first.response_tokens, second.response_tokens) == (51.0, 50.0)
    assert (first.running_s, second.running_s, first.prompt_tokens, second.prompt_tokens) == (10.0, 5.0, 10, 0)
    assert first.kv_token_s == pytest.approx(10 * 10 + 5 * 25) and second.kv_token_s == pytest.approx(10 * 5 + 5 * 75)
    assert (first.num_ended, second.num_ended) == (0, 1)


@pytest.mark.parametrize(
    ("first_at", "ended_at", "response", "counted"),
    [
        (60.0, 120.0, 61, (10, 61, 60, 60, 0)),
        (59.0, 60.0, 2, (0, 0, 0, 0, 1)),
        (110.0, 130.0, 41, (10, 21, 20, 10, 0)),
        (120.0, 130.0, 11, (0, 0, 0, 0, 0)),
        (119.5, 119.5, 1, (10, 1, 0, 0, 1)),
        (70.0, 80.0, 0, (10, 0, 0, 0, 1)),
        (70.0, 71.0, 2, (10, 2, 1, 1, 1)),
        (70.0, 65.0, 5, (10, 1, 0, 0, 1)),
        (70.0, 70.0, 5, (10, 5, 0, 0, 1)),
        (70.0, 70.05, 101, (10, 101, 0, 0, 1)),
        (59.99, 60.04, 101, (0, 0, 0, 0, 1)),
        (60.0, 60.05, 101, (10, 101, 0, 0, 1)),
        (120.0, 120.05, 101, (0, 0, 0, 0, 0)),
        (70.0, 71.0, 1001, (10, 1001, 1000, 1, 1)),
    ],
)
def test_a_window_counts_what_happens_from_its_begin_to_before_its_end(first_at, ended_at, response, counted):
    made = InstanceWindow()
    made.add(Served("i-1", 50.0, first_at, ended_at, 10, response, missed=True), 60.0, 120.0)
    assert counted == (made.prompt_tokens, made.response_tokens, made.num_steps, made.step_s, made.num_ended)
    assert made.num_missed == made.num_ended and made.tau_s == (made.step_s / made.num_steps if counted[2] else 0)


ALL = CapacityParams(busy_ratio=0.0, enough_s=0.0, memory_s=1e18)  # each window counts, and none is forgotten


def totals(made):
    return made.num_windows, *(round(tokens, 6) for tokens in made._tokens)


def test_an_answer_counts_in_the_open_windows_of_late_and_its_prompt_in_the_first():
    made = Throughput(ALL)
    made.add(Served("i-1", 180.0, 181.0, 601.0, 1000, 421))
    assert totals(closed(made, 10)) == (3, 1000, 121)
    made.add(Served("i-1", 659.0, 660.0, 670.0, 1000, 11))
    assert totals(closed(made, 20)) == (4, 2000, 132), "its first window is closed, and its prompt came in the second"
    made.add(Served("i-1", 1259.0, 1260.0, 1270.0, 1000, 11))
    assert totals(closed(made, 30)) == (6, 3000, 143)


def test_a_window_is_read_once_answers_that_end_late_have_come():
    made, rows = Throughput(ALL), {"i-1": ROW}
    made.add(Served("i-1", 61.0, 62.0, 70.0, 10, 9))
    assert not made.close(239.0, rows, {}) and made.num_windows == 0
    assert made.close(240.0, rows, {}) and made.num_windows == 1
    assert not made.close(999.0, rows, {})


@pytest.mark.parametrize(
    ("fields", "unsteady_at", "counts"),
    [
        ({"ready_at": 60.0}, 59.0, True),
        ({"ready_at": 60.5}, 0.0, False),
        ({"ready_at": 0.0}, 0.0, False),
        ({"ready_at": 0.5}, 60.0, False),
        ({"consolidating": True}, 0.0, False),
    ],
)
def test_who_was_ready_all_through_a_window_shows_it(fields, unsteady_at, counts):
    made = Throughput(ALL)
    made.add(Served("i-1", 61.0, 62.0, 70.0, 10, 9))
    made.close(999.0, {"i-1": replace(ROW, **fields)}, {"i-1": unsteady_at})
    assert made.num_windows == counts


def test_windows_weigh_less_with_the_used_time_after_them():
    made = Throughput(CapacityParams(full_ratio=1.0, busy_ratio=0.5, enough_s=60.0, memory_s=60.0), PROFILE)
    row = replace(ROW, max_concurrency=2, kv_tokens=0)
    made.add(Served("i-1", 60.0, 120.0, 120.0, 100, 1))
    assert closed(made, 2, row).used_s == 30.0, "half of its slots"
    assert made.source == DECLARED
    made.params = replace(made.params, enough_s=30.0)
    assert made.source == MEASURED
    made.params = replace(made.params, enough_s=60.0)
    made.add(Served("i-1", 1200.0, 1259.0, 1260.0, 100, 1))
    assert closed(made, 21, row).used_s == pytest.approx(30 * math.exp(-0.5) + 30)
    assert made.source == DECLARED and made._tokens == (pytest.approx(100), pytest.approx(1))
    for minute in range(30, 40):
        made.add(Served("i-1", 60.0 * minute, 60.0 * minute + 1, 60.0 * minute + 60, 100, 1))
    used_s = closed(made, 41, row).used_s
    assert made.source == MEASURED and made.capacity.prompt_per_s == pytest.approx(made._tokens[0] / used_s)
