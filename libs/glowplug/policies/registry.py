"""Policies by kind and name. A service picks one by `GLOWPLUG_POLICY_<KIND>=name`, with `options` behind the name.

Other packages add theirs as entry points of `glowplug.policies.<kind>` (domain/extensions.py).
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, cast

from glowplug.domain import extensions
from glowplug.domain.errors import BadRequest
from glowplug.policies.options import base_name, configured

Policy = Callable[..., Any]

# Imported when chosen: all modules together cost each of a fleet's dozen processes a tenth of its start.
KINDS: Final[dict[str, dict[str, str]]] = {
    "routing": {
        "least_loaded": "routing.counted:least_loaded",
        "round_robin": "routing.counted:round_robin",
        "minimum_use": "routing.counted:minimum_use",
        "first_room": "routing.counted:first_room",
        "preserve_load_aware": "routing.preserve_load_aware:preserve_load_aware",
        "prefix": "routing.prefix:prefix",
        "union": "routing.prefix:union",
    },
    "fairness": {"vtc": "fairness.vtc:vtc", "fifo": "fairness.fifo:fifo"},
    "placement": {
        "first_fit": "placement.first_fit:place",
        "serverlessllm": "placement.serverlessllm:place",
        "hydraserve": "placement.hydraserve:place",
        "union": "placement.union:place",
    },
    "scaling": {
        "reactive": "scaling.baselines:reactive",
        "hydraserve": "scaling.hydraserve:scale",
        "preserve": "scaling.preserve:scale",
        "static": "scaling.baselines:static",
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
    },
    "prewarming": {
        "none": "prewarming.baselines:nothing",
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


def installed(kind: str) -> list[str]:
    return sorted({*KINDS[kind], *extensions.names(f"policies.{kind}")})


def is_known(kind: str, name: str) -> bool:
    base = base_name(name)
    return base in KINDS[kind] or base in extensions.names(f"policies.{kind}")


def choose(kind: str, name: str) -> Policy:
    """Return the policy with its options applied. Raises BadRequest naming the field and known names."""
    if not is_known(kind, name):
        known = ", ".join(installed(kind)) + extensions.hint()
        raise BadRequest(f"no {kind} policy named {base_name(name)!r} (there are: {known})", param=f"policy_{kind}")
    return configured(kind, name, _defined(kind, base_name(name)))


def _defined(kind: str, base: str) -> Policy:
    if base not in KINDS[kind]:
        return cast(Policy, extensions.load(f"policies.{kind}", base))
    module, _, attribute = KINDS[kind][base].partition(":")
    return cast(Policy, getattr(import_module(f"glowplug.policies.{module}"), attribute))
