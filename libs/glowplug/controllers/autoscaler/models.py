"""One record per model: its row, the marks of demand, the instances asked for, and what agents were asked to do."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any

from glowplug.controllers import backoff
from glowplug.controllers.autoscaler.keeping import KeptCopy
from glowplug.controllers.effects import Effect, Publish, Remove, Save
from glowplug.domain.errors import Conflict
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import ModelDeployed
from glowplug.fleet.status import check_nowhere_else
from glowplug.policies.prediction.port import is_newer, until, windows_from

AT_ONCE = 8  # starts that fail in a row before the next one waits, though each may be tried on another node
PLACED_S = 1.0  # a placer that finds enough free GPUs says so in milliseconds


@dataclass(slots=True)
class Start:
    """An instance that the placer is asked for, of which no fact has come yet. `num_required`: how many instances it
    is to lead to."""

    wanted_at: float
    sent_at: float
    reason: str
    cause: Event | None
    num_required: int = 1
    waits: bool = False  # for free memory, and nobody waits for it
    node_id: str = ""  # on that node alone; "" anywhere
    is_awaited: bool = False  # a request or an operator waits for it


class OrderKind(StrEnum):
    """What an agent was last asked to do with an instance."""

    STOP = "stop"
    UNLOAD = "unload"  # an operator's stop: it is not taken back, and what it still streams is no demand
    RESUME = "resume"


STOPS = (OrderKind.STOP, OrderKind.UNLOAD)
_DRAINS = (InstanceState.READY, InstanceState.DRAINING)
_CHANGES = {  # the state before and after an order
    OrderKind.STOP: _DRAINS,
    OrderKind.UNLOAD: _DRAINS,
    OrderKind.RESUME: _DRAINS[::-1],
}


@dataclass(slots=True)
class Order:
    kind: OrderKind
    sent_at: float


@dataclass(slots=True)
class ModelRecord:
    """Everything the autoscaler keeps of one model, deployed or not. Times are epoch seconds."""

    key: str
    model: Model | None = None  # as deployed
    absent_since: float | None = None  # since when the table has had rows, but none of this model
    undeployed_revision: int | None = None  # the row it left with, until that row has left the table too
    unknown_since: float | None = None  # since when it has had instances without being deployed
    policy_state: Any = None  # what the scaling policy remembers of it
    forecasts: tuple[Forecast, ...] = ()  # of the latest forecast.made
    horizon_s: float = 0.0  # likewise: what a start takes
    waiting: Event | None = None  # the request that waits, for the trace
    asked: str = ""  # why an instance is wanted without a request
    asked_node: str = ""  # ... and on which node; "" on any
    kept: KeptCopy = field(default_factory=KeptCopy)  # its copy below READY
    num_failures: int = 0  # consecutive failed starts
    not_before: float = 0.0  # when the next start may be tried
    rest_until: float = 0.0  # it has nothing to balance until then
    stands_until: float = 0.0  # the policy's last answer stands until then; 0: it did not stand
    starts: dict[str, Start] = field(default_factory=dict)  # instance_id -> an instance asked for
    orders: dict[str, Order] = field(default_factory=dict)  # instance_id -> the last one sent

    @property
    def num_pending(self) -> int:
        """Instances to come that somebody waits for."""
        return sum(start.num_required for start in self.starts.values() if not start.waits)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known that a new record would not have. Its instances are in another table."""
        kept = self.starts or self.orders or self.forecasts
        return self.model is None and self.undeployed_revision is None and not kept

    def is_leaving(self, instance_id: str, *kinds: OrderKind) -> bool:
        """Whether its agent was last asked to stop it, by one of these `kinds` (none: by any)."""
        order = self.orders.get(instance_id)
        return order is not None and order.kind in (kinds or STOPS)

    def may_resume(self, instance_id: str, rows: Mapping[str, Instance]) -> bool:
        """Whether what drains may be taken back: an operator has not unloaded it, nor asks for another node."""
        only = self.asked_node if self.asked else ""
        return only in ("", rows[instance_id].node_id) and self.is_leaving(instance_id, OrderKind.STOP)

    def check_node(self, to: Rung, node_id: str, rows: Iterable[Instance]) -> None:
        """Raises Conflict where an operator's load on one node would start nothing there: a copy stands as near on
        another one, or is asked for."""
        check_nowhere_else(to, node_id, rows)
        elsewhere = [s for s in self.starts.values() if s.node_id != node_id and not (s.waits and to is Rung.READY)]
        if node_id and elsewhere:
            raise Conflict(f"an instance is asked for already, on {elsewhere[0].node_id or 'any node'}", param="node")

    def undeployed(self) -> "ModelRecord":
        """The record once the model is no more: what is under way goes on."""
        assert self.model is not None
        return ModelRecord(
            key=self.key, undeployed_revision=self.model.revision, unknown_since=self.unknown_since,
            starts=self.starts, orders=self.orders,
        )  # fmt: skip

    def take_forecasts(self, forecasts: tuple[Forecast, ...], horizon_s: float, now_s: float) -> None:
        """Unless later ones are known."""
        if is_newer(forecasts, self.forecasts, now_s):
            self.forecasts, self.horizon_s = forecasts, horizon_s

    def forecast_at(self, at_s: float) -> tuple[Forecast | None, Forecast | None]:
        """Of the window that holds `at_s`, with the most that is expected until a start begun then serves, and of the
        one after it; None where there is none. A forecast counts while its window lasts: a predictor that falls silent
        is none at all once its last window is over."""
        windows = self.windows_from(at_s)
        if not windows:
            return None, None
        return until(windows[0], windows, at_s + self.horizon_s), windows[1] if len(windows) > 1 else None

    def windows_from(self, at_s: float) -> tuple[Forecast, ...]:
        """Of the window that holds `at_s` and of all after it, each as it was forecast."""
        return windows_from(self.forecasts, at_s)

    def forecast_changes_at(self, at_s: float) -> float:
        """When after `at_s` a window begins, comes within the horizon or ends; never without forecasts."""
        horizon_s = self.horizon_s
        edges = (at for f in self.forecasts for at in (f.starts_at - horizon_s, f.starts_at, f.starts_at + f.window_s))
        return min((at for at in edges if at > at_s), default=math.inf)

    def failed(self, now_s: float, backoff_s: float, max_backoff_s: float, tries_left: int = 0) -> None:
        """A start has failed: the next one waits, longer each time. `tries_left`: on so many other nodes it may be
        tried, and is at once."""
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
        """Drop what is over: forecasts of past windows, and orders to instances that are unknown or have had their
        time."""
        if self.forecasts and now_s >= self.forecasts[-1].starts_at + self.forecasts[-1].window_s:
            self.forecasts = ()
        if not rows:
            self.unknown_since = None
        for instance_id, order in list(self.orders.items()):
            is_over = now_s - order.sent_at >= repeat_s if order.kind is OrderKind.RESUME else instance_id not in rows
            if is_over:
                del self.orders[instance_id]
        self.kept.forget_unknown(rows)

    def demand(self, load: ModelLoad, rows: Mapping[str, Instance]) -> ModelLoad:
        """The load with whoever asks without a request as one that waits, and without what a router last said it runs
        on an instance that is gone, asleep or unloaded."""
        if self.asked and not load.num_waiting:
            load = replace(load, num_waiting=1)
        leaving = sum(num for i, num in load.in_flight_by_instance.items() if self._has_left(i, rows))
        return replace(load, num_in_flight=max(0, load.num_in_flight - leaving)) if leaving else load

    def _has_left(self, instance_id: str, rows: Mapping[str, Instance]) -> bool:
        row = rows.get(instance_id)
        is_over = row is not None and (row.state.is_gone or row.state.is_dormant)
        return is_over or self.is_leaving(instance_id, OrderKind.UNLOAD)

    def as_ordered(self, rows: Mapping[str, Instance], now_s: float, repeat_s: float) -> tuple[Instance, ...]:
        """The rows as they will be when the orders of a moment ago are carried out: a policy that has chosen does not
        choose again before the agent has acted."""
        becomes = {}
        for instance_id, order in self.orders.items():
            before, after = _CHANGES[order.kind]
            row = rows.get(instance_id)
            if row is not None and row.state is before and now_s - order.sent_at < repeat_s:
                becomes[instance_id] = replace(row, state=after)
        return tuple({**rows, **becomes}.values()) if becomes else tuple(rows.values())


class ModelRecords:
    """model_key -> ModelRecord, and the table of models, which the autoscaler owns. Every change of a row grows its
    revision, also over an undeployment."""

    def __init__(self) -> None:
        self.records: dict[str, ModelRecord] = {}
        self._starting: dict[str, ModelRecord] = {}  # those with `starts`
        self._late: tuple[float, list[str]] | None = None  # see `is_short_elsewhere`

    def of(self, model_key: str) -> ModelRecord:
        """The record of that model, a new one if there is none."""
        record = self.records.get(model_key)
        if record is None:
            record = self.records[model_key] = ModelRecord(model_key)
        return record

    def deployed(self) -> Iterator[Model]:
        return (record.model for record in self.records.values() if record.model is not None)

    def find(self, model_key: str) -> Model | None:
        """The model of that key, if it is deployed."""
        record = self.records.get(model_key)
        return record.model if record is not None else None

    def wake(self, model_key: str, now_s: float, *, has_work: bool = True) -> None:
        """Something about a model has changed: no earlier answer stands. `has_work`: it may need an instance."""
        if (record := self.records.get(model_key)) is not None:
            record.stands_until = min(record.stands_until, now_s)
            if has_work:
                record.rest_until = 0.0

    def start(self, record: ModelRecord, instance_id: str, start: Start) -> None:
        """The placer is asked for an instance."""
        record.starts[instance_id] = start
        self._starting[record.key] = record
        self._late = None

    def started(self, record: ModelRecord, instance_id: str) -> None:
        """It is there, or is wanted no more."""
        if record.starts.pop(instance_id, None) is not None:
            self._late = None
            if not record.starts:
                del self._starting[record.key]

    def is_short_elsewhere(self, model_key: str, now_s: float) -> bool:
        """Whether an instance of another model has no place, though the placer has been asked for a while."""
        if not self._starting:
            return False
        if self._late is None or self._late[0] != now_s:
            self._late = now_s, self._two_late(now_s)
        return any(key != model_key for key in self._late[1])

    def _two_late(self, now_s: float) -> list[str]:
        """Two of those models, if there are. Kept for one moment, until a start or a deployment changes."""
        late = (
            key
            for key, record in self._starting.items()
            if record.model
            and any(now_s - start.wanted_at >= PLACED_S and not start.waits for start in record.starts.values())
        )
        return list(islice(late, 2))

    # rows

    def restore(self, rows: Mapping[str, Model], now_s: float) -> list[Effect]:
        """A lost row is written again, one of an undeployed model removed. `rows` may have been read before the latest
        change here was written."""
        removed: list[Effect] = []
        for key, row in rows.items():
            record = self.of(key)
            record.absent_since = None
            if record.undeployed_revision is not None and row.revision <= record.undeployed_revision:
                if record.model is None:
                    removed.append(Remove("models", key))
            elif record.model is None or row.revision > record.model.revision:
                record.model, self._late = row, None
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
        """Take models and forecasts: a store that came back empty gets its models from us. One that the leader has
        undeployed is known by the fact, or by its row having gone alone, more than `absent_s` ago."""
        for key, known in earlier.records.items():
            record = self.of(key)
            record.forecasts, record.horizon_s = known.forecasts, known.horizon_s
            if known.absent_since is None or now_s - known.absent_since <= absent_s:
                record.model, record.absent_since = known.model, known.absent_since

    def deploy(self, model: Model, *, create: bool, now_s: float) -> bool:
        """Write the row; False when it is what it was. Raises Conflict when a name belongs to another, or when it
        exists and `create` is set."""
        record = self.of(model.key)
        known = record.model
        if known is not None and create:
            raise Conflict(f"model {model.name!r} exists (its key is {model.key!r})", param="name")
        names = set(model.names)
        for other in self.deployed():
            if other.key != model.key and (clash := names.intersection(other.names)):
                raise Conflict(f"the name {min(clash)!r} belongs to model {other.name!r}", param="aliases")
        if known is not None:
            kept_at = model.kept_at or known.kept_at
            model = replace(model, suspended=known.suspended, pinned=model.pinned or known.pinned, kept_at=kept_at)
            if replace(model, revision=known.revision, declared_at=known.declared_at) == known:
                return False
        last = known.revision if known else -1 if record.undeployed_revision is None else record.undeployed_revision
        self._late = record.undeployed_revision = None
        record.model = replace(model, revision=max(int(now_s * 1000), last + 1))
        return True

    def change(self, record: ModelRecord, now_s: float, **fields: Any) -> list[Effect]:
        """Set an operator's marks in a row; what tells the others. Its declaration is what it was."""
        known = record.model
        assert known is not None
        revision, declared_at = max(int(now_s * 1000), known.revision + 1), known.declared_at or known.revision
        record.model = replace(known, revision=revision, declared_at=declared_at, **fields)
        return [Save("models", record.key, record.model), Publish(ModelDeployed(model=record.model))]

    def undeploy(self, record: ModelRecord) -> ModelRecord:
        """The model is no more."""
        self._late = None
        left = self.records[record.key] = record.undeployed()
        if left.starts:
            self._starting[left.key] = left
        return left


def place(instance_id: str, start: Start, model: Model) -> Publish:
    """What asks the placer for an instance."""
    command = PlaceInstance(
        instance_id=instance_id,
        model=model,
        reason=start.reason,
        wanted_at=start.wanted_at,
        num_required=start.num_required,
        waits=start.waits,
        node_id=start.node_id,
        is_awaited=start.is_awaited,
    )
    return Publish(command, start.cause)
