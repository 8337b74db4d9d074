"""A run on disk: its events line by line as on the bus, and its results.

    setup.json       the scenario as it was run, with its seed and version
    results.json     the figures, per model and in all
    events.jsonl     every fact and command in its envelope, with its subject: as `glowplug tap -o json` prints them
    decisions.jsonl  every decision with inputs, rivals and reason
    requests.jsonl   every request's end
    timeline.jsonl   bytes on every GPU, whenever they change: {"t_s", "gpu", "grants": [[holder, owner, bytes], ...]}

The same scenario, seed and version give the same bytes in every file.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from glowplug import __version__
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import SHARED, Node
from glowplug.events.envelope import Event, encode, to_json
from glowplug.events.facts import RequestFinished, RequestRejected
from glowplug.events.subjects import subject
from glowplug_lab.simulator.results import Results
from glowplug_lab.simulator.scenario.load import Scenario
from glowplug_lab.simulator.scenario.trace import is_path
from glowplug_lab.simulator.sweep import Case
from glowplug_lab.simulator.world import World

Finish = Callable[[Results, dict[str, Any]], None]
FILES = ("setup.json", "results.json", "events.jsonl", "decisions.jsonl", "requests.jsonl", "timeline.jsonl")


@contextmanager
def recorded(world: World, scenario: Scenario, case: Case, folder: Path | None) -> Iterator[Finish]:
    """Record a run of `world` in `folder`; the yielded `finish` takes its results. Without a folder, record nothing."""
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
    """The path of the scenario's own files relative to the run's folder, so that both may move together; "" if it has
    none."""
    return os.path.relpath((case.kept or case.beside).resolve(), folder.resolve()) if _names_a_file(case.tree) else ""


def _names_a_file(tree: Any) -> bool:
    """Return whether any field in the tree takes requests or lengths from a file given by its path."""
    if isinstance(tree, list):
        return any(map(_names_a_file, tree))
    if not isinstance(tree, Mapping):
        return False
    return any(is_path(tree.get(field)) for field in ("source", "lengths")) or any(map(_names_a_file, tree.values()))


class _Tape:
    """A writer of a run's lines, as events happen."""

    def __init__(self, world: World, files: Mapping[str, IO[bytes]]) -> None:
        self._world, self._files = world, files
        self._held: dict[str, Any] = {}

    def event(self, event: Event) -> None:
        self._line("events.jsonl", b'{"subject":"%s",%s' % (subject(event.data).encode(), encode(event)[1:]))
        if isinstance(event.data, RequestFinished):
            self._line("requests.jsonl", to_json(event.data))
        elif isinstance(event.data, RequestRejected):  # the fact alone does not say when
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
