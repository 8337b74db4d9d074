"""`glowplug forecast`: past, open and future windows."""

import pytest

from glowplug.cli.forecast import capacity, horizons, rows, summary

W = 60.0


def point(number, value, **fields):
    band = [[0.1, value - 2], [0.9, value + 2]]
    given = {"metric": "requests", "target_at": number * W, "value": value, "quantiles": band, "made_at": 600.0}
    given |= {"error_ratio": 0.0}
    return given | fields


def came(number, num_requests):
    return {"started_at": number * W, "num_requests": num_requests, "concurrency_seconds": 6.0 * num_requests}


def test_closed_windows_the_open_one_and_those_to_come_stand_in_order():
    points = [point(n, 10.0) for n in (8, 9, 10, 11, 12)]
    windows = [came(n, 8) for n in range(6, 11)]
    found = rows(points, windows, W, "requests", 3, now_s=10.5 * W)
    assert [row[1:] for row in found] == [
        ("closed", "8", "-", "-", "-"),
        ("closed", "8", "10", "8 to 12", "25%"),
        ("closed", "8", "10", "8 to 12", "25%"),
        ("open, so far", "8", "10", "8 to 12", "-"),
        ("in 1", "-", "10", "8 to 12", "-"),
        ("in 2", "-", "10", "8 to 12", "-"),
    ]


def test_closed_windows_show_what_was_expected_so_many_windows_before():
    points = [point(9, 5.0, ahead=3), point(9, 10.0, ahead=1), point(10, 10.0, ahead=1), point(11, 7.0, ahead=2)]
    found = rows(points, [came(9, 8), came(10, 1)], W, "requests", 3, now_s=10.5 * W, ahead=3)
    assert [(row[1], row[3]) for row in found] == [("closed", "5"), ("open, so far", "10"), ("in 1", "7")]
    assert horizons(points, W, 10.5 * W) == [1, 3], "of those to come nothing is known yet"


def test_concurrency_is_a_mean_and_its_peak_no_end_of_the_band():
    points = [point(9, 1.0, metric="concurrency", quantiles=[[0.1, 0.5], [0.9, 1.5], [1.0, 9.0]])]
    ((_, state, value, expected, band, off), _) = rows(points, [came(9, 10)], W, "concurrency", 1, now_s=10 * W)
    assert (state, value, expected, band, off) == ("closed", "1", "1", "0.5 to 1.5", "0%")


@pytest.mark.parametrize(
    ("anomaly", "said"), [("missing", "missing: it counts as expected"), ("spike", "a spike: it was cut")]
)
def test_what_stands_above_says_how_far_how_good_and_what_was_wrong(anomaly, said):
    rated = point(10, 10.0, metric="concurrency", error_ratio=0.25)
    answer = {"policy": "combined", "horizons": {"m": 41.0}, "data": [point(10, 10.0), rated]}
    found = summary("m", answer, [point(10, 10.0, anomaly=anomaly)], W, 660.0)
    assert found["last window"] == said and found["a start takes"] == "41.0 s" and found["made"] == "60s ago"
    assert found["recent error"] == "25% of the actual concurrency"
    assert summary("m", {"policy": "none", "data": []}, [], W, 660.0)["forecast"] == "none yet"


@pytest.mark.parametrize(
    ("rates_from", "said"),
    [
        ("measured", "1560 prompt and 285 response tokens/s, measured in 34 windows"),
        ("declared", "1560 prompt and 285 response tokens/s, as declared"),
        ("", "not known yet: no instance has been busy for long enough"),
    ],
)
def test_what_an_instance_takes_stands_above_with_how_it_is_known(rates_from, said):
    takes = {"prompt_per_s": 1560.2, "response_per_s": 284.9, "rates_from": rates_from, "num_windows": 34}
    assert capacity(takes) == {"one instance takes": said}
    assert "not known" in capacity(None)["one instance takes"]
