"""The console's view of the fleet, as rows.

Pure and bounded (fleet/tables.py says which row counts, and for how long). A row is made anew only after a change."""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

import msgspec

from glowplug.controllers.operator import Cordon
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.facts import (
    DecisionMade,
    InstanceChange,
    ModelDeployed,
    ModelUndeployed,
    NodeBeat,
    NodeJoined,
    NodeLeft,
    RouterLoadReported,
    WeightsFetched,
    WeightsFetchFailed,
    WeightsPartFetched,
    WeightsProgressed,
)
from glowplug.fleet.demand import LoadReports
from glowplug.fleet.start_times import START_TIMES, StartRow
from glowplug.fleet.status import StartEstimates
from glowplug.fleet.tables import ABSENT_S, FleetTables, NodeTable
from glowplug.services.console import fleet_rows as rows
from glowplug.services.console.decisions import DecisionLog
from glowplug.services.console.events import discreet_model
from glowplug.services.console.fleet_rows import FleetRow, WatchedFetch
from glowplug.services.console.records import Newest

DECISIONS_SHOWN: Final = 200
MODELS_REMEMBERED: Final = 4096
CORDONS: Final = "cordons"
STALLED_S: Final = 3.0  # without a report a fetch's rate is 0
FETCH_LEASE_S: Final = 10.0  # without a report a fetch is not part of a start
FORGOTTEN_S: Final = 60.0  # without a report a fetch is over
NEWEST: Final = 0.5

_HEALTHY: Final = (InstanceState.READY, InstanceState.DRAINING, InstanceState.STOPPED, InstanceState.SWAPPED_OUT)
TABLES: Final[Mapping[str, type[Any]]] = {
    "models": Model,
    "instances": Instance,
    "nodes": Node,
    CORDONS: Cordon,
    START_TIMES: StartRow,
}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Models by name, nodes and instances by id, decisions newest first."""

    now: float
    sources: dict[str, rows.SourceState]
    models: list[rows.ModelRow]
    instances: list[rows.InstanceRow]
    nodes: list[rows.NodeRow]
    decisions: list[rows.DecisionRow]


RowT = TypeVar("RowT")


class RowTable(Generic[RowT]):
    """Rows that are made anew only when touched. `make(key, now_s)` returns None for a row that is gone."""

    def __init__(self, make: Callable[[str, float], RowT | None]) -> None:
        self.rows: dict[str, RowT] = {}
        self._make = make
        self._touched: set[str] = set()
        self._before: dict[str, RowT | None] = {}  # changed rows as last taken

    def touch(self, keys: Iterable[str]) -> None:
        self._touched.update(keys)

    def refresh(self, now_s: float) -> None:
        for key in self._touched:
            row, old = self._make(key, now_s), self.rows.get(key)
            if row == old:
                continue
            self._before.setdefault(key, old)
            if row is None:
                del self.rows[key]
            else:
                self.rows[key] = row
        self._touched.clear()

    def take_changed(self) -> dict[str, RowT | None]:
        """Return changed keys with the row at the last call. One reader only: the hub."""
        before, self._before = self._before, {}
        return before


class Fetches:
    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, WatchedFetch]] = {}  # node id -> digest -> fetch

    def progress(self, report: WeightsProgressed, now_s: float) -> None:
        here = self._by_node.setdefault(report.node_id, {})
        known = here.get(report.digest)
        if known is None or report.num_bytes_done < known.report.num_bytes_done:
            here[report.digest] = WatchedFetch(report, now_s)
            return
        took_s = now_s - known.reported_at
        if took_s <= 0:
            here[report.digest] = replace(known, report=report)
            return
        rate, old = (report.num_bytes_done - known.report.num_bytes_done) / took_s, known.bytes_per_s
        here[report.digest] = WatchedFetch(report, now_s, rate if not old else old + NEWEST * (rate - old))

    def end(self, fact: WeightsFetched | WeightsPartFetched | WeightsFetchFailed) -> None:
        self._by_node.get(fact.node_id, {}).pop(fact.digest, None)

    def refresh(self, now_s: float) -> set[str]:
        touched = set()
        for node_id, here in list(self._by_node.items()):
            for digest, fetch in list(here.items()):
                silent_s = now_s - fetch.reported_at
                if silent_s >= FORGOTTEN_S:
                    del here[digest]
                    touched.add(node_id)
                elif silent_s >= STALLED_S and fetch.bytes_per_s:
                    here[digest] = replace(fetch, bytes_per_s=0.0)
                    touched.add(node_id)
            if not here:
                del self._by_node[node_id]
        return touched

    def of(self, model_key: str, node_id: str, now_s: float) -> WatchedFetch | None:
        """None if its latest report is older than FETCH_LEASE_S."""
        mine = (fetch for fetch in self.to(node_id) if fetch.report.model_key == model_key)
        latest = max(mine, key=lambda fetch: fetch.reported_at, default=None)
        return latest if latest is not None and now_s - latest.reported_at < FETCH_LEASE_S else None

    def to(self, node_id: str) -> tuple[WatchedFetch, ...]:
        return tuple(self._by_node.get(node_id, {}).values())


class Loads:
    """Load summed over routers that reported lately; idle models are left out."""

    def __init__(self, deployed: Container[str]) -> None:
        self._reports = LoadReports(deployed)
        self.by_model: dict[str, rows.ShownLoad] = {}
        self._by_instance = Counter[str]()
        self._is_stale = False

    def put(self, report: RouterLoadReported, now_s: float) -> None:
        self._reports.take(report, now_s)
        self._is_stale = True

    def model(self, key: str) -> rows.ShownLoad:
        return self.by_model.get(key, rows.ShownLoad())

    def instance(self, key: str) -> int:
        return self._by_instance[key]

    def refresh(self, now_s: float) -> tuple[set[str], set[str]]:
        """Return changed (model keys, instance ids). Routers silent for LOAD_STALE_S are forgotten."""
        if not self._reports.expire(now_s) and not self._is_stale:
            return set(), set()
        self._is_stale = False
        models, instances = dict[str, rows.ShownLoad](), Counter[str]()
        for loads in self._reports.loads.values():
            for key, load in loads.items():
                if load.num_waiting or load.num_in_flight:
                    waiting, running = models.get(key, (0, 0))
                    models[key] = rows.ShownLoad(waiting + load.num_waiting, running + load.num_in_flight)
                instances.update(load.in_flight_by_instance)
        changed_models = {key for key, _ in models.items() ^ self.by_model.items()}
        changed_instances = {key for key, _ in instances.items() ^ self._by_instance.items()}
        self.by_model, self._by_instance = models, instances
        return changed_models, changed_instances


class ShownFleet:
    def __init__(self, *, max_decisions: int = 2000) -> None:
        self.fleet = FleetTables()
        self.models, self.instances = self.fleet.models, self.fleet.instances
        self.node_table = NodeTable()
        self.nodes: Mapping[str, Node] = self.node_table.by_id
        self.decisions = DecisionLog(max_decisions=max_decisions)
        self.sources = {name: rows.SourceState(is_up=False, stale_since=0.0) for name in ("bus", "store")}
        self.model_rows = RowTable(self._model_row)
        self.instance_rows = RowTable(self._instance_row)
        self.node_rows = RowTable(self._node_row)
        self._declared: dict[str, Model] = {}  # models with all their fields, never shown
        self._cordoned: frozenset[str] = frozenset()
        self._coming: dict[str, str] = {}  # of starting instances
        self._estimates = StartEstimates()
        self._loads = Loads(self.models)
        self.fetches = Fetches()
        self._left_at: dict[str, float] = {}  # node id -> when it left or was given up
        self._lost: dict[str, float] = {}  # node id -> silent since, as shown
        self._starts: Newest[str, rows.TimedStart] = Newest(MODELS_REMEMBERED)  # the latest by model
        self._failures: Newest[str, Instance] = Newest(MODELS_REMEMBERED)

    def take(self, event: Event, now_s: float) -> None:
        self.decisions.take(event)
        match event.data:
            case NodeBeat(node=node) | NodeJoined(node=node):
                self._put_node(node, now_s)
            case RouterLoadReported() as report:
                self._loads.put(report, now_s)
            case DecisionMade(decision=decision):
                self._cordon_decided(decision)
            case ModelDeployed(model=model):
                self._put_model(model, now_s)
            case ModelUndeployed(model_key=model_key):
                self.fleet.model_table.forget(model_key)
                self._forget_models([model_key])
            case NodeLeft(node_id=node_id) if node_id in self.nodes:
                self._left_at.setdefault(node_id, now_s)
            case WeightsProgressed(node_id=node_id) as report:
                self.fetches.progress(report, now_s)
                self.node_rows.touch([node_id])
            case WeightsFetched() | WeightsPartFetched() | WeightsFetchFailed() as end:
                self.fetches.end(end)
                self.node_rows.touch([end.node_id])
            case data if isinstance(data, InstanceChange):
                self._put_instance(data.instance, now_s)

    def restore(self, table: str, table_rows: Mapping[str, Any], now_s: float) -> None:
        """`table`: one of TABLES."""
        if table == CORDONS:
            self._cordon(node_id for node_id, cordon in table_rows.items() if cordon.cordoned)
            return
        if table == START_TIMES:
            self._estimates.times.restore(table_rows)
            return
        if table == "models":
            for model in table_rows.values():
                self._put_model(model, now_s)
                self.decisions.put_model(model)
            gone = self.fleet.model_table.drop_absent(table_rows, now_s)
            self._forget_models(model.key for model in gone)
        elif table == "instances":
            for instance in self.fleet.instance_table.drop_absent(table_rows, now_s):
                self._coming.pop(instance.instance_id, None)
                self._touch_around(instance)
            for instance in sorted(table_rows.values(), key=lambda one: one.changed_at):
                self._put_instance(instance, now_s)
                self.decisions.put_instance(instance)
        else:
            self.node_table.unstored.read(table_rows)
            for node in table_rows.values():
                self._put_node(node, max(self.node_table.moved_at(node.node_id), min(node.heartbeat_at, now_s)))
            for node_id in [key for key in self.nodes if key not in table_rows]:
                if now_s - self.node_table.moved_at(node_id) > ABSENT_S:
                    self._drop_node(node_id)

    def source(self, name: str, is_up: bool, now_s: float) -> None:
        old = self.sources[name]
        if old.is_up != is_up or (not is_up and not old.stale_since):
            self.sources[name] = rows.SourceState(is_up=is_up, stale_since=0.0 if is_up else now_s)

    def refresh(self, now_s: float) -> float:
        """Return the time of the rows: while no source answers, the last moment one did, so that no node counts as
        lost."""
        if not any(source.is_up for source in self.sources.values()):
            now_s = max(source.stale_since for source in self.sources.values()) or now_s
        self.loads(now_s)
        self.model_rows.touch(self._coming.values())  # the rest of a start changes with time
        self.node_rows.touch(self.fetches.refresh(now_s))
        for node_id in self.nodes:
            if (lost_since := self._lost_since(node_id, now_s)) != self._lost.get(node_id, 0.0):
                self._lost[node_id] = lost_since
                self.node_rows.touch([node_id])
        for table in (self.model_rows, self.instance_rows, self.node_rows):
            table.refresh(now_s)
        return now_s

    def loads(self, now_s: float) -> Mapping[str, rows.ShownLoad]:
        model_keys, instance_ids = self._loads.refresh(now_s)
        self.model_rows.touch(model_keys)
        self.instance_rows.touch(instance_ids)
        return self._loads.by_model

    def snapshot(self, now_s: float) -> Snapshot:
        now_s = self.refresh(now_s)
        return Snapshot(
            now=now_s,
            sources=dict(self.sources),
            models=sorted(self.model_rows.rows.values(), key=lambda row: (row.value.name.lower(), row.value.key)),
            instances=[row for _, row in sorted(self.instance_rows.rows.items())],
            nodes=[FleetRow(self.nodes[key], row.joined) for key, row in sorted(self.node_rows.rows.items())],
            decisions=list(map(self.decisions.row, self.decisions.latest(DECISIONS_SHOWN))),
        )

    def digest_of(self, model_key: str) -> str:
        """Return the name of a model's weights in host memory, which is of their whole address."""
        return self._declared[model_key].weights.digest

    def _put_model(self, model: Model, now_s: float) -> None:
        if self.fleet.model_table.apply(discreet_model(model), now_s):
            self._declared[model.key] = model
            self.model_rows.touch([model.key])
            self.instance_rows.touch(self.fleet.instance_table.living(model.key))

    def _forget_models(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._declared.pop(key, None)
            self.model_rows.touch([key])

    def _put_node(self, node: Node, seen_at: float) -> None:
        known = self.nodes.get(node.node_id)
        if not self.node_table.apply(node, seen_at):
            return
        self._left_at.pop(node.node_id, None)
        if known is None or _drawn(known) != _drawn(node):
            self.node_rows.touch([node.node_id])

    def _drop_node(self, node_id: str) -> None:
        self.node_table.forget(node_id)
        self._left_at.pop(node_id, None)
        self._lost.pop(node_id, None)
        self.node_rows.touch([node_id])

    def _put_instance(self, instance: Instance, now_s: float) -> None:
        key = instance.instance_id
        known = self.instances.get(key)
        if not self.fleet.instance_table.apply(instance, now_s):
            return
        if instance.state is InstanceState.READY and (known is None or known.state.is_coming):
            self._learn_start(instance)
        if instance.state is InstanceState.FAILED:
            self._failures.put(instance.model_key, instance)
        elif instance.state in _HEALTHY:
            self._forgive(instance)
        if instance.state.is_coming:
            self._coming[key] = instance.model_key
        else:
            self._coming.pop(key, None)
        self._touch_around(instance)

    def _touch_around(self, instance: Instance) -> None:
        self.instance_rows.touch([instance.instance_id])
        self.model_rows.touch([instance.model_key])

    def _forgive(self, instance: Instance) -> None:
        failure = self._failures.get(instance.model_key)
        if failure and instance.changed_at >= failure.changed_at:
            del self._failures[instance.model_key]

    def _learn_start(self, instance: Instance) -> None:
        if (model := self.models.get(instance.model_key)) is not None:
            self._estimates.times.learn(instance, model)
        latest = self._starts.get(instance.model_key)
        start = rows.past_start(instance)
        if start is not None and (latest is None or start.ended_at >= latest.ended_at):
            self._starts.put(instance.model_key, start)

    def _cordon_decided(self, decision: DecisionRecord) -> None:
        if decision.kind == "drain" and decision.node_id and not decision.instance_id:
            alone = {decision.node_id}
            self._cordon(self._cordoned | alone if decision.chosen == "drain" else self._cordoned - alone)

    def _cordon(self, node_ids: Iterable[str]) -> None:
        cordoned = frozenset(node_ids)
        self.node_rows.touch(cordoned ^ self._cordoned)
        self._cordoned = cordoned

    def _lost_since(self, node_id: str, now_s: float) -> float:
        if node_id in self._left_at:
            return self._left_at[node_id]
        return 0.0 if self.node_table.is_alive(node_id, now_s) else max(self.node_table.moved_at(node_id), 1.0)

    def _model_row(self, key: str, now_s: float) -> rows.ModelRow | None:
        model = self.models.get(key)
        if model is None:
            return None
        mine = self.fleet.of(key).values()
        return rows.model_row(
            model,
            mine,
            self._loads.model(key),
            eta_s=self._estimates.left_s(model, mine, now_s),
            eta_measured=self._estimates.times.has_seen(model),
            start=self._starts.get(key),
            failure=self._failures.get(key),
        )

    def _instance_row(self, key: str, _: float) -> rows.InstanceRow | None:
        instance = self.instances.get(key)
        if instance is None:
            return None
        declared = self._declared.get(instance.model_key)
        outdated = declared is not None and not instance.state.is_gone and instance.is_outdated(declared)
        return FleetRow(instance, rows.InstanceStatus(num_in_flight=self._loads.instance(key), outdated=outdated))

    def _node_row(self, key: str, now_s: float) -> rows.NodeRow | None:
        node = self.nodes.get(key)
        if node is None:
            return None
        lost_since, fetches = self._lost_since(key, now_s), self.fetches.to(key)
        return FleetRow(node, rows.NodeStatus(lost_since=lost_since, cordoned=key in self._cordoned, fetches=fetches))


def _drawn(node: Node) -> tuple[object, ...]:
    """Leave out the fields that change with each beat."""
    on_disk = tuple((copy.digest, copy.num_bytes, copy.model_keys) for copy in node.on_disk)
    return node.gpus, node.engines, node.links, node.cached, on_disk, node.draining, node.host_cache_bytes
