"""The clocks of a run's controllers. By default all are alike: the kernel's virtual clock. Apart, each machine has its
own, and its processes read it and lay messages and rows on it as services do (runtime/clock.py, fleet/clocks.py)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from glowplug.controllers.effects import Tick
from glowplug.domain.moment import moved
from glowplug.events import Event
from glowplug.fleet.clocks import Clocks, laying
from glowplug.runtime.clock import MAX_GAP_S, READ_EVERY_S, SteadyClock
from glowplug_lab.simulator.kernel import Kernel


@dataclass(slots=True)
class _Process:
    """`held`: what came while it is paused; None while it runs."""

    clock: SteadyClock
    clocks: Clocks = field(default_factory=Clocks)
    rows: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)  # table -> key -> as written, as laid
    held: list[Any] | None = None


class Apart:
    """`ahead_s`: how far a machine's clock is ahead of the kernel's, by name of a controller; the agent and prefetcher
    of a node share one. It may be set during the run."""

    def __init__(self, ahead_s: Mapping[str, float]) -> None:
        self.ahead_s = dict(ahead_s)
        self._processes: dict[str, _Process] = {}
        self._kernel = Kernel()

    def begin(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._read()

    def _read(self) -> None:
        for process in self._processes.values():
            if process.held is None:
                process.clock.now_s()
        self._kernel.after(READ_EVERY_S, self._read)

    def _process(self, name: str) -> _Process:
        found = self._processes.get(name)
        if found is None:
            kernel, machine = self._kernel, name.removeprefix("prefetcher-")
            clock = SteadyClock(
                lambda: kernel.now_s, lambda: kernel.now_s + self.ahead_s.get(machine, 0.0), max_gap_s=MAX_GAP_S
            )
            found = self._processes[name] = _Process(clock)
        return found

    def now_s(self, name: str) -> float:
        return self._process(name).clock.now_s()

    def restarted(self, name: str) -> None:
        self._processes.pop(name, None)

    def pause(self, name: str) -> None:
        """Stop a process, as SIGSTOP does: it handles nothing until `resume`."""
        self._process(name).held = []

    def resume(self, name: str) -> list[Any]:
        """Return the stimuli that came meanwhile."""
        process = self._process(name)
        held, process.held = process.held, None
        return held or []

    def holds(self, name: str, stimulus: Any) -> bool:
        """Keep a stimulus back if the process is paused; a process that runs again ticks anyway."""
        held = self._process(name).held
        if held is not None and not isinstance(stimulus, Tick):
            held.append(stimulus)
        return held is not None

    def laid(self, name: str, stimulus: Any) -> tuple[Any, float]:
        """Return a stimulus by the process's clock, and the time by it."""
        process = self._process(name)
        now_s = process.clock.now_s()
        if isinstance(stimulus, Event):
            return process.clocks.laid(stimulus, now_s), now_s
        return self.by(name, stimulus), now_s

    def by(self, name: str, value: Any) -> Any:
        """Move the kernel's times to the process's clock."""
        return moved(value, self.now_s(name) - self._kernel.now_s)

    def rows(self, name: str, table: str, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Return a table's rows by the process's clock, each laid when it is first read."""
        process = self._process(name)
        known, found = process.rows.get(table, {}), dict[str, tuple[Any, Any]]()
        for key, row in rows.items():
            if key in known and known[key][0] is row:
                found[key] = known[key]
            else:
                lay = laying(type(row), process.clocks, process.clock.now_s)
                found[key] = row, lay(row) if lay is not None else row
        process.rows[table] = found
        return {key: laid for key, (_, laid) in found.items()}
