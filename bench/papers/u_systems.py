"""U: the systems compared: the union, every paper alone, the baselines they were compared with."""

from bench.papers.simulated import policies

KEEP = ["params.autoscaler.stop_becomes=prewarmed", "params.agent.reservation=paper"]
SLEEP = ["params.autoscaler.stop_becomes=swapped_out", "params.placer.evict_becomes=swapped_out"]
PLAIN = {"prediction": "none", "prewarming": "none", "residency": "lru", "caching": "lru"}
OFF = ["params.autoscaler.stop_becomes=stopped", "params.placer.evict_becomes=stopped", 'params.agent.reservation=""']
"""What a scenario switches on for its own paper is no part of another's system."""


def _alone(**names: str) -> list[str]:
    chosen = PLAIN | {"routing": "least_loaded", "placement": "first_fit", "scaling": "reactive"} | names
    return [*OFF, *policies(**chosen)]


UNION = "union"
SYSTEMS = {
    UNION: ["policies=union"],  # libs/glowplug/policies/systems.py
    "WarmServe": [
        *_alone(prediction="warmserve_csp", scaling="warmserve", placement="warmserve", prewarming="warmserve"),
        *KEEP,
    ],
    "HydraServe": _alone(routing="first_room", scaling="hydraserve", placement="hydraserve"),
    "PreServe": _alone(
        routing="preserve_load_aware:hold_overloaded=true", prediction="preserve_workload", scaling="preserve"
    ),
    "SwapServeLLM": [*_alone(residency="swapserve"), *SLEEP],
    "mCache": _alone(placement="serverlessllm", caching="mcache"),
    "SLLM-GPU": [*_alone(placement="serverlessllm", scaling="warmserve", prewarming="keep_last"), KEEP[0]],
    "ServerlessLLM": _alone(placement="serverlessllm"),
    "serverless vLLM": _alone(),  # first fit, reactive, least request, LRU
    "Llumnix-like": _alone(routing="llumnix_like", scaling="llumnix_like"),
    "proactive": _alone(prediction="preserve_workload", scaling="proactive"),
    "hybrid": _alone(prediction="preserve_workload", scaling="hybrid"),
    "round robin": _alone(routing="round_robin"),
    "minimum use": _alone(routing="minimum_use"),
    "MuxServe-like": _alone(scaling="muxserve_like", placement="muxserve_like"),
}
PAPERS = ("WarmServe", "HydraServe", "PreServe", "SwapServeLLM", "mCache")
CACHES = ("SLLM-GPU", "ServerlessLLM", "serverless vLLM")
ROUTERS = ("PreServe", "Llumnix-like", "round robin", "minimum use", "serverless vLLM")
"""Where instances neither come nor go a system is its router; least request is that of all others."""
