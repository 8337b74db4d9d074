"""Name -> driver. A driver is imported when it is asked for, so that no service pays for engines it never starts.

Other packages add theirs as entry points of `glowplug.engines` (domain/extensions.py)."""

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
    """Every engine that is installed, ours first."""
    return (*_CLASSES, *(name for name in extensions.names("engines") if name not in _CLASSES))


def is_installed(name: str) -> bool:
    """Whether an engine has that name."""
    return name in _CLASSES or name in extensions.names("engines")


class Declaration(Protocol):
    """What a driver says of its engine without having been made."""

    name: str
    capabilities: EngineCapabilities
    arguments: EngineArguments
    weights: EngineWeights

    @staticmethod
    def api(model: Model) -> EngineApi: ...


def declaration(name: str) -> Declaration:
    """What the driver of that engine declares. Raises BadRequest for a name that is not in `installed`."""
    return cast(Declaration, _class(name))


def api_of(model: Model) -> EngineApi:
    """What the model's engine answers, as its driver declares; everything for an engine that is not in `installed`."""
    return declaration(model.engine).api(model) if is_installed(model.engine) else EVERYTHING


def driver(name: str, settings: EngineSettings | None = None) -> EngineDriver:
    """The driver of that engine. Raises BadRequest for a name that is not in `installed`."""
    return cast(Callable[[EngineSettings], EngineDriver], _class(name))(settings or EngineSettings())


def _class(name: str) -> Any:
    if name in _CLASSES:
        module, attribute = _CLASSES[name]
        return getattr(import_module(module), attribute)
    if not is_installed(name):
        known = ", ".join(installed()) + extensions.hint()
        raise BadRequest(f"unknown engine {name!r}: one of {known}", param="engine")
    return extensions.load("engines", name)
