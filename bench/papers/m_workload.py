"""The workload of mCache's rows: seven models, the cost of their misses, and an hour of requests (section 6.1).

The paper takes an hour of the Azure Functions trace of 2019: services that HTTP calls, below the 90th percentile of
popularity, their calls in random order within ten minutes, thinned to 15 %, "around 2389 requests". That trace is not
available; its published popularity is, and gives the call rates of services below the 90th percentile. `bursts` and
`shuffled` draw from ServeGen's measured clients, the least popular of a day first, as many as keep the hour within the
paper's volume (below their own 90th percentile they still send 1.6 million an hour, of which 2389 are 0.15 %): each by
its own renewal process, or in random order within ten minutes.

The paper does not print a model's share of the cache. Section 6.3.1 says that with 20 % of the memory every algorithm
thrashes, and section 4's Figure 5 counts the cache in models. So a model takes one part in seven here; with the bytes
of the checkpoints (`bytes`) the small models stay in 20 % of the memory, and a third to a half of all requests hit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

from bench.papers.data import trace
from glowplug_lab.simulator.workload.sampling import binomial, renewal_times
from glowplug_lab.simulator.workload.tables import rows

MB = 10**6
SIZES = {
    "ResNet50": 103 * MB,
    "SSD": 138 * MB,
    "BERT-large": 1340 * MB,
    "RoBERTa-large": 1425 * MB,
    "XLNet-large": 1442 * MB,
    "GPT-2-medium": 1520 * MB,
    "T5-large": 2950 * MB,
}
"""Published sizes of the checkpoints; the paper prints neither its variants nor their sizes, only "hundreds of MB to
several GB"."""
BASE_SIZES = dict(zip(SIZES, (103 * MB, 138 * MB, 440 * MB, 501 * MB, 467 * MB, 548 * MB, 892 * MB), strict=True))
"""The base variants of the same five language models (GPT-2 small, T5-base)."""
PARTS = dict.fromkeys(SIZES, sum(SIZES.values()) // len(SIZES))
LOAD_BASE_S, LOAD_BYTES_PER_S = 0.113, 99.4 * MB  # the line through the paper's Table 2 (1.9 to 356.6 MB)
NUM_REQUESTS, SAMPLE = 2389, 0.15
HOUR_S, WINDOW_S = 3600.0, 600.0
WINDOWS, WINDOWS_A_DAY, NUM_DAYS = 6, 144, 8
Asked = list[tuple[float, str]]  # (seconds, model), in order
Penalty = Callable[[str, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One way to generate the hour."""

    memory: Mapping[str, int]  # bytes of the cache per model
    checkpoints: Mapping[str, int]  # bytes read by a miss
    functions: bool = False  # the published popularity of the Functions trace, or ServeGen's clients
    bursts: bool = False  # each client's renewal process, or random order within ten minutes

    def load_s(self, name: str, num_bytes: int) -> float:
        """Seconds to load a model, independent of its share of the cache."""
        return LOAD_BASE_S + self.checkpoints[name] / LOAD_BYTES_PER_S


SOURCES = {
    "parts": Source(memory=PARTS, checkpoints=SIZES, functions=True),
    "bytes": Source(memory=SIZES, checkpoints=SIZES, functions=True),
    "base": Source(memory=PARTS, checkpoints=BASE_SIZES, functions=True),
    "alike": Source(memory=PARTS, checkpoints=PARTS, functions=True),
    "shuffled": Source(memory=PARTS, checkpoints=SIZES),
    "bursts": Source(memory=PARTS, checkpoints=SIZES, bursts=True),
    "bursts-bytes": Source(memory=SIZES, checkpoints=SIZES, bursts=True),
}


class Window(NamedTuple):
    """Ten minutes of one client: gaps between requests are Gamma ("G") or Weibull ("W") with this shape."""

    num_requests: int
    dist: str
    shape: float


Client = dict[int, Window]  # by number of the window


@cache
def clients() -> dict[str, Client]:
    """The clients of ServeGen's language models."""
    found: dict[str, Client] = {}
    for row in rows(trace("servegen_clients_10min")):
        if row.text("model").startswith("m-"):
            window = Window(row.count("requests"), row.text("dist"), row.positive("shape"))
            client = found.setdefault(f"{row.text('model')}/{row.text('client')}", {})
            client[int(row.seconds("t_s") // WINDOW_S)] = window
    return found


def _sent(client: Client, first: int, num: int) -> int:
    return sum(client[at].num_requests for at in range(first, first + num) if at in client)


def unpopular(first: int) -> dict[str, int]:
    """The clients kept for the hour from window `first`, least popular first -> requests in their whole day: as many as
    keep the hour within the paper's volume."""
    day = first // WINDOWS_A_DAY * WINDOWS_A_DAY
    popularity = {name: _sent(client, day, WINDOWS_A_DAY) for name, client in clients().items()}
    ordered = sorted((name for name, num in popularity.items() if num), key=lambda name: (popularity[name], name))
    kept: dict[str, int] = {}
    volume = 0
    for name in ordered:
        volume += _sent(clients()[name], first, WINDOWS)
        if kept and volume > NUM_REQUESTS / SAMPLE:
            break
        kept[name] = popularity[name]
    return kept


def functions_rates(chance: Random, num: int = 1200) -> list[float]:
    """Requests a second of `num` HTTP functions below the 90th percentile of popularity.

    Lognormal through the published figures of the Azure Functions trace: 45 % of functions at most once an hour, 81 %
    at most once a minute, 98.83 % at most once a second (mCache section 3.1; Shahrad et al., 2020).
    """
    rates: list[float] = []
    while len(rates) < num:
        z = chance.gauss(0.0, 1.0)
        if z < 1.2816:  # the 90th percentile
            rates.append(10.0 ** (-3.33 + 1.55 * z))
    return rates


def mapped(rates: Sequence[float], mapping: str, chance: Random) -> list[str]:
    """The model of each service (section 6.1): services in order of popularity, models in order of loading time."""
    slow_first = sorted(SIZES, key=lambda name: -SIZES[name])
    models = [""] * len(rates)
    for place, at in enumerate(sorted(range(len(rates)), key=lambda at: -rates[at])):
        quantile = place * len(slow_first) // len(rates)
        match mapping:
            case "random":
                models[at] = chance.choice(slow_first)
            case "round-robin":
                models[at] = slow_first[place % len(slow_first)]
            case "quantile":
                models[at] = slow_first[quantile]
            case "quantile-r":
                models[at] = slow_first[-1 - quantile]
            case _:
                raise ValueError(f"no mapping of services to models is called {mapping!r}")
    return models


def requests(source: Source, mapping: str, seed: int) -> Asked:
    """About 2389 requests within an hour, drawn from the first eight days: placed first, then thinned, as in the paper.
    The same seed gives the same services and models in all sources that draw them alike."""
    chance = Random(f"{mapping} {seed}")
    if source.functions:
        rates = functions_rates(chance)
        models = mapped(rates, mapping, chance)
        picked = chance.choices(models, weights=rates, k=NUM_REQUESTS)
        return sorted((chance.random() * HOUR_S, model) for model in picked)
    first = chance.randrange(NUM_DAYS * 24) * WINDOWS
    kept = unpopular(first)
    models = mapped([float(num) for num in kept.values()], mapping, chance)
    keep = min(1.0, NUM_REQUESTS / sum(_sent(clients()[name], first, WINDOWS) for name in kept))
    return sorted(
        ((at - first) * WINDOW_S + offset_s, model)
        for name, model in zip(kept, models, strict=True)
        for at in range(first, first + WINDOWS)
        if at in clients()[name]
        for offset_s in _offsets(clients()[name][at], keep, source.bursts, chance)
    )


def _offsets(window: Window, keep: float, bursts: bool, chance: Random) -> Iterator[float]:
    """Seconds into the window of each kept request."""
    if not bursts:
        return (chance.random() * WINDOW_S for _ in range(binomial(window.num_requests, keep, chance)))
    times = renewal_times(window.num_requests, WINDOW_S, window.dist, window.shape, chance)
    return (at_s for at_s in times if chance.random() < keep)
