"""A made-up fleet and its traces, told in real events and real OTLP: what the console's tests and screenshots show."""

from collections.abc import Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import CachedWeights, Gpu, GpuRole, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.facts import (
    DecisionMade,
    InstanceFailed,
    InstanceLoading,
    InstanceReady,
    ModelDeployed,
    NodeBeat,
    RequestFinished,
    RequestRejected,
    RouterLoadReported,
)
from glowplug.telemetry import semconv

MIB = 1 << 20
PHASE_SECONDS = {
    PhaseName.DECIDE: (0.0, 0.018),
    PhaseName.FETCH: (0.02, 0.61),
    PhaseName.LAUNCH: (0.024, 0.92),
    PhaseName.LOAD: (0.944, 0.58),
    PhaseName.WARMUP: (1.524, 0.21),
}
Value = str | int | float | bool


def trace_id(seed: int) -> str:
    """A trace id that cannot be mistaken for another seed's."""
    return f"{seed + 1:032x}"


def make_span(
    trace: int,
    span: int,
    parent: int,
    name: str,
    start_s: float,
    seconds: float,
    attributes: Mapping[str, Value] | None = None,
    *,
    kind: int = 1,
    error: str = "",
    events: Mapping[str, float] | None = None,
) -> Span:
    """One OTLP span; ids are small numbers, parent 0 is none."""
    return Span(
        trace_id=bytes.fromhex(trace_id(trace)),
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
    """Attributes as OTLP has them."""
    found = []
    for key, value in attributes.items():
        match value:
            case bool():
                wire = AnyValue(bool_value=value)
            case int():
                wire = AnyValue(int_value=value)
            case float():
                wire = AnyValue(double_value=value)
            case _:
                wire = AnyValue(string_value=value)
        found.append(KeyValue(key=key, value=wire))
    return found


def export(by_service: Mapping[str, list[Span]]) -> ExportTraceServiceRequest:
    """One export with a resource per service."""
    request = ExportTraceServiceRequest()
    for service, spans in by_service.items():
        part = request.resource_spans.add()
        part.resource.attributes.extend(pairs({"service.name": f"glowplug-{service}", "service.instance.id": service}))
        scope = part.scope_spans.add()
        scope.scope.name = "glowplug"
        scope.spans.extend(spans)
    return request


def cold_trace(seed: int, at: float, model: str, request_id: str) -> ExportTraceServiceRequest:
    """A request that woke its model: every service has its part."""
    about: dict[str, Value] = {semconv.ATTR_MODEL: model, semconv.ATTR_REQUEST_ID: request_id}
    phase_spans = {
        name: make_span(
            seed,
            30 + i,
            20 if name is not PhaseName.DECIDE else 10,
            f"cold_start.{name}",
            at + 0.006 + offset,
            seconds,
            {semconv.ATTR_PHASE: name.value, semconv.ATTR_PREDICTED_SECONDS: seconds * 1.1, semconv.ATTR_MODEL: model},
        )
        for i, (name, (offset, seconds)) in enumerate(PHASE_SECONDS.items())
    }
    instance: dict[str, Value] = {semconv.ATTR_INSTANCE_ID: f"i-{seed:04x}", semconv.ATTR_NODE_ID: "node-2"}
    reason = "first GPU with 256 MiB free: node-2/0"
    return export(
        {
            "router": [
                make_span(
                    seed, 1, 0, "POST /v1/chat/completions", at, 2.61, about, kind=2, events={"first byte": 1.79}
                ),
                make_span(seed, 2, 1, "hold", at + 0.002, 1.76, {semconv.ATTR_REASON: "no instance runs"}),
                make_span(seed, 3, 1, "stream", at + 1.764, 0.84, instance, kind=3, events={"first token": 0.03}),
            ],
            "autoscaler": [
                make_span(seed, 5, 2, "autoscaler.request.waiting", at + 0.004, 0.001, {"glowplug.wanted": 1})
            ],
            "placer": [
                make_span(seed, 10, 5, "placer.placer.place", at + 0.006, 0.018, {semconv.ATTR_REASON: reason}),
                phase_spans[PhaseName.DECIDE],
            ],
            "prefetcher": [
                make_span(seed, 21, 10, "prefetcher.prefetcher.fetch", at + 0.025, 0.612, {"glowplug.source": "http"}),
                phase_spans[PhaseName.FETCH],
            ],
            "agent": [
                make_span(seed, 20, 10, "agent.agent.start", at + 0.025, 1.72, instance),
                *(phase_spans[name] for name in (PhaseName.LAUNCH, PhaseName.LOAD, PhaseName.WARMUP)),
            ],
            "engine": [
                make_span(seed, 40, 3, "chat", at + 1.77, 0.83, {"gen_ai.usage.output_tokens": 64}, kind=2),
                make_span(seed, 41, 40, "prefill", at + 1.772, 0.024),
                make_span(seed, 42, 40, "decode", at + 1.796, 0.8),
            ],
        }
    )


def warm_trace(seed: int, at: float, model: str, request_id: str) -> ExportTraceServiceRequest:
    about: dict[str, Value] = {semconv.ATTR_MODEL: model, semconv.ATTR_REQUEST_ID: request_id}
    return export(
        {
            "router": [
                make_span(seed, 1, 0, "POST /v1/chat/completions", at, 0.62, about, kind=2),
                make_span(seed, 3, 1, "stream", at + 0.001, 0.618, kind=3),
            ]
        }
    )


def failed_trace(seed: int, at: float, model: str, request_id: str) -> ExportTraceServiceRequest:
    """An engine that died, and a span whose parent never came."""
    about: dict[str, Value] = {
        semconv.ATTR_MODEL: model,
        semconv.ATTR_REQUEST_ID: request_id,
        semconv.ATTR_EMULATED: True,
    }
    error = "engine closed the stream after 12 tokens"
    return export(
        {
            "router": [
                make_span(seed, 1, 0, "POST /v1/chat/completions", at, 0.31, about, kind=2, error="engine_failed"),
                make_span(seed, 3, 1, "stream", at + 0.001, 0.3, kind=3, error=error),
            ],
            "agent": [make_span(seed, 50, 999, "agent.engine_exited", at + 0.302, 0.05, {"glowplug.exit_code": -9})],
        }
    )


def model(key: str, name: str, mib: int, engine: str = "llamacpp", **changes: object) -> Model:
    fields: dict[str, object] = {
        "name": name,
        "key": key,
        "engine": engine,
        "weights": WeightsRef(uri=f"file:/models/{key}.gguf", num_bytes=mib * MIB),
        "weights_bytes": mib * MIB,
        "kv_bytes": 64 * MIB,
        "revision": 1,
        **changes,
    }
    return Model(**fields)  # type: ignore[arg-type]


def instance(key: str, model_key: str, node: str, state: InstanceState, at: float, **changes: object) -> Instance:
    """An instance on GPU 0 of `node`, asked for at `at`."""
    phases = tuple(
        Phase(name=n, started_at=at + o, ended_at=at + o + s, predicted_s=s * 1.1)
        for n, (o, s) in PHASE_SECONDS.items()
    )
    fields: dict[str, object] = {
        "instance_id": key,
        "model_key": model_key,
        "engine": "llamacpp",
        "state": state,
        "workers": (Worker(worker_id=f"{key}-w0", node_id=node, gpu_id=f"{node}/0", num_bytes=256 * MIB),),
        "created_at": at,
        "ready_at": at + 1.734 if state is InstanceState.READY else 0.0,
        "changed_at": at + 1.734,
        "phases": phases if state is InstanceState.READY else (),
        "revision": 5,
        **changes,
    }
    return Instance(**fields)  # type: ignore[arg-type]


def node(node_id: str, at: float, grants: tuple[Grant, ...], **changes: object) -> Node:
    gpu = Gpu(gpu_id=f"{node_id}/0", total_bytes=640 * MIB, grants=grants)
    if grants:
        gpu = Gpu(gpu_id=f"{node_id}/0", total_bytes=640 * MIB, grants=grants, role=GpuRole.DEDICATED)
    fields: dict[str, object] = {
        "node_id": node_id,
        "gpus": (gpu,),
        "engines": ("llamacpp", "emulated"),
        "agent_url": "http://127.0.0.1:8010",
        "host_cache_bytes": 1024 * MIB,
        "cached": (CachedWeights(digest="d" * 64, num_bytes=139 * MIB, model_keys=("smol-chat",)),),
        "heartbeat_at": at,
        "revision": 1,
        **changes,
    }
    return Node(**fields)  # type: ignore[arg-type]


def grants(holder: str, weights_mib: int, kv_mib: int) -> tuple[Grant, ...]:
    return (
        Grant(holder=holder, owner=GrantOwner.WEIGHTS, num_bytes=weights_mib * MIB),
        Grant(holder=holder, owner=GrantOwner.KV, num_bytes=kv_mib * MIB),
    )


def fact(data: object, at: float, number: int = 0, traceparent: str = "") -> Event:
    """`data` as an event from a made-up writer."""
    kind: str = data.TYPE  # type: ignore[attr-defined]
    return Event(
        event_id=f"e-{kind}-{number}-{at}",
        type=kind,
        occurred_at=at,
        issuer="story-1",
        data=data,
        traceparent=traceparent,
    )


def traceparent(seed: int) -> str:
    return f"00-{trace_id(seed)}-0000000000000001-01"


def fleet_events(now: float) -> list[Event]:
    """Six models on three nodes in every state worth drawing."""
    models = [
        model("smol-chat", "smol-chat", 139, pinned=True),
        model("smol-poet", "smol-poet", 139),
        model("smol-coder", "smol-coder", 256),
        model("smol-tutor", "smol-tutor", 139),
        model("big-emulated", "Qwen/Qwen3-8B", 448, "emulated"),
        model("broken", "smol-broken", 139),
    ]
    live = [
        instance("i-71c2", "smol-chat", "node-1", InstanceState.READY, now - 340),
        instance("i-0a9e", "smol-poet", "node-2", InstanceState.READY, now - 22),
        instance("i-33f0", "big-emulated", "node-2", InstanceState.READY, now - 61, emulated=True, engine="emulated"),
        instance("i-b7d4", "smol-coder", "node-1", InstanceState.LOADING, now - 0.9),
    ]
    failed = instance(
        "i-dead",
        "broken",
        "node-3",
        InstanceState.FAILED,
        now - 70,
        reason="weights_corrupt: sha256 of smol-broken.gguf does not match",
    )
    loads = {
        "smol-chat": ModelLoad(num_in_flight=3, in_flight_by_instance={"i-71c2": 3}),
        "smol-poet": ModelLoad(num_in_flight=1, in_flight_by_instance={"i-0a9e": 1}),
        "smol-coder": ModelLoad(num_waiting=7),
    }
    events = [fact(ModelDeployed(model=m), now, i) for i, m in enumerate(models)]
    events += [
        fact(InstanceReady(instance=i) if i.state is InstanceState.READY else InstanceLoading(instance=i), now, n)
        for n, i in enumerate(live)
    ]
    events += [fact(InstanceFailed(instance=failed, code="weights_corrupt"), now)]
    events += beats(now)
    events += [fact(RouterLoadReported(router_id="router-1", loads=loads), now)]
    events += [fact(request_finished(i, now - 40 + 3 * i), now - 40 + 3 * i, i, traceparent(i)) for i in range(12)]
    rejected = RequestRejected(
        model_key="broken", request_id="req-rejected", router_id="router-1", status=503, code="weights_unavailable"
    )
    events += [fact(rejected, now - 3)]
    events += [fact(DecisionMade(decision=d), now, i) for i, d in enumerate(decisions(now))]
    return events


def beats(now: float, revision: int = 1) -> list[Event]:
    nodes = [
        node("node-1", now, grants("i-71c2", 139, 64) + grants("i-b7d4", 256, 64), revision=revision),
        node("node-2", now, grants("i-0a9e", 139, 64) + grants("i-33f0", 320, 96), revision=revision),
        node("node-3", now, (), cached=(), revision=revision),
    ]
    return [fact(NodeBeat(node=n), now, i) for i, n in enumerate(nodes)]


def request_finished(number: int, at: float) -> RequestFinished:
    cold = number % 5 == 0
    keys = ("smol-chat", "smol-poet", "big-emulated", "smol-chat")
    ttft_s = 1.79 if cold else 0.031 + 0.004 * number
    return RequestFinished(
        model_key=keys[number % 4],
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
        emulated=keys[number % 4] == "big-emulated",
    )


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
        DecisionRecord(
            decision_id=f"d-{i}",
            kind=kind,
            policy=policy,
            service=service,
            reason=reason,
            made_at=now - 24 + 4 * i,
            model_key=model_key,
            traceparent=traceparent(0),
        )
        for i, (kind, policy, service, model_key, reason) in enumerate(made)
    ]
