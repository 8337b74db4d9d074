"""Which bytes have landed: a set of half-open integer ranges, kept sorted and apart."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Intervals:
    """Ranges [first, last). Adding is O(number of ranges), which parts keep small."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        """Take in [first, last); touching and overlapping ranges become one."""
        if first >= last:
            return
        low = bisect_left(self._ranges, first, key=lambda r: r[1])
        high = bisect_right(self._ranges, last, key=lambda r: r[0])
        if low < high:
            first, last = min(first, self._ranges[low][0]), max(last, self._ranges[high - 1][1])
        self._ranges[low:high] = [(first, last)]

    @property
    def prefix_end(self) -> int:
        """The end of the range that starts at 0: the watermark."""
        return self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0

    @property
    def total(self) -> int:
        return sum(last - first for first, last in self._ranges)

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """What of [first, last) is missing, in order."""
        missing, position = [], first
        for start, end in self._ranges:
            if end <= position:
                continue
            if start >= last:
                break
            if start > position:
                missing.append((position, start))
            position = end
        if position < last:
            missing.append((position, last))
        return missing

    def as_list(self) -> list[tuple[int, int]]:
        return list(self._ranges)
