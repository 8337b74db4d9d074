"""What of some ranges is still to be brought, and who brings which part of it. Pure: time and rates come from outside.

Parts are handed out in the order of the ranges, each as long as its holder needs about `part_s` for, so that a slow
holder is given little and early bytes are not long under way. When nothing is left to hand out, a holder that is free
takes over the end of a part that another one is slow with. All bounds are those of pieces (weights/pieces.py).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.weights.pieces import Layout

PART_S = 1.0  # of reading, for one part
FIRST_PART_BYTES = 4 << 20  # of a holder whose rate is not known yet
STALLED_S = 2.0  # without a byte: all that is left of a part may be taken over
_WORTH_TAKING = 2.0  # a part is taken over that would take so often as long where it is


@dataclass(slots=True, eq=False)
class Part:
    """[position, last) of the region, on its way from `holder`. `last` falls when another takes over the end."""

    rank: int
    first: int
    last: int
    holder: str
    began_at: float
    moved_at: float
    position: int
    num_bytes: int = 0  # that came; more than the position moved where some are read twice

    @property
    def num_bytes_left(self) -> int:
        return max(0, self.last - self.position)


class Parts:
    """`ranges` are [first, last) in the order wanted, of whole pieces and disjoint."""

    def __init__(self, layout: Layout, ranges: Sequence[tuple[int, int]], part_bytes: int) -> None:
        self._layout, self._part_bytes = layout, part_bytes
        self._missing = [(rank, first, last) for rank, (first, last) in enumerate(ranges) if first < last]
        self._running: list[Part] = []

    @property
    def is_done(self) -> bool:
        """What has been taken over from a holder that is stalled counts for nothing there."""
        return not self._missing and not any(part.num_bytes_left for part in self._running)

    def take(self, holder: str, bytes_per_s: float, has: bytes | None, now_s: float) -> Part | None:
        """The next part for a holder of that rate (0: not known) that has these pieces (None: all)."""
        for at, (rank, first, last) in enumerate(self._missing):
            start, end = (first, last) if has is None else self._available(first, last, has)
            if start >= end:
                continue
            end = min(end, start + self._size(bytes_per_s))
            rest = [(rank, a, b) for a, b in ((first, start), (end, last)) if a < b]
            self._missing[at : at + 1] = rest
            return self._began(Part(rank, start, end, holder, now_s, now_s, start))
        return None

    def take_over(self, holder: str, bytes_per_s: float, has: bytes | None, now_s: float) -> Part | None:
        """The end of a part that another holder is slow with, so that both are done at about the same time."""
        if bytes_per_s <= 0:
            return None
        others = [part for part in self._running if part.holder != holder and part.num_bytes_left]
        for part in sorted(others, key=lambda one: -one.num_bytes_left):
            first = self._split(part, bytes_per_s, now_s)
            start, end = (first, part.last) if has is None else self._available(first, part.last, has)
            if start < end == part.last:
                part.last = start
                return self._began(Part(part.rank, start, end, holder, now_s, now_s, start))
        return None

    def moved(self, part: Part, position: int, now_s: float) -> None:
        part.position, part.moved_at = position, now_s

    def end(self, part: Part) -> None:
        """Take a part back from its reader, and hand out again the bytes that have not come."""
        self._running.remove(part)
        first, _ = self._layout.rounded(part.position, part.position + 1)
        if part.num_bytes_left:
            insort(self._missing, (part.rank, max(part.first, first), part.last))

    def _began(self, part: Part) -> Part:
        self._running.append(part)
        return part

    def _size(self, bytes_per_s: float) -> int:
        wanted = bytes_per_s * PART_S if bytes_per_s else FIRST_PART_BYTES
        piece = self._layout.piece_bytes
        return max(piece, min(int(wanted), self._part_bytes) // piece * piece)

    def _split(self, part: Part, bytes_per_s: float, now_s: float) -> int:
        """Where the part may be cut; its end where that is not worth it."""
        if now_s - part.moved_at >= STALLED_S:
            return self._layout.rounded(part.position, part.position + 1)[0]
        left, taken_s = part.num_bytes_left, now_s - part.began_at
        if part.position == part.first:
            return part.last  # it has only just begun
        rate = (part.position - part.first) / max(taken_s, 1e-6)
        own_s = left / bytes_per_s
        if rate * own_s * _WORTH_TAKING >= left:
            return part.last
        kept = int(left * rate / (rate + bytes_per_s))
        return self._layout.rounded(part.position, part.position + kept + 1)[1]

    def _available(self, first: int, last: int, has: bytes) -> tuple[int, int]:
        """The first run of pieces in [first, last) that are there."""
        pieces = self._layout.touched(first, last)
        start = has.find(1, pieces.start, pieces.stop)
        if start < 0:
            return first, first
        end = has.find(0, start, pieces.stop)
        end = pieces.stop if end < 0 else end
        return max(first, self._layout.piece(start)[0]), min(last, self._layout.piece(end - 1)[1])
