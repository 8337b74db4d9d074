"""MuxServe-like static sharing: place each engine on the least shared GPUs, with a part of their KV space.

Baseline of WarmServe section 7.1 ("collocates models on GPUs"; instances "are created in prior"); the scaling of the
same name starts one engine per model and stops none. Groups are aligned blocks of GPUs. An engine's KV cache takes half
of the memory left by the weights, at most the model's own; an engine that finds none waits for ever.

Departures: MuxServe searches group widths with measured rates; here the width is the model's `num_gpus`, set by an
operator (section 7.3 lists the groups it found). Its engines share one pool of KV blocks; here each has a part. It
divides SMs; here the simulator's rule applies (busy engines share a GPU's time evenly).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glowplug.domain.bounds import Positive
from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted
from glowplug.domain.units import show_bytes
from glowplug.policies.decisions import PlaceDecision, ScaleDecision, StageDecision
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu, free_bytes, weights_per_gpu
from glowplug.policies.scaling.port import ScalingView, settle

MAX_RIVALS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MuxserveParams:
    kv_part: Positive = 0.5  # KV cache's share of the memory left by the weights


def place(request: PlaceRequest, view: PlacementView, params: MuxserveParams = MuxserveParams()) -> PlaceDecision:
    """Choose the least shared group of one node. Ties: most bytes free, then the first node and GPUs."""
    model, options = request.model, []
    for node in view.fleet:
        if node.draining or model.engine not in node.engines:
            continue
        for group in _groups(node, model.num_gpus):
            free = min(free_bytes(gpu, view.fleet.reserved) for gpu in group)
            if free >= weights_per_gpu(model) + _least_kv(model):
                options.append((_sharers(group, view.fleet.reserved), -free, node, group))
    if not options:
        need = show_bytes(weights_per_gpu(model) + _least_kv(model))
        who = "no GPU has" if model.num_gpus == 1 else f"no {model.num_gpus} GPUs side by side each have"
        return PlaceDecision(possible=False, reason=f"{who} {need} free, and nobody leaves")
    options.sort(key=lambda option: (option[0], option[1], option[2].node_id))
    sharers, negative_free, node, group = options[0]
    stage = StageDecision(
        node_id=node.node_id,
        gpu_ids=tuple(gpu.gpu_id for gpu in group),
        bytes_per_gpu=granted(model, -negative_free, params),
    )
    rivals = (Rival(name=g[0].gpu_id, score=float(num), unit="engines there") for num, _, _, g in options[:MAX_RIVALS])
    holds = "holds" if sharers == 1 else "hold"
    reason = f"{counted(sharers, 'engine')} {holds} memory there, and nowhere fewer"
    return PlaceDecision(stages=(stage,), reason=reason, rivals=tuple(rivals))


def granted(model: Model, free: int, params: MuxserveParams = MuxserveParams()) -> int:
    """Bytes per GPU, of `free`: weights and a part of the rest."""
    weights = weights_per_gpu(model)
    part = max(_least_kv(model), int((free - weights) * params.kv_part))
    return weights + min(part, bytes_per_gpu(model) - weights)


def _least_kv(model: Model) -> int:
    return (bytes_per_gpu(model) - weights_per_gpu(model)) // max(1, model.max_concurrency)


def _sharers(group: Sequence[Gpu], reserved: Mapping[str, int]) -> int:
    """All promised bytes count as one engine."""
    there = {grant.holder for gpu in group for grant in gpu.grants}
    return len(there) + any(reserved.get(gpu.gpu_id) for gpu in group)


def _groups(node: Node, num: int) -> list[Sequence[Gpu]]:
    return [node.gpus[first : first + num] for first in range(0, len(node.gpus) - num + 1, num)]


def scale(view: ScalingView, state: None = None) -> tuple[ScaleDecision, None]:
    """Keep the model's minimum, and at least one instance."""
    least = max(1, view.floor)
    why = f"its minimum, {counted(least, 'instance')}, is kept from its deployment on"
    return settle(view, least, why, keep_alive_s=-1), None
