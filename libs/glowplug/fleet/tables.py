"""The tables of instances and nodes as a service knows them, kept current by facts and mended by the store.

A row is taken when its revision is not lower than the known one, so that facts may come late, twice or not at all.
A row missing from its table is dropped once nobody has spoken of it for ABSENT_S; one that stays behind what is known
for as long is right: what was known never reached the store.
"""

from collections.abc import Mapping

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance

ABSENT_S = 15.0


class InstanceTable:
    """instance_id -> Instance, newest revision wins."""

    def __init__(self) -> None:
        self.by_id: dict[str, Instance] = {}
        self._by_model: dict[str, dict[str, Instance]] = {}
        self._living: dict[str, dict[str, Instance]] = {}  # the same without those that are gone
        self._heard_at: dict[str, float] = {}

    def of(self, model_key: str) -> dict[str, Instance]:
        """The instances of one model, gone ones too."""
        return self._by_model.get(model_key, {})

    def living(self, model_key: str) -> dict[str, Instance]:
        """The instances of one model that are not gone: what a pass costs does not grow with what has been."""
        return self._living.get(model_key, {})

    @property
    def model_keys(self) -> list[str]:
        return sorted(self._by_model)

    def apply(self, instance: Instance, now_s: float) -> bool:
        """Take one row; False when it is older than the one known."""
        known = self.by_id.get(instance.instance_id)
        if known is not None and instance.revision < known.revision:
            return False
        self.by_id[instance.instance_id] = instance
        self._by_model.setdefault(instance.model_key, {})[instance.instance_id] = instance
        if instance.state.is_gone:
            self._living.get(instance.model_key, {}).pop(instance.instance_id, None)
        else:
            self._living.setdefault(instance.model_key, {})[instance.instance_id] = instance
        self._heard_at[instance.instance_id] = now_s
        return True

    def restore(self, rows: Mapping[str, Instance], now_s: float) -> list[Instance]:
        """Take a whole table; returns the rows that changed."""
        changed = []
        for instance in rows.values():
            before = self.by_id.get(instance.instance_id)
            is_behind = before is not None and instance.revision < before.revision
            if is_behind and now_s - self._heard_at[instance.instance_id] > ABSENT_S:
                self.forget(instance.instance_id)
            if self.apply(instance, now_s) and before != instance:
                changed.append(instance)
        for instance_id in [i for i in self.by_id if i not in rows]:
            if now_s - self._heard_at[instance_id] > ABSENT_S:
                self.forget(instance_id)
        return changed

    def forget(self, instance_id: str) -> None:
        instance = self.by_id.pop(instance_id, None)
        self._heard_at.pop(instance_id, None)
        if instance is not None:
            siblings, living = self._by_model[instance.model_key], self._living.get(instance.model_key, {})
            del siblings[instance_id]
            living.pop(instance_id, None)
            if not siblings:
                del self._by_model[instance.model_key]
                self._living.pop(instance.model_key, None)


class NodeTable:
    """node_id -> Node, with when its revision last moved by OUR clock: no clock of another machine is trusted."""

    def __init__(self, lease_s: float) -> None:
        self.by_id: dict[str, Node] = {}
        self._moved_at: dict[str, float] = {}
        self._lease_s = lease_s

    def apply(self, node: Node, now_s: float) -> bool:
        known = self.by_id.get(node.node_id)
        if known is not None and node.revision <= known.revision:
            return False
        self.by_id[node.node_id] = node
        self._moved_at[node.node_id] = now_s
        return True

    def alive(self, now_s: float) -> list[Node]:
        return [n for n in self.by_id.values() if self.is_alive(n.node_id, now_s)]

    def is_alive(self, node_id: str, now_s: float) -> bool:
        return now_s - self._moved_at.get(node_id, float("-inf")) <= self._lease_s

    def expire(self, now_s: float) -> list[Node]:
        """Take out and return the nodes whose lease has run out."""
        gone = [n for n in self.by_id.values() if now_s - self._moved_at[n.node_id] > self._lease_s]
        for node in gone:
            self.forget(node.node_id)
        return gone

    def shift(self, by_s: float) -> None:
        """Move every lease by a jump of our clock, or by a time in which we did not listen."""
        self._moved_at = {node_id: at + by_s for node_id, at in self._moved_at.items()}

    def forget(self, node_id: str) -> None:
        self.by_id.pop(node_id, None)
        self._moved_at.pop(node_id, None)
