"""Sleeping engines of a fleet whose models take turns: none of no use, and none beyond the host memory for them."""

from collections import Counter

import pytest

from glowplug.domain.instance import Instance, InstanceState
from glowplug_lab.simulator.hardware.engine import Origin
from glowplug_lab.simulator.setup import GB
from glowplug_lab.simulator.world import World
from tests.simulation.fleets import turning
from tests.simulation.seeds import seeds

SECONDS = 600.0
TICK_S = 0.5
EACH_BYTES = int(12.5 * GB * 1.4)


class Asleep:
    """Sleepers by model and GPU, and host memory by node, after each change of an instance."""

    def __init__(self, world: World) -> None:
        self.rows: dict[str, Instance] = {}
        self.surplus_since: dict[tuple[str, str], float] = {}
        self.longest_surplus_s, self.most_bytes, self.most = 0.0, Counter[str](), 0
        world.control.on_save.append(self._saved)

    def _saved(self, table: str, row: object, now_s: float) -> None:
        if not isinstance(row, Instance):
            return
        self.rows[row.instance_id] = row
        asleep = [one for one in self.rows.values() if one.state is InstanceState.SWAPPED_OUT]
        self.most = max(self.most, len(asleep))
        of_place = Counter((one.model_key, one.gpu_id) for one in asleep)
        self.surplus_since = {place: self.surplus_since.get(place, now_s) for place, n in of_place.items() if n > 1}
        for since_s in self.surplus_since.values():
            self.longest_surplus_s = max(self.longest_surplus_s, now_s - since_s)
        of_node = Counter[str]()
        for one in asleep:
            of_node[one.node_id] += one.host_bytes
        self.most_bytes |= of_node


def run(seed: int, swap_host_bytes: int | None = None) -> tuple[World, Asleep]:
    setup, arrivals = turning(seed, SECONDS, swap_host_bytes)
    world = World(setup, arrivals, check=True, label=f"turning seed {seed}")
    asleep = Asleep(world)
    world.run(SECONDS, drain_s=120.0)
    assert world.results.total().num_finished == len(arrivals)
    return world, asleep


@pytest.mark.parametrize("seed", seeds(1))
def test_a_model_has_one_engine_asleep_on_a_gpu_that_holds_one(seed):
    world, asleep = run(seed)
    assert world.results.starts[Origin.PREWARMED] > 3, "replicas have grown beside sleepers"
    assert asleep.longest_surplus_s <= 2 * TICK_S, f"{asleep.surplus_since}"
    assert asleep.most <= 8 * 3


@pytest.mark.parametrize("seed", seeds(1))
def test_sleepers_stay_within_the_host_memory_for_them_and_the_likeliest_needed_stay(seed):
    _, free = run(seed)
    world, asleep = run(seed, swap_host_bytes=3 * EACH_BYTES)
    assert max(free.most_bytes.values()) > 3 * EACH_BYTES >= max(asleep.most_bytes.values()), "the bound is felt"
    ended = [row for row in asleep.rows.values() if "host memory there" in row.reason]
    assert len(ended) > 10, "those of least worth ended for others"
    assert world.results.starts[Origin.SWAPPED] > 1.5 * world.results.starts[Origin.HOST], "wakes are the rule"


def test_without_host_memory_for_them_none_sleeps():
    _, asleep = run(0, swap_host_bytes=0)
    assert not asleep.most
