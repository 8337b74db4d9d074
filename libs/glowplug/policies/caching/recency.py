"""LRU and LFU, two caching baselines of mCache section 6.3."""

from collections.abc import Sequence

from glowplug.policies.caching.ordering import Ordering, Resident


class Lru:
    """Evict the least recently used first. Stateless: residents carry their `last_used_at`."""

    name = "least recently used"
    rule = "the one used longest ago leaves first"
    unit = "at last use"

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        """Do nothing."""

    def left(self, name: str) -> None:
        """Do nothing."""

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        return sorted(((r.last_used_at, r) for r in present), key=lambda entry: (entry[0], entry[1].name))


class Lfu:
    """Evict the least often used first, then the least recently used. A count ends when its resident leaves."""

    name = "least frequently used"
    rule = "the one used least often leaves first"
    unit = "uses"

    def __init__(self) -> None:
        self._uses: dict[str, int] = {}

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        self._uses[name] = self._uses.get(name, 0) + 1 if hit else 1

    def left(self, name: str) -> None:
        self._uses.pop(name, None)

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        scored = ((float(self._uses.get(r.name, 0)), r) for r in present)
        return sorted(scored, key=lambda entry: (entry[0], entry[1].last_used_at, entry[1].name))


def lru(_: object) -> Ordering:
    return Lru()


def lfu(_: object) -> Ordering:
    return Lfu()
