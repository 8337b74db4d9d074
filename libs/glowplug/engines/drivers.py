"""Name -> driver. A driver is imported when it is asked for, so that no service pays for engines it never starts."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from glowplug.domain.errors import BadRequest
from glowplug.engines.port import EngineDriver, EngineSettings

NAMES = ("llamacpp", "vllm", "emulated")

_CLASSES = {
    "llamacpp": ("glowplug.engines.llamacpp", "LlamacppDriver"),
    "vllm": ("glowplug.engines.vllm", "VllmDriver"),
    "emulated": ("glowplug.engines.emulated", "EmulatedDriver"),
}


def driver(name: str, settings: EngineSettings | None = None) -> EngineDriver:
    """The driver of that engine. Raises BadRequest for a name that is not in `NAMES`."""
    if name not in _CLASSES:
        raise BadRequest(f"unknown engine {name!r}: one of {', '.join(NAMES)}", param="engine")
    module, attribute = _CLASSES[name]
    make = cast(Callable[[EngineSettings], EngineDriver], getattr(import_module(module), attribute))
    return make(settings or EngineSettings())
