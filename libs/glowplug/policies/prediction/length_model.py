"""The length of an answer from its conversation's text: ridge regression on hashed words, then trees.

Paper: PreServe section 4.2, a response's length from its prompt, by a small encoder. Departure: no encoder, which costs
seventy times as much and predicts no better (docs/policies.md, response lengths).

    heads    for the logarithm of the length, and for its being beyond each of some lengths: a weight for each hashed
             word, in eight bits; the words of the text to be answered, and those of the texts before, are averaged by
             the root of their number
    trees    boosted for the median, over the numbers of length_text.py and the heads; their sum is log(1 + tokens)
    ratios   of the actual length over that median: its 10th and 90th percentile, by how long it is expected and
             whether the conversation has answers already

Needs only numpy. bench/fit/lengths.py makes the file; other versions are refused.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from glowplug.domain.errors import BadRequest
from glowplug.policies.prediction.length_text import NUM_BUCKETS, NUM_NUMBERS, Described, Turn, describe

VERSION: Final = 2
SHIPPED: Final = Path(__file__).with_name("length_model.npz")
MAX_LOG: Final = 12.0


@dataclass(frozen=True, slots=True)
class Length:
    """Response tokens: the median, and bounds of four of five answers."""

    tokens: int
    low: int
    high: int


class LengthModel:
    """The trained model. Raises BadRequest for another version or shape."""

    def __init__(self, parts: dict[str, Any]) -> None:
        missing = {"version", "weights", "scale", "bias", "feature", "limit", "left", "right", "value", "roots"}
        missing |= {"depth", "edges", "low", "high"}
        missing -= parts.keys()
        if missing or int(parts["version"]) != VERSION:
            found = f"lacks {', '.join(sorted(missing))}" if missing else f"is of version {int(parts['version'])}"
            raise BadRequest(f"the file {found}; this version reads {VERSION}", param="length_model")
        self._weights, self._scale, self._bias = parts["weights"], parts["scale"], parts["bias"]
        if self._weights.shape != (NUM_BUCKETS, len(self._bias)):
            raise BadRequest(f"the weights have the shape {self._weights.shape}", param="length_model")
        # A leaf is its own successor, so that all trees take equally many steps.
        self._feature, self._limit = parts["feature"].astype(np.intp), parts["limit"]
        self._next = np.stack([parts["left"], parts["right"]], axis=1).astype(np.intp).ravel()
        self._value, self._roots = parts["value"], parts["roots"].astype(np.intp)
        if int(self._feature.max(initial=0)) >= NUM_NUMBERS + len(self._bias):
            raise BadRequest("a tree reads a feature that does not exist", param="length_model")
        self._depth = int(parts["depth"])
        self._edges, self._low, self._high = parts["edges"].tolist(), parts["low"].tolist(), parts["high"].tolist()

    @property
    def num_heads(self) -> int:
        return len(self._bias)

    @property
    def num_trees(self) -> int:
        return len(self._roots)

    def tables(self) -> list[tuple[str, Any, Any]]:
        """Return (name, type, array) for length_native.py; a node's two successors are side by side."""
        floats = [("scale", self._scale), ("bias", self._bias), ("limit", self._limit), ("value", self._value)]
        tables: list[tuple[str, Any, Any]] = [(name, np.float32, array) for name, array in floats]
        tables += [("next", np.int32, self._next), ("roots", np.int32, self._roots)]
        return [*tables, ("weights", np.int8, self._weights), ("feature", np.uint8, self._feature)]

    @classmethod
    def read(cls, path: Path = SHIPPED) -> "LengthModel":
        """Raises BadRequest if the file is no model."""
        try:
            with np.load(path, allow_pickle=False) as parts:
                return cls(dict(parts))
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise BadRequest(f"{path.name}: {error}", param="length_model") from error

    def of(self, turns: Sequence[Turn]) -> Length:
        """Predict the answer to the last turn. Raises ValueError without turns."""
        return self.expect(describe(turns))

    def expect(self, described: Described) -> Length:
        return self.length(self._log(described), described.has_answers)

    def length(self, log: float, has_answers: bool) -> Length:
        log = min(MAX_LOG, max(0.0, log))
        at = bisect_left(self._edges, log)
        kind = int(has_answers)
        tokens = math.expm1(log)
        low, high = tokens * self._low[kind][at], tokens * self._high[kind][at]
        return Length(max(1, round(tokens)), max(1, round(low)), max(1, round(high)))

    def _log(self, described: Described) -> float:
        heads = self._sum(described.words)
        if described.around:
            heads = heads + self._sum(described.around)
        inputs = np.empty(NUM_NUMBERS + len(heads), dtype=np.float32)
        inputs[:NUM_NUMBERS] = described.numbers
        inputs[NUM_NUMBERS:] = heads * self._scale + self._bias
        at = self._roots
        for _ in range(self._depth):
            at = self._next[2 * at + (inputs[self._feature[at]] > self._limit[at])]
        return float(self._value[at].sum(dtype=np.float64))

    def _sum(self, words: set[int]) -> Any:
        places = np.fromiter(words, dtype=np.intp, count=len(words))
        rows = self._weights.take(places, axis=0)
        total = np.einsum("ij->j", rows, dtype=np.int32)  # two thirds of rows.sum(0)'s time
        return total / math.sqrt(max(1, len(words)))
