"""Policies by kind and name, and where each of them is defined. A service picks one from configuration:
`GLOWPLUG_POLICY_<KIND>=name`, with options behind the name where the policy has any (`options`).

Other packages add theirs as entry points of `glowplug.policies.<kind>` (domain/extensions.py)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, cast

from glowplug.domain import extensions
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
    """Every policy of a kind that is installed, sorted."""
    return sorted({*KINDS[kind], *extensions.names(f"policies.{kind}")})


def is_known(kind: str, name: str) -> bool:
    """Whether a policy of that name is installed; options behind the name do not matter."""
    base = base_name(name)
    return base in KINDS[kind] or base in extensions.names(f"policies.{kind}")


def choose(kind: str, name: str) -> Policy:
    """Return the policy `name` of `kind`, with the options behind its name applied. Raises BadRequest naming the field
    and the names there are."""
    if not is_known(kind, name):
        known = ", ".join(installed(kind)) + extensions.hint()
        raise BadRequest(f"no {kind} policy named {base_name(name)!r} (there are: {known})", param=f"policy_{kind}")
    return configured(kind, name, _defined(kind, base_name(name)))


def _defined(kind: str, base: str) -> Policy:
    if base not in KINDS[kind]:
        return cast(Policy, extensions.load(f"policies.{kind}", base))
    module, _, attribute = KINDS[kind][base].partition(":")
    return cast(Policy, getattr(import_module(f"glowplug.policies.{module}"), attribute))
