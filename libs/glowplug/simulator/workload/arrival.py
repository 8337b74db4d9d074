"""One request that will come, and what is wrong with a trace that cannot be read."""

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request: when it comes (seconds from the start of its trace), for which model, and how long it is.
    `expected_tokens` is what a length predictor would say of its response; 0: nothing."""

    at_s: float
    model: str
    prompt_tokens: int
    response_tokens: int
    expected_tokens: int = 0


def merge(*streams: Iterable[Arrival]) -> Iterator[Arrival]:
    """Several ordered streams as one; ties go to the stream named first."""
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)


class Count(NamedTuple):
    """`num_requests` for one model somewhere in `[from_s, from_s + width_s)`: a trace that was counted, not logged."""

    from_s: float
    width_s: float
    model: str
    num_requests: int


class TraceError(ValueError):
    """A trace that cannot be read. The message names the file, the line and the field."""

    def __init__(self, source: str, line: int, field: str, problem: str) -> None:
        where = f"{source}, line {line}" if line else source
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self._arguments = (source, line, field, problem)

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, int, str, str]]:
        """Between processes it travels as its arguments."""
        return type(self), self._arguments
