"""Actual against expected lengths of answers, learned for one model.

PreServe (section 4.3.1) takes the expected length for the length, plus a fifth each time an answer outlives it. An
expected length is a median, so half of the answers outlive it, and caches seem to empty while they fill (row P3e of
docs/papers). Ours, not a paper's: a life table. Per band of the ratio actual / expected, it has the share of answers
ending there among those reaching it (the actuarial estimate of Kaplan and Meier, 1958), by expected length. Bands with
few answers lean on the model's, and these on the paper's reading: answers end as expected.

A length is drawn by a share s, the part of such answers that is shorter. Shares spread evenly over an instance's
requests make the drawn sum the expected one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_EDGES: Final = (
    *(0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.98, 1.02, 1.1, 1.25, 1.5, 1.8, 2.2, 2.8, 3.6, 5.0, 7.0, 10.0),
    *(15.0, 25.0, 50.0, 100.0),
)
"""Edges of the bands of the ratio; beyond the last, answers are assumed to double."""
_NUM_BANDS: Final = len(_EDGES) - 1
_AS_EXPECTED: Final = _EDGES.index(0.98)  # the band of answers as long as expected
_BEFORE: Final = tuple(float(at == _AS_EXPECTED or at > _AS_EXPECTED + 1) for at in range(_NUM_BANDS))
"""Prior share of answers ending in each band reached: as expected, or about a fifth later, as in the paper."""
_NUM_TO_TRUST: Final = 5.0  # answers for a half weight
_LEAST: Final = 1e-6  # outliving a band
_GROWTH: Final = 1.02  # in answers, until a curve is recomputed
_MOST: Final = 4000.0  # answers, until all counts are halved
_BOUND: Final = 1 << 20  # most tokens drawn


@dataclass(slots=True)
class _LifeTable:
    """Answers ended in, and last seen in, each band. `curve`: minus the share longer than each edge."""

    ended: list[float] = field(default_factory=lambda: [0.0] * _NUM_BANDS)
    left: list[float] = field(default_factory=lambda: [0.0] * _NUM_BANDS)
    num: float = 0.0
    curve: list[float] = field(default_factory=list)
    curve_until: float = 0.0  # `num` up to which the curve holds

    def halve(self) -> None:
        self.ended = [one / 2 for one in self.ended]
        self.left = [one / 2 for one in self.left]
        self.num, self.curve_until = self.num / 2, 0.0

    def ending(self, lean_on: Sequence[float]) -> list[float]:
        """Return the shares ending in each band, of those reaching it and not last seen there."""
        shares, reached = [0.0] * _NUM_BANDS, _NUM_TO_TRUST
        for band in range(_NUM_BANDS - 1, -1, -1):
            reached += self.ended[band]
            shares[band] = (self.ended[band] + _NUM_TO_TRUST * lean_on[band]) / reached
            reached += self.left[band]
        return shares

    def draw_curve(self, every: "_LifeTable") -> None:
        ending = every.ending(_BEFORE)
        left, self.curve = 1.0, [-1.0]
        for one in ending if self is every else self.ending(ending):
            left *= max(_LEAST, 1.0 - one)
            self.curve.append(-left)
        self.curve_until = self.num * _GROWTH + 1


class AnswerLengths:
    def __init__(self) -> None:
        self._all = _LifeTable()
        self._tables: dict[int, _LifeTable] = {}

    def learn(self, expected_tokens: int, tokens: int, *, has_ended: bool = True) -> None:
        """Learn one answer's tokens, whole or up to its client's leaving."""
        expected = max(1, expected_tokens)
        band = min(_NUM_BANDS - 1, bisect_right(_EDGES, max(0, tokens) / expected) - 1)
        alike = self._tables.get(expected.bit_length())
        if alike is None:
            alike = self._tables[expected.bit_length()] = _LifeTable()
        for table in (self._all, alike):
            (table.ended if has_ended else table.left)[band] += 1.0
            table.num += 1.0
            if table.num > _MOST:
                table.halve()

    def draw(self, expected_tokens: int, share: float, reached_tokens: int = 0) -> int:
        """Draw the length of an answer beyond `reached_tokens` with `share` (0 to 1) of such answers shorter."""
        expected, least = max(1, expected_tokens), reached_tokens + 1
        table = self._tables.get(expected.bit_length(), self._all)
        if table.num >= table.curve_until:
            table.draw_curve(self._all)
        curve = table.curve
        ratio = reached_tokens / expected
        band = bisect_right(_EDGES, ratio) - 1
        if band >= _NUM_BANDS:
            return max(least, min(_BOUND, 2 * reached_tokens))
        low, high = _EDGES[band], _EDGES[band + 1]
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
