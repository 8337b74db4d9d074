"""Stimuli of the placer beside events: an operator drains a node, or moves weights in host memory. The placer has no
effects of its own."""

from dataclasses import dataclass

CORDONS = "cordons"  # the table of the nodes that an operator drains


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator takes a node out of placement and drains it, or puts it back. Also a row of the store."""

    node_id: str
    cordoned: bool


@dataclass(frozen=True, slots=True)
class FetchToHost:
    """An operator wants a model's weights in the host memory of a node; "": of one that the placer chooses."""

    model_key: str
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class DropFromHost:
    """An operator wants a model's weights out of host memory of a node ("": of all) once no instance reads them."""

    model_key: str
    node_id: str = ""
