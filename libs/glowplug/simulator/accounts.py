"""Who held what, and for how long: GPU-seconds and instance-seconds, exact to the event, in memory of constant size."""

from typing import Any

from glowplug.domain.hardware import GrantOwner, Node
from glowplug.domain.instance import Instance
from glowplug.simulator.results import Results


class Integral:
    """A count over time."""

    __slots__ = ("now", "since_s", "total")

    def __init__(self, since_s: float) -> None:
        self.now, self.since_s, self.total = 0, since_s, 0.0

    def add(self, change: int, at_s: float) -> None:
        at_s = max(at_s, self.since_s)  # what changes before the count begins is only the level it begins with
        self.total += self.now * (at_s - self.since_s)
        self.since_s = at_s
        self.now += change


class Accounts:
    """Hears of every row that is saved. What was held before `since_s` does not count."""

    def __init__(self, since_s: float) -> None:
        self.gpus, self.serving_gpus, self.instances = (Integral(since_s) for _ in range(3))
        self.peak = 0
        self._of_node: dict[str, tuple[int, int]] = {}
        self._serving: set[str] = set()

    def saved(self, table: str, row: Any, now_s: float) -> None:
        """One row as it is now."""
        if table == "nodes":
            self._node(row, now_s)
        elif table == "instances":
            self._instance(row, now_s)

    def close(self, results: Results, now_s: float) -> None:
        """Write what has come together."""
        for integral in (self.gpus, self.serving_gpus, self.instances):
            integral.add(0, now_s)
        results.gpu_seconds = self.gpus.total
        results.gpu_serving_seconds = self.serving_gpus.total
        results.instance_seconds = self.instances.total
        results.instances_peak = self.peak

    def _node(self, node: Node, now_s: float) -> None:
        used = sum(bool(gpu.grants) for gpu in node.gpus)
        serving = sum(any(g.owner is not GrantOwner.PREWARM for g in gpu.grants) for gpu in node.gpus)
        before = self._of_node.get(node.node_id, (0, 0))
        if (used, serving) != before:
            self._of_node[node.node_id] = (used, serving)
            self.gpus.add(used - before[0], now_s)
            self.serving_gpus.add(serving - before[1], now_s)

    def _instance(self, row: Instance, now_s: float) -> None:
        counts = row.serves and not row.state.is_gone
        if counts and row.instance_id not in self._serving:
            self._serving.add(row.instance_id)
            self.instances.add(1, now_s)
            self.peak = max(self.peak, self.instances.now)
        elif not counts and row.instance_id in self._serving:
            self._serving.discard(row.instance_id)
            self.instances.add(-1, now_s)
