"""What the console knows of the fleet, out of facts, telemetry and tables that may come late, twice or not at all.

Pure: told events and rows with `now_s`, asked for rows. An older `revision` never wins. Every collection is bounded:
tables by what the fleet has, logs by a fixed length, and what the store no longer lists leaves after a grace time.
A row is made anew only when something it shows was touched, so that a large fleet costs what changes in it.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

import msgspec
from glowplug.controllers.router.eta import Estimates

from glowplug.controllers.placer.controller import Cordon
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
    RequestFinished,
    RequestRejected,
    RouterLoadReported,
    WeightsFetched,
    WeightsFetchFailed,
    WeightsProgressed,
)
from glowplug.policies.start_times import START_TIMES, StartRow
from services.console import fleet_rows as rows
from services.console import fleet_shapes as shapes
from services.console.fleet_fetches import Fetches
from services.console.fleet_loads import Loads
from services.console.fleet_table import RowTable

NODE_LEASE_S: Final = 5.0  # silence after which a node is shown as lost
ABSENT_GRACE_S: Final = 10.0  # a row the store has lost is shown this long
REQUESTS_KEPT: Final = 200
LOOKED_BACK: Final = 32  # requests among which a refused one is looked for: its two events come together
DECISIONS_KEPT: Final = 200
TOMBSTONES_KEPT: Final = 4096
MODELS_REMEMBERED: Final = 4096  # of which the last start and failure are kept
CORDONS: Final = "cordons"

_HEALTHY: Final = (InstanceState.READY, InstanceState.DRAINING, InstanceState.STOPPED, InstanceState.SWAPPED_OUT)
TABLES: Final[Mapping[str, type[Any]]] = {
    "models": Model,
    "instances": Instance,
    "nodes": Node,
    CORDONS: Cordon,
    START_TIMES: StartRow,
}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment. Models by name, nodes and instances by id, logs newest first."""

    now: float
    seq: int
    sources: dict[str, rows.SourceRow]
    models: list[rows.ModelRow]
    instances: list[rows.InstanceRow]
    nodes: list[rows.NodeRow]
    decisions: list[rows.DecisionRow]
    requests: list[rows.RequestRow]


class FleetView:
    """`seq` grows with each change worth drawing again."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.instances: dict[str, Instance] = {}
        self.nodes: dict[str, Node] = {}
        self.requests: deque[rows.RequestRow] = deque(maxlen=REQUESTS_KEPT)
        self.decisions: deque[rows.DecisionRow] = deque(maxlen=DECISIONS_KEPT)
        self.sources = {name: rows.SourceRow(is_up=False, stale_since=0.0) for name in ("bus", "store")}
        self.seq = 0
        self.model_rows = RowTable(self._model_row)
        self.instance_rows = RowTable(self._instance_row)
        self.node_rows = RowTable(self._node_row)
        self._cordoned: frozenset[str] = frozenset()
        self._of_model: dict[str, dict[str, Instance]] = {}  # model key -> its instances
        self._coming: dict[str, str] = {}  # instance id -> model key, of those on their way
        self._estimates = Estimates()
        self._loads = Loads()
        self._fetches = Fetches()
        self._seen_at: dict[str, float] = {}  # node id -> when its latest beat came
        self._lost: dict[str, float] = {}  # node id -> silent since, as last shown
        self._starts: dict[str, rows.ColdStart] = {}  # model key -> latest start that came to ready
        self._failures: dict[str, rows.Failure] = {}
        self._gone: dict[str, int] = {}  # instance id -> revision it went with
        self._absent_since: dict[tuple[str, str], float] = {}
        self._decision_ids: dict[str, None] = {}  # the latest, oldest first

    def take(self, event: Event, now_s: float) -> None:
        """One fact or telemetry event; types the page does not draw are ignored."""
        match event.data:
            case NodeBeat(node=node) | NodeJoined(node=node):
                self._put_node(node, now_s)
            case RouterLoadReported() as report:
                self._loads.put(report, now_s)
            case RequestRejected(request_id=request_id) if self._has_ended(request_id):
                return  # its end, told before it, says the code too
            case RequestFinished() | RequestRejected():
                self.requests.append(shapes.request_row(event))
            case DecisionMade(decision=decision):
                self._put_decision(decision)
                self._hear_cordon(decision)
            case ModelDeployed(model=model):
                self._put_model(model)
            case ModelUndeployed(model_key=model_key):
                self._drop("models", model_key)
            case NodeLeft(node_id=node_id):
                self._seen_at[node_id] = min(self._seen_at.get(node_id, now_s), now_s - NODE_LEASE_S)
            case WeightsProgressed(node_id=node_id) as report:
                self._fetches.progress(report, now_s)
                self.node_rows.touch([node_id])
            case WeightsFetched() | WeightsFetchFailed() as end:
                self._fetches.end(end)
                self.node_rows.touch([end.node_id])
            case data if isinstance(data, InstanceChange):
                self._put_instance(data.instance)
            case _:
                return
        self.seq += 1

    def _has_ended(self, request_id: str) -> bool:
        latest = islice(reversed(self.requests), LOOKED_BACK)
        return any(row.request_id == request_id for row in latest)

    def restore(self, table: str, table_rows: Mapping[str, Any], now_s: float) -> None:
        """A whole table as the store has it (one of TABLES)."""
        self.seq += 1
        if table == CORDONS:
            self._cordon(node_id for node_id, cordon in table_rows.items() if cordon.cordoned)
            return
        if table == START_TIMES:
            self._estimates.times.restore(table_rows)
            return
        known: dict[str, Any] = getattr(self, table)
        for value in table_rows.values():
            if table == "models":
                self._put_model(value)
            elif table == "instances":
                self._put_instance(value)
            else:
                self._put_node(value, value.heartbeat_at)
        for key in list(known):
            if key in table_rows:
                self._absent_since.pop((table, key), None)
            elif now_s - self._absent_since.setdefault((table, key), now_s) >= ABSENT_GRACE_S:
                del self._absent_since[table, key]
                self._drop(table, key)
        self._absent_since = {k: at for k, at in self._absent_since.items() if k[0] != table or k[1] in known}

    def restore_decisions(self, newest_first: list[DecisionRecord]) -> None:
        """The tail of the store's log of decisions, for what was decided before this console came up."""
        for decision in reversed(newest_first):
            self._put_decision(decision)

    def source(self, name: str, is_up: bool, now_s: float) -> None:
        """Tell whether "bus" or "store" answers now; the first moment of silence is remembered."""
        old = self.sources[name]
        if old.is_up != is_up or (not is_up and not old.stale_since):
            self.sources[name] = rows.SourceRow(is_up=is_up, stale_since=0.0 if is_up else now_s)
            self.seq += 1

    def refresh(self, now_s: float) -> float:
        """Bring the rows up to `now_s`, and return the moment they stand for. While no source answers that is the last
        moment one did: a console that hears nothing cannot say that a node is lost."""
        if not any(source.is_up for source in self.sources.values()):
            now_s = max(source.stale_since for source in self.sources.values()) or now_s
        model_keys, instance_ids = self._loads.refresh(now_s)
        self.model_rows.touch(model_keys)
        self.model_rows.touch(self._coming.values())  # what is left of a start changes by itself
        self.instance_rows.touch(instance_ids)
        self.node_rows.touch(self._fetches.refresh(now_s))
        for node_id in self.nodes:
            if (lost_since := self._lost_since(node_id, now_s)) != self._lost.get(node_id, 0.0):
                self._lost[node_id] = lost_since
                self.node_rows.touch([node_id])
        for table in (self.model_rows, self.instance_rows, self.node_rows):
            table.refresh(now_s)
        return now_s

    def snapshot(self, now_s: float) -> Snapshot:
        """Everything, as rows."""
        now_s = self.refresh(now_s)
        return Snapshot(
            now=now_s,
            seq=self.seq,
            sources=dict(self.sources),
            models=sorted(self.model_rows.rows.values(), key=_by_name),
            instances=[row for _, row in sorted(self.instance_rows.rows.items())],
            nodes=[row for _, row in sorted(self.node_rows.rows.items())],
            decisions=list(reversed(self.decisions)),
            requests=list(reversed(self.requests)),
        )

    def _put_model(self, model: Model) -> None:
        known = self.models.get(model.key)
        if known is None or model.revision > known.revision:
            self.models[model.key] = model
            self.model_rows.touch([model.key])

    def _put_node(self, node: Node, seen_at: float) -> None:
        key = node.node_id
        self._seen_at[key] = max(seen_at, self._seen_at.get(key, 0.0))
        known = self.nodes.get(key)
        if known is None or (node.revision, node.heartbeat_at) >= (known.revision, known.heartbeat_at):
            self.nodes[key] = node
            if known is None or _drawn(known) != _drawn(node):
                self.node_rows.touch([key])

    def _put_instance(self, instance: Instance) -> None:
        key = instance.instance_id
        known = self.instances.get(key)
        if instance.revision <= (known.revision if known else self._gone.get(key, -1)):
            return
        if instance.state is InstanceState.READY and (known is None or known.state.is_coming):
            self._learn_start(instance)
        if instance.state is InstanceState.FAILED:
            failure = rows.Failure(key, instance.changed_at, instance.reason)
            _remember(self._failures, instance.model_key, failure)
        elif instance.state in _HEALTHY:
            self._forgive(instance)
        if instance.state.is_gone:
            self._drop("instances", key)
            self._touch_around(instance)
            self._gone[key] = instance.revision
            if len(self._gone) > TOMBSTONES_KEPT:
                del self._gone[next(iter(self._gone))]
            return
        self.instances[key] = instance
        self._of_model.setdefault(instance.model_key, {})[key] = instance
        if instance.state.is_coming:
            self._coming[key] = instance.model_key
        else:
            self._coming.pop(key, None)
        self._touch_around(instance)

    def _drop(self, table: str, key: str) -> None:
        known: dict[str, Any] = getattr(self, table)
        gone = known.pop(key, None)
        if table == "models":
            self.model_rows.touch([key])
        elif table == "nodes":
            self._seen_at.pop(key, None)
            self._lost.pop(key, None)
            self.node_rows.touch([key])
        elif gone is not None:
            self._coming.pop(key, None)
            mine = self._of_model.get(gone.model_key, {})
            mine.pop(key, None)
            if not mine:
                self._of_model.pop(gone.model_key, None)
            self._touch_around(gone)

    def _touch_around(self, instance: Instance) -> None:
        """An instance shows in its own row, in its model's, and in what its nodes' GPUs hold."""
        self.instance_rows.touch([instance.instance_id])
        self.model_rows.touch([instance.model_key])
        self.node_rows.touch(worker.node_id for worker in instance.workers)

    def _forgive(self, instance: Instance) -> None:
        """An instance that works, or ended as asked, after a failure of the same model makes the failure history."""
        failure = self._failures.get(instance.model_key)
        if failure and instance.changed_at >= failure.failed_at:
            del self._failures[instance.model_key]

    def _learn_start(self, instance: Instance) -> None:
        if (model := self.models.get(instance.model_key)) is not None:
            self._estimates.times.learn(instance, model)
        latest = self._starts.get(instance.model_key)
        if instance.ready_at and (latest is None or instance.ready_at >= latest.ready_at):
            _remember(self._starts, instance.model_key, shapes.cold_start(instance))

    def _put_decision(self, decision: DecisionRecord) -> None:
        if decision.decision_id in self._decision_ids:
            return
        self._decision_ids[decision.decision_id] = None
        if len(self._decision_ids) > 2 * DECISIONS_KEPT:
            del self._decision_ids[next(iter(self._decision_ids))]
        self.decisions.append(shapes.decision_row(decision))
        self.seq += 1

    def _hear_cordon(self, decision: DecisionRecord) -> None:
        """The decision to drain a node comes before its row is read again."""
        if decision.kind == "drain" and decision.node_id and not decision.instance_id:
            alone = {decision.node_id}
            self._cordon(self._cordoned | alone if decision.chosen == "drain" else self._cordoned - alone)

    def _cordon(self, node_ids: Iterable[str]) -> None:
        cordoned = frozenset(node_ids)
        self.node_rows.touch(cordoned ^ self._cordoned)
        self._cordoned = cordoned

    def _lost_since(self, node_id: str, now_s: float) -> float:
        seen_at = self._seen_at.get(node_id, 0.0)
        return 0.0 if now_s - seen_at < NODE_LEASE_S else max(seen_at, 1.0)

    def _model_row(self, key: str, now_s: float) -> rows.ModelRow | None:
        model = self.models.get(key)
        if model is None:
            return None
        mine = list(self._of_model.get(key, {}).values())
        is_ready = any(i.state is InstanceState.READY for i in mine)
        return shapes.model_row(
            model,
            mine,
            self._loads.model(key),
            eta_s=0.0 if is_ready else self._estimates.start_left_s(model, mine, now_s),
            eta_measured=self._estimates.times.has_seen(model),
            start=self._starts.get(key),
            failure=self._failures.get(key),
        )

    def _instance_row(self, key: str, _: float) -> rows.InstanceRow | None:
        instance = self.instances.get(key)
        return None if instance is None else shapes.instance_row(instance, self._loads.instance(key))

    def _node_row(self, key: str, now_s: float) -> rows.NodeRow | None:
        node = self.nodes.get(key)
        if node is None:
            return None
        return shapes.node_row(
            node,
            self.instances,
            lost_since=self._lost_since(key, now_s),
            cordoned=key in self._cordoned,
            fetches=self._fetches.rows(key),
        )


def _by_name(row: rows.ModelRow) -> tuple[str, str]:
    return (row.name.lower(), row.key)


def _drawn(node: Node) -> tuple[object, ...]:
    """What of a node its row shows; a beat that brings nothing else changes nothing."""
    return node.gpus, node.engines, node.links, node.cached, node.draining, node.host_cache_bytes


def _remember(memory: dict[str, Any], key: str, value: Any) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MODELS_REMEMBERED:
        del memory[next(iter(memory))]
