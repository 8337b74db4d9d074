"""Readers of public trace formats, recognised by header. Missing token counts are drawn.

| format | columns |
|---|---|
| our own | `t_s, prompt_tokens, response_tokens` and, where there are several, `model` |
| Azure LLM 2023 and 2024 | `TIMESTAMP, ContextTokens, GeneratedTokens` |
| BurstGPT | `Timestamp, Model, Request tokens, Response tokens, ...`; failed requests (no response) are left out |
| Mooncake | JSON lines: `timestamp` (ms), `input_length, output_length`; or `t_ms, prompt_tokens, response_tokens` |
| | ... and either with `hash_ids`, the blocks of 512 tokens of the prompt |
| counted | `t_s, requests` and, where there are several, `model`; each row covers the time up to the next one's |
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from glowplug_lab.simulator.workload.arrival import Arrival, Count, TraceError, merge
from glowplug_lab.simulator.workload.sampling import Lengths, binomial, spread
from glowplug_lab.simulator.workload.tables import Row, header, rows

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Defaults for rows without a model or lengths."""

    model: str = "model"
    lengths: Lengths | None = None
    keep: float = 1.0  # of the requests
    chance: Random = field(default_factory=lambda: Random(0))

    def draw(self, source: str) -> Lengths:
        """Raises TraceError without lengths."""
        if self.lengths is None:
            problem = "the trace has no token counts, and no lengths were given to draw from"
            raise TraceError(source, 0, "lengths", f"{problem} (workload.lengths names some)")
        return self.lengths


@dataclass(frozen=True, slots=True)
class Format:
    """`columns` are all required and identify the format."""

    columns: tuple[str, ...]
    says: str
    read: Callable[[Path, Reading], Iterator[Arrival]]
    has_lengths: bool = False


def read(path: Path, how: Reading | None = None) -> Iterator[Arrival]:
    """Read requests in order of time, the first at or after 0 s.

    Raises TraceError for an unknown format, and, when reached, an invalid row.
    """
    return _format(path).read(path, how or Reading())


def _format(path: Path) -> Format:
    """Raises TraceError for an unknown header, naming the columns missing from the nearest format."""
    names = header(path)
    for one in FORMATS:
        if all(name in names for name in one.columns):
            return one
    near = max(FORMATS, key=lambda one: sum(name in names for name in one.columns) / len(one.columns)).columns
    lacking = [name for name in near if name not in names]
    there = ", ".join(names)[:120]
    if 2 * len(lacking) > len(near):
        raise TraceError(str(path), 1, "header", f"no known format has the columns {there} ({accepted()})")
    raise TraceError(str(path), 1, ", ".join(lacking), f"is missing among the columns {there} ({accepted()})")


def accepted() -> str:
    return f"read are: {'; '.join(one.says for one in FORMATS)}"


def is_counted(path: Path) -> bool:
    """Whether a trace holds counts in bins (`t_s, requests`). Raises TraceError when it is empty."""
    names = set(header(path)) if path.is_file() else set()
    return {"t_s", "requests"} <= names and "dist" not in names


def has_lengths(path: Path) -> bool:
    """Raises TraceError for an unknown format."""
    return _format(path).has_lengths


def _kept(path: Path, arrivals: Iterable[tuple[int, Arrival]], how: Reading, field: str) -> Iterator[Arrival]:
    """Times count from the first. Raises TraceError for an arrival out of order."""
    last_s, start_s = float("-inf"), None
    for line, arrival in arrivals:
        if start_s is None:
            start_s = arrival.at_s
        at_s = arrival.at_s - start_s
        if at_s < last_s:
            problem = f"a request at {at_s:.6g} s comes after one at {last_s:.6g} s (from the first one on)"
            raise TraceError(str(path), line, field, problem)
        last_s = at_s
        if how.keep >= 1 or how.chance.random() < how.keep:
            yield arrival._replace(at_s=at_s)


def _tokens(row: Row, prompt: str, response: str) -> tuple[int, int]:
    return max(1, row.count(prompt)), max(1, row.count(response))


def _requests(
    time: str,
    prompt: str,
    response: str,
    at_s: Callable[[Row, str], float] = Row.seconds,
    *,
    model: str = "",
    answered: bool = False,
    blocks: str = "",
) -> Callable[[Path, Reading], Iterator[Arrival]]:
    """`answered`: skip requests without a response. `blocks`: column of prompt blocks, if present."""

    def each(path: Path, how: Reading) -> Iterator[tuple[int, Arrival]]:
        for row in rows(path):
            if answered and not row.count(response):
                continue
            name = row.text(model) if model and model in row.values else how.model
            prefix = row.numbers(blocks) if blocks in row.values else ()
            yield row.line, Arrival(at_s(row, time), name, *_tokens(row, prompt, response), prefix=prefix)

    return lambda path, how: _kept(path, each(path, how), how, time)


def _ms(row: Row, field: str) -> float:
    return row.seconds(field) / 1e3


def counts(path: Path, how: Reading | None = None) -> Iterator[list[Count]]:
    """A count lasts until the next time (the last as long as the one before). Raises TraceError."""
    how = how or Reading()
    group: list[Count] = []
    width_s = MINUTE_S
    for row in rows(path):
        model = row.text("model") if "model" in row.values else how.model
        here = Count(row.seconds("t_s"), 0.0, model, row.count("requests"))
        if group and here.from_s != group[0].from_s:
            width_s = here.from_s - group[0].from_s
            if width_s < 0:
                raise TraceError(row.source, row.line, "t_s", f"{here.from_s:.6g} s after {group[0].from_s:.6g} s")
            yield [count._replace(width_s=width_s) for count in group]
            group = []
        group.append(here)
    yield [count._replace(width_s=width_s) for count in group]


def _counted(path: Path, how: Reading) -> Iterator[Arrival]:
    lengths = how.draw(str(path))
    for group in counts(path, how):
        kept = [one._replace(num_requests=binomial(one.num_requests, how.keep, how.chance)) for one in group]
        yield from merge(*(spread(count, lengths, how.chance) for count in kept))


OWN: Final = ("t_s", "prompt_tokens", "response_tokens")
AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST: Final = ("Timestamp", "Model", "Request tokens", "Response tokens")
FLAT: Final = ("t_ms", *OWN[1:])
SEVERAL: Final = "and, where there are several, model"
FORMATS: Final = (
    Format(OWN, f"{', '.join(OWN)} {SEVERAL}", _requests(*OWN, model="model"), has_lengths=True),
    Format(AZURE, f"{', '.join(AZURE)} (Azure LLM)", _requests(*AZURE, Row.moment), has_lengths=True),
    Format(BURST, f"{', '.join(BURST)} (BurstGPT)",
           _requests(BURST[0], *BURST[2:], model=BURST[1], answered=True), has_lengths=True),
    Format(FLAT, ", ".join(FLAT), _requests(*FLAT, _ms, blocks="hash_ids"), has_lengths=True),
    Format(("t_s", "requests"), f"t_s, requests {SEVERAL}", _counted),
    Format(("{",), "JSON lines with timestamp (ms), input_length, output_length (Mooncake)",
           _requests("timestamp", "input_length", "output_length", _ms, blocks="hash_ids"), has_lengths=True),
)  # fmt: skip


def length_pairs(path: Path) -> list[tuple[int, int]]:
    """(prompt_tokens, response_tokens) of a trace with requests, or with lengths only."""
    names = header(path)
    if {"prompt_tokens", "response_tokens"} <= set(names):
        return [_tokens(row, "prompt_tokens", "response_tokens") for row in rows(path)]
    return [(arrival.prompt_tokens, arrival.response_tokens) for arrival in read(path)]
