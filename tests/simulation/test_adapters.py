"""Adapters on whole fleets while their hosts die."""

from pathlib import Path

import pytest

from glowplug.domain.instance import Instance, InstanceState
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.world import World
from tests.simulation.seeds import seeds

SCENARIO = Path(__file__).parents[2] / "scenarios" / "adapters.yaml"
SECONDS = 16.0
LATE_S = 10.0  # a node's lease, and the placer's next tick
SETTINGS = [
    f"seconds={SECONDS:.0f}",
    "models.adapter.copies=32",
    "models.adapter.keep_alive_s=5",
    "models.base.max_concurrency=4",
    "models.adapter.max_concurrency=4",
    "workload.rps=10",
    "servers.*.num_servers=3",
]
FAULTS = {
    "none": "[]",
    "engines": "[{at_s: 8, node_id: node-1, model: base-1}, {at_s: 10, node_id: node-1, model: base-2},"
    " {at_s: 12, node_id: node-2, model: base-3}]",
    "node": "[{at_s: 10, node_id: node-1}]",
}


class Watch:
    def __init__(self, world: World) -> None:
        self.world, self.num_loaded, self.most_slots, self.since = world, 0, 0, dict[str, float]()
        world.control.on_save.append(self.saved)
        world.traffic.on_end.append(lambda ticket, how: self.slots())

    def rows(self) -> dict[str, Instance]:
        return self.world.control.tables["instances"]

    def saved(self, table: str, row: object, now_s: float) -> None:
        if table != "instances" or not isinstance(row, Instance):
            return
        rows = self.rows() | {row.instance_id: row}
        if row.host_id and row.state is InstanceState.READY:
            self.num_loaded += 1
            assert rows[row.host_id].state is InstanceState.READY, f"{row.instance_id} is READY without its host"
            there = [r for r in rows.values() if r.host_id == row.host_id and not r.state.is_gone]
            assert len(there) <= rows[row.host_id].adapter_slots, f"{row.host_id} holds {len(there)} adapters"
            self.most_slots = max(self.most_slots, len(there))
        if row.adapter_slots and row.state.is_gone:
            self.since[row.instance_id] = now_s
        for host_id, gone_at in self.since.items():
            left = [r.instance_id for r in rows.values() if r.host_id == host_id and not r.state.is_gone]
            assert not left or now_s - gone_at <= LATE_S, f"{left} outlive {host_id}"

    def slots(self) -> None:
        router = self.world.control.router
        for host_id, riders in router.balances.hosts.riders.items():
            host = router.fleet.instances.get(host_id)
            num = sum(router.in_flight.get(name, 0) for name in (host_id, *riders))
            assert host is None or num <= host.max_concurrency, f"the router has sent {num} requests to {host_id}"


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", seeds(1))
def test_whoever_dies_every_request_ends_and_no_adapter_outlives_its_host(seed, faults):
    scenario = load(SCENARIO, [*SETTINGS, f"faults={FAULTS[faults]}"])
    world = World(scenario.setup, scenario.arrivals(seed), check=True, label=f"adapters, {faults}, seed {seed}")
    watch = Watch(world)
    results = world.run(SECONDS, drain_s=120.0)
    total = results.total()
    assert world.traffic.num_open == 0 and total.num_arrived > 100
    assert set(total.num_refused) <= {"engine_failed"}, "only those that ran in what died fail"
    assert total.num_finished >= total.num_arrived - (40 if faults != "none" else 0)
    assert watch.num_loaded > 20 and watch.most_slots > 4, "adapters take turns in the slots"
    after = [row for row in watch.rows().values() if row.host_id and not row.state.is_gone]
    assert all(not watch.rows()[row.host_id].state.is_gone for row in after)
