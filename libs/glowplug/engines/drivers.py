"""Name -> driver. A driver is imported when it is asked for, so that no service pays for engines it never starts."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.engines.apis import EVERYTHING, EngineApi
from glowplug.engines.declaration import EngineArguments, EngineWeights
from glowplug.engines.port import EngineCapabilities, EngineDriver, EngineSettings

_CLASSES = {
    "llamacpp": ("glowplug.engines.llamacpp", "LlamacppDriver"),
    "vllm": ("glowplug.engines.vllm", "VllmDriver"),
    "command": ("glowplug.engines.command", "CommandDriver"),
    "emulated": ("glowplug.engines.emulated", "EmulatedDriver"),
}
NAMES = tuple(_CLASSES)


class Declaration(Protocol):
    """What a driver says of its engine without having been made."""

    name: str
    capabilities: EngineCapabilities
    arguments: EngineArguments
    weights: EngineWeights

    @staticmethod
    def api(model: Model) -> EngineApi: ...


def declaration(name: str) -> Declaration:
    """What the driver of that engine declares. Raises BadRequest for a name that is not in `NAMES`."""
    return cast(Declaration, _class(name))


def api_of(model: Model) -> EngineApi:
    """What the model's engine answers, as its driver declares; everything for an engine that is not in `NAMES`."""
    return declaration(model.engine).api(model) if model.engine in _CLASSES else EVERYTHING


def driver(name: str, settings: EngineSettings | None = None) -> EngineDriver:
    """The driver of that engine. Raises BadRequest for a name that is not in `NAMES`."""
    return cast(Callable[[EngineSettings], EngineDriver], _class(name))(settings or EngineSettings())


def _class(name: str) -> Any:
    if name not in _CLASSES:
        raise BadRequest(f"unknown engine {name!r}: one of {', '.join(NAMES)}", param="engine")
    module, attribute = _CLASSES[name]
    return getattr(import_module(module), attribute)
