"""A virtual clock that runs timers by due time, without sleeping or chance."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Action = Callable[..., object]


@dataclass(slots=True, eq=False)
class Timer:
    """`action` is None once run or cancelled."""

    at_s: float
    action: Action | None
    arguments: tuple[Any, ...]

    def cancel(self) -> None:
        self.action = None
        self.arguments = ()


class Kernel:
    """Seconds. Timers due together run in the order they were set."""

    __slots__ = ("_heap", "_order", "now_s", "num_done")

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.num_done = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = 0

    def at(self, at_s: float, action: Action, *arguments: Any) -> Timer:
        """A past time counts as now, after timers already due."""
        if at_s < self.now_s:
            at_s = self.now_s
        timer = Timer(at_s, action, arguments)
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, timer))
        return timer

    def after(self, delay_s: float, action: Action, *arguments: Any) -> Timer:
        """Raises ValueError for a negative delay or nan."""
        if not delay_s >= 0:
            raise ValueError(f"a delay of {delay_s} s")
        return self.at(self.now_s + delay_s, action, *arguments)

    @property
    def next_s(self) -> float | None:
        heap = self._heap
        while heap and heap[0][2].action is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def step(self) -> bool:
        heap = self._heap
        while heap:
            at_s, _, timer = heapq.heappop(heap)
            action = timer.action
            if action is None:
                continue
            timer.action = None
            self.now_s = at_s
            self.num_done += 1
            action(*timer.arguments)
            return True
        return False

    def run(self, until_s: float) -> None:
        """Run all timers up to and at `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.step()
        self.now_s = max(self.now_s, until_s)
