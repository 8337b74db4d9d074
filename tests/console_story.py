"""A made-up fleet and its traces, as real events and real OTLP."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.hardware import CachedWeights, Gpu, GpuRole, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import Model, WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance
from glowplug.events.facts import (
    DecisionMade,
    InstanceFailed,
    InstanceLoading,
    InstanceReady,
    ModelDeployed,
    NodeBeat,
    RequestFinished,
    RequestRejected,
    RequestWaiting,
    RouterLoadReported,
    RouterRequestsFinished,
)
from glowplug.services.console import otlp
from glowplug.services.console.fleet_view import ShownFleet
from glowplug.telemetry import semconv
from tests.fleet_builder import a_model, a_node, an_instance

MIB = 1 << 20
MARKUP = "<img src=x onerror=document.title='owned'><b>bold</b>"  # every view must escape this
PHASE_SECONDS = {
    PhaseName.DECIDE: (0.0, 0.018),
    PhaseName.FETCH: (0.02, 0.61),
    PhaseName.LAUNCH: (0.024, 0.92),
    PhaseName.LOAD: (0.944, 0.58),
    PhaseName.WARMUP: (1.524, 0.21),
}
Value = str | int | float | bool


def trace_id(seed: int) -> str:
    return f"{seed + 1:032x}"


def traceparent(seed: int) -> str:
    return f"00-{trace_id(seed)}-0000000000000001-01"


@dataclass
class Trace:
    seed: int
    at: float

    def span(
        self,
        span: int,
        parent: int,
        name: str,
        offset_s: float,
        seconds: float,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: int = 1,
        error: str = "",
        events: Mapping[str, float] | None = None,
    ) -> Span:
        start_s = self.at + offset_s
        return Span(
            trace_id=bytes.fromhex(trace_id(self.seed)),
            span_id=span.to_bytes(8, "big"),
            parent_span_id=parent.to_bytes(8, "big") if parent else b"",
            name=name,
            kind=kind,  # type: ignore[arg-type]
            start_time_unix_nano=int(start_s * 1e9),
            end_time_unix_nano=int((start_s + seconds) * 1e9),
            attributes=pairs(attributes or {}),
            events=[Span.Event(name=e, time_unix_nano=int((start_s + at) * 1e9)) for e, at in (events or {}).items()],
            status=Status(code=Status.STATUS_CODE_ERROR, message=error) if error else None,
        )


def pairs(attributes: Mapping[str, Value]) -> list[KeyValue]:
    fields = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    return [
        KeyValue(key=key, value=AnyValue(**{fields[type(value)]: value}))  # type: ignore[arg-type]
        for key, value in attributes.items()
    ]


def export(**by_service: list[Span]) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    for service, spans in by_service.items():
        part = request.resource_spans.add()
        part.resource.attributes.extend(pairs({"service.name": f"glowplug-{service}", "service.instance.id": service}))
        scope = part.scope_spans.add()
        scope.scope.name = "glowplug"
        scope.spans.extend(spans)
    return request


def received(request: ExportTraceServiceRequest, **options: bool) -> otlp.Batch:
    return otlp.decode(request.SerializeToString(), otlp.PROTOBUF, **options)


def cold_trace(seed: int, at: float, model: str, request_id: str) -> ExportTraceServiceRequest:
    span = Trace(seed, at).span
    about: dict[str, Value] = {semconv.ATTR_MODEL: model, semconv.ATTR_REQUEST_ID: request_id}
    instance: dict[str, Value] = {semconv.ATTR_INSTANCE_ID: f"i-{seed:04x}", semconv.ATTR_NODE_ID: "node-2"}
    decide, fetch, *started = (
        span(
            30 + i,
            20 if name is not PhaseName.DECIDE else 10,
            f"cold_start.{name}",
            0.006 + offset,
            seconds,
            {semconv.ATTR_PHASE: name.value, semconv.ATTR_PREDICTED_SECONDS: seconds * 1.1, semconv.ATTR_MODEL: model},
        )
        for i, (name, (offset, seconds)) in enumerate(PHASE_SECONDS.items())
    )
    reason = "first GPU with 256 MiB free: node-2/0"
    return export(
        router=[
            span(1, 0, "POST /v1/chat/completions", 0.0, 2.61, about, kind=2, events={"first byte": 1.79}),
            span(2, 1, "hold", 0.002, 1.76, {semconv.ATTR_REASON: "no instance runs"}),
            span(3, 1, "stream", 1.764, 0.84, instance, kind=3, events={"first token": 0.03}),
        ],
        autoscaler=[span(5, 2, "autoscaler.request.waiting", 0.004, 0.001, {"glowplug.wanted": 1})],
        placer=[span(10, 5, "placer.placer.place", 0.006, 0.018, {semconv.ATTR_REASON: reason}), decide],
        prefetcher=[span(21, 10, "prefetcher.prefetcher.fetch", 0.025, 0.612, {"glowplug.source": "http"}), fetch],
        agent=[span(20, 10, "agent.agent.start", 0.025, 1.72, instance), *started],
        engine=[
            span(40, 3, "chat", 1.77, 0.83, {"gen_ai.usage.output_tokens": 64}, kind=2),
            span(41, 40, "prefill", 1.772, 0.024),
            span(42, 40, "decode", 1.796, 0.8),
        ],
    )


def warm_trace(seed: int, at: float, model: str, request_id: str) -> ExportTraceServiceRequest:
    span = Trace(seed, at).span
    about: dict[str, Value] = {semconv.ATTR_MODEL: model, semconv.ATTR_REQUEST_ID: request_id}
    return export(
        router=[
            span(1, 0, "POST /v1/chat/completions", 0.0, 0.62, about, kind=2),
            span(3, 1, "stream", 0.001, 0.618, kind=3),
        ]
    )


def failed_trace(seed: int, at: float, model: str, request_id: str) -> ExportTraceServiceRequest:
    span = Trace(seed, at).span
    about = {semconv.ATTR_MODEL: model, semconv.ATTR_REQUEST_ID: request_id, semconv.ATTR_EMULATED: True}
    return export(
        router=[
            span(1, 0, "POST /v1/chat/completions", 0.0, 0.31, about, kind=2, error="engine_failed"),
            span(3, 1, "stream", 0.001, 0.3, kind=3, error="engine closed the stream after 12 tokens"),
        ],
        agent=[span(50, 999, "agent.engine_exited", 0.302, 0.05, {"glowplug.exit_code": -9})],
    )


def predicted_trace(seed: int, at: float) -> ExportTraceServiceRequest:
    """A trace as really sent: hold, phases with one prediction missing, first token."""
    span = Trace(seed, at).span
    about: dict[str, Value] = {semconv.ATTR_MODEL: "smol-poet", semconv.ATTR_REQUEST_ID: f"req-{seed}"}
    phases = {"decide": (0.0, 0.02, 0.02), "fetch": (0.02, 0.9, 0.6), "launch": (0.02, 1.5, 0.0)}
    return export(
        router=[
            span(1, 0, "router.request", 0.0, 4.0, about, kind=2),
            span(2, 1, "router.hold", 0.0, 1.6),
            span(3, 1, "engine.generate", 1.6, 2.4, kind=3, events={"first token": 0.4}),
        ],
        agent=[
            span(20, 1, "agent.start", 0.02, 1.5, {semconv.ATTR_DECISION_ID: "d-9"}),
            *(
                span(30 + i, 20, f"engine.{name}", offset, took, {
                    semconv.ATTR_PHASE: name, semconv.ATTR_PREDICTED_SECONDS: predicted, semconv.ATTR_EMULATED: True,
                })
                for i, (name, (offset, took, predicted)) in enumerate(phases.items())
            ),
        ],
    )  # fmt: skip


def model(key: str, name: str, mib: int, engine: str = "llamacpp", **changes: Any) -> Model:
    weights = WeightsRef(uri=f"file:/models/{key}.gguf", num_bytes=mib * MIB)
    return a_model(name, mib=mib, **{"key": key, "engine": engine, "weights": weights, "kv_bytes": 64 * MIB, **changes})


def instance(key: str, model_key: str, node: str, state: InstanceState, at: float, **changes: Any) -> Instance:
    made = an_instance(key, model_key, state, gpu_id=f"{node}/0", mib=256, revision=5)
    made = replace(made, engine="llamacpp", created_at=at, changed_at=at + 1.734)
    if state is InstanceState.READY:
        phases = (
            Phase(name=name, started_at=at + offset, ended_at=at + offset + seconds, predicted_s=seconds * 1.1)
            for name, (offset, seconds) in PHASE_SECONDS.items()
        )
        made = replace(made, ready_at=at + 1.734, phases=tuple(phases))
    return replace(made, **changes)


def node(node_id: str, at: float, grants: tuple[Grant, ...], **changes: Any) -> Node:
    role = GpuRole.DEDICATED if grants else GpuRole.IDLE
    fields: dict[str, Any] = {
        "gpus": (Gpu(gpu_id=f"{node_id}/0", total_bytes=640 * MIB, grants=grants, role=role),),
        "engines": ("llamacpp", "emulated"),
        "host_cache_bytes": 1024 * MIB,
        "cached": (CachedWeights(digest="d" * 64, num_bytes=139 * MIB, model_keys=("smol-chat",)),),
        "heartbeat_at": at,
    }
    return replace(a_node(node_id), **(fields | changes))


def grants(holder: str, weights_mib: int, kv_mib: int) -> tuple[Grant, ...]:
    sizes = {GrantOwner.WEIGHTS: weights_mib, GrantOwner.KV: kv_mib}
    return tuple(Grant(holder=holder, owner=owner, num_bytes=mib * MIB) for owner, mib in sizes.items())


def fact(data: Any, at: float, number: int = 0, traceparent: str = "") -> Event:
    """A finished request becomes the router's report."""
    if isinstance(data, RequestFinished):
        data = RouterRequestsFinished(router_id=data.router_id, requests=(data,), traceparents=(traceparent,))
    id_ = f"e-{data.TYPE}-{number}-{at}"
    return Event(event_id=id_, type=data.TYPE, occurred_at=at, issuer="story-1", data=data, traceparent=traceparent)


def view(now: float) -> ShownFleet:
    seen = ShownFleet()
    for name in ("bus", "store"):
        seen.source(name, True, now)
    for event in fleet_events(now):
        seen.take(event, now)
    return seen


def fleet_events(now: float) -> list[Event]:
    models = [
        model("smol-chat", "smol-chat", 139, pinned=True),
        model("smol-poet", "smol-poet", 139),
        model("smol-coder", "smol-coder", 256),
        model("smol-tutor", "smol-tutor", 139),
        model("big-emulated", "Qwen/Qwen3-8B", 448, "emulated"),
        model("broken", "smol-broken", 139),
    ]
    ready = [
        instance("i-71c2", "smol-chat", "node-1", InstanceState.READY, now - 340),
        instance("i-0a9e", "smol-poet", "node-2", InstanceState.READY, now - 22),
        instance("i-33f0", "big-emulated", "node-2", InstanceState.READY, now - 61, emulated=True, engine="emulated"),
    ]
    loading = instance("i-b7d4", "smol-coder", "node-1", InstanceState.LOADING, now - 0.9)
    reason = "weights_corrupt: sha256 of smol-broken.gguf does not match"
    failed = instance("i-dead", "broken", "node-3", InstanceState.FAILED, now - 70, reason=reason)
    loads = {
        "smol-chat": ModelLoad(num_in_flight=3, in_flight_by_instance={"i-71c2": 3}),
        "smol-poet": ModelLoad(num_in_flight=1, in_flight_by_instance={"i-0a9e": 1}),
        "smol-coder": ModelLoad(num_waiting=7),
    }
    rejected = RequestRejected(
        model_key="broken", request_id="req-rejected", router_id="router-1", status=503, code="weights_unavailable"
    )
    return [
        *(fact(ModelDeployed(model=m), now, i) for i, m in enumerate(models)),
        *(fact(InstanceReady(instance=one), now, i) for i, one in enumerate(ready)),
        fact(InstanceLoading(instance=loading), now),
        fact(InstanceFailed(instance=failed, code="weights_corrupt"), now),
        *beats(now),
        fact(RouterLoadReported(router_id="router-1", loads=loads), now),
        *(fact(request_finished(i, now - 40 + 3 * i), now - 40 + 3 * i, i, traceparent(i)) for i in range(12)),
        fact(rejected, now - 3),
        *(fact(DecisionMade(decision=d), now, i) for i, d in enumerate(decisions(now))),
    ]


def beats(now: float, revision: int = 1) -> list[Event]:
    nodes = [
        node("node-1", now, grants("i-71c2", 139, 64) + grants("i-b7d4", 256, 64), revision=revision),
        node("node-2", now, grants("i-0a9e", 139, 64) + grants("i-33f0", 320, 96), revision=revision),
        node("node-3", now, (), cached=(), revision=revision),
    ]
    return [fact(NodeBeat(node=n), now, i) for i, n in enumerate(nodes)]


def request_finished(number: int, at: float) -> RequestFinished:
    cold = number % 5 == 0
    model_key = ("smol-chat", "smol-poet", "big-emulated", "smol-chat")[number % 4]
    ttft_s = 1.79 if cold else 0.031 + 0.004 * number
    return RequestFinished(
        model_key=model_key,
        request_id=f"req-{number:04d}-7d1e",
        router_id="router-1",
        instance_id="i-71c2",
        status=502 if number == 7 else 200,
        arrived_at=at - ttft_s - 0.8,
        finished_at=at,
        queue_s=1.75 if cold else 0.0002,
        ttft_s=ttft_s,
        e2e_s=ttft_s + 0.8,
        prompt_tokens=31,
        response_tokens=64 + number,
        tokens_exact=number != 4,
        cold=cold,
        emulated=model_key == "big-emulated",
        stream=True,
    )


def a_decision(
    number: int, kind: str = "place", reason: str = "it is the first with enough free memory", **fields: Any
) -> DecisionRecord:
    given = {"policy": "first_fit", "service": "placer", "made_at": float(number), **fields}
    return DecisionRecord(decision_id=f"d-{number}", kind=kind, reason=reason, **given)


def decisions(now: float) -> list[DecisionRecord]:
    made = [
        ("scale", "reactive", "autoscaler", "smol-poet", "1 request waits and no instance runs: start one"),
        ("place", "first_fit", "placer", "smol-poet", "node-2/0 is the first GPU with 203 MiB free"),
        ("scale", "reactive", "autoscaler", "smol-coder", "7 requests wait and no instance runs: start one"),
        ("evict", "lru", "placer", "smol-tutor", "idle longest (84 s) on node-1/0, which needs 320 MiB"),
        ("place", "first_fit", "placer", "smol-coder", "node-1/0 has 437 MiB free after the drain of i-5510"),
        ("refuse", "first_fit", "placer", "broken", "weights are corrupt; not placed again until the file changes"),
    ]
    return [
        a_decision(i, kind, reason, policy=policy, service=service, model_key=model_key, made_at=now - 24 + 4 * i,
                   traceparent=traceparent(0))
        for i, (kind, policy, service, model_key, reason) in enumerate(made)
    ]  # fmt: skip


def placement(now: float) -> list[Event]:
    waiting = RequestWaiting(
        model_key="smol-poet", request_id="req-w", router_id="router-1", num_waiting=1, waiting_since=now,
        deadline_at=now + 60,
    )  # fmt: skip
    wanted = model("smol-poet", "smol-poet", 139)
    rivals = (
        Rival(name="node-1/0", score=16.0 * MIB, why="203 MiB are needed", unit="bytes free"),
        Rival(name="node-2/0", score=301.0 * MIB, why="it is the first with enough free memory", unit="bytes free"),
    )
    inputs = {"need_bytes": 203 * MIB, "waited_s": 0.004, "asked_because": "1 waiting"}
    record = a_decision(
        9, reason=f"first GPU with 301 MiB free {MARKUP}", made_at=now, model_key="smol-poet", instance_id="i-9",
        node_id="node-2", gpu_id="node-2/0", chosen="node-2/0", inputs=inputs, rivals=rivals, cause_id="e-place",
        traceparent=traceparent(0),
    )  # fmt: skip
    ready = instance("i-9", "smol-poet", "node-2", InstanceState.READY, now - 2, emulated=True)
    steps: list[tuple[str, Any, str, str]] = [
        ("e-waiting", waiting, "req-w", "router-1"),
        ("e-place", PlaceInstance(instance_id="i-9", model=wanted, reason="1 waiting", wanted_at=now), "e-waiting",
         "autoscaler-1"),
        ("e-decision", DecisionMade(decision=record), "e-place", "placer-1"),
        ("e-ready", InstanceReady(instance=ready), "e-start", "agent-node-2"),
    ]  # fmt: skip
    return [
        replace(fact(data, now, traceparent=traceparent(0)), event_id=id_, cause_id=cause, issuer=issuer, epoch=1)
        for id_, data, cause, issuer in steps
    ]
