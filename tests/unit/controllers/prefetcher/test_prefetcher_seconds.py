"""mCache Eq. 1's P on a node: measured seconds, else the pace of what was measured."""

import pytest

from glowplug.controllers.prefetcher.seconds import FetchSeconds, SecondsParams


def test_the_measured_first_then_the_pace_of_its_source_then_a_guess() -> None:
    seconds = FetchSeconds(SecondsParams(newest=0.5, bytes_per_s=100.0))
    assert seconds.expected("a", 500) == pytest.approx(5.0)
    seconds.measured("a", 100, 4.0, "http")
    assert seconds.expected("a", 100) == pytest.approx(4.0)
    assert seconds.expected("a", 200) == pytest.approx(8.0), "its source gives 25 bytes a second"
    assert seconds.expected("b", 200) == pytest.approx(8.0)
    seconds.measured("a", 100, 2.0, "http")
    assert seconds.expected("a", 100) == pytest.approx(3.0)


def test_no_time_is_no_measurement_and_memory_is_bounded() -> None:
    seconds = FetchSeconds(SecondsParams(max_digests=2, bytes_per_s=100.0))
    seconds.measured("a", 100, 0.0, "file")
    assert seconds.expected("a", 100) == pytest.approx(1.0)
    for at, name in enumerate("abc"):
        seconds.measured(name, 100, 1.0 + at, "file")
    assert seconds.expected("c", 100) == pytest.approx(3.0)
    assert seconds.expected("a", 100) == seconds.expected("unseen", 100) != pytest.approx(1.0)
