"""Fleets whose machines' clocks are apart: everybody is answered as if they were alike."""

from random import Random

import pytest

from glowplug.controllers.agent.messages import AgentParams
from glowplug.events import Event
from glowplug.events.facts import NodeLeft
from glowplug_lab.simulator.clocks import Apart
from tests.simulation.chaos import Fleet
from tests.simulation.seeds import seeds

MACHINES = ("router", "autoscaler", "placer", "predictor", "node-1", "node-2")
OFF_S = (0.0, 5.0, 20.0, 600.0, 3600.0)
LATE_S = 1.0  # two ticks: the runs' delays differ


def apart(chance: Random) -> Apart:
    return Apart({name: chance.choice((-1.0, 1.0)) * chance.choice(OFF_S) for name in MACHINES})


class Watched(Fleet):
    """`left`: nodes that counted as lost."""

    def _event(self, event: Event) -> None:
        super()._event(event)
        self.left = [*getattr(self, "left", ()), *([event.data] if isinstance(event.data, NodeLeft) else ())]


def a_fleet(seed: int, system: str, clocks: Apart | None) -> Watched:
    return Watched(seed, 4, system=system, lose=0.0, double=0.0, clocks=clocks)


def cold_starts_s(fleet: Fleet) -> list[float]:
    """Seconds to the answer of a request for each model, one after the other."""
    took_s = []
    for name in fleet.names:
        began_s = fleet.kernel.now_s
        ticket = fleet.come(name)
        while fleet.outcome[ticket] == "open":
            fleet.advance(0.1)
        assert fleet.outcome[ticket] == "200", f"{fleet.label}: {name}: {fleet.outcome[ticket]}"
        took_s.append(fleet.kernel.now_s - began_s)
    return took_s


@pytest.mark.parametrize("system", ["", "union"])
@pytest.mark.parametrize("seed", seeds())
def test_a_cold_start_takes_no_longer(seed: int, system: str) -> None:
    clocks = apart(Random(seed))
    alike, there = (cold_starts_s(a_fleet(seed, system, one)) for one in (None, clocks))
    late_s = [after - before for before, after in zip(alike, there, strict=True)]
    assert max(late_s) < LATE_S, f"seed {seed}: {late_s} later with {clocks.ahead_s}"


@pytest.mark.parametrize("system", ["", "union"])
@pytest.mark.parametrize("seed", seeds())
def test_nobody_goes_without_an_answer_and_no_instance_stays_while_clocks_are_set(seed: int, system: str) -> None:
    clocks = apart(Random(seed))
    fleet = a_fleet(seed, system, clocks)

    def is_set() -> None:
        clocks.ahead_s[fleet.random.choice(MACHINES)] = fleet.random.choice((-1.0, 1.0)) * fleet.random.choice(OFF_S)

    for second in range(5, 60, 5):
        fleet.kernel.after(second, is_set)
    fleet.load(60.0, 3.0)
    fleet.advance(60.0)
    fleet.settle(90.0 if not system else AgentParams().start_deadline_s + 60.0)
    ends = fleet.ends()
    assert ends.keys() <= {"200", "client_left"} and ends["200"] > 0.9 * ends.total(), f"seed {seed}: {ends}"
    assert not fleet.left, f"seed {seed}: {fleet.left}"


@pytest.mark.parametrize("name", ["autoscaler", "placer"])
@pytest.mark.parametrize("seed", seeds())
def test_a_paused_process_goes_on_as_if_no_time_had_passed(seed: int, name: str) -> None:
    clocks = apart(Random(seed))
    fleet = a_fleet(seed, "", clocks)
    assert len(cold_starts_s(fleet)) == len(fleet.names)
    clocks.pause(name)
    fleet.advance(60.0)
    fleet.control.resume(name)
    assert len(cold_starts_s(fleet)) == len(fleet.names)
    assert not fleet.left, f"seed {seed}: {fleet.left}"
    fleet.settle()
