"""Requests of an operator: to the autoscaler, over REST or through model files; from Cordon on, to the placer."""

from dataclasses import dataclass
from typing import Final

from glowplug.domain.model import Model, Rung

POLICY: Final = "operator"
CORDONS: Final = "cordons"


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
    """Start one instance now and lift a suspension; it stays for the model's keep-alive. Below READY it is put away
    once started, asleep or prewarmed, and evicts no serving instance. `node_id`: on that node alone."""

    model_key: str
    to: Rung = Rung.READY
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class Unload:
    """Drain every instance now; the next request starts one again. `rung`: only the instances on that rung."""

    model_key: str
    rung: Rung | None = None


@dataclass(frozen=True, slots=True)
class Sleep:
    """Drain every instance now and let its engine sleep where it can; the next request wakes it."""

    model_key: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Drain every instance and start none until Load."""

    model_key: str


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep one copy at that rung at least, or no longer. READY: never evicted, never below one instance; asleep: one
    engine sleeps while none serves; host: weights stay in host memory, of one node at least."""

    model_key: str
    pinned: bool
    at: Rung = Rung.READY


@dataclass(frozen=True, slots=True)
class Cordon:
    """Take a node out of placement and drain it, or put it back. Also a row of the store."""

    node_id: str
    cordoned: bool


@dataclass(frozen=True, slots=True)
class FetchToHost:
    """Bring a model's weights to the host memory of a node; "": of one that the placer chooses."""

    model_key: str
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class DropFromHost:
    """Drop a model's weights from host memory of a node ("": of all) once no instance reads them."""

    model_key: str
    node_id: str = ""
