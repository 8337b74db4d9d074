"""Records of models: row, demand, instances asked for, and orders sent to agents."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from glowplug.controllers import backoff
from glowplug.controllers.autoscaler.keeping import KeptCopy
from glowplug.controllers.autoscaler.replacing import Replacing
from glowplug.controllers.effects import Effect, Publish, Remove, Save
from glowplug.domain.declared import check_owner
from glowplug.domain.errors import Conflict
from glowplug.domain.instance import Becomes, Instance, InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import ModelDeployed
from glowplug.fleet.adapters import AdapterIndex
from glowplug.fleet.forecasts import Ahead
from glowplug.fleet.status import check_nowhere_else

AT_ONCE = 8  # failed starts in a row before even another node has to wait
PLACED_S = 1.0  # a placer with enough free GPUs answers in milliseconds


@dataclass(slots=True)
class Start:
    """An instance asked of the placer that no fact has answered."""

    command: PlaceInstance
    sent_at: float
    cause: Event | None

    def again(self, model: Model, now_s: float, **changes: Any) -> Publish:
        self.command, self.sent_at = replace(self.command, model=model, **changes), now_s
        return Publish(self.command, self.cause)


class OrderKind(StrEnum):
    STOP = "stop"
    UNLOAD = "unload"  # an operator's: not taken back, and its streams are no demand
    RESUME = "resume"


STOPS = (OrderKind.STOP, OrderKind.UNLOAD)
_DRAINS = (InstanceState.READY, InstanceState.DRAINING)
_CHANGES = {
    OrderKind.STOP: _DRAINS,
    OrderKind.UNLOAD: _DRAINS,
    OrderKind.RESUME: _DRAINS[::-1],
}


@dataclass(slots=True)
class Order:
    kind: OrderKind
    sent_at: float
    becomes: Becomes = "stopped"  # of a stop
    reason: str = ""


@dataclass(slots=True)
class ModelRecord:
    """The autoscaler's record of one model, deployed or not. Times are epoch seconds."""

    key: str
    model: Model | None = None
    absent_since: float | None = None  # since when the table, not empty, lacks its row
    undeployed_revision: int | None = None  # until the table lacks that row
    unknown_since: float | None = None  # since when it has instances but is not deployed
    policy_state: Any = None
    ahead: Ahead = field(default_factory=Ahead)
    waiting: Event | None = None  # the request.waiting to name as the cause
    asked: str = ""  # why an instance is wanted without a request
    asked_node: str = ""  # "": any
    keep_alive_s: float | None = None  # asked by a client for the serving instances
    kept: KeptCopy = field(default_factory=KeptCopy)
    replacing: Replacing = field(default_factory=Replacing)
    num_failures: int = 0
    not_before: float = 0.0  # of the next start
    rest_until: float = 0.0  # nothing to balance before
    stands_until: float = 0.0  # of the policy's last answer
    starts: dict[str, Start] = field(default_factory=dict)
    orders: dict[str, Order] = field(default_factory=dict)  # instance_id -> the last one

    @property
    def num_pending(self) -> int:
        """Coming instances that a request or an operator waits for."""
        return sum(start.command.num_required for start in self.starts.values() if not start.command.waits)

    @property
    def is_empty(self) -> bool:
        """Whether a new record would hold the same."""
        kept = self.starts or self.orders or self.ahead
        return self.model is None and self.undeployed_revision is None and not kept

    def is_leaving(self, instance_id: str, *kinds: OrderKind) -> bool:
        """Return whether the last order was a stop of one of these `kinds` (none: any)."""
        order = self.orders.get(instance_id)
        return order is not None and order.kind in (kinds or STOPS)

    def may_resume(self, instance_id: str, rows: Mapping[str, Instance]) -> bool:
        """Return whether it may be taken back: not if unloaded, outdated, or on another node than asked."""
        only, row = self.asked_node if self.asked else "", rows[instance_id]
        if self.model is None or row.is_outdated(self.model):
            return False
        return only in ("", row.node_id) and self.is_leaving(instance_id, OrderKind.STOP)

    def check_node(self, to: Rung, node_id: str, rows: Iterable[Instance]) -> None:
        """Raise Conflict where an operator's load on one node would start nothing there: another node has an equally
        near copy, or one is asked for."""
        check_nowhere_else(to, node_id, rows)
        asked = [s.command for s in self.starts.values() if not (s.command.waits and to is Rung.READY)]
        elsewhere = [command for command in asked if command.node_id != node_id]
        if node_id and elsewhere:
            raise Conflict(f"an instance is already requested, on {elsewhere[0].node_id or 'any node'}", param="node")

    def kept_as_asked(self, model: Model, rows: Mapping[str, Instance]) -> Model:
        """Apply a client's keep-alive, which ends once none of the `rows` serves."""
        if self.keep_alive_s is not None and not any(row.serves for row in rows.values()):
            self.keep_alive_s = None
        return model if self.keep_alive_s is None else replace(model, keep_alive_s=self.keep_alive_s)

    def ask_again(self, model: Model, now_s: float, repeat_s: float) -> list[Effect]:
        return [s.again(model, now_s) for s in self.starts.values() if now_s - s.sent_at >= repeat_s]

    def undeployed(self) -> "ModelRecord":
        """Keep starts and orders under way."""
        assert self.model is not None
        return ModelRecord(
            key=self.key, undeployed_revision=self.model.revision, unknown_since=self.unknown_since,
            starts=self.starts, orders=self.orders,
        )  # fmt: skip

    def forecast_at(self, at_s: float) -> tuple[Forecast | None, Forecast | None]:
        """Return the forecasts of the window at `at_s`, with the highest demand until a start begun then serves, and of
        the next window. A silent predictor is ignored after its last window."""
        windows = self.ahead.windows_from(at_s)
        if not windows:
            return None, None
        return self.ahead.until_a_start_serves(windows[0], at_s), windows[1] if len(windows) > 1 else None

    def failed(self, now_s: float, backoff_s: float, max_backoff_s: float, tries_left: int = 0) -> None:
        """Pause starts, longer each time, unless other nodes remain to try (`tries_left`)."""
        if tries_left and self.num_failures < AT_ONCE:
            self.num_failures += 1
            return
        self.asked = ""
        if self.model is not None:
            self.num_failures += 1
            self.not_before = now_s + backoff.backoff_s(self.num_failures, backoff_s, max_backoff_s)

    def may_try_again(self) -> None:
        self.num_failures, self.not_before = 0, 0.0

    def expire(self, rows: Mapping[str, Instance], now_s: float, repeat_s: float) -> None:
        """Drop past forecasts, and orders that are over or of unknown instances."""
        if self.ahead.is_over(now_s):
            self.ahead = replace(self.ahead, windows=())
        if not rows:
            self.unknown_since = None
        for instance_id, order in list(self.orders.items()):
            is_over = now_s - order.sent_at >= repeat_s if order.kind is OrderKind.RESUME else instance_id not in rows
            if is_over:
                del self.orders[instance_id]
        self.kept.forget_unknown(rows)

    def demand(self, load: ModelLoad, rows: Mapping[str, Instance]) -> ModelLoad:
        """Add a waiting request for an operator's wish; omit those reported on instances gone, asleep or unloaded."""
        if self.asked and not load.num_waiting:
            load = replace(load, num_waiting=1)
        leaving = sum(num for i, num in load.in_flight_by_instance.items() if self._has_left(i, rows))
        return replace(load, num_in_flight=max(0, load.num_in_flight - leaving)) if leaving else load

    def _has_left(self, instance_id: str, rows: Mapping[str, Instance]) -> bool:
        row = rows.get(instance_id)
        is_over = row is not None and (row.state.is_gone or row.state.is_dormant)
        return is_over or self.is_leaving(instance_id, OrderKind.UNLOAD)

    def as_ordered(self, rows: Mapping[str, Instance], now_s: float, repeat_s: float) -> tuple[Instance, ...]:
        """Apply recent orders, so that the policy does not choose again before the agents act."""
        becomes = {}
        for instance_id, order in self.orders.items():
            before, after = _CHANGES[order.kind]
            row = rows.get(instance_id)
            if row is not None and row.state is before and now_s - order.sent_at < repeat_s:
                becomes[instance_id] = replace(row, state=after)
        return tuple({**rows, **becomes}.values()) if becomes else tuple(rows.values())


class ModelRecords:
    """Records by model_key, and the table of models. Each change of a row raises its revision, even over an
    undeployment."""

    def __init__(self) -> None:
        self.records: dict[str, ModelRecord] = {}
        self._starting: dict[str, ModelRecord] = {}
        self._late: tuple[float, list[str]] | None = None  # see `is_short_elsewhere`
        self._adapters = AdapterIndex()
        self.bases: Mapping[str, str] = self._adapters.bases

    def of(self, model_key: str) -> ModelRecord:
        record = self.records.get(model_key)
        if record is None:
            record = self.records[model_key] = ModelRecord(model_key)
        return record

    def deployed(self) -> Iterator[Model]:
        return (record.model for record in self.records.values() if record.model is not None)

    def find(self, model_key: str) -> Model | None:
        record = self.records.get(model_key)
        return record.model if record is not None else None

    def __contains__(self, model_key: object) -> bool:
        """Return whether a model is deployed."""
        record = self.records.get(model_key) if isinstance(model_key, str) else None
        return record is not None and record.model is not None

    def adapters_of(self, base_key: str) -> Mapping[str, Model]:
        return self._adapters.of(base_key)

    def wake(self, model_key: str, now_s: float, *, has_work: bool = True) -> None:
        """End the policy's standing answer. `has_work`: the model may need an instance."""
        if (record := self.records.get(model_key)) is not None:
            record.stands_until = min(record.stands_until, now_s)
            if has_work:
                record.rest_until = 0.0

    def keep_alive(self, model_key: str, keep_alive_s: float, now_s: float) -> None:
        if self.find(model_key) is not None:
            self.of(model_key).keep_alive_s = keep_alive_s
            self.wake(model_key, now_s)

    def start(self, record: ModelRecord, start: Start) -> None:
        record.starts[start.command.instance_id] = start
        self._starting[record.key] = record
        self._late = None

    def changed(self) -> None:
        self._late = None

    def started(self, record: ModelRecord, instance_id: str) -> None:
        if record.starts.pop(instance_id, None) is not None:
            self._late = None
            if not record.starts:
                del self._starting[record.key]

    def is_short_elsewhere(self, model_key: str, now_s: float) -> bool:
        """Return whether another model has waited `PLACED_S` for a place."""
        if not self._starting:
            return False
        if self._late is None or self._late[0] != now_s:
            self._late = now_s, self._two_late(now_s)
        return any(key != model_key for key in self._late[1])

    def _two_late(self, now_s: float) -> list[str]:
        """Return at most two models with a late start other than batch's."""
        late = (
            key
            for key, record in self._starting.items()
            if record.model
            and not record.model.base  # it waits for its base, and takes no memory of others
            and any(
                now_s - command.wanted_at >= PLACED_S and not (command.waits or command.is_batch)
                for command in (start.command for start in record.starts.values())
            )
        )
        return list(islice(late, 2))

    # rows

    def restore(self, rows: Mapping[str, Model], now_s: float) -> list[Effect]:
        """Rewrite lost rows and remove undeployed models'; the table may have been read before the latest write."""
        removed: list[Effect] = []
        for key, row in rows.items():
            record = self.of(key)
            record.absent_since = None
            if record.undeployed_revision is not None and row.revision <= record.undeployed_revision:
                if record.model is None:
                    removed.append(Remove("models", key))
            elif record.model is None or row.revision > record.model.revision:
                record.model, self._late = row, None
                self._adapters.put(row)
        lost: list[Effect] = []
        for record in self.records.values():
            if record.key in rows:
                continue
            record.undeployed_revision = None
            if record.model is not None:
                lost.append(Save("models", record.key, record.model))
                is_first = record.absent_since is None
                record.absent_since = (now_s if is_first else record.absent_since) if rows else None
        return [*lost, *removed]

    def inherit(self, earlier: "ModelRecords", now_s: float, absent_s: float) -> None:
        """Take over models and forecasts, so that an emptied store gets its models again. A model counts as undeployed
        by the fact, or when its row alone has been absent for more than `absent_s`."""
        for key, known in earlier.records.items():
            record = self.of(key)
            record.ahead = known.ahead
            record.keep_alive_s = known.keep_alive_s
            if known.absent_since is None or now_s - known.absent_since <= absent_s:
                record.model, record.absent_since = known.model, known.absent_since
                if record.model is not None:
                    self._adapters.put(record.model)

    def deploy(self, model: Model, *, create: bool, now_s: float) -> bool:
        """Write a row; return False if unchanged. Raises Conflict for a name of another model, or an existing one if
        `create`."""
        record = self.of(model.key)
        known = record.model
        check_names(model, self.deployed(), create=create)
        if known is not None:
            kept_at = model.kept_at or known.kept_at
            model = replace(model, suspended=known.suspended, pinned=model.pinned or known.pinned, kept_at=kept_at)
            if replace(model, revision=known.revision, declared_at=known.declared_at) == known:
                return False
        last = known.revision if known else -1 if record.undeployed_revision is None else record.undeployed_revision
        self._late = record.undeployed_revision = None
        record.model = declared(model, known, max(int(now_s * 1000), last + 1))
        self._adapters.put(record.model)
        return True

    def change(self, record: ModelRecord, now_s: float, **fields: Any) -> list[Effect]:
        """Set an operator's marks and publish the row; its declaration is unchanged."""
        known = record.model
        assert known is not None
        revision, declared_at = max(int(now_s * 1000), known.revision + 1), known.declared_at or known.revision
        record.model = replace(known, revision=revision, declared_at=declared_at, **fields)
        return [Save("models", record.key, record.model), Publish(ModelDeployed(model=record.model))]

    def undeploy(self, record: ModelRecord) -> ModelRecord:
        self._late = None
        self._adapters.drop(record.key)
        left = self.records[record.key] = record.undeployed()
        if left.starts:
            self._starting[left.key] = left
        return left


def declared(model: Model, known: Model | None, revision: int) -> Model:
    """Return a declaration as the next row after `known`."""
    is_same = known is not None and model.engine_digest == known.engine_digest
    return replace(
        model, revision=revision, declared_at=(known.declared_at or known.revision) if known and is_same else 0
    )


def check_names(model: Model, deployed: Iterable[Model], *, create: bool) -> None:
    """Raise Conflict for a name of another model, an existing model if `create`, or one declared elsewhere where either
    source is a custom resource."""
    names = set(model.names)
    for other in deployed:
        if other.key == model.key:
            check_owner(f"model {other.name!r}", other.source, model.source)
            if create:
                raise Conflict(f"model {model.name!r} exists (its key is {model.key!r})", param="name")
        elif clash := names.intersection(other.names):
            raise Conflict(f"the name {min(clash)!r} belongs to model {other.name!r}", param="aliases")
