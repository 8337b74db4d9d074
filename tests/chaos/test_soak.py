"""bench/soak.py: under mixed load and kills no stream is cut, and nothing that a fleet keeps grows with time.

Lane: system (a minute, too short to judge growth); long (an hour; `SOAK_S=300` makes it shorter).
"""

import os
from pathlib import Path
from typing import Final

import pytest

from bench import soak

SOAK_S: Final = float(os.environ.get("SOAK_S", "3600"))
pytestmark = [pytest.mark.fleet, pytest.mark.llamacpp]


@pytest.mark.timeout(600)
def test_a_minute_in_which_no_request_is_lost_but_with_its_router(tmp_path: Path) -> None:
    seen = soak.run(tmp_path, 60.0, 1.0, tmp_path / "samples.jsonl")
    assert not seen.lost
    assert seen.ends[soak.DONE] and seen.killed
    assert {kind for kind, _ in seen.seen} >= {*soak.SLACK, soak.BUS, soak.DISK_BYTES}


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 1200)
def test_nothing_grows_with_time_and_no_request_is_lost(tmp_path: Path) -> None:
    seen = soak.run(tmp_path, SOAK_S, 1.0, tmp_path / "samples.jsonl")
    print(seen.tables())
    assert not seen.faults()
