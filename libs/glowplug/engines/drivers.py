"""Drivers by engine name, imported on demand.

Other packages add theirs as entry points of `glowplug.engines` (domain/extensions.py).
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

from glowplug.domain import extensions
from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.engines.apis import EVERYTHING, EngineApi
from glowplug.engines.declaration import EngineArguments, EngineWeights
from glowplug.engines.port import EngineCapabilities, EngineDriver, EngineSettings

_CLASSES = {
    "llamacpp": ("glowplug.engines.llamacpp", "LlamacppDriver"),
    "vllm": ("glowplug.engines.vllm", "VllmDriver"),
    "command": ("glowplug.engines.command", "CommandDriver"),
}


def installed() -> tuple[str, ...]:
    return (*_CLASSES, *(name for name in extensions.names("engines") if name not in _CLASSES))


def is_installed(name: str) -> bool:
    return name in _CLASSES or name in extensions.names("engines")


class Declaration(Protocol):
    name: str
    capabilities: EngineCapabilities
    arguments: EngineArguments
    weights: EngineWeights

    @staticmethod
    def api(model: Model) -> EngineApi: ...


def declaration(name: str) -> Declaration:
    """Raises BadRequest for an unknown name."""
    return cast(Declaration, _class(name))


def api_of(model: Model) -> EngineApi:
    """Return everything for an engine that is not in `installed`."""
    return declaration(model.engine).api(model) if is_installed(model.engine) else EVERYTHING


def driver(name: str, settings: EngineSettings | None = None) -> EngineDriver:
    """Raises BadRequest for an unknown name."""
    return cast(Callable[[EngineSettings], EngineDriver], _class(name))(settings or EngineSettings())


def _class(name: str) -> Any:
    if name in _CLASSES:
        module, attribute = _CLASSES[name]
        return getattr(import_module(module), attribute)
    if not is_installed(name):
        known = ", ".join(installed()) + extensions.hint()
        raise BadRequest(f"unknown engine {name!r}: one of {known}", param="engine")
    return extensions.load("engines", name)
