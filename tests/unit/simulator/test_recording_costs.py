"""Costs of steps and the pace of requests, read off a recorded fleet's answers."""

import pytest

from glowplug.simulator.recording_costs import Busy, Costs
from tests.unit.simulator.test_recording import request


def test_costs_are_read_off_streamed_requests() -> None:
    costs = Costs([request(number) for number in range(20)], 256)
    assert costs.tree["prefill_ms"] == pytest.approx([10, 0.5], rel=0.01)
    assert costs.tree["decode_ms"] == pytest.approx([20, 0], rel=0.01)
    assert costs.pace == []


def test_costs_are_read_off_whole_answers_where_nobody_streams() -> None:
    rows = []
    for number in range(20):
        e2e_s = 0.1 + 0.02 * (10 + number)
        rows.append(request(number, response_tokens=10 + number, ttft_s=e2e_s, e2e_s=e2e_s))
    costs = Costs(rows, 256)
    assert costs.tree["decode_ms"][0] == pytest.approx(20, rel=0.01)
    assert costs.tree["prefill_ms"][0] == pytest.approx(120, rel=0.05)
    assert costs.pace == []


def test_prompts_of_unknown_length_cost_the_same_each() -> None:
    costs = Costs([request(number, prompt_tokens=0) for number in range(20)], 256)
    assert costs.tree["prefill_ms"][1] == 0
    assert costs.tree["prefill_ms"][0] > 50


def test_without_a_request_there_are_costs_all_the_same() -> None:
    assert min(Costs([], 256).tree["decode_ms"][0], Costs([], 256).tree["prefill_ms"][0]) > 0


def test_a_step_is_dearer_beside_others() -> None:
    """30 ms alone, 40 ms beside one other: 20 ms and 10 ms for each of them."""
    rows = []
    for number in range(12):
        for twin in range(1 + number % 2):
            seconds = 0.3 if number % 2 == 0 else 0.4
            rows.append(request(10 * number, request_id=f"{number}-{twin}", ttft_s=0.05, e2e_s=0.05 + seconds))
    costs = Costs(rows, 256)
    assert costs.tree["decode_ms"] == pytest.approx([20, 10], rel=0.01)
    assert costs.pace == []


def test_the_mean_of_the_paces_is_kept_and_each_of_them() -> None:
    """The lower quartile of 10, 10, 10 and 50 ms was 10 ms: a replay was twice as fast as its recording."""
    rows = [request(10 * n, ttft_s=0.05, e2e_s=0.05 + (0.5 if n % 4 == 3 else 0.1)) for n in range(8)]
    costs = Costs(rows, 256)
    assert costs.tree["decode_ms"][0] == pytest.approx(20)
    assert [later for _, later in costs.pace] == pytest.approx([0.5, 0.5, 0.5, 2.5] * 2)


def test_requests_that_waited_for_others_tell_nothing_of_prefill() -> None:
    """Every second request comes while the one before is read, and waits 2 s for it."""
    rows = [request(100 * n + 10 * (n % 2), ttft_s=0.1 if n % 2 else 1.0, queue_s=0.0) for n in range(8)]
    busy = [request(100 * n + 0.1, request_id=f"b{n}", ttft_s=3.0, e2e_s=3.5, queue_s=0.0) for n in range(8)]
    costs = Costs([row for row in rows if row["ttft_s"] == 0.1] + busy + [request(100 * n) for n in range(8)], 256)
    assert costs.tree["prefill_ms"][0] + 105 * costs.tree["prefill_ms"][1] < 200


def test_how_many_ran_at_once_is_a_mean_over_time() -> None:
    busy = Busy([(0.0, 10.0), (5.0, 10.0), (20.0, 30.0)])
    assert busy.mean(0.0, 10.0) == 1.5
    assert busy.mean(5.0, 10.0) == 2.0
    assert busy.mean(10.0, 20.0) == 0.0
    assert busy.mean(0.0, 30.0) == pytest.approx(25 / 30)
