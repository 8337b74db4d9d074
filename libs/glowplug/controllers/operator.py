"""What an operator asks of the autoscaler, over REST or through model files."""

from dataclasses import dataclass
from typing import Final

from glowplug.domain.model import Model, Rung

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
    """Start one instance now and lift a suspension; it stays for the model's keep-alive. Below READY it is put away as
    soon as it has started: asleep or prewarmed, and nobody who serves leaves for it. `node_id`: on that node alone."""

    model_key: str
    to: Rung = Rung.READY
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Unload:
    """Drain every instance now; the next request starts one again. `rung`: only those that stand there."""

    model_key: str
    rung: Rung | None = None


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
    """Pinned: one copy stays at that rung at least. READY: never evicted, never below one instance; asleep: one engine
    sleeps while none serves; host: its weights stay in host memory where they lie, and lie on one node at least."""

    model_key: str
    pinned: bool
    at: Rung = Rung.READY
