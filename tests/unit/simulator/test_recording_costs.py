"""Costs of steps and the pace of requests, read off a recorded fleet's answers."""

import pytest

from glowplug.simulator.recording.costs import Busy, Costs
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


def test_each_request_keeps_its_pace_and_so_does_the_mean() -> None:
    """The lower quartile of 10, 10, 10 and 50 ms was 10 ms: a replay was twice as fast as its recording."""
    rows = [request(10 * n, ttft_s=0.05, e2e_s=0.05 + (0.5 if n % 4 == 3 else 0.1)) for n in range(8)]
    costs = Costs(rows, 256)
    decode_ms = costs.tree["decode_ms"][0]
    assert [decode_ms * later for _, later in costs.pace] == pytest.approx([10, 10, 10, 50] * 2)


def test_every_request_has_a_pace_whatever_became_of_it() -> None:
    """The third of them failed, the fourth came whole after a stall: those behind them keep their own."""
    rows = [request(10 * n, ttft_s=0.05, e2e_s=0.05 + 0.1 * (n + 1), stream=True) for n in range(8)]
    rows[2] |= {"error_code": "engine_failed", "ttft_s": 0.0}
    rows[3] |= {"ttft_s": 1.4, "e2e_s": 1.401}
    costs = Costs(rows, 256)
    decode_ms = costs.tree["decode_ms"][0]
    assert [decode_ms * later for _, later in costs.pace[4:]] == pytest.approx([50, 60, 70, 80], rel=0.01)


def test_requests_that_waited_for_others_tell_nothing_of_prefill() -> None:
    """Of each pair the second comes while the prompt of the first is read, and its first token comes after 3 s."""
    alone = [request(10 * n, arrived_at=1000.0 + 100 * n) for n in range(8)]
    late = {"ttft_s": 3.0, "e2e_s": 3.5}
    pairs = [request(50, arrived_at=1050.0 + 100 * n + late_s, **(late if late_s else {}))
             for n in range(8) for late_s in (0.0, 0.02)]  # fmt: skip
    assert Costs([*alone, *pairs], 256).tree["prefill_ms"] == pytest.approx([10, 0.5], rel=0.01)


def test_how_many_ran_at_once_is_a_mean_over_time() -> None:
    busy = Busy([(0.0, 10.0), (5.0, 10.0), (20.0, 30.0)])
    assert busy.mean(0.0, 10.0) == 1.5
    assert busy.mean(5.0, 10.0) == 2.0
    assert busy.mean(10.0, 20.0) == 0.0
    assert busy.mean(0.0, 30.0) == pytest.approx(25 / 30)
