"""Runs of cases, in this process or in worker processes, with the same numbers either way.

A worker gets the scenario as written, never one of our objects, and returns plain numbers; what a run records goes to
its own folder.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from glowplug_lab.simulator.results import summary
from glowplug_lab.simulator.run_folder import recorded
from glowplug_lab.simulator.scenario.load import ScenarioError, load_tree
from glowplug_lab.simulator.sweep import Case
from glowplug_lab.simulator.workload.arrival import TraceError
from glowplug_lab.simulator.world import World

POLL_S = 0.2
Progress = Callable[[Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one case: its numbers (see `results.summary`), and the notes to be shown with them."""

    variant: str
    seed: int
    numbers: dict[str, Any]
    notes: tuple[str, ...]


class BrokenRun(AssertionError):
    """An invariant of a simulated run does not hold. The message names the run, its seed and what broke, and on a line
    of its own the command that reproduces it, if known."""


def run_case(case: Case, folder: Path | None, progress: Callable[[float], None] | None = None) -> Outcome:
    """Run one case, and record everything that happens in `folder` if given. Raises BrokenRun when an invariant breaks
    (those of checkers.py only if the case is checked), and ScenarioError when the trace turns out to be invalid. Any
    other error is a bug: it gets a note with the run and the command."""
    scenario = load_tree(case.tree, case.beside)
    label = f"{scenario.name}, {case.variant}, seed {case.seed}"
    world = World(scenario.setup, scenario.arrivals(case.seed), check=case.check, label=label)
    with recorded(world, scenario, case, folder) as finish:
        try:
            results = world.run(scenario.seconds, drain_s=scenario.words.drain_s, progress=progress)
        except TraceError as error:
            raise ScenarioError("workload.source", str(error)) from error
        except AssertionError as error:
            raise BrokenRun(_described(label, _what(error), case)) from error
        except Exception as error:
            error.add_note(_described(label, "this run broke off", case))
            raise
        numbers = summary(results)
        finish(results, numbers)
    return Outcome(case.variant, case.seed, numbers, scenario.notes)


def _described(label: str, what: str, case: Case) -> str:
    what = what if what.startswith(label) else f"{label}: {what}"
    return f"{what}\nagain: {case.again}" if case.again else what


def _what(error: AssertionError) -> str:
    """The message of an error; for an assertion without one, its file, line and text."""
    if str(error):
        return str(error)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(at.filename).name}, line {at.lineno}: {at.line}"


def run_cases(
    cases: Sequence[Case], folders: Sequence[Path | None], jobs: int, progress: Progress | None = None
) -> list[Outcome]:
    """Run all cases, `jobs` at a time, and return their outcomes in order. `progress` is called from time to time with
    the share done of each case."""
    if jobs > 1 and len(cases) > 1:
        return _in_processes(cases, folders, min(jobs, len(cases)), progress)
    done = [0.0] * len(cases)

    def report(number: int, share: float) -> None:
        done[number] = share
        if progress is not None:
            progress(done)

    return [
        run_case(case, folder, partial(report, number))
        for number, (case, folder) in enumerate(zip(cases, folders, strict=True))
    ]


def _in_processes(
    cases: Sequence[Case], folders: Sequence[Path | None], jobs: int, progress: Progress | None
) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    shares = context.Array(ctypes.c_double, len(cases), lock=False)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(shares,)) as pool:
        unheld = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:  # includes the submits: a Ctrl-C from just before the block is raised there
            # A terminal sends Ctrl-C to all processes: workers inherit the block, and this process ends them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            futures = [
                pool.submit(_work, number, case, folder)
                for number, (case, folder) in enumerate(zip(cases, folders, strict=True))
            ]
            signal.pthread_sigmask(signal.SIG_SETMASK, unheld)
            pending = set(futures)
            while pending:
                finished, pending = wait(pending, timeout=POLL_S, return_when="FIRST_EXCEPTION")
                for future in finished:
                    future.result()
                if progress is not None:
                    progress(shares[:])
        except BaseException:  # Ctrl-C too: a run may have hours left
            signal.pthread_sigmask(signal.SIG_SETMASK, unheld)
            for worker in multiprocessing.active_children():
                worker.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


_shares: Any = None


def _begin(shares: Any) -> None:
    global _shares
    _shares = shares
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit once the parent process has ended, since nobody reads the runs any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(number: int, case: Case, folder: Path | None) -> Outcome:
    return run_case(case, folder, partial(_shares.__setitem__, number))
