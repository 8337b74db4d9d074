"""Stimuli of the placer beside events, all from an operator. The placer has no effects of its own."""

from dataclasses import dataclass

CORDONS = "cordons"


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
