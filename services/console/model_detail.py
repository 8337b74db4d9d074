"""One model in full: what its owner declared, its latest starts with their phases, and the start under way.

Pure, like the view of the fleet beside it, and bounded: `STARTS_KEPT` starts of each of `MODELS_KEPT` models."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance, InstanceState, PhaseName
from glowplug.domain.model import Model
from services.console import fleet_rows as rows
from services.console.decisions import DecisionLog, named_in
from services.console.events import discreet_model
from services.console.fleet_view import Fetches
from services.console.records import Newest, record_of

STARTS_KEPT: Final = 10
MODELS_KEPT: Final = 4096
FETCH_LEASE_S: Final = 10.0  # time without a report after which a fetch is no longer shown as under way


class FetchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch of weights into one node's host memory, under way. `num_bytes` is 0 while unknown."""

    node_id: str
    num_bytes_done: int
    num_bytes: int
    heard_at: float


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start that is over. `reason` says why it failed, and is "" when it came to ready."""

    instance_id: str
    node_id: str
    gpu_id: str
    ended_at: float
    seconds: float
    emulated: bool
    reason: str
    phases: tuple[rows.PhaseRow, ...]


class Coming(msgspec.Struct, frozen=True, kw_only=True):
    """A start under way: the phases known so far. `began_at` is what their offsets count from."""

    instance_id: str
    node_id: str
    state: str
    began_at: float
    emulated: bool
    phases: tuple[rows.PhaseRow, ...]
    fetch: FetchRow | None


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The decision to which the model owes its present state. `decision_id` is "" when none is on record."""

    reason: str
    decision_id: str = ""
    made_at: float = 0.0


class ModelDetail(msgspec.Struct, frozen=True, kw_only=True):
    """`model` is the row of the fleet; `declared` what its file or the API says."""

    now: float
    model: rows.ModelRow
    instances: list[rows.InstanceRow]
    declared: dict[str, Any]
    starts: list[Start]
    coming: list[Coming]
    why: Why


class StartHistory:
    """The latest starts by model, newest first."""

    def __init__(self) -> None:
        self._starts: Newest[str, deque[Start]] = Newest(MODELS_KEPT)

    def put(self, instance: Instance) -> None:
        """An instance as a fact or a table has it; a start is remembered when it is over, once."""
        known = any(start.instance_id == instance.instance_id for start in self._starts.get(instance.model_key, ()))
        if known or instance.state.is_coming:
            return
        if instance.state is InstanceState.FAILED and not instance.ready_at:
            self._remember(instance, instance.changed_at, instance.reason or "no reason given")
        elif instance.ready_at:
            self._remember(instance, instance.ready_at, "")

    def starts(self, model_key: str) -> list[Start]:
        """Newest first."""
        return sorted(self._starts.get(model_key, ()), key=lambda start: -start.ended_at)

    def _remember(self, instance: Instance, ended_at: float, reason: str) -> None:
        kept = self._starts.get(instance.model_key) or deque(maxlen=STARTS_KEPT)
        began = rows.began_at(instance) or ended_at
        seconds, phases = max(0.0, ended_at - began), rows.phase_rows(instance, began)
        kept.append(record_of(Start, instance, ended_at=ended_at, seconds=seconds, reason=reason, phases=phases))
        self._starts.put(instance.model_key, kept)


def coming(instances: Iterable[Instance], fetches: Fetches, now_s: float) -> list[Coming]:
    """Those of `instances` that are on their way, oldest first."""
    found = []
    for instance in sorted(instances, key=lambda i: (i.created_at, i.instance_id)):
        if instance.state.is_coming:
            began, phases = rows.began_at(instance), _phases_so_far(instance)
            fetch = _fetch_row(instance, fetches, now_s)
            found.append(
                record_of(Coming, instance, state=instance.state.value, began_at=began, phases=phases, fetch=fetch)
            )
    return found


def _fetch_row(instance: Instance, fetches: Fetches, now_s: float) -> FetchRow | None:
    fetch = fetches.of(instance.model_key, instance.node_id)
    if fetch is None or now_s - fetch.reported_at >= FETCH_LEASE_S:
        return None
    return record_of(FetchRow, fetch, heard_at=fetch.reported_at)


def why_so(model_key: str, instances: Iterable[Instance], decisions: DecisionLog) -> Why:
    """Why the model is where it is: what placed the newest instance that serves or is on its way. Without one, the
    latest decision about it, or by which an instance of it had to leave for another model."""
    living = sorted((i for i in instances if not i.state.is_gone), key=lambda i: (i.created_at, i.instance_id))
    active = [i for i in living if not i.state.is_dormant and i.state is not InstanceState.DRAINING]
    found = next((d for i in reversed(active) if (d := decisions.get(i.decision_id)) is not None), None)
    if found is None and not active:
        found = next((d for d in decisions.newest() if _concerns(d, model_key, decisions)), None)
    if found is not None:
        return Why(reason=found.reason, decision_id=found.decision_id, made_at=found.made_at)
    if living:
        return Why(reason=living[-1].reason or "the decision that placed it is on record no more")
    return Why(reason="nothing has been decided about it: no request has asked for it")


def _concerns(record: DecisionRecord, model_key: str, decisions: DecisionLog) -> bool:
    if record.kind != "evict":
        return record.model_key == model_key
    victims = (decisions.outcome(instance_id) for instance_id in named_in(record) - {record.instance_id})
    return any(victim is not None and victim.model_key == model_key for victim in victims)


def _phases_so_far(instance: Instance) -> tuple[rows.PhaseRow, ...]:
    """Those reported, and the fetch: an agent reports LOADING the moment the weights are whole in host memory."""
    began = rows.began_at(instance)
    reported = rows.phase_rows(instance, began)
    if instance.state is not InstanceState.LOADING or any(phase.name == PhaseName.FETCH for phase in reported):
        return reported
    offset_s = instance.created_at - began
    fetch_s = max(0.0, instance.changed_at - instance.created_at)
    return (*reported, rows.PhaseRow(PhaseName.FETCH.value, offset_s, fetch_s, 0.0))


def declared(model: Model) -> dict[str, Any]:
    """What the model's owner said, JSON-ready, without what is private."""
    fields: dict[str, Any] = msgspec.to_builtins(discreet_model(model))
    return fields
