"""A scenario: a named fleet and workload in YAML, as the simulator takes them. docs/simulator.md lists every field.

scenario file ─▶ base files ─▶ key=value settings ─▶ checked words ─▶ Setup, arrivals, history
"""

import gzip
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from glowplug.domain.units import DAY_S
from glowplug.policies.options import base_name
from glowplug.policies.registry import KINDS
from glowplug.simulator.scenario.errors import ScenarioError, from_pydantic
from glowplug.simulator.scenario.fleet import build_setup
from glowplug.simulator.scenario.history import windows_before
from glowplug.simulator.scenario.trace import seconds_of
from glowplug.simulator.scenario.traffic import Traffic
from glowplug.simulator.scenario.tree import Tree, in_units, override, read_tree
from glowplug.simulator.scenario.words import ScenarioWords
from glowplug.simulator.setup import Setup
from glowplug.simulator.workload.arrival import Arrival, TraceError

__all__ = ["Scenario", "ScenarioError", "load", "load_tree"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one run needs. `notes` says what was stood in for: a person must read them beside every figure."""

    words: ScenarioWords
    setup: Setup
    traffic: Traffic
    tree: Mapping[str, Any]  # as written, settings laid over: what a run folder keeps, and `load_tree` takes again
    beside: Path  # where its relative paths start

    @property
    def name(self) -> str:
        return self.words.name

    @property
    def seconds(self) -> float:
        return self.words.seconds

    @property
    def seed(self) -> int:
        return self.words.seed

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.traffic.notes))

    def arrivals(self, seed: int | None = None) -> Iterator[Arrival]:
        """The requests, in order of time; the same for the same seed (the scenario's own when none is given)."""
        return self.traffic.arrivals(self.seed if seed is None else seed)


def load(path: Path, settings: Iterable[str] = ()) -> Scenario:
    """The scenario in `path` with 'dotted.path=value' settings over it. Raises ScenarioError, one line that names the
    field, or the file and line of a trace that cannot be read."""
    tree = override(read_tree(path.resolve()), settings, path.resolve().parent)
    tree.setdefault("name", path.stem)
    return load_tree(tree, path.resolve().parent)


def load_tree(tree: Tree, beside: Path) -> Scenario:
    """The scenario that a mapping describes. Raises ScenarioError."""
    try:
        seconds = seconds_of(in_units(tree), beside)
    except (TraceError, OSError) as error:
        raise ScenarioError("workload.source", str(error)) from error
    tree = tree if seconds is None else {**tree, "seconds": seconds}
    try:
        words = ScenarioWords.model_validate(in_units(tree))
    except ValidationError as error:
        raise from_pydantic(error, "") from error
    setup, lengths = build_setup(words)
    keys = [one.model.key for one in setup.models]
    try:
        traffic = Traffic(words.workload, keys, words.seconds, beside, lengths)
        if next(traffic.arrivals(words.seed), None) is None:  # a trace whose first row is not sound says so now
            traffic.require_requests()
    except TraceError as error:
        raise ScenarioError("workload.source", str(error)) from error
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise ScenarioError("workload.source", f"{words.workload.source}: {error}") from error
    return Scenario(words, _with_past(words, setup, traffic), traffic, tree, beside)


def _with_past(words: ScenarioWords, setup: Setup, traffic: Traffic) -> Setup:
    """The Setup with the time of day the trace begins at, and what its predictor saw before."""
    began_at = setup.began_at + words.workload.start_s % DAY_S
    if not words.history.seconds:
        return replace(setup, began_at=began_at)
    window_s = words.history.window_s or _window_s(setup)
    found = {one.model.key: windows_before(words.history, traffic, one, window_s, began_at) for one in setup.models}
    history = {key: windows for key, windows in found.items() if windows}
    if not history:
        traffic.notes.append(f"history: {words.workload.source} gives no past here: the predictor begins without one")
    return replace(setup, began_at=began_at, history=history)


def _window_s(setup: Setup) -> float:
    """The predictor's window: its own setting, or what the forecaster's paper uses."""
    own: float = getattr(KINDS["prediction"].get(base_name(setup.policies.prediction)), "WINDOW_S", 60.0)
    return setup.params.predictor.window_s or own
