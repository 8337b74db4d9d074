"""The union's prewarming: WarmServe's plan where weights lie in host memory already.

WarmServe (section 7.1) has every model's weights in host memory, so a replica costs a copy over PCIe. Over the network
it costs what cold starts need: with 384 models on 16 Gbit/s cards TTFT attainment on HydraServe's workload fell from
100 % to 94 % (simulated). So replicas are made where host memory has the weights, which mCache's importance decides;
the others come with the first start.

A replica that no forecast asks for is worth nothing to WarmServe; of those that drained and stayed the one used longest
ago gives way first here, as in SLLM-GPU (`keep_last`). Any that a forecast asks for is worth more.
"""

from dataclasses import replace

from glowplug.policies.placement.links import has_weights
from glowplug.policies.prewarming import warmserve
from glowplug.policies.prewarming.baselines import keep_last
from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView

PARAMS = warmserve.WarmserveParams()
UNWISHED = 1e-3  # what a replica without a forecast is worth at most; one that is wished for saves seconds


def plan(view: PrewarmView, params: warmserve.WarmserveParams = PARAMS) -> PrewarmPlan:
    """`warmserve.plan` without the steps whose weights would come over the network, and a worth for every replica."""
    found = warmserve.plan(view, params)
    near = tuple(
        step
        for step in found.steps
        if (node := view.fleet.node(step.node_id)) is not None and has_weights(node, view.models[step.model_key])
    )
    stayed = {replica_id: UNWISHED * worth for replica_id, worth in keep_last(view).scores.items()}
    scores = stayed | dict(found.scores)
    return replace(
        found, steps=near, scores=scores, inputs={**found.inputs, "over_network": len(found.steps) - len(near)}
    )
