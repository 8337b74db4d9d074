"""Models that take the same memory, asked in turn faster than two can be exchanged (peers.md T17: A/B/A/B)."""

from pathlib import Path

import pytest

from glowplug.domain.instance import InstanceState
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World
from tests.simulation.seeds import seeds

SCENARIO = Path(__file__).parents[2] / "scenarios" / "alternating.yaml"
SECONDS = 60.0
FAIR_S, EXCHANGE_S = 5.0, 1.5  # the placer's fair_turn_s; a drain, a swap out and a swap in


class Stays:
    """Successive owners of the memory, with their seconds of READY."""

    def __init__(self, world: World) -> None:
        self.models: list[str] = []
        self.seconds: list[float] = []
        self.ended_s: list[float] = []  # of each answer, since the traffic began
        self._since: dict[str, float] = {}
        world.control.on_save.append(self._saved)

    def _saved(self, table: str, row: object, now_s: float) -> None:
        if table != "instances" or row.replica:  # type: ignore[attr-defined]
            return
        instance_id, is_ready = row.instance_id, row.state is InstanceState.READY  # type: ignore[attr-defined]
        if is_ready and instance_id not in self._since:
            self._since[instance_id] = now_s
            self.models.append(row.model_key)  # type: ignore[attr-defined]
        elif not is_ready and instance_id in self._since:
            self.seconds.append(now_s - self._since.pop(instance_id))


def run(settings: list[str], seed: int, arrivals: list[Arrival] | None = None) -> tuple[World, Stays]:
    scenario = load(SCENARIO, [f"seconds={SECONDS:.0f}", *settings])
    given = scenario.arrivals(seed) if arrivals is None else arrivals
    world = World(scenario.setup, given, check=True, label=f"alternating seed {seed}")
    stays = Stays(world)
    world.traffic.on_end.append(lambda ticket, how: stays.ended_s.append(world.kernel.now_s - world.began_s))
    world.run(SECONDS, drain_s=120.0)
    return world, stays


@pytest.mark.parametrize("system", ["union", "swapserve"])
@pytest.mark.parametrize(("num_models", "rps"), [(2, 1.0), (3, 3.0)])
@pytest.mark.parametrize("seed", seeds(1))
def test_each_has_its_least_time_and_nobody_waits_longer_than_a_round(seed, num_models, rps, system):
    settings = [f"models.model.copies={num_models}", f"workload.rps={rps}", f"policies={system}"]
    world, stays = run(settings, seed)
    least_s = world.setup.params.placer.min_residency_s
    assert least_s > 0 and min(stays.seconds) >= least_s, "the least time that a READY instance stays"
    assert SECONDS / (num_models * (FAIR_S + EXCHANGE_S)) < len(stays.models) <= SECONDS / least_s + 1
    for result in world.results.by_model.values():
        assert result.num_finished == result.num_arrived and not result.num_refused
        assert result.ttft.highest <= (num_models + 1) * (FAIR_S + EXCHANGE_S), "the others' time, and one more"
    for first in range(len(stays.models) - 2 * num_models):
        assert len({*stays.models[first : first + 2 * num_models]}) == num_models, f"{stays.models}"


def test_a_longer_residency_means_fewer_exchanges():
    of = {s: run([f"params.placer.min_residency_s={s}", "workload.rps=1"], 1) for s in (0, 1, 3)}
    exchanges = {s: len(stays.models) for s, (_, stays) in of.items()}
    assert min(of[0][1].seconds) < 1.0 <= min(of[1][1].seconds) < 3.0 <= min(of[3][1].seconds)
    assert exchanges[3] < exchanges[1] < exchanges[0], f"{exchanges}"


def test_in_turn_costs_hardly_more_time_than_one_model_after_the_other():
    """At least 80 % of the best order's throughput, where one model nearly fills the GPU."""
    ended_s, exchanges = {}, {}
    for order in ("grouped", "in turn"):
        keys = [f"model-{n % 2 + 1 if order == 'in turn' else n // 160 + 1}" for n in range(320)]
        world, stays = run([], 1, [Arrival(n / 8, key, 60, 20) for n, key in enumerate(keys)])
        assert world.results.total().num_finished == 320
        ended_s[order], exchanges[order] = max(stays.ended_s), len(stays.models)
    assert exchanges["in turn"] > 3 * exchanges["grouped"], f"{exchanges}"
    assert ended_s["grouped"] >= 0.8 * ended_s["in turn"], f"{ended_s}"
