"""A made-up fleet and its stories, as real events."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
    StreamMove,
    WeightsFetched,
)
from glowplug.services.console.fleet_view import ShownFleet
from tests.fleet_builder import a_model, a_node, an_instance

MIB = 1 << 20
CHAT = WeightsRef(uri="file:/models/smol-chat.gguf")
MARKUP = "<img src=x onerror=document.title='owned'><b>bold</b>"  # every view must escape this
PHASE_SECONDS = {
    PhaseName.DECIDE: (0.0, 0.018),
    PhaseName.FETCH: (0.02, 0.61),
    PhaseName.LAUNCH: (0.024, 0.92),
    PhaseName.LOAD: (0.944, 0.58),
    PhaseName.WARMUP: (1.524, 0.21),
}


def trace_id(seed: int) -> str:
    return f"{seed + 1:032x}"


def traceparent(seed: int) -> str:
    return f"00-{trace_id(seed)}-0000000000000001-01"


def cold_trace(seed: int, at: float, model_key: str, request_id: str) -> list[Event]:
    """A request that waited for a start: twelve rows, the request's three last."""
    name, phases = f"i-{seed:04x}", _phases(at + 0.006, PHASE_SECONDS)
    started = instance(name, model_key, "node-9", InstanceState.READY, at + 0.025, phases=phases, start_kind="cold")
    about = {"model_key": model_key, "instance_id": name, "traceparent": traceparent(seed)}
    made = (
        a_decision(100 * seed, "scale", "1 request waits", service="autoscaler", made_at=at + 0.004, **about),
        a_decision(100 * seed + 1, "place", FIRST_FIT, made_at=at + 0.006, chosen="node-9/0", **about),
    )
    fetched = WeightsFetched(
        node_id="node-9", model_key=model_key, digest="d" * 64, num_bytes=139 * MIB, seconds=0.61, source="http"
    )
    asked = finished(request_id, model_key, at, 2.61, queue_s=1.758, ttft_s=1.79, held=True, eta_s=1.7, cold=True)
    started = replace(started, decision_id=made[1].decision_id)
    return [
        *(told(DecisionMade(decision=one), one.made_at, seed) for one in made),
        told(fetched, at + 0.637, seed),
        told(InstanceReady(instance=started), at + 1.76, seed),
        told(replace(asked, dispatched_s=1.764, instance_id=name), at + 2.61, seed),
    ]


FIRST_FIT = "first GPU with 256 MiB free: node-9/0"


def _phases(at: float, seconds: Mapping[PhaseName, tuple[float, float]]) -> tuple[Phase, ...]:
    return tuple(
        Phase(name=name, started_at=at + offset, ended_at=at + offset + took, predicted_s=took * 1.1)
        for name, (offset, took) in seconds.items()
    )


def warm_trace(seed: int, at: float, model_key: str, request_id: str) -> list[Event]:
    return [told(finished(request_id, model_key, at, 0.62, dispatched_s=0.001, ttft_s=0.03), at + 0.62, seed)]


def failed_trace(seed: int, at: float, model_key: str, request_id: str) -> list[Event]:
    """An emulated engine was lost in mid-stream, and no other continued: three rows, all with the error."""
    lost = StreamMove(
        at=at + 0.3, until=at + 0.31, reason="engine_lost", message="engine closed the stream after 12 tokens",
        num_tokens=12, from_instance="i-33f0",
    )  # fmt: skip
    fact = finished(
        request_id, model_key, at, 0.31, dispatched_s=0.001, ttft_s=0.03, status=502, error_code="engine_failed",
        emulated=True, num_continued=1, moves=(lost,),
    )  # fmt: skip
    return [told(fact, at + 0.31, seed)]


def predicted_trace(seed: int, at: float) -> list[Event]:
    """A start with one prediction missing, of a request that took 4 s."""
    decision = a_decision(100 * seed, "place", FIRST_FIT, made_at=at + 0.02, traceparent=traceparent(seed))
    seconds = {PhaseName.DECIDE: (0.0, 0.02, 0.02), PhaseName.FETCH: (0.02, 0.9, 0.6), PhaseName.LAUNCH: (0.02, 1.5, 0)}
    phases = tuple(
        Phase(name=name, started_at=at + offset, ended_at=at + offset + took, predicted_s=predicted)
        for name, (offset, took, predicted) in seconds.items()
    )
    started = instance(
        f"i-{seed:04x}", "smol-poet", "node-9", InstanceState.READY, at + 0.02, phases=phases, ready_at=at + 1.52,
        start_kind="cold", emulated=True, decision_id=decision.decision_id,
    )  # fmt: skip
    asked = finished(
        f"req-{seed}", "smol-poet", at, 4.0, queue_s=1.6, dispatched_s=1.6, held=True, ttft_s=2.0, cold=True
    )
    return [
        told(DecisionMade(decision=decision), decision.made_at, seed),
        told(InstanceReady(instance=started), at + 1.52, seed),
        told(asked, at + 4.0, seed),
    ]


def finished(request_id: str, model_key: str, at: float, seconds: float, **changes: Any) -> RequestFinished:
    """The end of a stream that arrived `at`."""
    given: dict[str, Any] = {
        "router_id": "router-1", "instance_id": "i-71c2", "status": 200, "queue_s": 0.0, "ttft_s": 0.0,
        "prompt_tokens": 31, "response_tokens": 64, "tokens_exact": True, "cold": False, "stream": True,
        "operation": "chat",
    }  # fmt: skip
    given |= {"model_key": model_key, "request_id": request_id, "arrived_at": at, "finished_at": at + seconds}
    return RequestFinished(**{**given, "e2e_s": seconds, **changes})


def told(data: Any, at: float, seed: int) -> Event:
    """Tell it in the trace of this seed."""
    return fact(data, at, seed, traceparent(seed))


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
        "cached": (CachedWeights(digest=CHAT.digest, num_bytes=139 * MIB, model_keys=("smol-chat",)),),
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
