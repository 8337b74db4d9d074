"""How bench/soak.py judges its samples."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.soak import DISK_BYTES, DONE, FILES, LIMITS, MIB, USS, Soak, slope

MINUTES = 60


def recorded(tmp_path: Path, *values: Callable[[int], Any], **fields: Any) -> Soak:
    """An hour of samples, one a minute."""
    told = {"ends": {DONE: 1}, "lost": [], "skipped": 0, "load": 1.0} | fields
    rows = [
        {"at_s": 60.0 * minute, "values": [value(minute) for value in values], **told} for minute in range(MINUTES + 1)
    ]
    path = tmp_path / "samples"
    path.write_text("\n".join(map(json.dumps, [*rows, {"killed": "nats", "whole_again_s": 1.0}])))
    return Soak.read(path)


def test_the_slope_is_deaf_to_a_spike_and_a_step() -> None:
    assert slope([(t, 10.0 * t) for t in range(20)]) == 10.0
    assert slope([(t, 1e9 if t == 7 else 5.0) for t in range(20)]) == 0.0
    assert slope([(t, 100.0 * (t > 15)) for t in range(20)]) == 0.0


@pytest.mark.parametrize(
    ("value", "is_fault"),
    [
        pytest.param(lambda minute: (USS, "router-1", 1, 80 * MIB + minute * 0.1 * MIB), True, id="a leak"),
        pytest.param(lambda minute: (USS, "router-1", 1, min(minute, 30) * MIB), False, id="one that ends"),
        pytest.param(lambda minute: (USS, "agent-1", minute // 12, minute % 12 * MIB), False, id="killed at times"),
        pytest.param(lambda minute: (FILES, "router-1", 1, minute), True, id="files"),
        pytest.param(lambda minute: (DISK_BYTES, "logs", 0, minute * 300_000), True, id="logs"),
        pytest.param(lambda minute: ("bytes", next(iter(LIMITS)), 0, 1 << 40), True, id="a stream over its limit"),
    ],
)
def test_growth_within_the_second_half_is_a_fault(tmp_path: Path, value: Callable[[int], Any], is_fault: bool) -> None:
    assert bool(recorded(tmp_path, value).faults()) == is_fault


def test_a_lost_request_is_a_fault_and_every_series_is_in_the_tables(tmp_path: Path) -> None:
    seen = recorded(
        tmp_path,
        lambda minute: (USS, "router-1", 1, 80 * MIB),
        lambda minute: (USS, "agent-1", minute // 12, MIB),
        lambda minute: ("rows", "instances", 0, 7),
        lost=["cut after 1 s"],
    )
    assert seen.faults() == ["a request was lost: cut after 1 s"]
    text = seen.tables()
    assert "| router-1 | 80.0 | 80.0 | +0.0 |" in text and "| agent-1 | killed |" in text
    assert "| rows of instances | 7 | 7 | +0 |" in text and "1 kills: nats (1.0 s)" in text
