"""How rows are made out of domain values and events. Pure."""

from collections.abc import Mapping

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Temperature
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.facts import RequestRejected
from services.console.events import trace_id_of
from services.console.fleet_rows import (
    CachedRow,
    ColdStart,
    DecisionRow,
    Failure,
    FetchRow,
    GpuRow,
    GrantRow,
    InstanceRow,
    LinkRow,
    ModelRow,
    NodeRow,
    PhaseRow,
    RequestRow,
)


def instance_row(instance: Instance, num_in_flight: int) -> InstanceRow:
    """One instance; its place is that of its first worker."""
    return InstanceRow(
        instance_id=instance.instance_id,
        model_key=instance.model_key,
        engine=instance.engine,
        state=instance.state.value,
        node_id=instance.workers[0].node_id if instance.workers else "",
        gpu_id=instance.workers[0].gpu_id if instance.workers else "",
        num_bytes=sum(worker.num_bytes for worker in instance.workers),
        num_in_flight=num_in_flight,
        max_concurrency=instance.max_concurrency,
        created_at=instance.created_at,
        ready_at=instance.ready_at,
        changed_at=instance.changed_at,
        reason=instance.reason,
        decision_id=instance.decision_id,
        emulated=instance.emulated,
    )


def node_row(
    node: Node,
    instances: Mapping[str, Instance],
    *,
    lost_since: float,
    cordoned: bool = False,
    fetches: tuple[FetchRow, ...] = (),
) -> NodeRow:
    """One node with its GPUs; grants name the model of the instance that holds them."""
    return NodeRow(
        node_id=node.node_id,
        is_alive=lost_since == 0,
        lost_since=lost_since,
        draining=node.draining or cordoned,
        cordoned=cordoned,
        engines=node.engines,
        gpus=tuple(_gpu_row(gpu, instances) for gpu in node.gpus),
        host_cache_bytes=node.host_cache_bytes,
        cached=tuple(
            CachedRow(digest=blob.digest, num_bytes=blob.num_bytes, model_keys=blob.model_keys) for blob in node.cached
        ),
        links=tuple(
            LinkRow(
                link_id=link.link_id,
                bytes_per_s=link.bytes_per_s,
                bytes_in_flight=link.bytes_in_flight,
                num_transfers=link.num_transfers,
            )
            for link in node.links
        ),
        fetches=fetches,
        bytes_in_flight=sum(link.bytes_in_flight for link in node.links),
    )


def _gpu_row(gpu: Gpu, instances: Mapping[str, Instance]) -> GpuRow:
    grants = []
    for grant in gpu.grants:
        holder = instances.get(grant.holder)
        grants.append(
            GrantRow(
                holder=grant.holder,
                owner=grant.owner.value,
                num_bytes=grant.num_bytes,
                model_key=holder.model_key if holder else "",
                emulated=holder.emulated if holder else False,
            )
        )
    return GpuRow(
        gpu_id=gpu.gpu_id,
        kind=gpu.kind,
        role=gpu.role.value,
        total_bytes=gpu.total_bytes,
        free_bytes=max(0, gpu.free_bytes),
        grants=tuple(grants),
    )


def cold_start(instance: Instance) -> ColdStart:
    """The start of an instance that is ready, phases counted from the earliest thing known of it."""
    began = min((instance.created_at or instance.ready_at, *(phase.started_at for phase in instance.phases)))
    phases = tuple(
        PhaseRow(phase.name.value, phase.started_at - began, max(0.0, phase.actual_s), phase.predicted_s)
        for phase in sorted(instance.phases, key=lambda phase: (phase.started_at, phase.ended_at))
    )
    return ColdStart(
        instance_id=instance.instance_id,
        node_id=instance.workers[0].node_id if instance.workers else "",
        ready_at=instance.ready_at,
        seconds=max(0.0, instance.ready_at - began),
        emulated=instance.emulated,
        phases=phases,
    )


def model_row(
    model: Model,
    instances: list[Instance],
    load: ModelLoad,
    *,
    eta_s: float,
    eta_measured: bool,
    start: ColdStart | None,
    failure: Failure | None,
) -> ModelRow:
    """One model with its instances, oldest first."""
    return ModelRow(
        key=model.key,
        name=model.name,
        engine=model.engine,
        temperature=_temperature(instances).value,
        state=_state(instances, load.num_waiting, is_failed=failure is not None),
        eta_s=round(eta_s, 1),
        eta_measured=eta_measured,
        num_waiting=load.num_waiting,
        num_in_flight=load.num_in_flight,
        num_ready=sum(i.state is InstanceState.READY for i in instances),
        max_instances=model.max_instances,
        memory_bytes=model.memory_bytes,
        keep_alive_s=model.keep_alive_s,
        pinned=model.pinned,
        suspended=model.suspended,
        emulated=model.engine == "emulated" or any(i.emulated for i in instances),
        instances=tuple(i.instance_id for i in sorted(instances, key=lambda i: (i.created_at, i.instance_id))),
        last_cold_start=start,
        failure=failure,
    )


def decision_row(decision: DecisionRecord) -> DecisionRow:
    fields = {name: getattr(decision, name) for name in DecisionRow.__struct_fields__ if name != "trace_id"}
    return DecisionRow(**fields, trace_id=trace_id_of(decision.traceparent))


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


def request_row(event: Event) -> RequestRow:
    data = event.data
    trace_id = trace_id_of(event.traceparent)
    if isinstance(data, RequestRejected):
        return RequestRow(
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
    return RequestRow(
        request_id=data.request_id,
        model_key=data.model_key,
        status=data.status,
        code=data.error_code,
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
