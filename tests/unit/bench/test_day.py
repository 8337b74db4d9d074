"""bench/day.py: the load it makes of a day, and what it reads from a recording."""

from random import Random

import pytest

from bench import day
from bench.measured.fleet import Ask, at

SERVICE = day.Service("m", "counts", 0, "lengths")


def finished(at_s: float, **fields: object) -> tuple[str, dict[str, object]]:
    given = {"arrived_at": at_s, "finished_at": at_s + 2.0, "status": 200, "error_code": "", "cold": False}
    return "request.finished", given | {"ttft_s": 0.5, "e2e_s": 2.0, "response_tokens": 16} | fields


def instance(kind: str, created_at: float, changed_at: float, **fields: object) -> tuple[str, dict[str, object]]:
    given = {"instance_id": "i-1", "created_at": created_at, "changed_at": changed_at, "replica": False}
    return f"instance.{kind}", {"instance": given | fields}


def test_a_squeezed_day_has_the_days_shape_and_the_wanted_rate() -> None:
    counts = [0] * 100 + [300] * 100 + [100] * 200
    asks = day.day_of(SERVICE, counts, [(160, 80)], 4000.0, 0.5, 1)
    by_quarter = [sum(1000.0 * n <= one.at_s < 1000.0 * (n + 1) for one in asks) for n in range(4)]
    assert by_quarter[0] == 0 and by_quarter[1] == pytest.approx(1200, rel=0.1)
    assert by_quarter[2:] == [pytest.approx(400, rel=0.15)] * 2
    assert [one.at_s for one in asks] == sorted(one.at_s for one in asks)
    assert {(len(one.prompt.split()), one.max_tokens) for one in asks} == {(10, 10)}
    assert asks == day.day_of(SERVICE, counts, [(160, 80)], 4000.0, 0.5, 1), "every system gets the same"
    assert list(day.times_of([0, 0], 10.0, 1.0, Random(1))) == []


def test_a_part_of_the_day_begins_at_its_own_nought() -> None:
    asks = [Ask(at_s, "m", "a", 2) for at_s in (0.0, 9.5, 10.0, 19.9, 20.0)]
    assert [one.at_s for one in day.part_of(asks, 1, 10.0)] == [0.0, pytest.approx(9.9)]


def test_misses_instances_and_starts_are_counted() -> None:
    seen = day.Seen()
    rows = [
        instance("starting", 90.0, 90.0),
        instance("ready", 90.0, 91.0),
        instance("prewarmed", 95.0, 96.0, instance_id="r-1", replica=True),
        finished(100.0, cold=True),
        finished(101.0, ttft_s=2.1),
        finished(102.0, e2e_s=0.5 + 15 * 0.21),
        finished(103.0, status=503, error_code="wait_timeout"),
        instance("stopped", 90.0, 104.0),
        instance("ready", 103.0, 104.0, instance_id="i-2"),
        finished(108.0),
    ]
    day.take(rows, seen)
    assert (seen.num_requests, seen.num_failed, seen.num_missed, seen.num_cold, seen.num_starts) == (5, 1, 3, 1, 2)
    assert seen.instance_s == pytest.approx((104 - 100) + (110 - 103)), "from the first request to the end of the last"
    assert len(seen.ttft) == len(seen.tpot) == 4
    assert "3 (60.0%)" in day.shown("union", seen)


def test_windows_are_squeezed_as_the_day_is() -> None:
    found = day.settings_of("union", 1200.0, day.ROOT)
    assert float(found["GLOWPLUG_WINDOW_S"]) == pytest.approx(600 / 72)
    assert found["GLOWPLUG_SEASON_S"] == "1200.0"


def test_a_percentile_is_the_nearest_rank() -> None:
    assert at([3.0, 1.0, 2.0], 0.5) == 2.0 and at([1.0], 0.99) == 1.0 and str(at([], 0.5)) == "nan"
