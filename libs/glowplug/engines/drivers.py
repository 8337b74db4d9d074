"""Name -> driver. A driver is imported when it is asked for, so that no service pays for engines it never starts."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.engines.apis import EVERYTHING, EngineApi
from glowplug.engines.port import EngineDriver, EngineSettings

NAMES = ("llamacpp", "vllm", "emulated")

_CLASSES = {
    "llamacpp": ("glowplug.engines.llamacpp", "LlamacppDriver"),
    "vllm": ("glowplug.engines.vllm", "VllmDriver"),
    "emulated": ("glowplug.engines.emulated", "EmulatedDriver"),
}


def api_of(model: Model) -> EngineApi:
    """What the model's engine answers, as its driver declares; everything for an engine that is not in `NAMES`."""
    if model.engine not in _CLASSES:
        return EVERYTHING
    declared = cast(Callable[[Model], EngineApi], _class(model.engine).api)
    return declared(model)


def driver(name: str, settings: EngineSettings | None = None) -> EngineDriver:
    """The driver of that engine. Raises BadRequest for a name that is not in `NAMES`."""
    if name not in _CLASSES:
        raise BadRequest(f"unknown engine {name!r}: one of {', '.join(NAMES)}", param="engine")
    make = cast(Callable[[EngineSettings], EngineDriver], _class(name))
    return make(settings or EngineSettings())


def _class(name: str) -> Any:
    module, attribute = _CLASSES[name]
    return getattr(import_module(module), attribute)
