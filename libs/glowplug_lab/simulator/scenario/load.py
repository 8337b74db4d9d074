"""Loading of scenarios, each a named fleet and workload in YAML. docs/simulator.md says what the fields mean.

scenario file ─▶ base files ─▶ key=value settings ─▶ checked words ─▶ Setup, arrivals, history
"""

import gzip
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from pydantic import ValidationError

from glowplug.domain.units import DAY_S
from glowplug.policies.options import base_name
from glowplug.policies.prediction.port import WindowTotals
from glowplug.policies.registry import choose
from glowplug_lab.simulator.scenario.errors import ScenarioError, from_pydantic
from glowplug_lab.simulator.scenario.fleet import build_setup
from glowplug_lab.simulator.scenario.trace import seconds_of
from glowplug_lab.simulator.scenario.traffic import Bin, Traffic
from glowplug_lab.simulator.scenario.tree import Tree, in_units, override, read_tree
from glowplug_lab.simulator.scenario.words import HistoryWords, ScenarioWords
from glowplug_lab.simulator.setup import ModelSetup, Setup
from glowplug_lab.simulator.workload.arrival import Arrival, TraceError

BATCH = 8  # sequences assumed to run together when a request's time in flight is estimated
EULER = 0.5772  # the mean of the Gumbel distribution
__all__ = ["Scenario", "ScenarioError", "load", "load_tree"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A loaded scenario, ready to run. `notes` names what was replaced, and must be shown with every figure."""

    words: ScenarioWords
    setup: Setup
    traffic: Traffic
    tree: Mapping[str, Any]  # as written, with settings; a run folder keeps it and `load_tree` reads it
    beside: Path  # folder of its relative paths

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
        """The requests in order of time, the same for the same seed (the scenario's own if none is given)."""
        return self.traffic.arrivals(self.seed if seed is None else seed)


def load(path: Path, settings: Iterable[str] = ()) -> Scenario:
    """Load the scenario in `path` with 'dotted.path=value' settings over it. Raises ScenarioError naming the field, or
    the file and line of a trace that cannot be read."""
    tree = override(read_tree(path.resolve()), settings, path.resolve().parent)
    tree.setdefault("name", path.stem)
    return load_tree(tree, path.resolve().parent)


def load_tree(tree: Tree, beside: Path) -> Scenario:
    """Load the scenario that a mapping describes. Raises ScenarioError."""
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
        if next(traffic.arrivals(words.seed), None) is None:  # an invalid first row raises here
            traffic.require_requests()
    except TraceError as error:
        raise ScenarioError("workload.source", str(error)) from error
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise ScenarioError("workload.source", f"{words.workload.source}: {error}") from error
    return Scenario(words, _with_past(words, setup, traffic), traffic, tree, beside)


def _with_past(words: ScenarioWords, setup: Setup, traffic: Traffic) -> Setup:
    """The Setup with the time of day at which the trace begins, and the predictor's history."""
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
    own: float = getattr(choose("prediction", base_name(setup.policies.prediction)), "WINDOW_S", 60.0)
    return setup.params.predictor.window_s or own


def windows_before(
    words: HistoryWords, traffic: Traffic, one: ModelSetup, window_s: float, began_s: float
) -> tuple[WindowTotals, ...]:
    """The closed windows of one model before `began_s` (epoch seconds), oldest first, without a gap, on the grid of
    multiples of `window_s`. Empty when the trace has no past."""
    key = one.model.key
    bins = traffic.past(key, words.seconds)
    if not bins:
        return ()
    pairs = traffic.lengths_of(key).pairs[:2000]
    prompt, response = fmean(p for p, _ in pairs), fmean(r for _, r in pairs)
    request_s = words.request_s or request_seconds(one, prompt, response)
    spread = max(1.0, traffic.words.cv)
    last = int(began_s // window_s)
    first = math.ceil((began_s + bins[0][0]) / window_s)
    grouped: dict[int, list[Bin]] = {}
    for bin_ in bins:
        for number, part in _cut(bin_, began_s, window_s):
            grouped.setdefault(number, []).append(part)

    def window(number: int) -> WindowTotals:
        parts = grouped.get(number, [])
        num = math.fsum(one[2] for one in parts)
        level = max((one[2] / one[1] * request_s for one in parts), default=0.0)
        peak = highest(level, spread, max(2.0, window_s / request_s)) if level else 0.0
        return WindowTotals(
            started_at=number * window_s,
            window_s=window_s,
            num_requests=num,
            prompt_tokens=num * prompt,
            response_tokens=num * response,
            concurrency_mean=num * request_s / window_s,
            concurrency_peak=max(peak, 1.0 if num >= 0.5 else 0.0),
        )

    return tuple(map(window, range(first, last)))


def request_seconds(one: ModelSetup, prompt: float, response: float) -> float:
    """Estimate the seconds in flight of a request of these lengths, on the model's first kind of GPU in a batch of
    8."""
    costs = next(iter(one.costs.values()))
    context = round(BATCH * (prompt + response / 2))
    return costs.prefill_s(round(prompt), round(prompt * prompt)) + response * costs.decode_s(BATCH, context)


def _cut(bin_: Bin, began_s: float, window_s: float) -> Iterator[tuple[int, Bin]]:
    """(number of the window, part of the bin in it) for each window that a bin touches."""
    from_s, width_s, num = bin_
    at_s, end_s = began_s + from_s, began_s + from_s + width_s
    while at_s < end_s:
        number = int(at_s // window_s)
        upto_s = min(end_s, (number + 1) * window_s)
        if upto_s <= at_s:  # nothing is left, by rounding
            return
        yield number, (at_s - began_s, upto_s - at_s, num * (upto_s - at_s) / width_s)
        at_s = upto_s


def highest(mean: float, cv: float, num: float) -> float:
    """The expected maximum, at least `mean`, of `num` independent gamma-distributed numbers with this mean and a
    variance of cv^2 mean: the quantile 1 - e^-0.577 / num (Gumbel), by Wilson and Hilferty."""
    shape = mean / (cv * cv)
    deviate = max(0.0, NormalDist().inv_cdf(1 - math.exp(-EULER) / num))
    root = 1 - 1 / (9 * shape) + deviate / (3 * math.sqrt(shape))
    return max(mean, mean * root**3)
