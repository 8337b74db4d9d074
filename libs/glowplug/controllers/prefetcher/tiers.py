"""Where the weights of each model lie on one node, and the last moves of weights between its tiers."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MOVES_REMEMBERED = 4096


class Tier(StrEnum):
    """Tiers of weights, from the fastest to the slowest."""

    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The last time that weights went whole from one tier to another."""

    source: Tier
    target: Tier
    num_bytes: int
    seconds: float
    ended_at: float


class Moves:
    """The last move of each kind, by digest."""

    def __init__(self) -> None:
        self._moves: OrderedDict[str, dict[tuple[Tier, Tier], Move]] = OrderedDict()

    def add(self, digest: str, move: Move) -> None:
        """Note a move. One that took no time is no measurement."""
        if not move.seconds > 0:
            return
        moves = self._moves.setdefault(digest, {})
        moves[move.source, move.target] = move
        self._moves.move_to_end(digest)
        while len(self._moves) > MOVES_REMEMBERED:
            self._moves.popitem(last=False)

    def of(self, digest: str) -> tuple[Move, ...]:
        """The moves of a digest, the latest first."""
        return tuple(sorted(self._moves.get(digest, {}).values(), key=lambda move: -move.ended_at))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWeights:
    """One set of weights. `tiers` have it whole, the fastest first; REMOTE alone where the node has none of it.
    `num_bytes` 0: not known. `expected_s`: measured seconds from each slower tier into host memory. `why_not_on_disk`
    is "" where a copy lies on disk or is to be written."""

    digest: str
    model_keys: tuple[str, ...]
    num_bytes: int
    tiers: tuple[Tier, ...]
    expected_s: Mapping[str, float] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    why_not_on_disk: str = ""
