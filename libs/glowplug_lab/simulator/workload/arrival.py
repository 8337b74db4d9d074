"""The types of a workload: a request to come, a count of requests, and the error of an unreadable trace."""

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Arrival(NamedTuple):
    """A request to come: its time (seconds from the start of its trace), model and lengths. `expected_tokens` is a
    length predictor's estimate of its response; 0: none. `tenant`: by name; "": of nobody in particular. `prefix`: the
    blocks of its prompt (policies/routing/prefix_index.py), where its trace has them."""

    at_s: float
    model: str
    prompt_tokens: int
    response_tokens: int
    expected_tokens: int = 0
    tenant: str = ""
    prefix: tuple[int, ...] = ()


def merge(*streams: Iterable[Arrival]) -> Iterator[Arrival]:
    """Merge ordered streams to one; ties go to the stream named first."""
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)


class Count(NamedTuple):
    """`num_requests` for one model somewhere in `[from_s, from_s + width_s)`, from a trace that holds counts only."""

    from_s: float
    width_s: float
    model: str
    num_requests: int


class TraceError(ValueError):
    """A trace cannot be read. The message names the file, the line and the field."""

    def __init__(self, source: str, line: int, field: str, problem: str) -> None:
        where = f"{source}, line {line}" if line else source
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self._arguments = (source, line, field, problem)

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, int, str, str]]:
        """Pickle the error as its arguments, for worker processes."""
        return type(self), self._arguments
