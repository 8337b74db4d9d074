"""Policies by kind and name, and where each of them is defined. A service picks one from configuration:
`GLOWPLUG_POLICY_<KIND>=name`, with options behind the name where the policy has any (`options`)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from glowplug.domain.errors import BadRequest
from glowplug.policies.options import base_name, configured

Policy = Callable[..., Any]

# Module below glowplug.policies and name in it. A process imports only the policies that it has chosen: the modules of
# all kinds together cost each of a fleet's dozen processes a tenth of its start.
KINDS: Final[dict[str, dict[str, str]]] = {
    "routing": {
        "least_loaded": "routing.counted:least_loaded",
        "round_robin": "routing.counted:round_robin",
        "minimum_use": "routing.counted:minimum_use",
        "first_room": "routing.counted:first_room",
        "preserve_load_aware": "routing.preserve_load_aware:preserve_load_aware",
        "llumnix_like": "routing.llumnix_like:llumnix_like",
        "prefix": "routing.prefix:prefix",
        "sticky": "routing.prefix_baselines:sticky",
        "llmd_like": "routing.prefix_baselines:llmd_like",
        "union": "routing.prefix:union",
    },
    "fairness": {"vtc": "fairness.vtc:vtc", "fifo": "fairness.fifo:fifo"},
    "placement": {
        "first_fit": "placement.first_fit:place",
        "serverlessllm": "placement.serverlessllm:place",
        "warmserve": "placement.warmserve_placement:place",
        "warmserve_unplaced": "placement.warmserve_placement:unplaced",
        "hydraserve": "placement.hydraserve:place",
        "muxserve_like": "placement.muxserve_like:place",
        "union": "placement.union:place",
    },
    "scaling": {
        "reactive": "scaling.baselines:reactive",
        "warmserve": "scaling.warmserve:scale",
        "warmserve_one_way": "scaling.warmserve:one_way",
        "hydraserve": "scaling.hydraserve:scale",
        "preserve": "scaling.preserve:scale",
        "proactive": "scaling.preserve:proactive",
        "hybrid": "scaling.preserve:hybrid",
        "llumnix_like": "scaling.llumnix_like:scale",
        "static": "scaling.baselines:static",
        "muxserve_like": "scaling.baselines:muxserve_like",
        "union": "scaling.union:scale",
    },
    "eviction": {
        "lru": "eviction.lru:evict",
        "swapserve": "eviction.swapserve:evict",
        "union": "eviction.union:evict",
    },
    "prediction": {
        "none": "prediction.baselines:Nothing",
        "combined": "prediction.learned:combined",
        "last_window": "prediction.baselines:LastWindow",
        "moving_average": "prediction.baselines:MovingAverage",
        "seasonal_naive": "prediction.baselines:SeasonalNaive",
        "warmserve_csp": "prediction.warmserve_csp:WarmserveCsp",
        "preserve_workload": "prediction.learned:preserve_workload",
    },
    "prewarming": {
        "none": "prewarming.baselines:nothing",
        "keep_last": "prewarming.baselines:keep_last",
        "warmserve": "prewarming.warmserve:plan",
        "warmserve_literal": "prewarming.warmserve:literal",
        "warmserve_unplaced": "prewarming.warmserve:unplaced",
        "warmserve_unproactive": "prewarming.warmserve:unproactive",
        "union": "prewarming.union:plan",
    },
    "caching": {
        "lru": "caching.recency:lru",
        "lfu": "caching.recency:lfu",
        "mcache": "caching.mcache_importance:mcache",
        "union": "caching.union:union",
    },
}


def choose(kind: str, name: str) -> Policy:
    """Return the policy `name` of `kind`, with the options behind its name applied. Raises BadRequest naming the field
    and the names there are."""
    policies, base = KINDS[kind], base_name(name)
    if base not in policies:
        known = ", ".join(sorted(policies)) or "none yet"
        raise BadRequest(f"no {kind} policy named {base!r} (there are: {known})", param=f"policy_{kind}")
    module, _, attribute = policies[base].partition(":")
    policy: Policy = getattr(import_module(f"glowplug.policies.{module}"), attribute)
    return configured(kind, name, policy)
