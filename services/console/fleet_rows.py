"""The page's rows of the fleet, flat and JSON-ready, made of domain values. Times are epoch seconds."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import SHARED, Gpu, Link, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.fleet import status
from glowplug.services.console.events import trace_id_of
from glowplug.services.console.records import record_of


class Load(NamedTuple):
    num_waiting: int = 0
    num_in_flight: int = 0


class PhaseRow(msgspec.Struct, frozen=True):
    """`offset_s`: from the request for the instance."""

    name: str
    offset_s: float
    duration_s: float
    predicted_s: float


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """`reason`: of a failure, else ""."""

    instance_id: str
    node_id: str
    gpu_id: str
    ended_at: float
    seconds: float
    emulated: bool
    reason: str
    phases: tuple[PhaseRow, ...]


class Failure(msgspec.Struct, frozen=True):
    instance_id: str
    failed_at: float
    reason: str


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: one of ModelState. `eta_s`: 0 when ready."""

    key: str
    name: str
    engine: str
    temperature: str
    state: str
    eta_s: float
    eta_measured: bool
    num_waiting: int
    num_in_flight: int
    num_ready: int
    max_instances: int
    memory_bytes: int
    keep_alive_s: float
    pinned: bool
    suspended: bool  # drained: no start until loaded again
    emulated: bool
    instances: tuple[str, ...]
    last_cold_start: Start | None
    failure: Failure | None


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: str
    model_key: str
    engine: str
    state: str
    node_id: str
    gpu_id: str
    num_bytes: int
    num_in_flight: int
    max_concurrency: int
    created_at: float
    ready_at: float
    reason: str
    decision_id: str
    emulated: bool


class GrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """`model_key`: "" if unknown. Shared weights have one row, with owner `shared` and all holders."""

    holder: str
    owner: str
    num_bytes: int
    model_key: str
    emulated: bool


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    gpu_id: str
    kind: str
    role: str
    total_bytes: int
    free_bytes: int
    grants: tuple[GrantRow, ...]


class CachedRow(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    num_bytes: int
    model_keys: tuple[str, ...]


class FetchRow(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes_per_s`: over the latest reports; 0 if none arrived lately."""

    digest: str
    model_key: str
    num_bytes_done: int
    num_bytes: int
    bytes_per_s: float


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """`lost_since`: 0 while beats arrive. `draining`: the node leaves, or is `cordoned`."""

    node_id: str
    is_alive: bool
    lost_since: float
    draining: bool
    cordoned: bool
    engines: tuple[str, ...]
    gpus: tuple[GpuRow, ...]
    host_cache_bytes: int
    cached: tuple[CachedRow, ...]
    on_disk: tuple[CachedRow, ...]
    links: tuple[Link, ...]
    fetches: tuple[FetchRow, ...]
    bytes_in_flight: int


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    decision_id: str
    kind: str
    policy: str
    service: str
    reason: str
    made_at: float
    model_key: str
    instance_id: str
    node_id: str
    gpu_id: str
    chosen: str
    trace_id: str


class SourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """`stale_since`: 0 while fresh."""

    is_up: bool
    stale_since: float


def instance_row(instance: Instance, num_in_flight: int) -> InstanceRow:
    num_bytes = sum(worker.num_bytes for worker in instance.workers)
    return record_of(
        InstanceRow, instance, state=instance.state.value, num_bytes=num_bytes, num_in_flight=num_in_flight
    )


def node_row(
    node: Node,
    instances: Mapping[str, Instance],
    *,
    lost_since: float,
    cordoned: bool = False,
    fetches: tuple[FetchRow, ...] = (),
) -> NodeRow:
    return record_of(
        NodeRow,
        node,
        is_alive=lost_since == 0,
        lost_since=lost_since,
        draining=node.draining or cordoned,
        cordoned=cordoned,
        gpus=tuple(_gpu_row(gpu, instances) for gpu in node.gpus),
        cached=tuple(record_of(CachedRow, blob) for blob in node.cached),
        on_disk=tuple(record_of(CachedRow, copy) for copy in node.on_disk),
        fetches=fetches,
        bytes_in_flight=sum(link.bytes_in_flight for link in node.links),
    )


def _gpu_row(gpu: Gpu, instances: Mapping[str, Instance]) -> GpuRow:
    grants = []
    held = [(grant.holder, grant.holder, grant.owner.value, grant.num_bytes) for grant in gpu.all_grants]
    held += [(one.holders[0], ", ".join(one.holders), SHARED, one.num_bytes) for one in gpu.shared if one.counts]
    for first, holder, owner, num_bytes in held:
        if not num_bytes:
            continue  # of shared weights, counted once
        row = instances.get(first)
        model_key, emulated = (row.model_key, row.emulated) if row else ("", False)
        grants.append(GrantRow(holder=holder, owner=owner, num_bytes=num_bytes, model_key=model_key, emulated=emulated))
    return record_of(GpuRow, gpu, role=gpu.role.value, free_bytes=max(0, gpu.free_bytes), grants=tuple(grants))


def began_at(instance: Instance) -> float:
    """Return the earliest known time of a start (its decision precedes the instance), or 0."""
    known = [instance.created_at, *(phase.started_at for phase in instance.phases)]
    return min((at for at in known if at), default=0.0)


def phase_rows(instance: Instance, began: float, *, unfinished_s: float = 0.0) -> tuple[PhaseRow, ...]:
    """Return phases in order, from `began`. `unfinished_s`: length of an unfinished one."""
    return tuple(
        PhaseRow(
            phase.name.value,
            phase.started_at - began,
            max(0.0, phase.actual_s) if phase.ended_at else unfinished_s,
            phase.predicted_s,
        )
        for phase in sorted(instance.phases, key=lambda phase: (phase.started_at, phase.ended_at))
    )


def start_of(instance: Instance) -> Start | None:
    """Return a finished start; phases are counted from its earliest known time."""
    failed = instance.state is InstanceState.FAILED and not instance.ready_at
    ended_at = instance.changed_at if failed else instance.ready_at
    if instance.state.is_coming or not ended_at:
        return None
    reason = instance.reason or "no reason given" if failed else ""
    began = began_at(instance) or ended_at
    seconds, phases = max(0.0, ended_at - began), phase_rows(instance, began)
    return record_of(Start, instance, ended_at=ended_at, seconds=seconds, reason=reason, phases=phases)


def model_row(
    model: Model,
    instances: Collection[Instance],
    load: Load,
    *,
    eta_s: float,
    eta_measured: bool,
    start: Start | None,
    failure: Failure | None,
) -> ModelRow:
    return record_of(
        ModelRow,
        model,
        temperature=status.temperature(instances).value,
        state=status.model_state(instances, num_waiting=load.num_waiting, has_failed=failure is not None).value,
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


def decision_row(decision: DecisionRecord) -> DecisionRow:
    return record_of(DecisionRow, decision, trace_id=trace_id_of(decision.traceparent))
