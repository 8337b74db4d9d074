"""Types of a workload."""

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Arrival(NamedTuple):
    """`at_s`: seconds from the start of the trace. `expected_tokens`: predicted response length; 0: none. `tenant`: ""
    for none. `prefix`: prompt blocks (policies/routing/prefix_index.py), if traced."""

    at_s: float
    model: str
    prompt_tokens: int
    response_tokens: int
    expected_tokens: int = 0
    tenant: str = ""
    prefix: tuple[int, ...] = ()


def merge(*streams: Iterable[Arrival]) -> Iterator[Arrival]:
    """Ties go to the first stream."""
    return heapq.merge(*streams, key=lambda arrival: arrival.at_s)


class Count(NamedTuple):
    """`num_requests` somewhere in `[from_s, from_s + width_s)`."""

    from_s: float
    width_s: float
    model: str
    num_requests: int


class TraceError(ValueError):
    """The message names file, line and field."""

    def __init__(self, source: str, line: int, field: str, problem: str) -> None:
        where = f"{source}, line {line}" if line else source
        super().__init__(f"{where}: {field}: {problem}" if field else f"{where}: {problem}")
        self._arguments = (source, line, field, problem)

    def __reduce__(self) -> tuple[type["TraceError"], tuple[str, int, str, str]]:
        """Pickle the arguments."""
        return type(self), self._arguments
