"""ServeGen as it is published: a folder with `chunk-<client>-trace.csv` and `chunk-<client>-dataset.json` per client.

A trace has no header; its columns are window start (s), requests a second, CV, distribution, shape, scale, in windows
of 600 s. A dataset holds, per window start, the distributions of prompt and response tokens as text. Every client is
one model.
"""

import ast
import bisect
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, Final

from glowplug.simulator.workload.arrival import Arrival, TraceError, merge
from glowplug.simulator.workload.formats import SERVEGEN_WINDOW_S, Reading, read
from glowplug.simulator.workload.sampling import binomial, renewal_times
from glowplug.simulator.workload.tables import rows

_DISTRIBUTIONS: Final = {"Gamma": "G", "Weibull": "W"}
TRACES: Final = "chunk-*-trace.csv"
COLUMNS: Final = ("start", "rate", "cv", "distribution", "shape", "scale")


class Histogram:
    """A distribution of whole numbers: value -> probability."""

    def __init__(self, shares: Mapping[int, float]) -> None:
        self._values = sorted(shares)
        self._upto = list(accumulate(shares[value] for value in self._values))

    def draw(self, chance: Random) -> int:
        (value,) = chance.choices(self._values, cum_weights=self._upto)
        return max(1, value)


class Measured:
    """The lengths of one client, by time. Raises TraceError when its dataset is not as published."""

    def __init__(self, dataset: Path) -> None:
        entries: list[tuple[float, Histogram, Histogram]] = []
        for from_s, fields in _dataset(dataset):
            prompts, responses = (_shares(dataset, fields, from_s, name) for name in ("input_tokens", "output_tokens"))
            if prompts and responses:
                entries.append((_start(dataset, from_s), Histogram(prompts), Histogram(responses)))
        if not entries:
            raise TraceError(str(dataset), 0, "input_tokens", "holds no distribution")
        self._entries = sorted(entries, key=lambda entry: entry[0])
        self._starts = [entry[0] for entry in self._entries]

    def draw(self, at_s: float, chance: Random) -> tuple[int, int]:
        """One (prompt_tokens, response_tokens) of the latest distribution up to `at_s`, or the first there is."""
        _, prompts, responses = self._entries[max(0, bisect.bisect_right(self._starts, at_s) - 1)]
        return prompts.draw(chance), responses.draw(chance)


def _dataset(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(window start, its fields) of a dataset. Raises TraceError."""
    try:
        written = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(str(path), 0, "", f"is no ServeGen dataset: {error}") from error
    if not isinstance(written, dict) or not all(isinstance(fields, dict) for fields in written.values()):
        raise TraceError(str(path), 0, "", "is no ServeGen dataset: it maps no windows to their fields")
    return list(written.items())


def _start(path: Path, text: str) -> float:
    try:
        from_s = float(text)
    except ValueError:
        from_s = math.nan
    if not 0 <= from_s < math.inf:
        raise TraceError(str(path), 0, text[:40], "is no window's start in seconds from 0 up")
    return from_s


def _shares(path: Path, fields: Mapping[str, Any], from_s: str, name: str) -> dict[int, float]:
    """One distribution of a window, written as a Python dictionary of tokens to probability; it may be empty."""
    field = f"{from_s[:40]}.{name}"
    if name not in fields:
        raise TraceError(str(path), 0, field, "is missing")
    try:
        found = ast.literal_eval(str(fields[name]))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise TraceError(str(path), 0, field, f"{str(fields[name])[:40]!r} is no distribution") from error
    if not isinstance(found, dict):
        raise TraceError(str(path), 0, field, f"{str(found)[:40]!r} is no distribution")
    for tokens, share in found.items():
        if not isinstance(tokens, int) or tokens < 0:
            raise TraceError(str(path), 0, field, f"{str(tokens)[:40]!r} is not a whole number of tokens from 0 up")
        if not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise TraceError(str(path), 0, field, f"{tokens}: {str(share)[:40]!r} is no probability")
    if found and not sum(found.values()) > 0:
        raise TraceError(str(path), 0, field, "has no probability above 0")
    return found


def _of_client(name: str, trace: Path, dataset: Path, how: Reading, chance: Random) -> Iterator[Arrival]:
    """The requests of one client in order. One without a dataset (some were published so) draws from `how.lengths`."""
    measured = Measured(dataset) if dataset.exists() else None
    given = None if measured else how.draw(str(dataset))
    for from_s, rate, dist, shape in _windows(trace):
        num = binomial(round(rate * SERVEGEN_WINDOW_S), how.keep, chance)
        for at_s in renewal_times(num, SERVEGEN_WINDOW_S, dist, shape, chance):
            tokens = measured.draw(from_s, chance) if measured else given.draw(chance)  # type: ignore[union-attr]
            yield Arrival(from_s + at_s, name, *tokens)


def _windows(trace: Path) -> list[tuple[float, float, str, float]]:
    """(start, requests a second, distribution, shape) of the busy ones; all at once, for a published folder holds more
    clients than a process may have files open."""
    found: list[tuple[float, float, str, float]] = []
    last_s = -1.0
    for row in rows(trace, COLUMNS):
        from_s, rate = row.seconds("start"), row.number("rate")
        if from_s < last_s:
            raise TraceError(row.source, row.line, "start", f"{from_s:.6g} s after {last_s:.6g} s")
        last_s = from_s
        if rate:
            dist = row.one_of("distribution", ("Gamma", "Weibull"))
            found.append((from_s, rate, _DISTRIBUTIONS[dist], row.positive("shape")))
    return found


def read_trace(path: Path, how: Reading | None = None) -> Iterator[Arrival]:
    """The requests of a trace in order of time: a file of any public format, or a folder as ServeGen publishes it.
    Raises TraceError."""
    return read_folder(path, how) if path.is_dir() else read(path, how)


def is_folder(path: Path) -> bool:
    """Whether a folder holds clients as ServeGen publishes them."""
    return path.is_dir() and any(path.glob(TRACES))


def read_folder(folder: Path, how: Reading | None = None) -> Iterator[Arrival]:
    """All clients of one published folder as one ordered trace; each draws from a chance of its own.

    Raises TraceError when the folder holds no client.
    """
    how = how or Reading()
    traces = sorted(folder.glob(TRACES), key=lambda path: int(re.findall(r"\d+", path.name)[0]))
    if not traces:
        raise TraceError(str(folder), 0, "", f"holds no {TRACES}")
    streams = []
    for trace in traces:
        number = trace.name.split("-")[1]
        dataset, chance = folder / f"chunk-{number}-dataset.json", Random(how.chance.getrandbits(64))
        streams.append(_of_client(f"{folder.name}-{number}", trace, dataset, how, chance))
    return merge(*streams)
