"""What the placer is asked beside events: an operator drains a node. It has no effects of its own."""

from dataclasses import dataclass

CORDONS = "cordons"  # the table of the nodes that an operator drains


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator takes a node out of placement (and drains it), or puts it back. A row of the store too."""

    node_id: str
    cordoned: bool
