"""Stories outlive their console."""

import logging
from pathlib import Path

import pytest

from glowplug.events import Event
from glowplug.services.console.decisions import DecisionLog
from glowplug.services.console.stories import Stories, StoryDisk
from tests import console_story as fleet

COLD = fleet.cold_trace(3, 1000.0, "m", "r")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "console" / "stories.log"


def write(path: Path, *events: Event, max_bytes: int = 1 << 20) -> StoryDisk:
    disk = StoryDisk(path, max_bytes)
    for event in events:
        disk.keep(event)
    disk.write()
    return disk


def test_a_story_is_the_same_after_a_restart(path: Path) -> None:
    write(path, *COLD)
    decisions = DecisionLog()
    stories = Stories(10, decisions, {})
    for event in StoryDisk(path).read():
        decisions.take(event)
        stories.take(event)
    told = stories.of_request("r")
    assert told is not None and len(stories.rows(told)) == 12
    assert list(StoryDisk(path).read()) == COLD


def test_what_is_not_sampled_is_not_written(path: Path) -> None:
    unsampled = fleet.traceparent(4).removesuffix("01") + "00"
    write(path, fleet.fact(fleet.finished("r", "m", 1.0, 1.0), 2.0, 1, unsampled), COLD[-1])
    assert list(StoryDisk(path).read()) == [COLD[-1]]


def test_a_line_that_a_kill_has_cut_short_is_left_out_alone(path: Path) -> None:
    write(path, *COLD)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 30)
    write(path, COLD[0])
    assert list(StoryDisk(path).read()) == [*COLD[:-1], COLD[0]]


def test_the_files_lose_the_oldest_and_stay_in_their_bound(path: Path) -> None:
    for seed in range(200):
        write(path, *fleet.warm_trace(seed, 1000.0, "m", f"r-{seed}"), max_bytes=10_000)
    assert sum(file.stat().st_size for file in path.parent.iterdir()) < 22_000
    assert [request.request_id for event in StoryDisk(path).read() for request in event.data.requests][-1] == "r-199"


def test_a_place_that_cannot_be_written_costs_the_restart_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        disk = write(place / "stories.log", *COLD)
        disk.keep(COLD[0])
        disk.write()
    assert len(caplog.records) == 1 and "in memory only" in caplog.text
    assert list(disk.read()) == []


def test_a_file_that_somebody_has_deleted_is_begun_again(path: Path) -> None:
    disk = write(path, COLD[0])
    path.unlink()
    disk.keep(COLD[1])
    disk.write()
    assert list(StoryDisk(path).read()) == [COLD[1]]
