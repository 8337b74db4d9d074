"""The host memory for sleeping engines, where no setting gives it."""

from pathlib import Path

import psutil

from glowplug.runtime.host_memory import least_limit, memory_bytes, sleepers_bytes


def test_it_is_a_quarter_of_the_memory() -> None:
    assert sleepers_bytes(24_000) == 6000


def test_the_least_limit_of_the_cgroups_above_counts(tmp_path: Path) -> None:
    pod = tmp_path / "pod" / "container"
    pod.mkdir(parents=True)
    (pod / "memory.max").write_text("max\n")
    (tmp_path / "pod" / "memory.max").write_text("5000\n")
    (tmp_path / "memory.max").write_text("9000\n")
    assert least_limit(pod, 10_000) == 5000
    assert least_limit(pod, 4000) == 4000
    assert least_limit(None, 10_000) == 10_000


def test_it_is_no_more_than_the_machine_has() -> None:
    assert 0 < memory_bytes() <= psutil.virtual_memory().total
