"""Cache orders for the comparison in rows M only: ARC and SRRIP, of mCache section 6.3, and Belady's.

Belady's order knows the future and is an upper bound (erratum E27) if all sizes are equal. If sizes differ it is no
bound, since two small models may be worth more than a large one that is needed sooner.
"""

import math
from collections.abc import Mapping, Sequence

from glowplug.policies.caching.ordering import Resident


class Belady:
    """Evict the one that is needed last, of any size. `uses`: name -> the times of all its uses, in order."""

    name = "needed last"
    rule = "who is needed last leaves first"
    unit = "at next use"

    def __init__(self, uses: Mapping[str, Sequence[float]]) -> None:
        self._coming = {name: list(reversed(times)) for name, times in uses.items()}

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        coming = self._coming.get(name, [])
        while coming and coming[-1] <= now_s:
            coming.pop()

    def left(self, name: str) -> None:
        """The future does not change."""

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        def next_use(resident: Resident) -> float:
            coming = self._coming.get(resident.name, [])
            while coming and coming[-1] <= now_s:
                coming.pop()
            return coming[-1] if coming else math.inf

        return sorted(((next_use(r), r) for r in present), key=lambda entry: (-entry[0], entry[1].name))


class Srrip:
    """Static re-reference interval prediction with `num_bits` per resident (Jaleel et al., ISCA 2010).

    A new resident is predicted to come back late (2^n - 2), a resident just hit soon (0). One predicted furthest away
    (2^n - 1) is evicted; if there is none, all age until there is.
    """

    name = "furthest re-reference"
    rule = "who is predicted to be asked for again last leaves first"
    unit = "predicted interval"

    def __init__(self, num_bits: int = 2) -> None:
        self._far = (1 << num_bits) - 1
        self._intervals: dict[str, int] = {}
        self._came: dict[str, int] = {}
        self._num_came = 0

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        self._intervals[name] = 0 if hit else self._far - 1
        if not hit:
            self._num_came += 1
            self._came[name] = self._num_came

    def left(self, name: str) -> None:
        """Age the others as far as the eviction required: the evicted is at the far end."""
        aged = self._far - self._intervals.pop(name, self._far)
        self._came.pop(name, None)
        if aged > 0:
            self._intervals = {key: min(self._far, value + aged) for key, value in self._intervals.items()}

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        scored = ((float(self._intervals.get(r.name, self._far - 1)), r) for r in present)
        return sorted(scored, key=lambda entry: (-entry[0], self._came.get(entry[1].name, 0), entry[1].name))


class Arc:
    """Adaptive replacement (Megiddo and Modha, FAST 2003), in bytes: once-used and often-used share the cache in a
    proportion that follows regret. A miss on a ghost of one side moves the target towards that side by the missed size,
    multiplied by how many more bytes of ghosts the other side has, if it has more."""

    name = "adaptive replacement"
    rule = "who comes first in the order of ARC leaves first"
    unit = "place in the order"

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._target = 0.0  # bytes the once-used may hold
        self._once: dict[str, int] = {}
        self._often: dict[str, int] = {}
        self._once_ghosts: dict[str, int] = {}
        self._often_ghosts: dict[str, int] = {}

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        if hit and (name in self._once or name in self._often):
            self._once.pop(name, None)
            self._often.pop(name, None)
            self._often[name] = num_bytes
            return
        once, often = sum(self._once_ghosts.values()), sum(self._often_ghosts.values())
        if name in self._once_ghosts:
            step = num_bytes * max(1.0, often / max(1, once))
            self._target = min(float(self._capacity), self._target + step)
            del self._once_ghosts[name]
            self._often[name] = num_bytes
        elif name in self._often_ghosts:
            step = num_bytes * max(1.0, once / max(1, often))
            self._target = max(0.0, self._target - step)
            del self._often_ghosts[name]
            self._often[name] = num_bytes
        else:
            self._once[name] = num_bytes
        self._forget_old_ghosts()

    def left(self, name: str) -> None:
        """Leave a ghost: if the evicted returns, its eviction is regretted."""
        for present, ghosts in ((self._once, self._once_ghosts), (self._often, self._often_ghosts)):
            if name in present:
                ghosts[name] = present.pop(name)
        self._forget_old_ghosts()

    def _forget_old_ghosts(self) -> None:
        """Hold the once-used and their ghosts to the size of the cache, and all together to twice that: the directory
        of the paper, in bytes."""
        while self._once_ghosts and _sum(self._once, self._once_ghosts) > self._capacity:
            del self._once_ghosts[next(iter(self._once_ghosts))]
        everybody = (self._once, self._often, self._once_ghosts, self._often_ghosts)
        while self._often_ghosts and _sum(*everybody) > 2 * self._capacity:
            del self._often_ghosts[next(iter(self._often_ghosts))]

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        """Merge the two lists in the order in which ARC would evict."""
        by_name = {r.name: r for r in present}
        once = [by_name[n] for n in self._once if n in by_name]
        often = [by_name[n] for n in self._often if n in by_name]
        unknown = sorted((r for r in present if r.name not in self._once and r.name not in self._often), key=_age)
        left = sum(r.num_bytes for r in once)
        ordered = list(unknown)
        while once or often:
            if once and (left > self._target or not often):
                left -= once[0].num_bytes
                ordered.append(once.pop(0))
            else:
                ordered.append(often.pop(0))
        return [(float(at), r) for at, r in enumerate(ordered)]


def _sum(*sides: Mapping[str, int]) -> int:
    return sum(sum(side.values()) for side in sides)


def _age(resident: Resident) -> tuple[float, str]:
    return (resident.last_used_at, resident.name)
