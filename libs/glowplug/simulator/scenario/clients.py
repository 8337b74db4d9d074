"""ServeGen clients as the models of a scenario: popular ones, bursty ones, and the long tail."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final

from glowplug.simulator.scenario.errors import ScenarioError
from glowplug.simulator.scenario.sources import SERVEGEN_LENGTHS, LengthBook, client_lengths, find, require
from glowplug.simulator.scenario.words import ClientWords, WorkloadWords
from glowplug.simulator.workload.arrival import Arrival, merge
from glowplug.simulator.workload.formats import SERVEGEN_WINDOW_S
from glowplug.simulator.workload.sampling import Lengths, renewal_times
from glowplug.simulator.workload.tables import read_once, rows

NUM_PAIRS: Final = 2_000

Pairs = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Client:
    """One client's windows: from (s of the trace), requests, distribution of the gaps, its shape."""

    name: str
    windows: list[tuple[float, int, str, float]] = field(default_factory=list)
    num_requests: int = 0
    cvs: list[float] = field(default_factory=list)
    ratio: float = 1.0  # requests served per request of the trace


def read_clients(path: Path, upto_s: float, from_s: float) -> list[Client]:
    """Clients with their windows before `upto_s`; requests and CVs are those from `from_s` on. Ordered by name."""
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
    """Shares of the first day's requests, clients laid round robin onto `num_models` models (HydraServe section 8.1),
    in an order that has nothing to do with their rates; where there are fewer clients than models, the others get half
    of the quietest one's rate each. They sum to 1."""
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
    """The clients that stand in for the models of a scenario, and their requests."""

    def __init__(self, words: WorkloadWords, keys: Sequence[str], seconds: float, path: Path, book: LengthBook) -> None:
        self._words, self._seconds, self._book = words, seconds, book
        span_s = seconds * words.squeeze
        there = [c for c in read_clients(path, words.start_s + span_s, words.start_s) if c.num_requests]
        if sum(group.num for group in words.clients) != len(keys):
            raise ScenarioError(
                "workload.clients", f"{sum(g.num for g in words.clients)} clients for {len(keys)} models"
            )
        picked = [client for group in words.clients for client in _pick(group, there, seconds)]
        self._by_key = dict(zip(keys, picked, strict=True))
        measured = client_lengths(find(SERVEGEN_LENGTHS, Path(), "workload.lengths"))
        self._lengths = {key: self._of(client.name, measured) for key, client in self._by_key.items()}

    def _of(self, name: str, measured: dict[str, list[tuple[float, float, float, float]]]) -> Lengths:
        """Lengths of one client; of one without any, those of the workload."""
        windows = measured.get(name)
        if not windows or self._words.lengths is not None:
            return self._book.of(self._words.lengths, self._words.source)
        prompt, prompt_sigma, response, response_sigma = (fmean(column) for column in zip(*windows, strict=True))
        return self._book.bounded(_drawn(name, prompt, prompt_sigma, response, response_sigma))

    def lengths_of(self, key: str) -> Lengths:
        return self._lengths[key]

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """Every client's requests, in order of time."""
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
        """(from, width, expected requests) of the windows in the `seconds` before the run; times are below 0."""
        client, start_s, squeeze = self._by_key[key], self._words.start_s, self._words.squeeze
        return [
            ((from_s - start_s) / squeeze, SERVEGEN_WINDOW_S / squeeze, num * client.ratio * self._words.keep)
            for from_s, num, _, _ in client.windows
            if from_s < start_s and (start_s - from_s) / squeeze <= seconds
        ]


@lru_cache(maxsize=64)
def _drawn(name: str, prompt: float, prompt_sigma: float, response: float, response_sigma: float) -> Pairs:
    """A pool of one client's lengths; the same for every run."""
    draw = Random(name).lognormvariate
    return tuple(
        (max(1, round(prompt * draw(0, prompt_sigma))), max(1, round(response * draw(0, response_sigma))))
        for _ in range(NUM_PAIRS)
    )


def _pick(group: ClientWords, there: list[Client], seconds: float) -> list[Client]:
    """The clients of one group, scaled to its rate; they are taken out of `there`."""
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
