"""Single papers and the baselines of their evaluations, as systems (glowplug/policies/systems.py)."""

from collections.abc import Mapping
from typing import Final

from glowplug.policies import systems
from glowplug.policies.systems import System, system_of

OURS: Final[Mapping[str, System]] = {
    "warmserve": system_of(
        "WarmServe alone",
        stop_becomes="prewarmed",  # section 4: weights stay on the GPU
        reservation="paper",  # section 4.1, Eq. 1
        prediction="warmserve_csp",
        scaling="warmserve_one_way",  # section 4.1: instances in grace "no longer receive" requests
        placement="warmserve",
        prewarming="warmserve",
    ),
    "hydraserve": system_of("HydraServe alone", routing="first_room", scaling="hydraserve", placement="hydraserve"),
    "preserve": system_of(
        "PreServe alone",
        routing="preserve_load_aware:hold_overloaded=true",  # section 4.3.3: wait while all are overloaded
        prediction="preserve_workload",
        scaling="preserve",
    ),
    "swapserve": system_of(
        "SwapServeLLM alone",
        stop_becomes="swapped_out",  # section 4: started once, then paused
        evict_becomes="swapped_out",
        victims="shortest_queue",  # section 3.5, between GPUs as on one
        eviction="swapserve",
    ),
    "mcache": system_of("mCache alone", placement="serverlessllm", caching="mcache"),
    "serverlessllm": system_of("baseline: host cache, nearest weights", placement="serverlessllm"),
    "sllm_gpu": system_of(
        "baseline: what drained stays on its GPU until memory is needed, under WarmServe's autoscaler",
        stop_becomes="prewarmed",
        scaling="warmserve_one_way",  # WarmServe section 7.1: all systems share this autoscaler
        placement="serverlessllm",
        prewarming="keep_last",
    ),
    "muxserve_like": system_of(
        "baseline: every model created in prior, GPUs shared, nothing starts or stops",
        scaling="muxserve_like",
        placement="muxserve_like",
    ),
    "llumnix_like": system_of(
        "baseline: routing and scaling by the steps that are free (PreServe 5.3, 5.4), without migration",
        routing="llumnix_like",
        scaling="llumnix_like",
    ),
    "proactive": system_of("baseline: the forecast alone", prediction="preserve_workload", scaling="proactive"),
    "hybrid": system_of(
        "baseline: the larger of forecast and demand", prediction="preserve_workload", scaling="hybrid"
    ),
    "round_robin": system_of("baseline: serverless_vllm, requests dealt in turn", routing="round_robin"),
    "minimum_use": system_of("baseline: serverless_vllm, the least used instance", routing="minimum_use"),
    "serverless_vllm": system_of("baseline: first fit, reactive, LRU"),
}

SYSTEMS: Final[Mapping[str, System]] = {systems.DEFAULT: systems.UNION, **OURS}
"""Every system by name."""


def __getattr__(name: str) -> System:
    """For entry points."""
    if name in OURS:
        return OURS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
