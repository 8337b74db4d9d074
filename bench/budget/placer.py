"""A placer with the union's policies over a made-up fleet."""

import random

from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance
from glowplug.events.facts import RouterLoadReported
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.registry import choose

GB = 10**9
GPU_BYTES = 80 * GB
SIZES = ((1, 12.5), (1, 24.2), (2, 24.2), (4, 128.5))  # GPUs, GB of weights
STAGES = StageSeconds(container_s=1.0, cuda_s=0.5, library_s=0.5, hop_s=0.001, prefill_s=1.5, decode_s=0.042)
ABILITIES = ("emulated:prewarm", "emulated:stages", "emulated:swap")
POLICIES = {"placement": "union", "eviction": "lru", "prewarming": "warmserve"}


def model_of(number: int) -> Model:
    """Make a model. Sizes take turns; an instance takes its GPUs whole."""
    num_gpus, gigabytes = SIZES[number % len(SIZES)]
    weights = int(gigabytes * GB)
    return Model(
        name=f"m{number}",
        key=f"m{number}",
        engine="emulated",
        weights=WeightsRef(uri=f"file:/m{number}", num_bytes=weights),
        weights_bytes=weights,
        kv_bytes=num_gpus * GPU_BYTES - weights,
        max_concurrency=32,
        max_instances=8,
        num_gpus=num_gpus,
        slo=Slo(ttft_s=7.5, tpot_s=0.2),
        revision=1,
    )


def node_of(number: int, num_gpus: int) -> Node:
    node_id = f"node-{number:04d}"
    gpus = tuple(Gpu(gpu_id=f"{node_id}/{g}", total_bytes=GPU_BYTES, kind="emulated") for g in range(num_gpus))
    return Node(node_id=node_id, gpus=gpus, engines=("emulated",), agent_url="", abilities=ABILITIES, revision=1)


class Fleet:
    """A placer of an empty fleet; a third of its models have a waiting request."""

    def __init__(self, num_models: int, num_nodes: int, num_gpus: int) -> None:
        self.models = [model_of(number) for number in range(num_models)]
        nodes = [node_of(number, num_gpus) for number in range(num_nodes)]
        place, evict, prewarm = (choose(kind, name) for kind, name in POLICIES.items())
        params = PlacerParams(settle_s=0.0, start_stages=STAGES, forget_s=1e9)
        self.placer = PlacerController(place, evict, POLICIES, 1, params, prewarm=prewarm)
        self.placer.restore("models", {m.key: m for m in self.models}, 0.0)
        self.placer.restore("nodes", {node.node_id: node for node in nodes}, 0.0)
        busy = random.Random(1).sample(self.models, num_models // 3)
        loads = {m.key: ModelLoad(last_active_at=-10.0) for m in self.models}
        loads |= {m.key: ModelLoad(num_waiting=1, last_active_at=0.0) for m in busy}
        self.placer.handle(event("e1", RouterLoadReported(router_id="router-1", loads=loads)), 0.0)


def event(event_id: str, payload: PlaceInstance | RouterLoadReported) -> Event:
    return Event(event_id=event_id, type=payload.TYPE, occurred_at=0.0, issuer="autoscaler-1", data=payload, epoch=1)
