"""Keep one reader's tables of models, instances and nodes: facts update them, the store corrects them.

Facts may be late, lost or repeated. Four rules keep every reader right:

- Revision. A row is news if its revision is higher, or equal with other content. One writer numbers a row, so
  repetitions change nothing. Only a placer that gives up a node and that node's agent may reach the same number: the
  last row counts until the agent, on reading the other, writes a higher one.
- Absence. A row that the store lacks, or has only in an older revision, is dropped once every reading of ABSENT_S has
  missed it and no fact has reported it: owners refill an emptied store within that time, and warm models stay. It
  counts from the first reading that missed the row, so the length of an outage does not matter.
- Tombstones. A gone instance's revision outlives its row, so that no late fact revives it.
- Lease. A node lives while its row's revision moves, by the reader's clock alone.

Ids in facts may be invented: of those that the store lacks, MAX_UNSTORED are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

from glowplug.domain.errors import ModelNotFound
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model, Temperature
from glowplug.fleet import status

ABSENT_S: Final = 15.0
NODE_LEASE_S: Final = 8.0  # agents beat every second
NUM_TOMBSTONES: Final = 4096
MAX_UNSTORED: Final = 4096
NEVER: Final = float("-inf")


class Revised(Protocol):
    @property
    def revision(self) -> int: ...


RowT = TypeVar("RowT", bound=Revised)


class Unstored:
    """Ids that facts alone have told. `lacked`: by the last reading of the store, too."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.lacked: frozenset[str] = frozenset()
        self._stored: frozenset[str] = frozenset()

    def admits(self, key: str) -> bool:
        """Take a new id, if there is room for it."""
        if key in self._stored:
            return True
        if len(self.ids) >= MAX_UNSTORED:
            return False
        self.ids.add(key)
        return True

    def read(self, stored: Mapping[str, object]) -> None:
        self._stored = frozenset(stored)
        self.ids -= self._stored
        self.lacked = frozenset(self.ids)


class Rows(Generic[RowT]):
    def __init__(self, absent_s: float = ABSENT_S) -> None:
        self.by_id: dict[str, RowT] = {}
        self._reported_at: dict[str, float] = {}
        self._missed_since: dict[str, float] = {}  # missed by the last reading
        self._absent_s = absent_s

    def _is_news(self, key: str, row: RowT, now_s: float) -> bool:
        known = self.by_id.get(key)
        if known is not None and row.revision < known.revision:
            return False
        self._reported_at[key] = now_s
        return known is None or row.revision > known.revision or (row is not known and row != known)

    def _missing(self, rows: Mapping[str, RowT], now_s: float) -> list[str]:
        """Ids of rows that every recent reading has missed, or had in an older revision, for too long."""
        known, reported_at, before = self.by_id, self._reported_at, self._missed_since
        missed_now = (key for key, row in known.items() if key not in rows or rows[key].revision < row.revision)
        self._missed_since = missed = {key: before.get(key, now_s) for key in missed_now}
        return [k for k, since in missed.items() if now_s - max(since, reported_at[k]) > self._absent_s]

    def doubt(self) -> None:
        """Mark all rows as possibly stale: the first reading that misses one drops it, unless a fact reports it
        before."""
        self._missed_since = dict.fromkeys(self.by_id, NEVER)
        self._reported_at = dict.fromkeys(self.by_id, NEVER)


def keys_by_name(models: Mapping[str, Model]) -> dict[str, str]:
    """Names and keys win over aliases, and the lowest key among equal aliases."""
    keys: dict[str, str] = {}
    for key in sorted(models, reverse=True):
        keys.update(dict.fromkeys(models[key].aliases, key))
    for key, model in models.items():
        keys.update({model.name: key, key: key})
    return keys


def find_model(models: Mapping[str, Model], name: str) -> Model:
    """Find a deployed model by key, name or alias. Raises ModelNotFound."""
    key = keys_by_name(models).get(name)
    if key is None:
        raise ModelNotFound(f"no model {name[:200]!r} is deployed", param="model")
    return models[key]


class ModelTable(Rows[Model]):
    def __init__(self, absent_s: float = ABSENT_S) -> None:
        super().__init__(absent_s)
        self._keys_by_name: dict[str, str] | None = None  # None: to be rebuilt

    def lookup(self, name: str) -> Model | None:
        """Find a model as `find_model` does, with an index that is kept."""
        if self._keys_by_name is None:
            self._keys_by_name = keys_by_name(self.by_id)
        found = self._keys_by_name.get(name)
        return None if found is None else self.by_id[found]

    def apply(self, model: Model, now_s: float) -> bool:
        """Take one row; return whether it is news."""
        if not self._is_news(model.key, model, now_s):
            return False
        self.by_id[model.key] = model
        self._keys_by_name = None
        return True

    def drop_absent(self, rows: Mapping[str, Model], now_s: float) -> list[Model]:
        """Drop and return the models that the table `rows` has lacked for `absent_s`. An empty table is a store that
        lost its rows and drops none: a fact reports the last undeployment."""
        if not rows:
            self._missed_since = {}
            return []
        gone = [self.by_id[key] for key in self._missing(rows, now_s) if key not in rows]
        for model in gone:
            self.forget(model.key)
        return gone

    def forget(self, model_key: str) -> bool:
        known = self.by_id.pop(model_key, None)
        self._reported_at.pop(model_key, None)
        self._keys_by_name = None
        return known is not None


class InstanceTable(Rows[Instance]):
    """Instances by id. Gone ones stay, for their reasons, until the store drops them; with `keeps_gone` False only as
    tombstones."""

    def __init__(self, *, keeps_gone: bool = True, absent_s: float = ABSENT_S) -> None:
        super().__init__(absent_s)
        self._keeps_gone, self.unstored = keeps_gone, Unstored()
        self._by_model: dict[str, dict[str, Instance]] = {}
        self._living: dict[str, dict[str, Instance]] = {}  # without gone ones
        self._ready: dict[str, list[Instance]] = {}  # of models that were asked about since their last change
        self._tombstones: dict[str, int] = {}  # instance_id -> last revision, oldest first

    def of(self, model_key: str) -> dict[str, Instance]:
        """Instances of one model, gone ones included."""
        return self._by_model.get(model_key, {})

    def living(self, model_key: str) -> dict[str, Instance]:
        return self._living.get(model_key, {})

    def ready(self, model_key: str) -> list[Instance]:
        """Instances that requests may be sent to."""
        found = self._ready.get(model_key)
        if found is None:
            living = self.living(model_key).values()
            found = self._ready[model_key] = [i for i in living if status.is_target(i)]
        return found

    @property
    def model_keys(self) -> list[str]:
        return sorted(self._by_model)

    def apply(self, instance: Instance, now_s: float) -> bool:
        key = instance.instance_id
        if key not in self.by_id and (
            instance.revision <= self._tombstones.get(key, -1) or not self.unstored.admits(key)
        ):
            return False
        if not self._is_news(key, instance, now_s):
            return False
        if instance.state.is_gone and not self._keeps_gone:
            self.forget(key)
            self._bury(instance)
            return True
        self.by_id[key] = instance
        self._ready.pop(instance.model_key, None)
        self._by_model.setdefault(instance.model_key, {})[key] = instance
        if instance.state.is_gone:
            self._drop(self._living, instance)
        else:
            self._living.setdefault(instance.model_key, {})[key] = instance
        return True

    def restore(self, rows: Mapping[str, Instance], now_s: float) -> list[Instance]:
        """Take a whole table; return the rows that changed."""
        self.drop_absent(rows, now_s)
        return [instance for instance in rows.values() if self.apply(instance, now_s)]

    def drop_absent(self, rows: Mapping[str, Instance], now_s: float) -> list[Instance]:
        """Drop and return the rows that `rows` has lacked for `absent_s`, or had only in an older revision: that one is
        right, as the known one never reached the store."""
        self.unstored.read(rows)
        gone = [self.by_id[key] for key in self._missing(rows, now_s)]
        for instance in gone:
            self.forget(instance.instance_id)
            if instance.state.is_gone and instance.instance_id not in rows:
                self._bury(instance)
        return gone

    def forget(self, instance_id: str) -> None:
        instance = self.by_id.pop(instance_id, None)
        self._reported_at.pop(instance_id, None)
        self.unstored.ids.discard(instance_id)
        if instance is not None:
            self._ready.pop(instance.model_key, None)
            self._drop(self._by_model, instance)
            self._drop(self._living, instance)

    def _bury(self, instance: Instance) -> None:
        self._tombstones[instance.instance_id] = instance.revision
        if len(self._tombstones) > NUM_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    @staticmethod
    def _drop(index: dict[str, dict[str, Instance]], instance: Instance) -> None:
        siblings = index.get(instance.model_key, {})
        siblings.pop(instance.instance_id, None)
        if not siblings:
            index.pop(instance.model_key, None)


class FleetTables:
    def __init__(self) -> None:
        self.model_table, self.instance_table = ModelTable(), InstanceTable(keeps_gone=False)
        self.models: Mapping[str, Model] = self.model_table.by_id
        self.instances: Mapping[str, Instance] = self.instance_table.by_id
        self.lookup = self.model_table.lookup
        self.of: Callable[[str], Mapping[str, Instance]] = self.instance_table.living
        self.ready: Callable[[str], Sequence[Instance]] = self.instance_table.ready

    def coming(self, model_key: str) -> list[Instance]:
        return [i for i in self.of(model_key).values() if status.is_coming(i)]

    def temperature(self, model_key: str) -> Temperature:
        return status.temperature(self.of(model_key).values())


class NodeTable:
    """Nodes by id, with the last move of their revision by this reader's clock."""

    def __init__(self, lease_s: float = NODE_LEASE_S) -> None:
        self.by_id: dict[str, Node] = {}
        self._moved_at: dict[str, float] = {}
        self._lease_s, self.unstored = lease_s, Unstored()

    def apply(self, node: Node, now_s: float) -> bool:
        """Take one row; return False for a repeated one, which is no sign of life."""
        known = self.by_id.get(node.node_id)
        if known is None:
            if not self.unstored.admits(node.node_id):
                return False
        elif node.revision <= known.revision:
            return False
        self.by_id[node.node_id] = node
        self._moved_at[node.node_id] = now_s
        return True

    def is_alive(self, node_id: str, now_s: float) -> bool:
        return now_s - self.moved_at(node_id) <= self._lease_s

    def moved_at(self, node_id: str) -> float:
        """Time of the last sign of life; -inf for an unknown node."""
        return self._moved_at.get(node_id, NEVER)

    def expire(self, now_s: float) -> list[Node]:
        gone = [n for n in self.by_id.values() if now_s - self._moved_at[n.node_id] > self._lease_s]
        for node in gone:
            self.forget(node.node_id)
        return gone

    def forget(self, node_id: str) -> None:
        self.by_id.pop(node_id, None)
        self._moved_at.pop(node_id, None)
        self.unstored.ids.discard(node_id)
