"""Glowplug: multi-LLM serving with fast cold starts. From Python: `Client` (glowplug/api.py)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glowplug.api import Client, FleetError

__version__ = "0.2.0"
__all__ = ["Client", "FleetError"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from glowplug import api  # imported here to keep `import glowplug` cheap

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
