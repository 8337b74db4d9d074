"""The Python API of the simulator.

import glowplug_lab

figures = glowplug_lab.simulate("scenarios/small.yaml", {"policies": "warmserve"})
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug_lab.simulator.jobs import run_case
from glowplug_lab.simulator.scenario.load import load, load_tree
from glowplug_lab.simulator.scenario.tree import override
from glowplug_lab.simulator.sweep import cases, variants


def simulate(
    scenario: str | Path | Mapping[str, Any], settings: Mapping[str, Any] | None = None, *, seed: int | None = None
) -> dict[str, Any]:
    """Simulate a scenario, given as a file or a mapping, and return its figures.

    `settings` override it by dotted path (`{"policies": "warmserve"}`). Figures: `total` (requests, TTFT and TPOT in
    seconds, attainment), `models` (likewise), `fleet` (GPU seconds, starts, bytes). Raises ScenarioError and OSError.
    """
    stated = [f"{path}={value}" for path, value in (settings or {}).items()]
    if isinstance(scenario, Mapping):
        whole = load_tree(override(dict(scenario), stated, Path()), Path())
    else:
        whole = load(Path(scenario), stated)
    (case,) = cases(dict(whole.tree), whole.beside, variants(()), (whole.seed if seed is None else seed,))
    return run_case(case, None).numbers
