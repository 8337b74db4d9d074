"""Whole systems by name: a policy for every room with the settings that go with them. `union` joins the five papers;
the other names are each paper alone, and the baselines they were compared with.

`GLOWPLUG_POLICIES=warmserve` is one for a fleet, `policies: warmserve` (or `--set policies=warmserve`) for a scenario.
What is set by itself goes before what its system says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`policies` by room, and `params` of the controllers that are not their defaults."""

    about: str
    policies: Mapping[str, str]
    params: Mapping[str, Mapping[str, Any]]


def _system(about: str, params: Mapping[str, Mapping[str, Any]] | None = None, **rooms: str) -> System:
    chosen = {
        "routing": "least_loaded",
        "prediction": "none",
        "scaling": "reactive",
        "placement": "first_fit",
        "prewarming": "none",
        "residency": "lru",
        "caching": "lru",
    } | rooms
    settings = {
        "agent": {"reservation": ""},
        "autoscaler": {"stop_becomes": "stopped"},
        "placer": {"evict_becomes": "stopped", "turns": "fair"},
    }
    return System(about=about, policies=chosen, params=settings | dict(params or {}))


_KEEPS = {"agent": {"reservation": "paper"}, "autoscaler": {"stop_becomes": "prewarmed"}}
# No Eq. 1 in the union: it takes instances back from their drain, which one without a KV cache cannot do
_STAYS = {"autoscaler": {"stop_becomes": "prewarmed"}}
_SWAPS = {"placer": {"evict_becomes": "swapped_out"}}
_TAKES_TURNS = {"placer": {"evict_becomes": "swapped_out", "turns": "balanced"}}

DEFAULT: Final = "union"
"""What a fleet runs that is told nothing: the defaults of the services' settings are its values."""

SYSTEMS: Final[Mapping[str, System]] = {
    "union": _system(
        "the five papers joined, one owner per knob",
        _STAYS | _TAKES_TURNS,
        routing="union",
        prediction="warmserve_csp",
        scaling="union",
        placement="union",
        prewarming="union",
        residency="swapserve",
        caching="mcache:copied_ratio=0.1",
    ),
    "warmserve": _system(
        "WarmServe alone",
        _KEEPS,
        prediction="warmserve_csp",
        scaling="warmserve",
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
    "swapserve": _system("SwapServeLLM alone", _SWAPS, residency="swapserve"),
    "mcache": _system("mCache alone", placement="serverlessllm", caching="mcache"),
    "serverlessllm": _system("baseline: host cache, nearest weights", placement="serverlessllm"),
    "sllm_gpu": _system(
        "baseline: what drained stays on its GPU until memory is needed",
        {"autoscaler": {"stop_becomes": "prewarmed"}},
        placement="serverlessllm",
        prewarming="keep_last",
    ),
    "muxserve_like": _system(
        "baseline: every model created in prior, GPUs shared, nothing starts or stops",
        scaling="muxserve_like",
        placement="muxserve_like",
    ),
    "serverless_vllm": _system("baseline: first fit, reactive, LRU"),
}
