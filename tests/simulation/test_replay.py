"""A replay of a recording is the recording again: here of a simulated fleet whose every cost is known, and is no
default of the simulator."""

from pathlib import Path
from typing import Any

import pytest

from glowplug.simulator.jobs import run_cases
from glowplug.simulator.recording.read import read_recording
from glowplug.simulator.recording.scenario import scenario_of, write_arrivals
from glowplug.simulator.scenario.load import load
from glowplug.simulator.sweep import cases, variants
from tests.unit.simulator.scenarios import TINY, workload, write

FIGURES = ("ttft_s_mean", "ttft_s_p50", "ttft_s_p95", "e2e_s_mean", "e2e_s_p50", "e2e_s_p95")
START = {"launch_s": 2.5, "warmup_s": 0.7, "swap_base_s": 0.0, "swap_bytes_per_s": 6e9, "overlap": False}


def a_run(tree: Any, folder: Path, out: Path) -> dict[str, Any]:
    todo = cases(dict(tree), folder, variants(()), (0,))
    (outcome,) = run_cases(todo, [out], 1)
    total: dict[str, Any] = outcome.numbers["total"]
    return total


@pytest.mark.parametrize("traffic", [{"rps": 0.6}, {"rps": 0.2}])
def test_a_fleet_that_swaps_is_replayed_as_it_was(tmp_path: Path, traffic: dict[str, float]) -> None:
    """It was 2 to 4.5 times off wherever models swapped: what a wake cost was a constant."""
    server = {**TINY["servers"][0], "num_gpus": 1, "weights_in_host": True, "abilities": ["swap"]}
    defaults = {**TINY["model_defaults"], "start": START, "kv_bytes": "8GB"}
    scenario = load(
        write(
            tmp_path,
            seconds=240,
            servers=[server],
            model_defaults=defaults,
            models=[{"name": "chat"}, {"name": "code"}],
            policies="swapserve",
            workload=workload(**traffic),
        )
    )
    recorded = a_run(scenario.tree, tmp_path, tmp_path / "recorded")
    found = read_recording(tmp_path / "recorded" / "events.jsonl")
    assert sum(len(one.wakes) for one in found.starts.by_model.values()) > 5
    write_arrivals(found, tmp_path / "arrivals.csv")
    replayed = a_run(scenario_of(found), tmp_path, tmp_path / "replayed")
    ratios = {name: replayed[name] / recorded[name] for name in FIGURES}
    assert all(0.8 < ratio < 1.2 for ratio in ratios.values()), ratios
