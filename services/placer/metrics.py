"""Metrics of the placer: nodes alive and lost, pending placements."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glowplug.controllers.placer.controller import PlacerController
from glowplug.events.facts import NodeLeft
from glowplug.telemetry import semconv

REMEMBER_LOST_S = 3600.0


class FleetCollector(Collector):
    """A collector that reads the placer's controller at each scrape; `controller()` is None while the service
    connects."""

    def __init__(self, controller: Callable[[], PlacerController | None], clock: Callable[[], float]) -> None:
        self._controller, self._clock = controller, clock
        self._lost: dict[str, float] = {}  # node_id -> when its silence was noticed

    def saw(self, effect: Any) -> None:
        """Note the loss of a node; an observer of ShellMetrics. The placer publishes NodeLeft only for silent nodes."""
        fact = getattr(effect, "payload", None)
        if isinstance(fact, NodeLeft):
            self._lost[fact.node_id] = self._clock()

    def collect(self) -> Iterator[Metric]:
        nodes = GaugeMetricFamily(semconv.NODES, "Nodes alive, by state", labels=["state"])
        up = GaugeMetricFamily(semconv.NODE_UP, "1 alive, 0 silent", labels=["node"])
        pending = GaugeMetricFamily(semconv.PLACEMENTS_PENDING, "Placements not settled, by stage", labels=["stage"])
        controller = self._controller()
        if controller is not None:
            now_s = self._clock()
            alive = controller.view(now_s)
            num_draining = sum(node.draining for node in alive)
            nodes.add_metric(["draining"], num_draining)
            nodes.add_metric(["alive"], len(alive) - num_draining)
            for node_id, value in self._known([node.node_id for node in alive], now_s):
                up.add_metric([node_id], value)
            known = controller.placements.values()
            pending.add_metric(["start"], sum(placement.sent is not None for placement in known))
            lacking = (placement for placement in known if placement.sent is None and not placement.command.waits)
            pending.add_metric(["room"], sum(1 for _ in lacking))  # a start that is to sleep just waits for free memory
        yield from (nodes, up, pending)

    def _known(self, alive: list[str], now_s: float) -> Iterator[tuple[str, int]]:
        self._lost = {n: at for n, at in self._lost.items() if n not in alive and now_s - at < REMEMBER_LOST_S}
        yield from ((node_id, 1) for node_id in alive)
        yield from ((node_id, 0) for node_id in sorted(self._lost))
