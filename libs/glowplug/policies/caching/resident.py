"""What every eviction policy weighs: somebody who holds bytes and might give them back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A cached set of weights (`name` is its digest) or a running engine (`name` is its instance_id).

    `num_bytes` is what its going would free; `last_used_at` is in epoch seconds; `held` says why it must stay
    ("3 requests in flight", "pinned", "used by i-7f2") and is "" when it may go. A higher `priority` goes later.
    `num_waiting` requests wait for its model. `has_copy`: its bytes lie on a GPU of the same node as well.
    """

    name: str
    num_bytes: int
    last_used_at: float
    priority: int = 0
    held: str = ""
    num_waiting: int = 0
    has_copy: bool = False
