"""Sweeps over variants and seeds, or over numbers of GPUs to find the least that meets objectives."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from glowplug.domain.reading import known
from glowplug_lab.simulator.scenario.errors import ScenarioError
from glowplug_lab.simulator.scenario.tree import Tree, override
from glowplug_lab.simulator.setup import MAX_GPUS, Setup

_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # outside YAML lists and mappings
MAX_CASES = 10_000


@dataclass(frozen=True, slots=True)
class Variant:
    label: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    variant: str
    seed: int
    tree: Tree
    beside: Path
    check: bool = False  # invariants after every event
    kept: Path | None = None  # place of `beside`'s files after the run
    settings: tuple[str, ...] = ()
    again: str = ""  # command for this case alone


def variants(compare: Sequence[str]) -> list[Variant]:
    """Combine the values of each 'key=a,b'. Raises ScenarioError."""
    choices: list[list[tuple[str, str]]] = []
    for text in compare:
        key, equals, values = text.partition("=")
        named = [value.strip() for value in _COMMA.split(values) if value.strip()]
        if not equals or not key.strip() or not named:
            raise ScenarioError("--compare", f"{text!r} is not key=a,b")
        if len(set(named)) < len(named):
            raise ScenarioError("--compare", f"{text!r} names a value twice")
        choices.append([(key.strip(), value) for value in named])
    short = len(choices) == 1
    made = [
        Variant(
            ", ".join(value if short else f"{key.rpartition('.')[2]}={value}" for key, value in some) or "as written",
            tuple(f"{key}={value}" for key, value in some),
        )
        for some in product(*choices)
    ]
    if len(made) > MAX_CASES:
        raise ScenarioError("--compare", f"{len(made)} variants are more than {MAX_CASES}")
    return made


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse '0..9', '1,2,5', '7', or a mix, without repeats. Raises ScenarioError."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        if match is None:
            raise ScenarioError("--seeds", f"{text!r} is not like 0..9 or 1,2,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_CASES:
            raise ScenarioError("--seeds", f"{part.strip()!r} is not a range")
        seeds += range(first, last + 1)
    return tuple(dict.fromkeys(seeds))


def cases(tree: Tree, beside: Path, some: Iterable[Variant], seeds: Sequence[int]) -> list[Case]:
    return [
        Case(
            variant.label,
            seed,
            override(tree, (*variant.settings, f"seed={seed}"), beside),
            beside,
            settings=variant.settings,
        )
        for variant in some
        for seed in seeds
    ]


_TIMES: Final = tuple(f"{name}_{which}" for name in ("ttft", "tpot", "e2e", "normalised")
                      for which in ("p50", "p95", "p99", "mean"))  # fmt: skip
_SHARES: Final = ("ttft_attainment", "tpot_attainment", "warm_ratio")


@dataclass(frozen=True, slots=True)
class Objective:
    """A bound on a time or refused share, or a least attainment."""

    name: str
    limit: float

    @property
    def is_share(self) -> bool:
        return self.name in (*_SHARES, "refused")

    @property
    def words(self) -> str:
        limit = f"{self.limit * 100:g} %" if self.is_share else f"{self.limit:g} s"
        return f"{self.name} {'of at least' if self.name in _SHARES else 'of at most'} {limit}"

    def value(self, total: Mapping[str, Any]) -> float | None:
        """None when no request gave one."""
        if self.name == "refused":
            arrived = total["num_arrived"]
            return (total["num_refused"] + total["num_unfinished"]) / arrived if arrived else None
        name, _, which = self.name.partition("_")
        found: float | None = total[self.name if self.name in _SHARES else f"{name}_s_{which}"]
        return found

    def met(self, total: Mapping[str, Any], *, may_lose: bool = False) -> bool:
        """A time needs every request answered, unless `may_lose`."""
        value = self.value(total)
        if value is None:
            return False
        if self.name in _SHARES:
            return value >= self.limit
        lost = total["num_refused"] + total["num_unfinished"] if self.name != "refused" else 0
        return value <= self.limit and (may_lose or not lost)


def all_met(objectives: Sequence[Objective], total: Mapping[str, Any]) -> bool:
    """With a bound on refusals, times are of answered requests."""
    may_lose = any(one.name == "refused" for one in objectives)
    return all(one.met(total, may_lose=may_lose) for one in objectives)


def check_objectives(objectives: Sequence[Objective], setup: Setup) -> None:
    """Raises ScenarioError for an attainment without a limit in any model."""
    for one in objectives:
        limit = f"{one.name.removesuffix('_attainment')}_s"
        if one.name.endswith("_attainment") and not any(getattr(m.model.slo, limit) for m in setup.models):
            raise ScenarioError("--slo", f"{one.name}: no model of the scenario has slo.{limit}")


def parse_objective(text: str) -> Objective:
    """Parse 'ttft_p99=1.0' or 'ttft_attainment=0.99'. Raises ScenarioError."""
    name, equals, limit = text.partition("=")
    names = (*_TIMES, *_SHARES, "refused")
    if not equals or name not in names:
        raise ScenarioError("--slo", f"{text!r} is not like ttft_p99=1.0 {known(name, names)}")
    try:
        number = float(limit.removesuffix("s"))
    except ValueError as error:
        raise ScenarioError("--slo", f"{limit!r} is not a number") from error
    objective = Objective(name, number)
    if not 0 <= number < float("inf") or (objective.is_share and number > 1):
        raise ScenarioError(
            "--slo", f"{name}={limit}: {'a share lies in 0..1' if objective.is_share else 'not a time'}"
        )
    return objective


def parse_range(text: str) -> tuple[int, int]:
    """Parse '2..16' GPUs. Raises ScenarioError."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdigit() or not last.isdigit() or not 1 <= int(first) <= int(last) <= MAX_GPUS:
        raise ScenarioError("--gpus", f"{text!r} is not like 2..16")
    return int(first), int(last)


def with_gpus(tree: Tree, num_gpus: int, server: str = "") -> Tree:
    """Whole servers of one kind (default: the first), and one with the rest. Raises ScenarioError."""
    servers = list(tree["servers"])
    names = [str(one.get("name", "")) for one in servers]
    if server and server not in names:
        raise ScenarioError("--server", f"there is no {server!r} {known(server, names)}")
    at = names.index(server) if server else 0
    kind = dict(servers[at])
    name, per_server = kind.get("name") or "server", int(kind.get("num_gpus", 8))
    whole, rest = divmod(num_gpus, per_server)
    made = []
    if whole:
        made.append({**kind, "name": name, "num_servers": whole})
    if rest:
        made.append({**kind, "name": f"{name}-part" if whole else name, "num_servers": 1, "num_gpus": rest})
    return {**tree, "servers": [*servers[:at], *made, *servers[at + 1 :]]}


@dataclass(slots=True)
class Search:
    """Bisect for the least number of GPUs. More do not always help, so neighbours are tried too, and notes tell where
    the result does not hold."""

    low: int
    high: int
    neighbours: int = 2

    def run(self, try_all: Callable[[Sequence[int]], Mapping[int, bool]]) -> tuple[int | None, list[str]]:
        """(least number or None, notes). `try_all` runs several numbers at once."""
        tried: dict[int, bool] = {}

        def look(*numbers: int) -> None:
            new = [n for n in dict.fromkeys(numbers) if self.low <= n <= self.high and n not in tried]
            tried.update(try_all(new) if new else {})

        look(self.high, self.low)
        if not tried[self.high]:
            look((self.low + self.high) // 2)
            found = [n for n, met in tried.items() if met]
            if not found:
                return None, []
            return None, [f"{self.high} GPUs do not meet it, and {min(found)} do: more of them do not always help"]
        low, high = self.low, self.low if tried[self.low] else self.high
        while high - low > 1:
            middle = (low + high) // 2
            look(middle)
            low, high = (low, middle) if tried[middle] else (middle, high)
        while True:
            look(*(high - n for n in range(1, self.neighbours + 1)), high + 1)
            lower = [n for n in range(high - self.neighbours, high) if tried.get(n)]
            if not lower:
                break
            high = min(lower)
        odd = [n for n, met in sorted(tried.items()) if n > high and not met]
        notes = [f"{', '.join(map(str, odd))} GPUs were tried, too, and miss it"] if odd else []
        if high == self.low > 1:
            notes.append(f"{high} is the least of this range: fewer may do, too")
        return high, notes
