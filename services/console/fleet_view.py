"""What the console knows of the fleet, out of facts, telemetry and tables that may come late, twice or not at all.

Pure: told events and rows with `now_s`, asked for rows. An older `revision` never wins. Every collection is bounded:
tables by what the fleet has, logs by a fixed length, and what the store no longer lists leaves after a grace time.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from glowplug.controllers.router_eta import Estimates
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Temperature
from glowplug.domain.snapshot import ModelLoad
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
)
from services.console import fleet_rows as rows

NODE_LEASE_S: Final = 5.0  # silence after which a node is shown as lost
LOAD_LEASE_S: Final = 3.0  # silence after which a router's load no longer counts
ABSENT_GRACE_S: Final = 10.0  # a row the store has lost is shown this long
REQUESTS_KEPT: Final = 200
DECISIONS_KEPT: Final = 200
TOMBSTONES_KEPT: Final = 4096
MODELS_REMEMBERED: Final = 4096  # of which the last start and failure are kept

_HEALTHY: Final = (InstanceState.READY, InstanceState.DRAINING, InstanceState.STOPPED, InstanceState.SWAPPED_OUT)
TABLES: Final[Mapping[str, type[Any]]] = {"models": Model, "instances": Instance, "nodes": Node}


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
        self._estimates = Estimates()
        self._loads: dict[str, tuple[float, Mapping[str, ModelLoad]]] = {}  # router id -> (heard at, loads)
        self._seen_at: dict[str, float] = {}  # node id -> when its latest beat came
        self._starts: dict[str, rows.ColdStart] = {}  # model key -> latest start that came to ready
        self._failures: dict[str, rows.Failure] = {}
        self._gone: dict[str, int] = {}  # instance id -> revision it went with
        self._absent_since: dict[tuple[str, str], float] = {}
        self._decision_ids: deque[str] = deque(maxlen=2 * DECISIONS_KEPT)

    def take(self, event: Event, now_s: float) -> None:
        """One fact or telemetry event; types the page does not draw are ignored."""
        match event.data:
            case NodeBeat(node=node) | NodeJoined(node=node):
                self._put_node(node, now_s)
            case RouterLoadReported(router_id=router_id, loads=loads):
                self._loads[router_id] = (now_s, loads)
            case RequestFinished() | RequestRejected():
                self.requests.append(_request_row(event))
            case DecisionMade(decision=decision):
                self._put_decision(decision)
            case ModelDeployed(model=model):
                self._put_model(model)
            case ModelUndeployed(model_key=model_key):
                self.models.pop(model_key, None)
            case NodeLeft(node_id=node_id):
                self._seen_at[node_id] = min(self._seen_at.get(node_id, now_s), now_s - NODE_LEASE_S)
            case data if isinstance(data, InstanceChange):
                self._put_instance(data.instance)
            case _:
                return
        self.seq += 1

    def restore(self, table: str, table_rows: Mapping[str, Any], now_s: float) -> None:
        """A whole table as the store has it (one of TABLES)."""
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
                del known[key], self._absent_since[table, key]
                self._seen_at.pop(key, None)
        self._absent_since = {k: at for k, at in self._absent_since.items() if k[0] != table or k[1] in known}
        self.seq += 1

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

    def snapshot(self, now_s: float) -> Snapshot:
        """Everything, as rows. While no source answers, nodes and loads stand as they were when the last one did:
        a console that hears nothing cannot say that a node is lost."""
        if not any(source.is_up for source in self.sources.values()):
            now_s = max(source.stale_since for source in self.sources.values()) or now_s
        loads = self._summed_loads(now_s)
        in_flight = {i: n for load in loads.values() for i, n in load.in_flight_by_instance.items()}
        return Snapshot(
            now=now_s,
            seq=self.seq,
            sources=dict(self.sources),
            models=[self._model_row(m, loads.get(m.key), now_s) for m in sorted(self.models.values(), key=_by_name)],
            instances=[rows.instance_row(self.instances[key], in_flight.get(key, 0)) for key in sorted(self.instances)],
            nodes=[
                rows.node_row(self.nodes[key], self.instances, lost_since=self._lost_since(key, now_s))
                for key in sorted(self.nodes)
            ],
            decisions=list(reversed(self.decisions)),
            requests=list(reversed(self.requests)),
        )

    def _put_model(self, model: Model) -> None:
        known = self.models.get(model.key)
        if known is None or model.revision > known.revision:
            self.models[model.key] = model

    def _put_node(self, node: Node, seen_at: float) -> None:
        self._seen_at[node.node_id] = max(seen_at, self._seen_at.get(node.node_id, 0.0))
        known = self.nodes.get(node.node_id)
        if known is None or (node.revision, node.heartbeat_at) >= (known.revision, known.heartbeat_at):
            self.nodes[node.node_id] = node

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
            self.instances.pop(key, None)
            self._gone[key] = instance.revision
            if len(self._gone) > TOMBSTONES_KEPT:
                del self._gone[next(iter(self._gone))]
        else:
            self.instances[key] = instance

    def _forgive(self, instance: Instance) -> None:
        """An instance that works, or ended as asked, after a failure of the same model makes the failure history."""
        failure = self._failures.get(instance.model_key)
        if failure and instance.changed_at >= failure.failed_at:
            del self._failures[instance.model_key]

    def _learn_start(self, instance: Instance) -> None:
        self._estimates.learn_start(instance)
        latest = self._starts.get(instance.model_key)
        if instance.ready_at and (latest is None or instance.ready_at >= latest.ready_at):
            _remember(self._starts, instance.model_key, rows.cold_start(instance))

    def _put_decision(self, decision: DecisionRecord) -> None:
        if decision.decision_id in self._decision_ids:
            return
        self._decision_ids.append(decision.decision_id)
        fields = {name: getattr(decision, name) for name in rows.DecisionRow.__struct_fields__ if name != "trace_id"}
        self.decisions.append(rows.DecisionRow(**fields, trace_id=_trace_id(decision.traceparent)))
        self.seq += 1

    def _summed_loads(self, now_s: float) -> dict[str, ModelLoad]:
        """Loads of every router heard of lately, by model."""
        for router_id in [r for r, (heard_at, _) in self._loads.items() if now_s - heard_at > LOAD_LEASE_S]:
            del self._loads[router_id]
        summed: dict[str, ModelLoad] = {}
        for _, loads in self._loads.values():
            for key, load in loads.items():
                summed[key] = _sum(summed[key], load) if key in summed else load
        return summed

    def _lost_since(self, node_id: str, now_s: float) -> float:
        seen_at = self._seen_at.get(node_id, 0.0)
        return 0.0 if now_s - seen_at < NODE_LEASE_S else max(seen_at, 1.0)

    def _model_row(self, model: Model, load: ModelLoad | None, now_s: float) -> rows.ModelRow:
        mine = [i for i in self.instances.values() if i.model_key == model.key]
        num_ready = sum(i.state is InstanceState.READY for i in mine)
        num_waiting = load.num_waiting if load else 0
        failure, start = self._failures.get(model.key), self._starts.get(model.key)
        coming = [i for i in mine if i.state.is_coming]
        eta_s = 0.0 if num_ready else self._estimates.start_left_s(model.key, coming, now_s)
        return rows.ModelRow(
            key=model.key,
            name=model.name,
            engine=model.engine,
            temperature=_temperature(mine).value,
            state=_state(mine, num_waiting, is_failed=failure is not None),
            eta_s=round(eta_s, 1),
            eta_measured=model.key in self._estimates.start_s,
            num_waiting=num_waiting,
            num_in_flight=load.num_in_flight if load else 0,
            num_ready=num_ready,
            max_instances=model.max_instances,
            memory_bytes=model.memory_bytes,
            keep_alive_s=model.keep_alive_s,
            pinned=model.pinned,
            emulated=model.engine == "emulated" or any(i.emulated for i in mine),
            instances=tuple(i.instance_id for i in sorted(mine, key=lambda i: (i.created_at, i.instance_id))),
            last_cold_start=start,
            failure=failure,
        )


def _by_name(model: Model) -> tuple[str, str]:
    return (model.name.lower(), model.key)


def _remember(memory: dict[str, Any], key: str, value: Any) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MODELS_REMEMBERED:
        del memory[next(iter(memory))]


def _temperature(instances: list[Instance]) -> Temperature:
    states = {i.state for i in instances}
    if InstanceState.READY in states:
        return Temperature.HOT
    return Temperature.WARM if InstanceState.SWAPPED_OUT in states else Temperature.COLD


def _state(instances: list[Instance], num_waiting: int, *, is_failed: bool) -> str:
    """The most useful word about a model: what its best instance is, else what it lacks."""
    states = {i.state for i in instances}
    for state in (InstanceState.READY, InstanceState.LOADING, InstanceState.STARTING, InstanceState.DRAINING):
        if state in states:
            return state.value
    if InstanceState.SWAPPED_OUT in states:
        return "asleep"
    if num_waiting:
        return "waiting"
    return "failed" if is_failed else "cold"


def _sum(a: ModelLoad, b: ModelLoad) -> ModelLoad:
    by_instance = dict(a.in_flight_by_instance)
    for key, count in b.in_flight_by_instance.items():
        by_instance[key] = by_instance.get(key, 0) + count
    return ModelLoad(
        num_waiting=a.num_waiting + b.num_waiting,
        num_in_flight=a.num_in_flight + b.num_in_flight,
        last_active_at=max(a.last_active_at, b.last_active_at),
        in_flight_by_instance=by_instance,
    )


def _trace_id(traceparent: str) -> str:
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else ""


def _request_row(event: Event) -> rows.RequestRow:
    data = event.data
    trace_id = _trace_id(event.traceparent)
    if isinstance(data, RequestRejected):
        return rows.RequestRow(
            request_id=data.request_id,
            model_key=data.model_key,
            status=data.status,
            code=data.code,
            finished_at=event.occurred_at,
            queue_s=0.0,
            ttft_s=0.0,
            e2e_s=0.0,
            response_tokens=0,
            tokens_exact=False,
            cold=False,
            emulated=False,
            instance_id="",
            trace_id=trace_id,
        )
    return rows.RequestRow(
        request_id=data.request_id,
        model_key=data.model_key,
        status=data.status,
        code="",
        finished_at=data.finished_at,
        queue_s=data.queue_s,
        ttft_s=data.ttft_s,
        e2e_s=data.e2e_s,
        response_tokens=data.response_tokens,
        tokens_exact=data.tokens_exact,
        cold=data.cold,
        emulated=data.emulated,
        instance_id=data.instance_id,
        trace_id=trace_id,
    )
