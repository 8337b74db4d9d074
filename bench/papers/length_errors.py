"""Expected lengths of answers with the errors of the shipped length model.

length_errors.toml holds the model's errors on answers that were held out from its training: quantiles of expected over
actual length, by the answer's length over the median length. `python -m bench.fit.lengths` writes it (`--errors`); its
head names the answers. The service corrects the model by each served model's own answers (the median ratio,
`response_length.py`), so the same ratios apply to a service with another median.
"""

import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.papers.simulated import Expect
from glowplug_lab.simulator.workload.arrival import Arrival

TABLE = Path(__file__).with_name("length_errors.toml")
MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LengthErrors:
    """Expected over actual length. `edges`: of rows, in medians; `shares`: of the quantiles in each row of `ratios`."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    ratios: tuple[tuple[float, ...], ...]

    @classmethod
    def read(cls, path: Path = TABLE) -> "LengthErrors":
        """Raises ValueError if a row is missing, or does not hold quantiles."""
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = tuple(tuple(map(float, row)) for row in found["ratios"])
        made = cls(tuple(found["edges"]), tuple(found["shares"]), rows)
        if len(rows) != len(made.edges) + 1 or any(len(row) != len(made.shares) for row in rows):
            raise ValueError(f"{path.name}: {len(rows)} rows for {len(made.edges)} edges, {len(made.shares)} shares")
        if any(list(row) != sorted(row) or row[0] <= 0 for row in rows):
            raise ValueError(f"{path.name}: a row that does not rise")
        return made

    def ratio(self, length: float, share: float) -> float:
        """The quantile `share` of expected over actual for an answer of `length` medians; shares outside the table take
        its nearest one."""
        row = self.ratios[bisect_right(self.edges, length)]
        at = bisect_right(self.shares, share)
        if at in (0, len(row)):
            return row[min(at, len(row) - 1)]
        part = (share - self.shares[at - 1]) / (self.shares[at] - self.shares[at - 1])
        return row[at - 1] + part * (row[at] - row[at - 1])

    def given(self, arrivals: Iterable[Arrival], median_tokens: float, seed: int) -> Iterator[Arrival]:
        """The same requests, each with such a model's expectation. `median_tokens`: of the service's answers."""
        for at, arrival in enumerate(arrivals):
            tokens = arrival.response_tokens
            ratio = self.ratio(tokens / median_tokens, Random(f"{seed}/lengths/{at}").random())
            yield arrival._replace(expected_tokens=min(MAX_TOKENS, max(1, round(tokens * ratio))))


def expect_as_shipped(median_tokens: float) -> Expect:
    """Likewise as a function of arrivals and seed, for a service with this median answer."""
    errors = LengthErrors.read()

    def expect(arrivals: Iterator[Arrival], seed: int) -> Iterator[Arrival]:
        return errors.given(arrivals, median_tokens, seed)

    return expect
