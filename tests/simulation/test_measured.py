"""Replays of a measured fleet. A recording's replay is the recording again: here of a simulated fleet with known costs,
none a default of the simulator."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.events.commands import StopInstance
from glowplug.events.facts import RequestFinished
from glowplug_lab.simulator.jobs import run_cases
from glowplug_lab.simulator.recording.read import read_recording
from glowplug_lab.simulator.recording.scenario import LIVE, scenario_of, write_arrivals
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.setup import Params, Setup, StartSeconds
from glowplug_lab.simulator.sweep import cases, variants
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World
from tests.simulation.test_mechanisms import COSTS, START, a_setup, ask, ready_s, start, state_of, workers_of
from tests.unit.simulator.scenarios import TINY, workload, write

SLOW, FAST = replace(START, launch_s=4.0), replace(START, launch_s=1.0)


def measured(setup: Setup, **fields: object) -> Setup:
    return replace(setup, models=(replace(setup.models[0], **fields),))  # type: ignore[arg-type]


def test_each_start_takes_what_the_start_before_it_in_the_recording_took_not_a_median() -> None:
    world = World(measured(a_setup(), starts=(SLOW, FAST)), [], check=True)
    for number in range(3):
        start(world, f"i{number}", at_s=20.0 * number, workers=workers_of(world.setup, first=number))
    world.run(60.0)
    took = [ready_s(world, f"i{number}") - 20.0 * number for number in range(3)]
    assert took == pytest.approx([4.0 + 1.5, 1.0 + 1.5, 4.0 + 1.5], abs=0.05)


def test_an_engine_loads_no_faster_than_it_was_seen_to() -> None:
    """16 GB over a lane of 16 GB/s, by an engine that takes 4 GB/s."""
    world = World(measured(a_setup(), starts=(replace(FAST, load_bytes_per_s=4e9),)), [], check=True)
    start(world, "i", workers=workers_of(world.setup))
    world.run(10.0)
    assert ready_s(world, "i") == pytest.approx(1.0 + 4.0 + 0.5, abs=0.05)


def test_a_swap_takes_what_that_swap_took_each_way() -> None:
    wake = StartSeconds(swap_base_s=0.0, swap_bytes_per_s=4e9, sleep_s=0.5)
    world = World(measured(a_setup(), wakes=(wake,)), [], check=True)
    start(world, "i", workers=workers_of(world.setup))
    stop = StopInstance(target="server-1", instance_id="i", reason="test", becomes="swapped_out")
    ask(world, stop, 10.0)
    seen: list[InstanceState] = []
    for at_s in (14.5, 16.0):  # 0.3 s of quiet, a tick, 0.5 s and 16 GB at 4 GB/s
        world.kernel.at(world.began_s + at_s, lambda: seen.append(state_of(world, "i")))
    start(world, "j", at_s=20.0, source="i", workers=workers_of(world.setup))
    world.run(30.0)
    assert seen == [InstanceState.DRAINING, InstanceState.SWAPPED_OUT]
    assert ready_s(world, "j") == pytest.approx(20.0 + 4.0, abs=0.05)


@pytest.mark.parametrize(("cores", "took_s"), [(0.0, 3.5), (1.0, 7.0), (2.0, 3.5)])
def test_starts_on_one_node_share_its_cores(cores: float, took_s: float) -> None:
    """2 s of launch, 1 s of load and 0.5 s of warm-up each, alone."""
    setup = a_setup()
    setup = replace(setup, servers=(replace(setup.servers[0], start_cores=cores),))
    world = World(setup, [], check=True)
    for number in range(2):
        start(world, f"i{number}", workers=workers_of(world.setup, first=number))
    world.run(20.0)
    assert [ready_s(world, f"i{number}") for number in range(2)] == pytest.approx([took_s] * 2, abs=0.05)


def test_each_request_is_as_slow_as_it_was_and_the_first_of_an_engine_slower_still() -> None:
    setup = a_setup()
    setup = measured(setup, pace=((1.0, 1.0), (3.0, 2.0)), starts=(replace(START, first_s=0.7),))
    world = World(setup, [Arrival(10.0, "m", 100, 11), Arrival(20.0, "m", 100, 11)], check=True)
    start(world, "i", workers=workers_of(setup))
    ended: list[RequestFinished] = []
    world.control.on_event.append(
        lambda event: ended.append(event.data) if isinstance(event.data, RequestFinished) else None
    )
    world.run(30.0)
    prefill_s = COSTS.prefill_s(100, 100 * 100)
    assert [one.ttft_s for one in ended] == pytest.approx([prefill_s + 0.7, 3 * prefill_s], abs=0.003)
    first, second = (one.e2e_s - one.ttft_s for one in ended)
    assert second == pytest.approx(2 * first, rel=0.02)


def reports(params: Params, arrivals: list[Arrival]) -> list[float]:
    world = World(replace(a_setup(), params=params), arrivals)
    found: list[tuple[str, float]] = []
    world.control.on_event.append(lambda event: found.append((event.type, event.occurred_at - world.began_s)))
    world.run(5.0)
    return [at_s for kind, at_s in found if kind == "router.load_reported" and at_s >= -1.0]


def test_the_router_reports_what_has_changed_as_a_live_one_does() -> None:
    """On change, 0.2 s after the last report at the soonest, and every 0.5 s: not in lockstep with the ticks."""
    found = reports(Params(), [Arrival(1.33, "m", 10, 2), Arrival(1.35, "m", 10, 2)])
    assert any(at_s == pytest.approx(1.33, abs=1e-6) for at_s in found)
    assert any(at_s == pytest.approx(1.53, abs=1e-6) for at_s in found)
    gaps = [after - at_s for at_s, after in pairwise(found)]
    assert min(gaps) >= 0.2 - 1e-6
    assert max(gaps) <= 0.5 + 1e-6


FIGURES = ("ttft_s_mean", "ttft_s_p50", "ttft_s_p95", "e2e_s_mean", "e2e_s_p50", "e2e_s_p95")
SWAPS = {"launch_s": 2.5, "warmup_s": 0.7, "swap_base_s": 0.0, "swap_bytes_per_s": 6e9, "overlap": False}


def a_run(tree: Any, folder: Path, out: Path) -> dict[str, Any]:
    todo = cases(dict(tree), folder, variants(()), (0,))
    (outcome,) = run_cases(todo, [out], 1)
    total: dict[str, Any] = outcome.numbers["total"]
    return total


@pytest.mark.parametrize("traffic", [{"rps": 0.6}, {"rps": 0.2}])
def test_a_fleet_that_swaps_is_replayed_as_it_was(tmp_path: Path, traffic: dict[str, float]) -> None:
    """It was 2 to 4.5 times off: the cost of a wake was a constant."""
    server = {**TINY["servers"][0], "num_gpus": 1, "weights_in_host": True, "abilities": ["swap"]}
    defaults = {**TINY["model_defaults"], "start": SWAPS, "kv_bytes": "8GB"}
    fleet = {"servers": [server], "model_defaults": defaults, "models": [{"name": "chat"}, {"name": "code"}]}
    fleet["params"] = {name: LIVE[name] for name in ("agent_tick_s", "agent")}  # a replay takes them to be a live one's
    scenario = load(write(tmp_path, seconds=240, policies="swapserve", workload=workload(**traffic), **fleet))
    recorded = a_run(scenario.tree, tmp_path, tmp_path / "recorded")
    found = read_recording(tmp_path / "recorded" / "events.jsonl")
    assert sum(len(one.wakes) for one in found.starts.by_model.values()) > 5
    write_arrivals(found, tmp_path / "arrivals.csv")
    replayed = a_run(scenario_of(found), tmp_path, tmp_path / "replayed")
    ratios = {name: replayed[name] / recorded[name] for name in FIGURES}
    assert all(0.8 < ratio < 1.2 for ratio in ratios.values()), ratios
