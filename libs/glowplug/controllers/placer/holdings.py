"""Worth of instances and copies on GPUs (`policies/worth.py`): how soon one is needed, by its model's forecast and last
use, times the seconds between its rung and the one below, as measured.

- A serving instance is needed by the next request for which its model's other instances have no slot. The rung below
  is its state after an eviction: an engine asleep, a replica, or weights in host memory.
- A replica or an engine asleep is needed likewise, behind the instances and the copies taken before it. The rung below
  is a start from host memory, or the fetch where host memory lacks the weights.
"""

from dataclasses import replace

from glowplug.controllers.placer.fleet import Fleet
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState, slots_per_instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import Forecast
from glowplug.fleet.start_times import StartKind, kind_from
from glowplug.policies.placement.links import declared_pcie, disk_rate, found_at, gpu_kind_of, network_rate
from glowplug.policies.worth import (
    NEVER_S,
    Asking,
    InMemory,
    asked,
    away_s,
    expected_factor,
    idle_worth,
    level,
    num_weighted,
    running_factor,
)

_RETURNS = {"swapped_out": StartKind.WAKE, "prewarmed": StartKind.GROWTH}


class Holdings:
    def __init__(self, fleet: Fleet, now_s: float) -> None:
        self.fleet, self.now_s = fleet, now_s
        self._forecasts: dict[str, Forecast | None] = {}
        self._ranks: dict[str, dict[str, int]] = {}
        self._slots: dict[str, int] = {}
        self._known: dict[str, InMemory] = {}

    def of(self, row: Instance) -> InMemory:
        known = self._known.get(row.instance_id)
        if known is None:
            known = self._known[row.instance_id] = self._of(row)
        return known

    def _of(self, row: Instance) -> InMemory:
        model, node = self.fleet.models.get(row.model_key), self.fleet.nodes.by_id.get(row.node_id)
        held = sum(worker.num_bytes for worker in row.workers)
        if model is None or node is None:
            return InMemory(name=row.instance_id, asked=0.0, climb_s=0.0, num_bytes=held)
        climb_s, (waiting, asking) = self._climb_s(row, model, node), self._asking(row, model)
        factor = expected_factor(self.fleet.load_of(model.key))
        return InMemory(
            name=row.instance_id,
            asked=float(waiting) if waiting >= 1 else max(waiting, factor * asked(asking, away_s(climb_s))),
            climb_s=climb_s,
            num_bytes=held,
            idle_worth=1.0 if waiting >= 1 else max(waiting, factor * idle_worth(asking, climb_s)),
        )

    def saves_s(self, row: Instance) -> float:
        return self.of(row).saves_s

    def asleep_saves_s(self, row: Instance) -> float:
        """Return seconds of waiting that an engine saves asleep; of a serving one, as if it slept already."""
        if row.state is InstanceState.SWAPPED_OUT:
            return self.saves_s(row)
        model, node = self.fleet.models.get(row.model_key), self.fleet.nodes.by_id.get(row.node_id)
        if model is None or node is None:
            return 0.0
        load, before = self.fleet.load_of(model.key), max(0, self._num_there(model) - 1) + self._rank(row, model)
        climb_s = max(0.0, self.start_s(model, node) - self._start_s(model, node, StartKind.WAKE))
        unused_s = self.now_s - max(load.last_active_at, row.ready_at, row.created_at)
        asking = level(self._forecast(model), before, self.slots_of(model), unused_s)
        return expected_factor(load) * asked(asking, away_s(climb_s)) * climb_s

    def another_saves_s(self, model: Model, node: Node) -> float:
        """Return seconds of waiting that one more instance on a node should save, beyond the copies there."""
        here = [row for row in self.fleet.capacity.nodes.copies(model) if row.node_id == node.node_id]
        kinds = [kind_from(row.state) if row.state.is_dormant else StartKind.GROWTH for row in here]
        climb_s = min(self._start_s(model, node, kind) for kind in (*kinds, found_at(node, model)))
        num_there, last_used_at = self._num_there(model), self.fleet.load_of(model.key).last_active_at
        unused_s = NEVER_S if num_there else self.now_s - last_used_at
        asking = level(self._forecast(model), num_there, self.slots_of(model), unused_s)
        return asked(asking, away_s(climb_s)) * climb_s

    def start_s(self, model: Model, node: Node) -> float:
        return self._start_s(model, node, found_at(node, model))

    def replica_seconds(self, model: Model) -> float:
        """Return seconds that a start from a replica saves against one from host memory, on any node."""
        times = self.fleet.network.times
        grown, started = times.predict(model, StartKind.GROWTH), times.predict(model, StartKind.CACHED)
        return max(0.0, started.whole_s - grown.whole_s)

    def _climb_s(self, row: Instance, model: Model, node: Node) -> float:
        fresh = found_at(node, model)
        if not row.state.is_dormant and not row.replica:
            return self._start_s(model, node, _RETURNS.get(self.fleet.becomes_of(row), fresh))
        from_here = kind_from(row.state) if row.state.is_dormant else StartKind.GROWTH
        return max(0.0, self._start_s(model, node, fresh) - self._start_s(model, node, from_here))

    def _start_s(self, model: Model, node: Node, kind: StartKind) -> float:
        times = self.fleet.network.times
        took = times.predict(model, kind, gpu_kind_of(node), declared_pcie(node))
        if kind in (StartKind.COLD, StartKind.DISK):
            rate = network_rate(node, model, times) if kind is StartKind.COLD else disk_rate(node, model, times)
            took = replace(took, fetch_s=model.fetch_bytes / rate)
        return took.whole_s

    def _asking(self, row: Instance, model: Model) -> tuple[float, Asking]:
        load, num_there = self.fleet.load_of(model.key), self._num_there(model)
        slots, forecast = self.slots_of(model), self._forecast(model)
        unused_s = self.now_s - max(load.last_active_at, row.ready_at, row.created_at)
        if row.state.is_dormant or row.replica:
            before = num_there + self._rank(row, model)
            return 0, level(forecast, before, slots, self._unneeded_s(row) if before else unused_s)
        others = max(0, num_there - 1)
        needed: float = max(load.num_waiting, int(load.num_in_flight > others * slots))
        if load.by_class:
            runs = running_factor(load) if load.num_in_flight > others * slots else 0.0
            needed = max(num_weighted(load.num_waiting, load), runs)
        return needed, level(forecast, others, slots, self._unneeded_s(row) if others else unused_s)

    def _num_there(self, model: Model) -> int:
        return self.fleet.capacity.num_active.get(model.key, 0)

    def _unneeded_s(self, row: Instance) -> float:
        """Seconds since a row behind others was last needed: a serving instance when it became ready, a dormant one
        when it last changed, a replica made ahead never."""
        if row.replica:
            return NEVER_S
        return max(0.0, self.now_s - (row.changed_at if row.state.is_dormant else max(row.ready_at, row.created_at)))

    def _forecast(self, model: Model) -> Forecast | None:
        if model.key not in self._forecasts:
            self._forecasts[model.key] = self.fleet.forecasts.of(model.key, self.now_s)
        return self._forecasts[model.key]

    def slots_of(self, model: Model) -> int:
        if model.key not in self._slots:
            living = self.fleet.instances.living(model.key).values()
            self._slots[model.key] = slots_per_instance(living, model.max_concurrency)
        return self._slots[model.key]

    def _rank(self, row: Instance, model: Model) -> int:
        """Return the number of the model's copies taken first: nearer ones, then older ones."""
        ranks = self._ranks.get(model.key)
        if ranks is None:
            copies = sorted(self.fleet.capacity.nodes.copies(model), key=_order)
            ranks = self._ranks[model.key] = {copy.instance_id: at for at, copy in enumerate(copies)}
        return ranks.get(row.instance_id, len(ranks))


def _order(row: Instance) -> tuple[bool, bool, float, str]:
    """A replica that loads comes before a sleeping engine, as it was planned."""
    state = row.state
    return state is InstanceState.SWAPPED_OUT, state is not InstanceState.PREWARMED, row.created_at, row.instance_id
