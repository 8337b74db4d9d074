"""Actual against expected lengths of answers, learned for one model.

PreServe (section 4.3.1) takes the expected length for the length, and a fifth more each time an answer outlives it. An
expected length is a median, so half of the answers outlive it, many by far: taken for the lengths themselves, such
medians say that caches empty which go on filling (row P3e of docs/papers). Ours, not a paper's: a life table. The ratio
of actual over expected length is cut into bands, and each band has the share of the answers ending in it among those
that reached it (the actuarial estimate of Kaplan and Meier, 1958), by how long the answer was expected to be. Bands
with few answers lean on those of all the model's answers, and these on the paper's reading: every answer ends where it
was expected to.

A length is drawn by a share s: of all answers with that expected length that have come as far, the share s is shorter.
Shares spread evenly over the requests of an instance make the sum of the drawn lengths the expected sum.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_EDGES: Final = (
    *(0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.98, 1.02, 1.1, 1.25, 1.5, 1.8, 2.2, 2.8, 3.6, 5.0, 7.0, 10.0),
    *(15.0, 25.0, 50.0, 100.0),
)
"""Bands of the ratio: from one edge to the next; beyond the last one an answer is taken to double."""
_NUM_BANDS: Final = len(_EDGES) - 1
_AS_EXPECTED: Final = _EDGES.index(0.98)  # the band of answers as long as expected
_BEFORE: Final = tuple(float(at == _AS_EXPECTED or at > _AS_EXPECTED + 1) for at in range(_NUM_BANDS))
"""Of each band before any answer: the share of those reaching it that end in it. Who goes on beyond what was expected
ends about a fifth later, as in the paper."""
_NUM_TO_TRUST: Final = 5.0  # answers in a band at which its own share counts half
_LEAST: Final = 1e-6  # least share of the answers reaching a band that outlives it
_GROWTH: Final = 1.02  # growth in answers after which a curve is computed anew
_MOST: Final = 4000.0  # answers at which all counts are halved
_BOUND: Final = 1 << 20  # most tokens drawn, unless more are there already


@dataclass(slots=True)
class _LifeTable:
    """A table by band of the answers that ended in it, and of the answers last seen in it. `curve`: minus the share of
    the answers longer than each edge, computed anew once enough answers have come to change it."""

    ended: list[float] = field(default_factory=lambda: [0.0] * _NUM_BANDS)
    left: list[float] = field(default_factory=lambda: [0.0] * _NUM_BANDS)
    num: float = 0.0  # answers that count
    curve: list[float] = field(default_factory=list)
    curve_until: float = 0.0  # `num` up to which the curve holds

    def learn(self, band: int, has_ended: bool) -> None:
        (self.ended if has_ended else self.left)[band] += 1.0
        self.num += 1.0
        if self.num > _MOST:
            self.ended = [one / 2 for one in self.ended]
            self.left = [one / 2 for one in self.left]
            self.num, self.curve_until = self.num / 2, 0.0

    def ending(self, lean_on: Sequence[float]) -> list[float]:
        """Shares of the answers ending in each band, among those that reach it and were not last seen there."""
        shares, reached = [0.0] * _NUM_BANDS, _NUM_TO_TRUST
        for band in range(_NUM_BANDS - 1, -1, -1):
            reached += self.ended[band]
            shares[band] = (self.ended[band] + _NUM_TO_TRUST * lean_on[band]) / reached
            reached += self.left[band]
        return shares

    def drawn_from(self, every: "_LifeTable") -> list[float]:
        """The curve of these answers; bands with few of them lean on `every`."""
        if self.num >= self.curve_until:
            ending = every.ending(_BEFORE)
            left, self.curve = 1.0, [-1.0]
            for one in ending if self is every else self.ending(ending):
                left *= max(_LEAST, 1.0 - one)
                self.curve.append(-left)
            self.curve_until = self.num * _GROWTH + 1
        return self.curve


class AnswerLengths:
    """Lengths of one model's answers. Memory is one small row per power of two of expected tokens."""

    def __init__(self) -> None:
        self._all = _LifeTable()
        self._tables: dict[int, _LifeTable] = {}

    def learn(self, expected_tokens: int, tokens: int, *, has_ended: bool = True) -> None:
        """Learn one answer's tokens beside the expected number: all of them, or those up to when its client left."""
        expected = max(1, expected_tokens)
        band = min(_NUM_BANDS - 1, bisect_right(_EDGES, max(0, tokens) / expected) - 1)
        self._all.learn(band, has_ended)
        table = self._tables.get(expected.bit_length())
        if table is None:
            table = self._tables[expected.bit_length()] = _LifeTable()
        table.learn(band, has_ended)

    def draw(self, expected_tokens: int, share: float, reached_tokens: int = 0) -> int:
        """Draw the tokens of an answer that is longer than `reached_tokens`, so that `share` (0 to 1) of all such
        answers are shorter. More than `reached_tokens`."""
        expected, least = max(1, expected_tokens), reached_tokens + 1
        curve = self._tables.get(expected.bit_length(), self._all).drawn_from(self._all)
        ratio = reached_tokens / expected
        band = bisect_right(_EDGES, ratio) - 1
        if band >= _NUM_BANDS:
            return max(least, min(_BOUND, 2 * reached_tokens))
        low, high = _EDGES[band], _EDGES[band + 1]
        # Within a band, answers end evenly.
        longer = curve[band] + (curve[band + 1] - curve[band]) * (ratio - low) / (high - low)
        wanted = longer * (1.0 - share)
        band = bisect_right(curve, wanted, band + 1) - 1
        if band == _AS_EXPECTED and expected >= least:
            return expected
        if band >= _NUM_BANDS:
            return max(least, min(_BOUND, round(_EDGES[-1] * expected)))
        part = (wanted - curve[band]) / (curve[band + 1] - curve[band])
        tokens = (_EDGES[band] + (_EDGES[band + 1] - _EDGES[band]) * part) * expected
        return max(least, min(_BOUND, round(tokens)))
