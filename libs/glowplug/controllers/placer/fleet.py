"""What every part of the placer knows: nodes, rows, loads, models, and the books on them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from glowplug.controllers.naming import Ids
from glowplug.controllers.placer.books import Books
from glowplug.controllers.placer.network import Network
from glowplug.controllers.placer.orders import record_of_node
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.fleet.demand import Demand
from glowplug.fleet.tables import InstanceTable, NodeTable
from glowplug.policies.placement.port import PlacementView
from glowplug.policies.start_times import PRIORS, Prior, StartRow


class Fleet:
    """Views and books, kept together."""

    def __init__(
        self, policies: dict[str, str], epoch: int, params: PlacerParams, priors: Mapping[str, Prior] = PRIORS
    ) -> None:
        self.policies, self.params, self.ids = policies, params, Ids(epoch)
        self.nodes, self.instances, self.loads = NodeTable(params.node_lease_s), InstanceTable(), Demand()
        self.models: dict[str, Model] = {}
        self.books, self.network = Books(), Network(params, priors)
        self.cordoned: set[str] = set()
        self.scores: dict[str, float] = {}  # replica -> its worth when last planned
        self.promised: set[str] = set()  # replicas of the books that no agent has spoken of yet
        self.learned: dict[str, StartRow] = {}  # rows of starts that the store does not have yet
        self.born_at: float | None = None
        self._order: list[str] | None = None

    def node(self, node: Node, now_s: float) -> bool:
        """Take a beat. Whether something may be placed that could not before."""
        known = self.nodes.by_id.get(node.node_id)
        if not self.nodes.apply(node, now_s):
            return False
        if known is None:
            self._order = None
        return self.books.node(node)

    def node_left(self, node_id: str) -> None:
        self.nodes.forget(node_id)
        self.books.drop_node(node_id)
        self.network.drop_node(node_id)
        self._order = None

    def row(self, instance: Instance, now_s: float) -> bool:
        """Take a row. Whether those who wait for room should look again."""
        if not self.instances.apply(instance, now_s):
            return False
        return self._took(instance, now_s)

    def restore_rows(self, rows: dict[str, Instance], now_s: float) -> list[Instance]:
        """Take the table; returns the rows that changed."""
        changed = self.instances.restore(rows, now_s)
        for instance in changed:
            self._took(instance, now_s)
        self.books.only(self.instances.by_id.keys() | self.promised)
        return changed

    def take_over(self, instances: InstanceTable, loads: Demand, now_s: float) -> None:
        """What an earlier placer knew."""
        self.instances, self.loads = instances, loads
        for instance in instances.by_id.values():
            self._took(instance, now_s)

    def forget(self, instance_id: str) -> None:
        self.instances.forget(instance_id)
        self.books.forget(instance_id)
        self.scores.pop(instance_id, None)

    def _took(self, instance: Instance, now_s: float) -> bool:
        row = self.network.saw(instance, self.models.get(instance.model_key), now_s)
        if row is not None:
            self.learned[row.key] = row
        if instance.state.is_gone:
            self.scores.pop(instance.instance_id, None)
        return self.books.row(instance)

    def on_node(self, node_id: str) -> list[Instance]:
        """Those on one node that are not gone."""
        return list(self.books.by_node.get(node_id, {}).values())

    def view(self, now_s: float) -> list[Node]:
        """The nodes alive now by id, cordoned ones marked as draining."""
        if self._order is None:
            self._order = sorted(self.nodes.by_id)
        nodes = self.nodes
        alive: Iterable[Node] = (nodes.by_id[n] for n in self._order if n in nodes.by_id and nodes.is_alive(n, now_s))
        if not self.cordoned:
            return list(alive)
        return [replace(n, draining=True) if n.node_id in self.cordoned else n for n in alive]

    def placement_view(self, now_s: float, nodes: list[Node]) -> PlacementView:
        return PlacementView(
            now_s=now_s,
            nodes=nodes,
            reserved=self.books.reserved,
            dormant=self.books.dormant,
            scores=self.scores,
            links=self.network.links,
            times=self.network.times,
            seconds=self.network.seconds,
            first_token_s=self.network.first_token_s,
            start_stages=self.params.start_stages,
        )

    def is_settled(self, now_s: float) -> bool:
        """Whether nodes and routers have had time to speak."""
        return self.born_at is not None and now_s - self.born_at >= self.params.settle_s

    def about_node(self, node_id: str, *what: Any) -> DecisionRecord:
        """See record_of_node, which `what` is for."""
        return record_of_node(node_id, self.ids.next("d-p"), *what)
