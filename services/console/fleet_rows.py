"""The page's rows of the fleet: a domain value as it is, beside it the facts that the page needs joined with it. Times
are epoch seconds.

The stream sends of each value the fields in SHOWN; `/api/v1/fleet` has them all."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Temperature
from glowplug.events.facts import WeightsProgressed
from glowplug.fleet import status

ValueT = TypeVar("ValueT")
JoinedT = TypeVar("JoinedT")


@dataclass(frozen=True, slots=True)
class FleetRow(Generic[ValueT, JoinedT]):
    value: ValueT
    joined: JoinedT


class ShownLoad(NamedTuple):
    num_waiting: int = 0
    num_in_flight: int = 0


@dataclass(frozen=True, slots=True)
class WatchedFetch:
    """Its latest report. `bytes_per_s`: over the latest reports; 0 until the second, or if none arrived lately."""

    report: WeightsProgressed
    reported_at: float
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStart:
    """An instance's start. `ended_at`: ready or failed; 0 while it lasts. `fetch`: of its weights, while reported."""

    instance: Instance
    began_at: float
    ended_at: float
    fetch: WatchedFetch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """`eta_s`: 0 when ready. `instances`: ids, oldest first. `failure`: the instance that failed last, unless one was
    healthy since."""

    temperature: Temperature
    state: status.ModelState
    eta_s: float
    eta_measured: bool
    num_waiting: int
    num_in_flight: int
    num_ready: int
    emulated: bool
    instances: tuple[str, ...]
    last_cold_start: TimedStart | None
    failure: Instance | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceStatus:
    """`outdated`: its model has been declared anew since its start."""

    num_in_flight: int
    outdated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """`lost_since`: 0 while beats arrive. `cordoned`: by an operator."""

    lost_since: float
    cordoned: bool
    fetches: tuple[WatchedFetch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMarks:
    """`trace_id`: "" unless sampled."""

    trace_id: str
    emulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """`stale_since`: 0 while fresh."""

    is_up: bool
    stale_since: float


ModelRow = FleetRow[Model, ModelStatus]
InstanceRow = FleetRow[Instance, InstanceStatus]
NodeRow = FleetRow[Node, NodeStatus]
DecisionRow = FleetRow[DecisionRecord, DecisionMarks]


SHOWN: Final[Mapping[type, tuple[str, ...]]] = {
    cls: tuple(names.split())
    for cls, names in {
        Model: "key name engine weights_bytes kv_bytes max_instances keep_alive_s pinned suspended",
        Instance: "instance_id model_key engine state workers max_concurrency created_at ready_at decision_id reason "
        "emulated host_bytes",
        Node: "node_id engines gpus links cached on_disk host_cache_bytes draining",
        DecisionRecord: "decision_id kind policy service made_at model_key instance_id node_id gpu_id chosen reason",
    }.items()
}
_STARTED: Final = ("instance_id", "state", "workers", "ready_at", "phases", "reason", "emulated")
_FAILED: Final = ("instance_id", "changed_at", "reason")


def shown(row: FleetRow[Any, Any]) -> dict[str, Any]:
    return {"value": _picked(row.value, SHOWN[type(row.value)]), "joined": _facts(row.joined)}


def changes(old: FleetRow[Any, Any], new: FleetRow[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return the shown fields that have other values."""
    value = {f: v for f in SHOWN[type(new.value)] if (v := getattr(new.value, f)) != getattr(old.value, f)}
    names = type(new.joined).__dataclass_fields__
    joined = _facts(new.joined, [f for f in names if getattr(new.joined, f) != getattr(old.joined, f)])
    return {name: fields for name, fields in (("value", value), ("joined", joined)) if fields}


def _facts(joined: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    facts = _picked(joined, type(joined).__dataclass_fields__ if names is None else names)
    for name, fact in facts.items():
        if isinstance(fact, TimedStart):
            facts[name] = {**_facts(fact), "instance": _picked(fact.instance, _STARTED)}
        elif isinstance(fact, Instance):
            facts[name] = _picked(fact, _FAILED)
    return facts


def _picked(value: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def timed_start(instance: Instance, fetch: WatchedFetch | None = None) -> TimedStart:
    """Count from the earliest known time: the decision precedes the instance."""
    failed = instance.state is InstanceState.FAILED and not instance.ready_at
    ended_at = instance.changed_at if failed else instance.ready_at
    known = [at for at in (instance.created_at, *(phase.started_at for phase in instance.phases)) if at]
    began_at = min(known, default=ended_at or instance.changed_at)
    return TimedStart(
        instance=instance, began_at=began_at, ended_at=max(began_at, ended_at) if ended_at else 0.0, fetch=fetch
    )


def past_start(instance: Instance) -> TimedStart | None:
    """None for a start that is under way, or was not seen."""
    start = timed_start(instance)
    return start if start.ended_at and not instance.state.is_coming else None


def model_row(
    model: Model,
    instances: Collection[Instance],
    load: ShownLoad,
    *,
    eta_s: float,
    eta_measured: bool,
    start: TimedStart | None,
    failure: Instance | None,
) -> ModelRow:
    joined = ModelStatus(
        temperature=status.temperature(instances),
        state=status.model_state(instances, num_waiting=load.num_waiting, has_failed=failure is not None),
        eta_s=round(eta_s, 1),
        eta_measured=eta_measured,
        num_waiting=load.num_waiting,
        num_in_flight=load.num_in_flight,
        num_ready=sum(map(status.is_ready, instances)),
        emulated=model.engine == "emulated" or any(i.emulated for i in instances),
        instances=tuple(i.instance_id for i in sorted(instances, key=lambda i: (i.created_at, i.instance_id))),
        last_cold_start=start,
        failure=failure,
    )
    return FleetRow(model, joined)
