"""The load of a node's cores."""

import os
from pathlib import Path

from glowplug.services.agent.cores import NUM_SAMPLES, CoresWatch, num_cores


def test_the_mean_of_the_last_seconds_leaves_out_who_counts(tmp_path: Path) -> None:
    load = tmp_path / "loadavg"
    watch = CoresWatch(load)
    watch.sample()
    assert watch.num_runnable == 0.0, "unknown"
    for num in (9, 3, 3, 4):
        load.write_text(f"0.10 0.20 0.30 {num}/99 1\n")
        for _ in range(NUM_SAMPLES // 4 if num < 9 else NUM_SAMPLES):
            watch.sample()
    assert watch.num_runnable == 3.75, "a fourth of 8, 2, 2 and 3"
    load.write_text("nothing")
    watch.sample()
    assert watch.num_runnable == 0.0


def test_cores_are_those_of_the_process_or_fewer_by_its_quota(tmp_path: Path) -> None:
    quota, allowed = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    assert num_cores(quota) == allowed
    for text, num in (("50000 100000\n", 0.5), ("max 100000\n", allowed), ("9900000 100000\n", allowed)):
        quota.write_text(text)
        assert num_cores(quota) == num
