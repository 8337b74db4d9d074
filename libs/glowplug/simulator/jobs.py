"""Cases carried out, here or in worker processes: the same numbers either way, for nothing in a run knows where it is.

A worker gets the scenario as written, never an object of ours, and answers with plain numbers; what a run records goes
to its own folder.
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

from glowplug.simulator.results import summary
from glowplug.simulator.run_folder import recorded
from glowplug.simulator.scenario.load import ScenarioError, load_tree
from glowplug.simulator.sweep import Case
from glowplug.simulator.workload.arrival import TraceError
from glowplug.simulator.world import World

POLL_S = 0.2
Progress = Callable[[Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case: its numbers (see `results.summary`), and the notes that must stand beside them."""

    variant: str
    seed: int
    numbers: dict[str, Any]
    notes: tuple[str, ...]


class BrokenRun(AssertionError):
    """An invariant of a simulated run does not hold. The message names the run and its seed, says what broke, and on a
    line of its own the command that breaks it again, where one is known."""


def run_case(case: Case, folder: Path | None, progress: Callable[[float], None] | None = None) -> Outcome:
    """One run; with a `folder`, everything that happened in it is recorded there. Raises BrokenRun when an invariant
    breaks (those of checkers.py are watched when the case is checked), ScenarioError when its trace turns out not to be
    sound. Any other error is a mistake of ours: it gets a note with the run and the command."""
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
    """The message; of an assertion without one, where it stands and what it says."""
    if str(error):
        return str(error)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(at.filename).name}, line {at.lineno}: {at.line}"


def run_cases(
    cases: Sequence[Case], folders: Sequence[Path | None], jobs: int, progress: Progress | None = None
) -> list[Outcome]:
    """All cases in their order, `jobs` at a time. `progress` is called with the share done of each, now and then."""
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
        try:  # around the submits too: a Ctrl-C that came just before it was held back is raised among them
            # a terminal sends Ctrl-C to everybody: workers inherit that it is held back, and are ended from here
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
    """Runs have no reader any more once the process that asked for them has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(number: int, case: Case, folder: Path | None) -> Outcome:
    return run_case(case, folder, partial(_shares.__setitem__, number))
