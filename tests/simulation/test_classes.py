"""An interactive and a batch tenant on two models; memory holds one at a time."""

from dataclasses import replace
from pathlib import Path

import pytest

from glowplug.domain.access import Priority
from glowplug_lab.simulator.results import Results
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

SCENARIO = Path(__file__).parents[2] / "scenarios" / "classes.yaml"
PEOPLE, NIGHTLY = "people", "nightly"


def run(seed: int, seconds: str, *, without: str = "", alike: bool = False) -> Results:
    made = load(SCENARIO, [f"seconds={seconds}"])
    setup, arrivals = made.setup, [one for one in made.arrivals(seed) if one.tenant != without]
    if alike:
        setup = replace(setup, tenants=tuple(replace(one, priority=Priority.STANDARD) for one in setup.tenants))
    return World(setup, arrivals, check=not (without or alike), label=f"classes seed {seed}").run(
        made.seconds, drain_s=1200.0
    )


@pytest.mark.parametrize(("seed", "seconds"), [(0, "15m"), pytest.param(1, "30m", marks=pytest.mark.long)])
def test_batch_fills_idle_memory_and_hardly_delays_an_interactive_tenant(seed: int, seconds: str):
    alone, beside, alike = run(seed, seconds, without=NIGHTLY), run(seed, seconds), run(seed, seconds, alike=True)
    of = {name: one.by_tenant[PEOPLE].ttft.at(0.95) for name, one in (("alone", alone), ("alike", alike))}
    p95_s = beside.by_tenant[PEOPLE].ttft.at(0.95)
    assert p95_s <= of["alone"] + 2.0, "a start, and the moment in which batch gives way"
    assert p95_s < of["alike"] / 2, "as standard requests the batch would have had its turns"
    assert beside.by_tenant[PEOPLE].num_finished == beside.by_tenant[PEOPLE].num_arrived
    batch = beside.by_tenant[NIGHTLY]
    assert batch.num_finished >= 0.85 * batch.num_arrived


def test_batch_has_its_turn_though_the_other_model_is_never_idle():
    made = load(SCENARIO, ["seconds=900", "model_defaults.max_wait_s=4m"])
    steady = [arrival(at, "chat", PEOPLE) for at in range(0, 900, 2)]
    some = [arrival(at + 0.5, "digest", NIGHTLY) for at in range(60, 600, 60)]
    world = World(
        made.setup, sorted([*steady, *some], key=lambda one: one.at_s), check=True, label="classes, never idle"
    )
    batch = world.run(900.0, drain_s=600.0).by_tenant[NIGHTLY]
    assert batch.num_finished == batch.num_arrived == len(some)


def arrival(at_s: float, model: str, tenant: str) -> Arrival:
    return Arrival(float(at_s), model, 100, 20, tenant=tenant)
