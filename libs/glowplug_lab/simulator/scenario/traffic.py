"""Draw a scenario's requests as in the papers, with all randomness from the run's seed.

| workload | requests |
|---|---|
| gamma | renewal arrivals at `rps`: each model's own share of it, or one stream split by the shares |
| generator* | the seeded generator fitted to the public traces; it replaces a missing trace |
| counted trace, `days` | WarmServe section 7.1: model i takes the counts of its own day, scaled to its share of `rps` |
| counted trace | the counts as one stream, split by the shares |
| trace of requests | the requests as one stream, split by the shares; a trace that names models keeps them apart |
| ServeGen clients | every client is one model |

Scaling down keeps each request with a probability; scaling up repeats each at the same moment and then scales down,
which makes bursts (WarmServe section 7.1).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Final

from glowplug.domain.units import DAY_S
from glowplug_lab.simulator.scenario.errors import ScenarioError
from glowplug_lab.simulator.scenario.sources import (
    DRAWN,
    SERVEGEN,
    TRACES,
    Clients,
    LengthBook,
    client_weights,
    find,
    require,
)
from glowplug_lab.simulator.scenario.trace import contents, is_path, served_by
from glowplug_lab.simulator.scenario.tree import data_folder
from glowplug_lab.simulator.scenario.words import LengthWords, TenantWords, WorkloadWords
from glowplug_lab.simulator.workload import generator, generator_fitted
from glowplug_lab.simulator.workload.arrival import Arrival, merge
from glowplug_lab.simulator.workload.formats import Reading, counts, is_counted, read
from glowplug_lab.simulator.workload.generator import dealt_functions, hours
from glowplug_lab.simulator.workload.sampling import (
    Lengths,
    binomial,
    bounded,
    gamma_times,
    power_law_shares,
    with_errors,
)
from glowplug_lab.simulator.workload.tables import read_once

Bin = tuple[float, float, float]  # start (s of the run), width (s), expected requests
BIN_S: Final = 600.0
SERVICES: Final = {"generator": generator_fitted.CONVERSATION, "generator_code": generator_fitted.CODE}
STANDS_FOR: Final = {"azure_2023_code": "generator_code", "azure_2024_code_10s": "generator_code",
                     "servegen_clients_10min": "generator_fleet"}  # fmt: skip
"""Trace -> what stands in for it; "generator" (conversations) for the others."""
BEGINS: Final = {"azure_2024_conv_10s": 6 * DAY_S, "azure_2024_code_10s": 4 * DAY_S}
"""Where a trace's 0 s lies in a week that begins on a Monday."""


class Generated:
    """`rate` requests a second in all; `shares` and `lengths` by model."""

    def __init__(
        self, words: WorkloadWords, seconds: float, rate: float, shares: dict[str, float], lengths: dict[str, Lengths]
    ) -> None:
        self._kind = words.source if words.source in DRAWN else STANDS_FOR.get(words.source, "generator")
        self._words, self._seconds, self._rate, self._shares, self._lengths = words, seconds, rate, shares, lengths

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        words, keys = self._words, list(self._shares)
        squeeze, span_s = words.squeeze, self._seconds * words.squeeze
        rate = self._rate / squeeze
        if words.source == "generator_fleet":
            Random(len(keys)).shuffle(keys)  # popularity is independent of model order
        if self._kind == "generator_fleet":
            stream = generator.fleet(seed, len(keys), rate, span_s, start_s=self._start_s(0), names=keys)
        else:
            kind, cv = SERVICES[self._kind], words.cv or None
            stream = merge(*(
                generator.service(kind, seed, rate * share, span_s, model=key, start_s=self._start_s(number), cv=cv)
                for number, (key, share) in enumerate(self._shares.items())
                if share > 0
            ))  # fmt: skip
        return self._fitted(stream, Random(f"{seed}/lengths"))

    def past(self, key: str, seconds: float) -> list[tuple[float, float, float]]:
        """(start, width, expected requests), from the daily cycle; empty for fleets."""
        kind = SERVICES.get(self._kind)
        if kind is None:
            return []
        start_s, squeeze = self._start_s(list(self._shares).index(key)), self._words.squeeze
        bins = range(max(1, round(self._seconds * squeeze / BIN_S)))
        mean = sum(hours(kind, start_s + (n + 0.5) * BIN_S) for n in bins) / len(bins)
        scale = self._rate * self._shares[key] * BIN_S / squeeze / mean
        week_s = 7 * DAY_S
        return [
            (-n * BIN_S / squeeze, BIN_S / squeeze,
             scale * hours(kind, (start_s - (n - 0.5) * BIN_S) % week_s))
            for n in range(int(seconds * squeeze / BIN_S), 0, -1)
        ]  # fmt: skip

    def _start_s(self, number: int) -> float:
        words = self._words
        day = words.days[number % len(words.days)] if words.days else 0
        return BEGINS.get(words.source, 0.0) + day * DAY_S + words.start_s

    def _fitted(self, stream: Iterator[Arrival], chance: Random) -> Iterator[Arrival]:
        words = self._words
        for arrival in stream:
            given, prefix = self._lengths.get(arrival.model), arrival.prefix
            if given is not None:
                (prompt, response), prefix = given.draw(chance), ()
            else:
                prompt, response = bounded(arrival.prompt_tokens, arrival.response_tokens, *words.token_bounds)
            at_s = arrival.at_s / words.squeeze
            if at_s < self._seconds:
                yield Arrival(at_s, arrival.model, prompt, response, prefix=prefix)


class Traffic:
    """`notes` names replacements."""

    def __init__(
        self,
        words: WorkloadWords,
        keys: Sequence[str],
        seconds: float,
        beside: Path,
        lengths: dict[str, str | LengthWords],
    ) -> None:
        self.words, self.keys, self.seconds = words, tuple(keys), seconds
        self.notes: list[str] = []
        self._own_lengths = lengths
        self._dealers = [tenant for tenant in words.tenants if tenant.workload is None]
        self._of_tenants = {
            tenant.name: Traffic(
                tenant.workload, _asked(tenant, keys), seconds, beside, {} if tenant.workload.lengths else lengths
            )
            for tenant in words.tenants
            if tenant.workload is not None
        }
        for one in self._of_tenants.values():
            self.notes += one.notes
        self._book = LengthBook(words, beside, self.notes)
        self.path = None if words.source in DRAWN else find(words.source, beside, "workload.source")
        if self.path is None and words.source not in DRAWN:
            self.notes.append(
                f"no {words.source} in {data_folder()}: the traffic is generated (seeded, fitted to traces)"
            )
        self.counted = self.path is not None and is_counted(self.path)
        self._bins = read_once(_read_bins, self.path) if self.path and self.counted else []
        self.shares = self._shares()
        self._check_days()
        self._lengths = {key: self._lengths_by(key) for key in self.keys}
        self.streams = self._streams()
        self._served_by = {key: key for key in self.keys}
        if self.path is not None and self.streams is None and is_path(words.source):
            self._read_by_path(self.path)

    def _read_by_path(self, path: Path) -> None:
        words, held = self.words, contents(path)
        span_s = self.seconds * words.squeeze
        here = sum(held.num_within(day_s, span_s) for day_s in self._starts())
        some = f"{here} of {held.num_requests}" if here != held.num_requests else f"{held.num_requests}"
        where = f" (those from {words.start_s:g} s on, for {span_s:g} s)" if here != held.num_requests else ""
        anew = ["times are drawn anew by workload.cv"] if words.cv else []
        anew += [f"workload.rps makes {words.rps:g} a second of them"] if words.rps else []
        anew += [f"workload.keep leaves {words.keep:.0%} of them"] if words.keep < 1 else []
        anew += ["lengths are drawn from workload.lengths"] if words.lengths is not None else []
        self.notes.append("; ".join([f"{some} requests of {words.source}{where}", *anew]))
        if self.counted or words.cv:
            return
        self._served_by = served_by(held.models, self.keys)
        others = [f"{name} by {key}" for name, key in self._served_by.items() if name != key]
        if others:
            more = f" and {len(others) - 5} more" if len(others) > 5 else ""
            self.notes.append(f"models that {words.source} names are served: {', '.join(others[:5])}{more}")

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        if self._of_tenants:
            own = (self._by_tenant(name, traffic, seed) for name, traffic in self._of_tenants.items())
            return merge(*own, *([self._dealt(seed)] if self._dealers else []))
        return self._dealt(seed) if self._dealers else self._undealt(seed)

    def _undealt(self, seed: int) -> Iterator[Arrival]:
        found = self.streams.arrivals(seed) if self.streams else self._arrivals(seed)
        return with_errors(found, f"{seed}/expected") if self.words.length_errors else found

    def _by_tenant(self, name: str, traffic: "Traffic", seed: int) -> Iterator[Arrival]:
        own_seed = Random(f"{seed}/{name}").getrandbits(32)  # equal words must not send at equal times
        return (arrival._replace(tenant=name) for arrival in traffic.arrivals(own_seed))

    def _dealt(self, seed: int) -> Iterator[Arrival]:
        chance, names = Random(f"{seed}/tenants"), [tenant.name for tenant in self._dealers]
        upto = list(accumulate(tenant.share for tenant in self._dealers))
        for arrival in self._undealt(seed):
            yield arrival._replace(tenant=chance.choices(names, cum_weights=upto)[0])

    def _arrivals(self, seed: int) -> Iterator[Arrival]:
        chance = Random(f"{seed}/traffic")
        if self.path is None or self.words.cv:
            return self._renewal(seed)
        if self._bins:
            return self._by_day(seed) if self.words.days else self._split(self._from_bins(0.0, 1.0, chance), chance)
        return self._requests(chance)

    def require_requests(self) -> None:
        """Raises TraceError if the trace has no request in the time served, before thinning."""
        if self.path is None or self.streams is not None:
            return
        words = self.words
        if self.counted:
            found = any(self._num_counted(start_s) for start_s in self._starts())
        else:
            lengths = self._book.of(words.lengths, words.source)
            found = next(self._cut(read(self.path, Reading(lengths=lengths))), None) is not None
        span_s = self.seconds * words.squeeze
        require(found, self.path, f"holds no request from {words.start_s:g} s on, for {span_s:g} s")

    def _starts(self) -> list[float]:
        return [self._day_s(number) for number in range(len(self.keys))] if self.words.days else [self.words.start_s]

    def lengths_of(self, key: str) -> Lengths:
        return self.streams.lengths_of(key) if isinstance(self.streams, Clients) else self._lengths[key]

    def past(self, key: str, seconds: float) -> list[Bin]:
        """Bins before the run, oldest first."""
        if self.streams is not None:
            return self.streams.past(key, seconds)
        number = self.keys.index(key)
        start_s, share = (self._day_s(number), 1.0) if self.words.days else (self.words.start_s, self.shares[number])
        ratio = self._ratio(start_s, self.shares[number] if self.words.days else 1.0) * share
        squeeze = self.words.squeeze
        return [
            ((from_s - start_s) / squeeze, width_s / squeeze, num * ratio)
            for from_s, width_s, num in self._bins
            if from_s < start_s and (start_s - from_s) / squeeze <= seconds
        ]

    def _lengths_by(self, key: str) -> Lengths:
        """The model's lengths, else the workload's, else the source's."""
        spec, field = self._own_lengths.get(key), f"models.{key}.lengths"
        if spec is None:
            spec, field = self.words.lengths, "workload.lengths"
        return self._book.of(spec, self.words.source, field)

    def _shares(self) -> list[float]:
        if self.words.shares == "servegen":
            path = find(SERVEGEN, Path(), "workload.shares")
            if path is not None:
                return client_weights(path, len(self.keys))
            self.notes.append(f"no {SERVEGEN} in {data_folder()}: models are shared by a power law with alpha 1.6")
            return power_law_shares(len(self.keys), 1.6)
        if self.words.shares == "functions":
            return dealt_functions(len(self.keys))
        return power_law_shares(len(self.keys), self.words.alpha)

    def _streams(self) -> Generated | Clients | None:
        words = self.words
        if self.path is not None:
            own_clients = words.clients and not self.counted
            return Clients(words, self.keys, self.seconds, self.path, self._book) if own_clients else None
        if words.source == "gamma":
            return None
        own = {key: self._lengths[key] for key in self.keys if key in self._own_lengths or words.lengths is not None}
        rate = sum(group.rps for group in words.clients) or self._rate()
        return Generated(words, self.seconds, rate, dict(zip(self.keys, self.shares, strict=True)), own)

    def _check_days(self) -> None:
        if not self.words.days or self.path is None:
            return
        if not self.counted:
            raise ScenarioError("workload.days", "only a counted trace (azure_2024_conv_10s, ...) has days")
        last_s = max((from_s + width_s for from_s, width_s, _ in self._bins), default=0.0)
        for number in range(len(self.keys)):
            if self._day_s(number) >= last_s:
                day = self.words.days[number % len(self.words.days)]
                raise ScenarioError("workload.days", f"day {day} lies past the end of {self.words.source}")

    def _day_s(self, number: int) -> float:
        days = self.words.days
        return days[number % len(days)] * DAY_S + self.words.start_s

    def _rate(self) -> float:
        if self.words.rps:
            return self.words.rps
        if self._bins:
            total = self._num_counted(self.words.start_s)
            require(total > 0, self.path or Path(), f"holds no request from {self.words.start_s:g} s on")
            return total * self.words.keep / self.seconds
        known = TRACES.get(self.words.source)
        if self.path is not None and known is None:
            raise ScenarioError(
                "workload.rps",
                "is needed where workload.cv draws arrivals anew and the trace is not a known one"
                " (workload.cv=0 keeps its own arrivals)",
            )
        return (known.rps if known else 1.0) * self.words.keep * self.words.squeeze

    def _inside(self, offset_s: float) -> bool:
        return 0 <= offset_s < self.seconds * self.words.squeeze

    def _ratio(self, start_s: float, share: float) -> float:
        if not self.words.rps:
            return self.words.keep
        there = self._num_counted(start_s)
        require(there > 0, self.path or Path(), f"no request from {start_s:.0f} s on")
        return self.words.rps * share * self.seconds / there

    def _num_counted(self, start_s: float) -> int:
        return sum(num for from_s, _, num in self._bins if self._inside(from_s - start_s))

    def _renewal(self, seed: int) -> Iterator[Arrival]:
        rate, cv = self._rate(), self.words.cv or 1.0
        if self.words.cv_of == "fleet":
            chance = Random(f"{seed}/traffic")
            return self._split(gamma_times(rate, cv, self.seconds, chance), chance)
        return self._merged(seed, lambda number, share, chance: self._long_renewal(rate * share, cv, chance))

    def _long_renewal(self, rate: float, cv: float, chance: Random) -> Iterator[float]:
        """Stationary: the first gap is cut at random."""
        early_s = 20 / rate * (1 + chance.random()) if rate > 0 else 0.0
        for at_s in gamma_times(rate, cv, self.seconds + early_s, chance) if rate > 0 else ():
            if at_s >= early_s:
                yield at_s - early_s

    def _by_day(self, seed: int) -> Iterator[Arrival]:
        return self._merged(seed, lambda number, share, chance: self._from_bins(self._day_s(number), share, chance))

    def _merged(self, seed: int, times: Callable[[int, float, Random], Iterator[float]]) -> Iterator[Arrival]:
        def one(number: int, key: str, share: float, chance: Random) -> Iterator[Arrival]:
            for at_s in times(number, share, chance):
                yield Arrival(at_s, key, *self._lengths[key].draw(chance))

        models = enumerate(zip(self.keys, self.shares, strict=True))
        return merge(*(one(number, key, share, Random(f"{seed}/{key}")) for number, (key, share) in models))

    def _from_bins(self, start_s: float, share: float, chance: Random) -> Iterator[float]:
        """Uniform inside each bin."""
        start_s = start_s if self.words.days else self.words.start_s
        ratio, squeeze = self._ratio(start_s, share), self.words.squeeze
        repeats = max(1, math.ceil(ratio))
        for from_s, width_s, num in self._bins:
            if not self._inside(from_s - start_s):
                continue
            times = [chance.random() * width_s for _ in range(binomial(num * repeats, ratio / repeats, chance))]
            if repeats > 1:
                times = _repeated(width_s, num, repeats, ratio / repeats, chance)
            for offset_s in sorted(times):
                yield (from_s - start_s + offset_s) / squeeze

    def _requests(self, chance: Random) -> Iterator[Arrival]:
        words = self.words
        assert self.path is not None
        reading = Reading(model="", lengths=self._book.of(words.lengths, words.source), keep=words.keep, chance=chance)
        own = words.lengths is None
        ratio = 1.0
        if words.rps:
            there = sum(1 for _ in self._cut(read(self.path, reading)))
            require(there > 0, self.path, f"no request from {words.start_s:.0f} s on")
            ratio = words.rps * self.seconds / there
        repeats = max(1, math.ceil(ratio))
        pick, by_name = self._picker(chance), dict(self._served_by)
        for at_s, arrival in self._cut(read(self.path, reading)):
            for _ in range(binomial(repeats, ratio / repeats, chance)):
                key = by_name.get(arrival.model) or (
                    by_name.setdefault(arrival.model, self.keys[len(by_name) % len(self.keys)])
                    if arrival.model
                    else pick()
                )
                prefix = arrival.prefix
                if own and key not in self._own_lengths:
                    tokens = bounded(arrival.prompt_tokens, arrival.response_tokens, *words.token_bounds)
                else:
                    tokens, prefix = self._lengths[key].draw(chance), ()
                yield Arrival(at_s, key, *tokens, prefix=prefix)

    def _cut(self, arrivals: Iterator[Arrival]) -> Iterator[tuple[float, Arrival]]:
        for arrival in arrivals:
            at_s = (arrival.at_s - self.words.start_s) / self.words.squeeze
            if at_s >= self.seconds:
                return
            if at_s >= 0:
                yield at_s, arrival

    def _split(self, times: Iterator[float], chance: Random) -> Iterator[Arrival]:
        pick = self._picker(chance)
        for at_s in times:
            key = pick()
            yield Arrival(at_s, key, *self._lengths[key].draw(chance))

    def _picker(self, chance: Random) -> Callable[[], str]:
        upto = list(accumulate(self.shares))
        return lambda: chance.choices(self.keys, cum_weights=upto)[0]


def _asked(tenant: TenantWords, keys: Sequence[str]) -> tuple[str, ...]:
    """Raises ScenarioError for a model that the scenario lacks."""
    for name in tenant.models:
        if name not in keys:
            raise ScenarioError("workload.tenants", f"{tenant.name} asks for {name!r}, which is not a model here")
    return tenant.models or tuple(keys)


def _read_bins(path: Path) -> list[tuple[float, float, int]]:
    return [(c.from_s, c.width_s, c.num_requests) for group in counts(path) for c in group]


def _repeated(width_s: float, num: int, repeats: int, keep: float, chance: Random) -> list[float]:
    """Repeats are at the same moment."""
    times: list[float] = []
    for _ in range(num):
        times += [chance.random() * width_s] * binomial(repeats, keep, chance)
    return times
