"""Recordings of live fleets (`tests/data/recordings`) against the simulator's replay of the same requests.

`bands.json` there holds the ratio of replayed to recorded time to first token (`today`: the furthest from 1 of four
replays, whose bus took 4 to 13 ms), and its allowed band: the `aim`, extended to a tenth beyond today.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import pytest

from glowplug_lab.simulator.jobs import run_cases
from glowplug_lab.simulator.recording.read import Recording, read_recording
from glowplug_lab.simulator.recording.scenario import ARRIVALS, scenario_of, write_arrivals
from glowplug_lab.simulator.sweep import cases, variants

RECORDINGS: Final = Path(__file__).parents[1] / "data" / "recordings"
BANDS: Final[dict[str, Any]] = json.loads((RECORDINGS / "bands.json").read_text(encoding="utf-8"))
MARGIN: Final = 1.1


def figures(ttft_s: Sequence[float]) -> dict[str, float]:
    """By nearest rank, in seconds."""
    ordered = sorted(ttft_s)
    named = {f"p{percent}": ordered[percent * len(ordered) // 100] for percent in (50, 90, 99)}
    return {"mean": fmean(ordered), **named}


def recorded(name: str) -> Recording:
    return read_recording(RECORDINGS / f"{name}.jsonl.gz")


def answered(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["ttft_s"] for row in rows if not row.get("error_code")]


def band(today: float) -> tuple[float, float]:
    """The aim, extended to the current ratio plus a tenth."""
    low, high = BANDS["aim"]
    return min(low, round(today / MARGIN, 2)), max(high, round(today * MARGIN, 2))


@pytest.mark.parametrize("name", sorted(BANDS["recordings"]))
def test_a_replay_is_no_further_from_its_recording_than_it_was(name: str, tmp_path: Path) -> None:
    recording = recorded(name)
    write_arrivals(recording, tmp_path / ARRIVALS)
    run_cases(cases(scenario_of(recording), tmp_path, variants(()), (0,)), [tmp_path / "run"], 1)
    lines = (tmp_path / "run" / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    replayed = answered([json.loads(line) for line in lines])
    live = answered(recording.finished)
    assert len(replayed) == len(live)
    ratios = {figure: value / figures(live)[figure] for figure, value in figures(replayed).items()}
    kept, (low, high) = BANDS["recordings"][name], BANDS["aim"]
    for figure, ratio in ratios.items():
        reached = low <= ratio <= high and not low <= kept[figure]["today"] <= high
        note = "; it reaches the aim: narrow the band if it stays so" if reached else ""
        print(f"{name}: {figure} replayed over recorded {ratio:.2f}, may be {kept[figure]['band']}{note}")
    outside = {figure: round(ratio, 3) for figure, ratio in ratios.items()
               if not kept[figure]["band"][0] <= ratio <= kept[figure]["band"][1]}  # fmt: skip
    assert not outside, f"{name}: outside its band: {outside}"


def test_each_band_is_the_aim_widened_to_where_the_simulator_stood() -> None:
    for name, kept in BANDS["recordings"].items():
        for figure, row in kept.items():
            assert tuple(row["band"]) == band(row["today"]), (name, figure)


def test_two_live_runs_of_one_load_are_further_apart_than_a_replay_should_be() -> None:
    """Why the aim is no narrower: the same requests on the same machine, twice within five minutes."""
    first, second = (figures(answered(recorded(name).finished)) for name in ("union_1", "union_2"))
    apart = {figure: second[figure] / first[figure] for figure in first}
    print("the second live run over the first:", {figure: round(ratio, 2) for figure, ratio in apart.items()})
    assert min(apart.values()) < BANDS["aim"][0]
