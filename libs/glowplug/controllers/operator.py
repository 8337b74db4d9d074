"""What an operator asks of the autoscaler, over REST or through model files."""

from dataclasses import dataclass
from typing import Final

from glowplug.domain.model import Model

POLICY: Final = "operator"  # the rule of a decision that a person made


@dataclass(frozen=True, slots=True, kw_only=True)
class Deploy:
    """Create or change a model. With `create`, an existing one is a Conflict."""

    model: Model
    create: bool = False


@dataclass(frozen=True, slots=True)
class Undeploy:
    model_key: str


@dataclass(frozen=True, slots=True)
class Load:
    """Start one instance now and lift a suspension; it stays for the model's keep-alive."""

    model_key: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Drain every instance now; the next request starts one again."""

    model_key: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Drain every instance now and let its engine sleep in its process, where it can; the next request wakes it."""

    model_key: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Drain every instance and start none until Load."""

    model_key: str


@dataclass(frozen=True, slots=True)
class Pin:
    """Pinned: never evicted, never below one instance."""

    model_key: str
    pinned: bool
