"""Sources of requests: named traces, lengths for traces without any, and ServeGen clients as models.

Traces are in the data folder (`GLOWPLUG_DATA`); the generator replaces missing ones at their rate, with a note.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final

from glowplug.domain.reading import known
from glowplug_lab.simulator.scenario.errors import ScenarioError
from glowplug_lab.simulator.scenario.trace import is_path, trace_file
from glowplug_lab.simulator.scenario.tree import data_folder
from glowplug_lab.simulator.scenario.words import ClientWords, LengthWords, WorkloadWords
from glowplug_lab.simulator.workload.arrival import Arrival, TraceError, merge
from glowplug_lab.simulator.workload.formats import length_pairs
from glowplug_lab.simulator.workload.sampling import Lengths, lognormal_pairs, renewal_times
from glowplug_lab.simulator.workload.tables import read_once, rows

SERVEGEN: Final = "servegen_clients_10min"
SERVEGEN_WINDOW_S: Final = 600.0
SERVEGEN_LENGTHS: Final = "servegen_client_lengths_6h"
NUM_PAIRS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Trace:
    """Mean requests a second, and the source of lengths."""

    rps: float
    lengths: str


TRACES: Final = {
    "azure_2023_conv": Trace(5.91, "azure_2023_conv"),
    "azure_2023_code": Trace(3.12, "azure_2023_code"),
    "azure_2024_conv_10s": Trace(48.0, "azure_2023_conv"),
    "azure_2024_code_10s": Trace(24.4, "azure_2023_code"),
    "mooncake_conversation": Trace(3.40, "mooncake_conversation"),
    "arxiv_summarization_lengths": Trace(0.0, "arxiv_summarization_lengths"),
    SERVEGEN: Trace(1842.0, SERVEGEN_LENGTHS),
}
DRAWN: Final = ("gamma", "generator", "generator_code", "generator_fleet")
FALLBACK_LENGTHS: Final = {
    "azure_2023_conv": LengthWords(prompt_mean=1195, prompt_cv=0.97, response_mean=201, response_cv=0.8),
    "azure_2023_code": LengthWords(prompt_mean=2040, prompt_cv=0.97, response_mean=28, response_cv=2.2),
    "mooncake_conversation": LengthWords(prompt_mean=12035, prompt_cv=1.31, response_mean=343, response_cv=0.73),
    "arxiv_summarization_lengths": LengthWords(prompt_mean=2588, prompt_cv=0.37, response_mean=291, response_cv=1.82),
    SERVEGEN_LENGTHS: LengthWords(),
}
"""Mean and coefficient of variation of each trace's own lengths."""


def find(name: str, beside: Path, field: str) -> Path | None:
    """Return None for a known trace missing from the data folder. Paths are relative to `beside`. Raises ScenarioError
    for an unknown name or missing path."""
    if is_path(name):
        return trace_file(name, beside, field)
    folder = data_folder()
    path = folder / f"{name}.csv.gz"
    if path.is_file():
        return path
    if name in TRACES or name == SERVEGEN_LENGTHS:
        return None
    raise ScenarioError(field, f"there is no trace {name!r} {known(name, (*DRAWN, *TRACES), 'known ones')}")


class LengthBook:
    """Each is read once; replacements are added to `notes`."""

    def __init__(self, words: WorkloadWords, beside: Path, notes: list[str]) -> None:
        self._words, self._beside, self._notes = words, beside, notes
        self._made: dict[str, Lengths] = {}

    def of(self, spec: str | LengthWords | None, source: str, field: str = "workload.lengths") -> Lengths:
        """Default to the lengths of `source`. Raises ScenarioError."""
        if spec is None:
            field = "workload.source"
            spec = TRACES[source].lengths if source in TRACES else source
            if spec in DRAWN or spec == SERVEGEN_LENGTHS:
                spec = "azure_2023_code" if spec == "generator_code" else "azure_2023_conv"
        found = self._made.get(repr(spec))
        if found is None:
            try:
                found = self._made[repr(spec)] = self.bounded(self._pairs(spec, field))
            except TraceError as error:
                raise ScenarioError(field, str(error)) from error
        return found

    def bounded(self, pairs: Sequence[tuple[int, int]]) -> Lengths:
        return Lengths(pairs, *self._words.token_bounds)

    def _pairs(self, spec: str | LengthWords, field: str) -> list[tuple[int, int]]:
        if isinstance(spec, LengthWords):
            return drawn_pairs(spec)
        path = find(spec, self._beside, field)
        if path is None:
            stands_in = "lengths are drawn from lognormals with its means and CVs"
            self._notes.append(f"no {spec} in {data_folder()}: {stands_in}")
            return drawn_pairs(FALLBACK_LENGTHS[spec])
        pairs: list[tuple[int, int]] = read_once(_first_pairs, path)
        require(bool(pairs), path, "holds no request to take lengths from")
        return pairs


def _first_pairs(path: Path) -> list[tuple[int, int]]:
    return list(islice(length_pairs(path), NUM_PAIRS))


@lru_cache(maxsize=8)
def drawn_pairs(words: LengthWords) -> list[tuple[int, int]]:
    """Independent of the run's seed."""
    return lognormal_pairs(
        NUM_PAIRS,
        Random(repr(words)),
        prompt_mean=words.prompt_mean,
        prompt_cv=words.prompt_cv,
        response_mean=words.response_mean,
        response_cv=words.response_cv,
    )


def _read_lengths(path: Path) -> dict[str, list[tuple[float, float, float, float]]]:
    """ServeGen client -> (prompt median, prompt sigma, response median, response sigma) per 6 h window: lognormals
    through the published p50 and p90."""
    by_client: dict[str, list[tuple[float, float, float, float]]] = {}
    for row in rows(path):
        prompt, response = (row.seconds(name) if row.text(name) else 0.0 for name in ("prompt_p50", "resp_p50"))
        if not prompt or not response:
            continue
        spread = [math.log(max(1.0, row.positive(f"{kind}_p90") / mid)) / 1.2816 for kind, mid in
                  (("prompt", prompt), ("resp", response))]  # fmt: skip
        name = f"{row.text('model')}-{row.text('client')}"
        by_client.setdefault(name, []).append((prompt, spread[0], response, spread[1]))
    return by_client


def require(condition: bool, path: Path, problem: str) -> None:
    """Raises TraceError naming the file."""
    if not condition:
        raise TraceError(str(path), 0, "", problem)


NUM_DRAWN: Final = 2_000

Pairs = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Client:
    """`windows`: (start in seconds of the trace, requests, distribution of gaps, its shape)."""

    name: str
    windows: list[tuple[float, int, str, float]] = field(default_factory=list)
    num_requests: int = 0
    cvs: list[float] = field(default_factory=list)
    ratio: float = 1.0  # served per request of the trace


def read_clients(path: Path, upto_s: float, from_s: float) -> list[Client]:
    """Windows before `upto_s`, clients by name; requests and CVs count from `from_s` on."""
    return [replace(client) for client in read_once(_read_clients, path, upto_s, from_s)]


def _read_clients(path: Path, upto_s: float, from_s: float) -> tuple[Client, ...]:
    clients: dict[str, Client] = {}
    for row in rows(path):
        at_s = row.seconds("t_s")
        if at_s >= upto_s:
            continue
        name = f"{row.text('model')}-{row.text('client')}"
        client = clients.setdefault(name, Client(name))
        num = row.count("requests")
        client.windows.append((at_s, num, row.one_of("dist", ("G", "W")), row.positive("shape")))
        if at_s + SERVEGEN_WINDOW_S > from_s:
            client.num_requests += num
            client.cvs.append(row.seconds("cv"))
    return tuple(clients[name] for name in sorted(clients))


def client_weights(path: Path, num_models: int) -> list[float]:
    """Shares in the first day's requests. Clients go round robin to models (HydraServe section 8.1), independently of
    rates; models without a client get half of the quietest one's. Raises TraceError."""
    rates = [float(client.num_requests) for client in read_clients(path, 86_400.0, 0.0)]
    weights = [0.0] * num_models
    for number, rate in enumerate(rates):
        weights[number % num_models] += rate
    require(any(rates), path, "holds no request on its first day")
    least = min(rate for rate in rates if rate) / 2
    weights = [weight or least for weight in weights]
    Random(num_models).shuffle(weights)
    total = sum(weights)
    return [weight / total for weight in weights]


class Clients:
    def __init__(self, words: WorkloadWords, keys: Sequence[str], seconds: float, path: Path, book: LengthBook) -> None:
        self._words, self._seconds, self._book = words, seconds, book
        span_s = seconds * words.squeeze
        there = [c for c in read_clients(path, words.start_s + span_s, words.start_s) if c.num_requests]
        if (num := sum(group.num for group in words.clients)) != len(keys):
            raise ScenarioError("workload.clients", f"{num} clients for {len(keys)} models")
        picked = [client for group in words.clients for client in _pick(group, there, seconds)]
        self._by_key = dict(zip(keys, picked, strict=True))
        of_lengths = find(SERVEGEN_LENGTHS, Path(), "workload.lengths")
        measured = read_once(_read_lengths, of_lengths) if of_lengths else {}
        self._lengths = {key: self._of(client.name, measured) for key, client in self._by_key.items()}

    def _of(self, name: str, measured: dict[str, list[tuple[float, float, float, float]]]) -> Lengths:
        windows = measured.get(name)
        if not windows or self._words.lengths is not None:
            return self._book.of(self._words.lengths, self._words.source)
        prompt, prompt_sigma, response, response_sigma = (fmean(column) for column in zip(*windows, strict=True))
        return self._book.bounded(_drawn(name, prompt, prompt_sigma, response, response_sigma))

    def lengths_of(self, key: str) -> Lengths:
        return self._lengths[key]

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        streams = [self._one(key, client, Random(f"{seed}/{key}")) for key, client in self._by_key.items()]
        return merge(*streams)

    def _one(self, key: str, client: Client, chance: Random) -> Iterator[Arrival]:
        start_s, squeeze, lengths = self._words.start_s, self._words.squeeze, self._lengths[key]
        for from_s, num, dist, shape in client.windows:
            if from_s + SERVEGEN_WINDOW_S <= start_s:
                continue
            wanted = num * client.ratio * self._words.keep
            count = int(wanted) + (chance.random() < wanted % 1)
            for offset_s in renewal_times(count, SERVEGEN_WINDOW_S, dist, shape, chance):
                at_s = (from_s + offset_s - start_s) / squeeze
                if 0 <= at_s < self._seconds:
                    yield Arrival(at_s, key, *lengths.draw(chance))

    def past(self, key: str, seconds: float) -> list[tuple[float, float, float]]:
        """(start, width, expected requests) before the run; starts are negative."""
        client, start_s, squeeze = self._by_key[key], self._words.start_s, self._words.squeeze
        return [
            ((from_s - start_s) / squeeze, SERVEGEN_WINDOW_S / squeeze, num * client.ratio * self._words.keep)
            for from_s, num, _, _ in client.windows
            if from_s < start_s and (start_s - from_s) / squeeze <= seconds
        ]


@lru_cache(maxsize=64)
def _drawn(name: str, prompt: float, prompt_sigma: float, response: float, response_sigma: float) -> Pairs:
    draw = Random(name).lognormvariate
    return tuple(
        (max(1, round(prompt * draw(0, prompt_sigma))), max(1, round(response * draw(0, response_sigma))))
        for _ in range(NUM_DRAWN)
    )


def _pick(group: ClientWords, there: list[Client], seconds: float) -> list[Client]:
    """Raises ScenarioError."""
    if len(there) < group.num:
        raise ScenarioError("workload.clients", f"{group.num} {group.pick} ones, and only {len(there)} are left")
    ranked = sorted(there, key=lambda client: (-client.num_requests, client.name))
    half = max(group.num, len(ranked) // 2)
    if group.pick == "popular":
        picked = ranked[: group.num]
    elif group.pick == "bursty":
        picked = sorted(ranked[:half], key=lambda c: (-fmean(c.cvs), c.name))[: group.num]
    else:
        quiet = ranked[-half:]
        picked = [quiet[number * len(quiet) // group.num] for number in range(group.num)]
    total = sum(client.num_requests for client in picked)
    for client in picked:
        there.remove(client)
        client.ratio = group.rps * seconds / total
    return picked
