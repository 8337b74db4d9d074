"""What the placer is asked beside events: an operator drains a node, or moves weights in host memory. It has no effects
of its own."""

from dataclasses import dataclass

CORDONS = "cordons"  # the table of the nodes that an operator drains


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator takes a node out of placement (and drains it), or puts it back. A row of the store too."""

    node_id: str
    cordoned: bool


@dataclass(frozen=True, slots=True)
class FetchToHost:
    """Bring a model's weights into the host memory of that node; "": of one that the placer chooses."""

    model_key: str
    node_id: str = ""


@dataclass(frozen=True, slots=True)
class DropFromHost:
    """Take a model's weights out of the host memory of that node, "" of every node, once no instance reads them."""

    model_key: str
    node_id: str = ""
