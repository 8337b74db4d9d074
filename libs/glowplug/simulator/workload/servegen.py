"""ServeGen as it is published: a folder with `chunk-<client>-trace.csv` and `chunk-<client>-dataset.json` per client.

A trace has no header; its columns are window start (s), requests a second, CV, distribution, shape, scale, in windows
of 600 s. A dataset holds, per window start, the distributions of prompt and response tokens as text. Every client is
one model.
"""

import ast
import bisect
import csv
import heapq
import json
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from random import Random

from glowplug.simulator.workload.arrival import Arrival, TraceError
from glowplug.simulator.workload.formats import SERVEGEN_WINDOW_S, Reading
from glowplug.simulator.workload.sampling import binomial, renewal_times

_DISTRIBUTIONS = {"Gamma": "G", "Weibull": "W"}


class Histogram:
    """A distribution of whole numbers: value -> probability."""

    def __init__(self, shares: Mapping[int, float]) -> None:
        self._values = sorted(shares)
        self._upto = list(accumulate(shares[v] for v in self._values))

    def draw(self, chance: Random) -> int:
        at = bisect.bisect_left(self._upto, chance.random() * self._upto[-1])
        return max(1, self._values[min(at, len(self._values) - 1)])


class Measured:
    """The lengths of one client, by time. Raises TraceError when its dataset is not as published."""

    def __init__(self, dataset: Path) -> None:
        entries: list[tuple[float, Histogram, Histogram]] = []
        try:
            written = json.loads(dataset.read_text(encoding="utf-8"))
            for from_s, fields in written.items():
                pair = (ast.literal_eval(fields["input_tokens"]), ast.literal_eval(fields["output_tokens"]))
                if all(pair):
                    entries.append((float(from_s), Histogram(pair[0]), Histogram(pair[1])))
        except (OSError, ValueError, SyntaxError, KeyError, AttributeError) as error:
            raise TraceError(str(dataset), 0, "", f"is no ServeGen dataset: {error}") from error
        if not entries:
            raise TraceError(str(dataset), 0, "input_tokens", "holds no distribution")
        self._entries = sorted(entries, key=lambda entry: entry[0])
        self._starts = [entry[0] for entry in self._entries]

    def draw(self, at_s: float, chance: Random) -> tuple[int, int]:
        """One (prompt_tokens, response_tokens) of the latest distribution up to `at_s`, or the first there is."""
        _, prompts, responses = self._entries[max(0, bisect.bisect_right(self._starts, at_s) - 1)]
        return prompts.draw(chance), responses.draw(chance)


class Client:
    """One client's windows and lengths. One without a dataset (some were published so) draws from `how.lengths`."""

    def __init__(self, name: str, trace: Path, dataset: Path) -> None:
        self.name, self.trace, self.dataset = name, trace, dataset
        self.measured = Measured(dataset) if dataset.exists() else None

    def arrivals(self, how: Reading, chance: Random) -> Iterator[Arrival]:
        """This client's requests in order of time."""
        given = None if self.measured else how.draw(str(self.dataset))
        for from_s, rate, dist, shape in self._windows():
            num = binomial(round(rate * SERVEGEN_WINDOW_S), how.keep, chance)
            for at_s in renewal_times(num, SERVEGEN_WINDOW_S, dist, shape, chance):
                tokens = self.measured.draw(from_s, chance) if self.measured else given.draw(chance)  # type: ignore[union-attr]
                yield Arrival(from_s + at_s, self.name, *tokens)

    def _windows(self) -> Iterator[tuple[float, float, str, float]]:
        with self.trace.open(encoding="utf-8", newline="") as file:
            for line, cells in enumerate(csv.reader(file), start=1):
                try:
                    from_s, rate = float(cells[0]), float(cells[1])
                    if rate > 0:
                        yield from_s, rate, _DISTRIBUTIONS[cells[3]], float(cells[4])
                except (ValueError, IndexError, KeyError) as error:
                    raise TraceError(str(self.trace), line, "", f"is no ServeGen window: {error}") from error


def read_folder(folder: Path, how: Reading | None = None) -> Iterator[Arrival]:
    """All clients of one published folder as one ordered trace; each draws from a chance of its own.

    Raises TraceError when the folder holds no client.
    """
    how = how or Reading()
    traces = sorted(folder.glob("chunk-*-trace.csv"), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
    if not traces:
        raise TraceError(str(folder), 0, "", "holds no chunk-*-trace.csv")
    streams = []
    for trace in traces:
        number = trace.name.split("-")[1]
        client = Client(f"{folder.name}-{number}", trace, folder / f"chunk-{number}-dataset.json")
        streams.append(client.arrivals(how, Random(how.chance.getrandbits(64))))
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)
