"""Policies by name. A service picks one from configuration: `GLOWPLUG_POLICY_<KIND>=name`, with options behind it where
the policy has any (`options`)."""

from collections.abc import Callable
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.policies.caching import union as union_caching
from glowplug.policies.caching.mcache_importance import mcache
from glowplug.policies.caching.recency import Arc, Lfu, Lru, Srrip
from glowplug.policies.eviction import lru, swapserve
from glowplug.policies.eviction import union as union_eviction
from glowplug.policies.options import base_name, configured
from glowplug.policies.placement import first_fit, muxserve_like, serverlessllm, warmserve_placement
from glowplug.policies.placement import hydraserve as hydraserve_placement
from glowplug.policies.placement import union as union_placement
from glowplug.policies.prediction.baselines import LastWindow, MovingAverage, Nothing, SeasonalNaive
from glowplug.policies.prediction.learned import combined, preserve_workload
from glowplug.policies.prediction.warmserve_csp import WarmserveCsp
from glowplug.policies.prewarming import baselines as prewarming_baselines
from glowplug.policies.prewarming import union as union_prewarming
from glowplug.policies.prewarming import warmserve as warmserve_prewarming
from glowplug.policies.routing.counted import first_room, least_loaded, minimum_use, round_robin
from glowplug.policies.routing.llumnix_like import llumnix_like
from glowplug.policies.routing.preserve_load_aware import preserve_load_aware
from glowplug.policies.routing.preserve_load_aware import union as route_union
from glowplug.policies.scaling import baselines as scaling_baselines
from glowplug.policies.scaling import hydraserve, preserve, union, warmserve
from glowplug.policies.scaling.llumnix_like import scale as llumnix_scale

Policy = Callable[..., Any]

KINDS: dict[str, dict[str, Policy]] = {
    "routing": {
        "least_loaded": least_loaded,
        "round_robin": round_robin,
        "minimum_use": minimum_use,
        "first_room": first_room,
        "preserve_load_aware": preserve_load_aware,
        "llumnix_like": llumnix_like,
        "union": route_union,
    },
    "placement": {
        "first_fit": first_fit.place,
        "serverlessllm": serverlessllm.place,
        "warmserve": warmserve_placement.place,
        "warmserve_unplaced": warmserve_placement.unplaced,
        "hydraserve": hydraserve_placement.place,
        "muxserve_like": muxserve_like.place,
        "union": union_placement.place,
    },
    "scaling": {
        "reactive": scaling_baselines.reactive,
        "warmserve": warmserve.scale,
        "warmserve_one_way": warmserve.one_way,
        "hydraserve": hydraserve.scale,
        "preserve": preserve.scale,
        "proactive": preserve.proactive,
        "hybrid": preserve.hybrid,
        "llumnix_like": llumnix_scale,
        "static": scaling_baselines.static,
        "muxserve_like": scaling_baselines.muxserve_like,
        "union": union.scale,
    },
    "eviction": {"lru": lru.evict, "swapserve": swapserve.evict, "union": union_eviction.evict},
    "prediction": {
        "none": Nothing,
        "combined": combined,
        "last_window": LastWindow,
        "moving_average": MovingAverage,
        "seasonal_naive": SeasonalNaive,
        "warmserve_csp": WarmserveCsp,
        "preserve_workload": preserve_workload,
    },
    "prewarming": {
        "none": prewarming_baselines.nothing,
        "keep_last": prewarming_baselines.keep_last,
        "warmserve": warmserve_prewarming.plan,
        "warmserve_literal": warmserve_prewarming.literal,
        "warmserve_unplaced": warmserve_prewarming.unplaced,
        "warmserve_unproactive": warmserve_prewarming.unproactive,
        "union": union_prewarming.plan,
    },
    "caching": {
        "lru": lambda _: Lru(),
        "lfu": lambda _: Lfu(),
        "arc": lambda cache: Arc(cache.capacity_bytes),
        "srrip": lambda _: Srrip(),
        "mcache": mcache,
        "union": union_caching.union,
    },
}


def choose(kind: str, name: str) -> Policy:
    """The policy `name` of `kind`, with the options behind its name. Raises BadRequest naming the field and what there
    is."""
    policies, base = KINDS[kind], base_name(name)
    if base not in policies:
        known = ", ".join(sorted(policies)) or "none yet"
        raise BadRequest(f"no {kind} policy named {base!r} (there are: {known})", param=f"policy_{kind}")
    return configured(kind, name, policies[base])
