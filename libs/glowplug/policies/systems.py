"""Whole systems by name: a policy of every kind with the settings that go with them. `union` joins the five papers; the
other names are each paper alone, and the baselines they were compared with.

Each system is defined only here. A fleet (`GLOWPLUG_POLICIES=warmserve`), a scenario (`policies: warmserve`, or `--set
policies=warmserve`) and the rows of `bench/papers` all read it here. A setting given by itself overrides its system's.
docs/policies.md says what holds for every system alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy of every kind (`policies`) and settings by service (`params`). Every system defines all of both, so that
    a scenario keeps nothing of its previous system."""

    about: str
    policies: Mapping[str, str]
    params: Mapping[str, Mapping[str, Any]]


def _system(
    about: str,
    *,
    stop_becomes: str = "stopped",
    evict_becomes: str = "stopped",
    turns: str = "fair",
    victims: str = "oldest_use",
    reservation: str = "",
    **kinds: str,
) -> System:
    chosen = {
        "routing": "least_loaded",
        "fairness": "fifo",
        "prediction": "none",
        "scaling": "reactive",
        "placement": "first_fit",
        "prewarming": "none",
        "eviction": "lru",
        "caching": "lru",
    } | kinds
    params = {
        "agent": {"reservation": reservation},
        "autoscaler": {"stop_becomes": stop_becomes},
        "placer": {"evict_becomes": evict_becomes, "turns": turns, "victims": victims},
    }
    return System(about=about, policies=chosen, params=params)


DEFAULT: Final = "union"
"""What a fleet runs unless a setting says otherwise: the defaults of the services' settings are its values."""

SYSTEMS: Final[Mapping[str, System]] = {
    "union": _system(
        "the five papers joined, one owner per knob",
        # no Eq. 1 of WarmServe: the union takes instances back from their drain, which needs their KV cache
        stop_becomes="prewarmed",
        evict_becomes="swapped_out",
        turns="balanced",
        victims="least_worth",
        routing="union",
        fairness="vtc",
        prediction="combined",
        scaling="union",
        placement="union",
        prewarming="union",
        eviction="union",
        caching="union",
    ),
    "warmserve": _system(
        "WarmServe alone",
        stop_becomes="prewarmed",  # section 4: a stopped instance keeps its weights on the GPU
        reservation="paper",  # section 4.1, Eq. 1
        prediction="warmserve_csp",
        scaling="warmserve_one_way",  # section 4.1: instances in their grace period "no longer receive" requests
        placement="warmserve",
        prewarming="warmserve",
    ),
    "hydraserve": _system("HydraServe alone", routing="first_room", scaling="hydraserve", placement="hydraserve"),
    "preserve": _system(
        "PreServe alone",
        routing="preserve_load_aware:hold_overloaded=true",  # section 4.3.3: it waits while all are overloaded
        prediction="preserve_workload",
        scaling="preserve",
    ),
    "swapserve": _system(
        "SwapServeLLM alone",
        stop_becomes="swapped_out",  # section 4: an engine is started once and paused from then on
        evict_becomes="swapped_out",
        victims="shortest_queue",  # section 3.5, between GPUs as on one
        eviction="swapserve",
    ),
    "mcache": _system("mCache alone", placement="serverlessllm", caching="mcache"),
    "serverlessllm": _system("baseline: host cache, nearest weights", placement="serverlessllm"),
    "sllm_gpu": _system(
        "baseline: what drained stays on its GPU until memory is needed, under WarmServe's autoscaler",
        stop_becomes="prewarmed",
        scaling="warmserve_one_way",  # WarmServe section 7.1 names no other: all systems share this autoscaler
        placement="serverlessllm",
        prewarming="keep_last",
    ),
    "muxserve_like": _system(
        "baseline: every model created in prior, GPUs shared, nothing starts or stops",
        scaling="muxserve_like",
        placement="muxserve_like",
    ),
    "llumnix_like": _system(
        "baseline: routing and scaling by the steps that are free (PreServe 5.3, 5.4), without migration",
        routing="llumnix_like",
        scaling="llumnix_like",
    ),
    "proactive": _system("baseline: the forecast alone", prediction="preserve_workload", scaling="proactive"),
    "hybrid": _system("baseline: the larger of forecast and demand", prediction="preserve_workload", scaling="hybrid"),
    "round_robin": _system("baseline: serverless_vllm, requests dealt in turn", routing="round_robin"),
    "minimum_use": _system("baseline: serverless_vllm, the least used instance", routing="minimum_use"),
    "serverless_vllm": _system("baseline: first fit, reactive, LRU"),
}
