"""Generated traffic under a scenario's models: the seeded generator, for those who want it and those without traces."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Final

from glowplug.domain.units import DAY_S
from glowplug.simulator.scenario.words import WorkloadWords
from glowplug.simulator.workload import generator, generator_fitted
from glowplug.simulator.workload.arrival import Arrival, merge
from glowplug.simulator.workload.generator import hours
from glowplug.simulator.workload.sampling import Lengths, bounded

BIN_S: Final = 600.0
SERVICES: Final = {"generator": generator_fitted.CONVERSATION, "generator_code": generator_fitted.CODE}
MANY: Final = ("generator_fleet", "generator_functions")
STANDS_FOR: Final = {"azure_2023_code": "generator_code", "azure_2024_code_10s": "generator_code",
                     "servegen_clients_10min": "generator_fleet"}  # fmt: skip
"""Trace -> what stands in for it; "generator" (conversations) for the others."""
BEGINS: Final = {"azure_2024_conv_10s": 6 * DAY_S, "azure_2024_code_10s": 4 * DAY_S}
"""Where a trace's 0 s lies in a week that begins on a Monday."""


class Generated:
    """Traffic of one kind at `rate` requests a second in all; `shares` and `lengths` are by model, in order."""

    def __init__(
        self,
        words: WorkloadWords,
        kind: str,
        rate: float,
        shares: Mapping[str, float],
        lengths: Mapping[str, Lengths],
        seconds: float,
    ) -> None:
        self._words, self._kind, self._rate, self._shares = words, kind, rate, shares
        self._lengths, self._seconds = lengths, seconds

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        """In order of time, up to the end of the run."""
        words, keys = self._words, list(self._shares)
        squeeze, span_s = words.squeeze, self._seconds * words.squeeze
        rate = self._rate / squeeze
        if words.source in MANY:
            Random(len(keys)).shuffle(keys)  # popularity has nothing to do with the order of the models
        if self._kind == "generator_fleet":
            stream = generator.fleet(seed, len(keys), rate, span_s, start_s=self._start_s(0), names=keys)
        elif self._kind == "generator_functions":
            stream = generator.functions(seed, len(keys), rate, span_s, cv=words.cv or 1.0, names=keys)
        else:
            make = generator.code if self._kind == "generator_code" else generator.conversation
            stream = merge(*(
                make(seed, rate * share, span_s, start_s=self._start_s(number), model=key, cv=words.cv or None)
                for number, (key, share) in enumerate(self._shares.items())
                if share > 0
            ))  # fmt: skip
        return self._fitted(stream, Random(f"{seed}/lengths"))

    def past(self, key: str, seconds: float) -> list[tuple[float, float, float]]:
        """(from, width, expected requests) before the run; the daily cycle alone, and nothing for fleets."""
        kind = SERVICES.get(self._kind)
        if kind is None:
            return []
        start_s, squeeze = self._start_s(list(self._shares).index(key)), self._words.squeeze
        middles = [start_s + (n + 0.5) * BIN_S for n in range(max(1, round(self._seconds * squeeze / BIN_S)))]
        mean = sum(hours(kind.weekday, kind.weekend, at) for at in middles) / len(middles)
        scale = self._rate * self._shares[key] * BIN_S / squeeze / mean
        week_s = 7 * DAY_S
        return [
            (-n * BIN_S / squeeze, BIN_S / squeeze,
             scale * hours(kind.weekday, kind.weekend, (start_s - (n - 0.5) * BIN_S) % week_s))
            for n in range(int(seconds * squeeze / BIN_S), 0, -1)
        ]  # fmt: skip

    def _start_s(self, number: int) -> float:
        words = self._words
        day = words.days[number % len(words.days)] if words.days else 0
        return BEGINS.get(words.source, 0.0) + day * DAY_S + words.start_s

    def _fitted(self, stream: Iterator[Arrival], chance: Random) -> Iterator[Arrival]:
        """With the scenario's lengths where it names some, inside its bounds everywhere."""
        words = self._words
        bounds: Sequence[int] = (words.max_prompt_tokens, words.min_response_tokens, words.max_total_tokens)
        for arrival in stream:
            given = self._lengths.get(arrival.model)
            if given is not None:
                prompt, response = given.draw(chance)
            else:
                prompt, response = bounded(arrival.prompt_tokens, arrival.response_tokens, *bounds)
            at_s = arrival.at_s / words.squeeze
            if at_s < self._seconds:
                yield Arrival(at_s, arrival.model, prompt, response)
