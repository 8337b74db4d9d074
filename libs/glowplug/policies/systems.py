"""Whole systems by name: a policy of every kind with its settings. `union` joins the five papers; other packages add
systems as entry points of `glowplug.systems`, as the laboratory does with each paper and its baselines.

A fleet (`GLOWPLUG_POLICIES=warmserve`), a scenario (`policies: warmserve`, or `--set policies=warmserve`) and the
papers' experiments use these. A setting given by itself overrides its system's. docs/policies.md has the common rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from glowplug.domain import extensions
from glowplug.domain.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Policies of every kind and settings by service (`params`). Every system defines all of both."""

    about: str
    policies: Mapping[str, str]
    params: Mapping[str, Mapping[str, Any]]


def system_of(
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
"""A fleet's default."""

UNION: Final = system_of(
    "the five papers joined, one owner per knob",
    # no Eq. 1 of WarmServe: taking draining instances back needs their KV cache
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
)


def installed() -> list[str]:
    return sorted({DEFAULT, *extensions.names("systems")})


def system(name: str) -> System:
    """Raises BadRequest naming the known systems."""
    if name == DEFAULT:
        return UNION
    if name not in installed():
        known = ", ".join(installed()) + extensions.hint()
        raise BadRequest(f"no system named {name!r} (there are: {known})", param="policies")
    found: System = extensions.load("systems", name)
    return found
