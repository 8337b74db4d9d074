"""Every row of the papers' page runs.

Lane: system (a row of each paper, 45 s), long (the others).
"""

import json
import math
import statistics
from collections.abc import Iterator

import pytest

from bench.papers import data, results, table, u_workloads, w_mux
from bench.papers.cache import Kept
from bench.papers.catalogue import EXPERIMENTS
from bench.papers.experiment import Experiment, Outcome, Runs

pytestmark = pytest.mark.skipif(not data.folder().is_dir(), reason=f"no traces in GLOWPLUG_DATA={data.folder()}")

SEED = 1
EACH = ("W1", "H2", "P1", "S2", "M1", "M2", "U")  # a row of each paper, and that of the union
MADE: dict[tuple[str, str], Outcome] = {}  # rows that share outcomes share them here, too


def outcome(experiment: Experiment, case: str) -> Outcome:
    key = (experiment.kept_as, case)
    if key not in MADE:
        MADE[key] = json.loads(json.dumps(experiment.run(case, SEED, True)))
    return MADE[key]


def numbers(found: Outcome) -> Iterator[float]:
    return (value for value in found.values() if isinstance(value, int | float))


@pytest.mark.parametrize(
    "experiment",
    [e if e.id in EACH else pytest.param(e, marks=pytest.mark.long) for e in EXPERIMENTS],
    ids=lambda e: e.id,
)
def test_a_row_runs_is_judged_and_comes_back_from_its_file_as_it_was(experiment: Experiment) -> None:
    """M1 and M2 raised AttributeError for weeks, while the page showed results of older code."""
    cases = {case: {SEED: outcome(experiment, case)} for case in experiment.cases(True)}
    for case, found in cases.items():
        assert any(math.isfinite(value) and value > 0 for value in numbers(found[SEED])), case
    made = [
        Kept(
            digest="d",
            took_s=1.0,
            outcome={},
            commit="c",
            date="2026-01-02 03:04:05",
            machine="2 cores, none",
            load=0.5,
        )
    ]
    result = results.judged(experiment, Runs(cases), made)
    text = results.dump(result)
    again = results.read(text)
    assert results.dump(again) == text
    page = table.page([again])
    assert table.pictures([again]).keys() == {f"{again.row.lower()}-{n.replace(' ', '-')}.svg" for n in result.plots}
    assert f"| {result.ours} | {result.verdict} | 1 |" in page and f"- {experiment.id}: of c" in page
    assert "None" not in page


@pytest.mark.parametrize(
    ("workload", "system"),
    [(name, system) for name, found in u_workloads.WORKLOADS.items() for system in found.alike[:1]],
)
def test_a_system_that_is_not_run_does_what_the_one_in_its_place_does(workload: str, system: str) -> None:
    runs = [u_workloads.run(workload, name, SEED, True) for name in (system, "serverless vLLM")]
    assert runs[0] == pytest.approx(runs[1], nan_ok=True)


def test_muxserves_steps_are_of_the_published_prompts() -> None:
    cut = [min(w_mux.MAX_PROMPT, prompt) for prompt, _ in data.lengths("azure_2023_conv")]
    assert statistics.fmean(cut) == pytest.approx(w_mux.PROMPT_TOKENS, abs=1e-3)
