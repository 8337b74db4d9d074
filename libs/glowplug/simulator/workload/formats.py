"""The public formats, each known by its header. A trace without token counts has its lengths drawn.

| format | columns |
|---|---|
| our own | `t_s, prompt_tokens, response_tokens` and, where there are several, `model` |
| Azure LLM 2023 and 2024 | `TIMESTAMP, ContextTokens, GeneratedTokens` |
| BurstGPT | `Timestamp, Model, Request tokens, Response tokens, ...`; failed requests (no response) are left out |
| Mooncake | JSON lines: `timestamp` (ms), `input_length, output_length`; or `t_ms, prompt_tokens, response_tokens` |
| counted | `t_s, requests` and, where there are several, `model`; each row covers the time up to the next one's |
| ServeGen, flat | `model, client, t_s, requests, dist, shape` (windows of 600 s; every client is one model) |
| Azure Functions 2019 | `HashFunction, Trigger, 1 ... 1440`: a day in minutes; every function is one model |
| Azure Functions 2021 | `app, func, end_timestamp, duration`; every function is one model |
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from glowplug.simulator.workload.arrival import Arrival, Count, TraceError, merge
from glowplug.simulator.workload.sampling import Lengths, binomial, renewal_times, spread
from glowplug.simulator.workload.tables import Row, header, rows

SERVEGEN_WINDOW_S: Final = 600.0
MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a trace is read: the model of rows that name none, lengths for those without, and what is kept."""

    model: str = "model"
    lengths: Lengths | None = None
    keep: float = 1.0  # share of the requests
    trigger: str = ""  # of Azure Functions; "" takes all (mCache section 6.1 takes "http")
    chance: Random = field(default_factory=lambda: Random(0))

    def draw(self, source: str) -> Lengths:
        """Lengths to draw from. Raises TraceError when the trace has none and none were given."""
        if self.lengths is None:
            problem = "the trace has no token counts, and no lengths were given to draw from"
            raise TraceError(source, 0, "lengths", f"{problem} (workload.lengths names some)")
        return self.lengths


@dataclass(frozen=True, slots=True)
class Format:
    """One public format: the columns that tell it (all of them are there), how an error names what is read, and who
    reads it. `has_lengths`: it says how long requests are."""

    columns: tuple[str, ...]
    says: str
    read: Callable[[Path, Reading], Iterator[Arrival]]
    has_lengths: bool = False


def read(path: Path, how: Reading | None = None) -> Iterator[Arrival]:
    """The requests of a trace in order of time, the first at or after 0 s.

    Raises TraceError for a format that is not known, and, where it stands, for a row that is not sound.
    """
    return _format(path).read(path, how or Reading())


def _format(path: Path) -> Format:
    """The format of a trace. Raises TraceError for what a header of no known one lacks of the format that most of its
    columns are of."""
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
    """The columns of every format that is read, for a person who has a trace of another."""
    return f"read are: {'; '.join(one.says for one in FORMATS)}"


def is_counted(path: Path) -> bool:
    """Whether a trace holds counts in bins (`t_s, requests`), not requests. Raises TraceError when it is empty."""
    names = set(header(path)) if path.is_file() else set()
    return {"t_s", "requests"} <= names and "dist" not in names


def has_lengths(path: Path) -> bool:
    """Whether a trace says how long its requests are. Raises TraceError when its columns are of no known format."""
    return path.is_dir() or _format(path).has_lengths  # a folder is ServeGen's own


def _kept(path: Path, arrivals: Iterable[tuple[int, Arrival]], how: Reading, field: str) -> Iterator[Arrival]:
    """Thinned, from the first one on; each comes with its line, and `field` says when. Raises TraceError for one before
    the last."""
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
) -> Callable[[Path, Reading], Iterator[Arrival]]:
    """A reader of rows that are a request each: its columns, the time as `at_s` reads it; those alone that were
    `answered`, where others are in the trace too."""

    def each(path: Path, how: Reading) -> Iterator[tuple[int, Arrival]]:
        for row in rows(path):
            if answered and not row.count(response):
                continue
            name = row.text(model) if model and model in row.values else how.model
            yield row.line, Arrival(at_s(row, time), name, *_tokens(row, prompt, response))

    return lambda path, how: _kept(path, each(path, how), how, time)


def _ms(row: Row, field: str) -> float:
    return row.seconds(field) / 1e3


def counts(path: Path, how: Reading | None = None) -> Iterator[list[Count]]:
    """A counted trace as it is: the Counts of one time after the other, each as wide as the step to the next time
    (the last as the one before it)."""
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
        yield from _spread(group, lengths, how)


def _spread(group: Iterable[Count], lengths: Lengths, how: Reading) -> Iterator[Arrival]:
    """The Counts of one time, thinned, as arrivals in order."""
    kept = [one._replace(num_requests=binomial(one.num_requests, how.keep, how.chance)) for one in group]
    return merge(*(spread(count, lengths, how.chance) for count in kept))


def _servegen(path: Path, how: Reading) -> Iterator[Arrival]:
    lengths = how.draw(str(path))
    windows: dict[float, list[tuple[str, int, str, float]]] = {}
    for row in rows(path):
        name = f"{row.text('model')}-{row.text('client')}"
        dist, num = row.one_of("dist", ("G", "W")), row.count("requests")
        if num:
            windows.setdefault(row.seconds("t_s"), []).append((name, num, dist, row.positive("shape")))
    for from_s in sorted(windows):
        times: list[tuple[float, str]] = []
        for name, num, dist, shape in windows[from_s]:
            num = binomial(num, how.keep, how.chance)  # thinned before it is placed: the client's CV stays what it was
            times += ((t, name) for t in renewal_times(num, SERVEGEN_WINDOW_S, dist, shape, how.chance))
        for at_s, name in sorted(times):
            yield Arrival(from_s + at_s, name, *lengths.draw(how.chance))


def _functions_2019(path: Path, how: Reading) -> Iterator[Arrival]:
    lengths = how.draw(str(path))
    by_minute: list[list[tuple[str, int]]] = [[] for _ in range(1440)]
    for row in rows(path):
        if how.trigger and row.text("Trigger") != how.trigger:
            continue
        name = row.text("HashFunction")
        for minute in range(1440):
            cell = row.values.get(str(minute + 1))
            if cell != "0" and (num := row.count(str(minute + 1))):
                by_minute[minute].append((name, num))
    for minute, cells in enumerate(by_minute):
        yield from _spread((Count(minute * MINUTE_S, MINUTE_S, name, num) for name, num in cells), lengths, how)


def _functions_2021(path: Path, how: Reading) -> Iterator[Arrival]:
    lengths = how.draw(str(path))
    starts = sorted((row.seconds("end_timestamp") - row.seconds("duration"), row.text("func")) for row in rows(path))
    return _kept(path, ((0, Arrival(at_s, func, *lengths.draw(how.chance))) for at_s, func in starts), how, "")


OWN: Final = ("t_s", "prompt_tokens", "response_tokens")
AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST: Final = ("Timestamp", "Model", "Request tokens", "Response tokens")
SERVEGEN: Final = ("model", "client", "t_s", "requests", "dist", "shape")
FLAT: Final = ("t_ms", *OWN[1:])
SEVERAL: Final = "and, where there are several, model"
FORMATS: Final = (
    Format(OWN, f"{', '.join(OWN)} {SEVERAL}", _requests(*OWN, model="model"), has_lengths=True),
    Format(AZURE, f"{', '.join(AZURE)} (Azure LLM)", _requests(*AZURE, Row.moment), has_lengths=True),
    Format(BURST, f"{', '.join(BURST)} (BurstGPT)",
           _requests(BURST[0], *BURST[2:], model=BURST[1], answered=True), has_lengths=True),
    Format(FLAT, ", ".join(FLAT), _requests(*FLAT, _ms), has_lengths=True),
    Format(SERVEGEN, f"{', '.join(SERVEGEN)} (ServeGen)", _servegen),
    Format(("t_s", "requests"), f"t_s, requests {SEVERAL}", _counted),
    Format(("HashFunction", "Trigger", "1", "1440"), "HashFunction, Trigger, 1 ... 1440 (Azure Functions 2019)",
           _functions_2019),
    Format(("app", "func", "end_timestamp", "duration"), "app, func, end_timestamp, duration (Azure Functions 2021)",
           _functions_2021),
    Format(("{",), "JSON lines with timestamp (ms), input_length, output_length (Mooncake)",
           _requests("timestamp", "input_length", "output_length", _ms), has_lengths=True),
)  # fmt: skip


def length_pairs(path: Path) -> list[tuple[int, int]]:
    """Every (prompt_tokens, response_tokens) of a trace that has them, or of a file of lengths alone."""
    names = header(path)
    if {"prompt_tokens", "response_tokens"} <= set(names):
        return [_tokens(row, "prompt_tokens", "response_tokens") for row in rows(path)]
    return [(arrival.prompt_tokens, arrival.response_tokens) for arrival in read(path)]
