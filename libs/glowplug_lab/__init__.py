"""Simulator, emulated engine, single-paper policies and GPU memory slots. Glowplug finds all by entry points and
imports none."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glowplug_lab.api import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from glowplug_lab import api  # the emulated engine's processes do without

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
