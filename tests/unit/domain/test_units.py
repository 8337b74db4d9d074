"""Sizes and durations as people write and read them."""

import pytest

from glowplug.domain.units import parse_bytes, parse_seconds, show_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1GiB", GIB),
        ("700MiB", 700 << 20),
        ("1.5GB", 1_500_000_000),
        ("512", 512),
        (" 2 g ", 2 * GIB),
        ("80 KiB", 81920),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 zib", "1e9", "nan", "1GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (700 << 20, "700 MiB")]
)
def test_sizes_shown(num_bytes: int, shown: str) -> None:
    assert show_bytes(num_bytes) == shown


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300.0), ("250ms", 0.25), ("-1", -1.0), ("1.5 H", 5400.0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "3 parsecs", "1e9", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_seconds(text)
