"""Run cases, in this process or in workers, with the same numbers.

Workers get the scenario as written and return plain numbers; recordings go to each run's folder.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from glowplug import __version__
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import SHARED, Node
from glowplug.events.envelope import Event, encode, to_json
from glowplug.events.facts import RequestFinished, RequestRejected
from glowplug.events.subjects import subject
from glowplug_lab.simulator.results import Results, summary
from glowplug_lab.simulator.scenario.load import Scenario, ScenarioError, load_tree
from glowplug_lab.simulator.scenario.trace import is_path
from glowplug_lab.simulator.sweep import Case
from glowplug_lab.simulator.workload.arrival import TraceError
from glowplug_lab.simulator.world import World

# A run on disk; the same scenario, seed and version give the same bytes in every file.
#
#     setup.json       the scenario as it was run, with its seed and version
#     results.json     the figures, per model and in all
#     events.jsonl     every fact and command in its envelope, with its subject: as `glowplug tap -o json` prints them
#     decisions.jsonl  every decision with inputs, rivals and reason
#     requests.jsonl   every request's end
#     timeline.jsonl   bytes on every GPU, whenever they change: {"t_s", "gpu", "grants": [[holder, owner, bytes], ...]}

Finish = Callable[[Results, dict[str, Any]], None]
FILES = ("setup.json", "results.json", "events.jsonl", "decisions.jsonl", "requests.jsonl", "timeline.jsonl")


@contextmanager
def recorded(world: World, scenario: Scenario, case: Case, folder: Path | None) -> Iterator[Finish]:
    """The yielded `finish` takes the results."""
    if folder is None:
        yield lambda results, numbers: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in FILES if name.endswith(".jsonl")}
        tape = _Tape(world, files)
        world.control.on_event.append(tape.event)
        world.control.on_decision.append(tape.decision)
        world.control.on_save.append(tape.saved)

        def finish(results: Results, numbers: dict[str, Any]) -> None:
            _write(folder / "results.json", {"simulated": True, "seed": case.seed, "end_s": results.seconds, **numbers})
            about = {"simulated": True, "version": __version__, "name": scenario.name, "variant": case.variant}
            when = {"seed": case.seed, "began_at": world.began_s, "notes": list(scenario.notes)}
            written = {"scenario": case.tree, "beside": _beside(case, folder)}
            _write(folder / "setup.json", about | when | written)

        yield finish


def _beside(case: Case, folder: Path) -> str:
    """Relative, so that both folders can move; "" without files."""
    return os.path.relpath((case.kept or case.beside).resolve(), folder.resolve()) if _names_a_file(case.tree) else ""


def _names_a_file(tree: Any) -> bool:
    if isinstance(tree, list):
        return any(map(_names_a_file, tree))
    if not isinstance(tree, Mapping):
        return False
    return any(is_path(tree.get(field)) for field in ("source", "lengths")) or any(map(_names_a_file, tree.values()))


class _Tape:
    def __init__(self, world: World, files: Mapping[str, IO[bytes]]) -> None:
        self._world, self._files = world, files
        self._held: dict[str, Any] = {}

    def event(self, event: Event) -> None:
        self._line("events.jsonl", b'{"subject":"%s",%s' % (subject(event.data).encode(), encode(event)[1:]))
        if isinstance(event.data, RequestFinished):
            self._line("requests.jsonl", to_json(event.data))
        elif isinstance(event.data, RequestRejected):  # the fact lacks a time
            at_s = to_json(event.occurred_at)
            self._line("requests.jsonl", b'{"answered_at":%s,%s' % (at_s, to_json(event.data)[1:]))

    def decision(self, decision: DecisionRecord) -> None:
        self._line("decisions.jsonl", to_json(decision))

    def saved(self, table: str, row: Any, now_s: float) -> None:
        if table != "nodes" or not isinstance(row, Node):
            return
        for gpu in row.gpus:
            grants = sorted([grant.holder, grant.owner.value, grant.num_bytes] for grant in gpu.grants)
            grants += [[", ".join(one.holders), SHARED, one.num_bytes] for one in gpu.shared if one.counts]
            if self._held.get(gpu.gpu_id, []) != grants:
                self._held[gpu.gpu_id] = grants
                t_s = round(now_s - self._world.began_s, 6)
                self._line("timeline.jsonl", json.dumps({"t_s": t_s, "gpu": gpu.gpu_id, "grants": grants}).encode())

    def _line(self, name: str, line: bytes) -> None:
        self._files[name].write(line + b"\n")


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


POLL_S = 0.2
Progress = Callable[[Sequence[float]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`numbers`: see `results.summary`."""

    variant: str
    seed: int
    numbers: dict[str, Any]
    notes: tuple[str, ...]


class BrokenRun(AssertionError):
    """A broken invariant; the message has run, seed, and the command that reproduces it."""


def run_case(case: Case, folder: Path | None, progress: Callable[[float], None] | None = None) -> Outcome:
    """Raises BrokenRun for a broken invariant (those of world.py only if checked) and ScenarioError for an invalid
    trace; other errors get a note with run and command."""
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
    if str(error):
        return str(error)
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(at.filename).name}, line {at.lineno}: {at.line}"


def run_cases(
    cases: Sequence[Case], folders: Sequence[Path | None], jobs: int, progress: Progress | None = None
) -> list[Outcome]:
    """Outcomes are in order. `progress` gets each case's share done."""
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
        try:  # with the submits: an earlier Ctrl-C is raised there
            # Ctrl-C reaches all processes: workers inherit the block, and this process ends them.
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
        except BaseException:  # Ctrl-C too: runs may have hours left
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
    """Exit with the parent, the only reader of the runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(number: int, case: Case, folder: Path | None) -> Outcome:
    return run_case(case, folder, partial(_shares.__setitem__, number))
