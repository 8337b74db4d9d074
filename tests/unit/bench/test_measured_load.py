"""A ratio of two measured runs is printed where the machine was alike busy in both, and nowhere else."""

import re
from pathlib import Path

import pytest

from bench.measured.load import Timed, compare, differ

BENCH = Path(__file__).parents[3] / "bench"


def runs(load: float, *figures: float) -> list[Timed]:
    return [Timed(figure, load) for figure in figures]


def test_a_ratio_is_of_the_medians_with_the_range_of_its_pairs_and_the_load_it_was_taken_at() -> None:
    ratio = compare(runs(0.5, 20.0, 24.0, 22.0), runs(1.1, 2.0, 2.0, 1.0), num_cores=2)
    assert (ratio.middle, ratio.low, ratio.high) == (11.0, 10.0, 22.0)
    assert ratio.show(".0f") == "11x (10x to 22x), load 0.5 to 1.1"


def test_runs_at_other_loads_have_no_ratio() -> None:
    """A plain start at load 10 to 13 beside a parked one at 5 to 6 read 40 x; in one run at rest it is 12 x."""
    ratio = compare(runs(11.5, 76.4, 82.0), runs(5.5, 1.8, 2.0, 2.5), num_cores=2)
    assert ratio.show() == "no ratio: the load averages differ, 11.5 and 5.5"
    assert ratio.middle != ratio.middle


@pytest.mark.parametrize(
    ("load", "other", "alike"),
    [(0.1, 1.0, True), (0.1, 1.3, False), (8.0, 11.9, True), (8.0, 12.1, False), (12.1, 8.0, False)],
)
def test_loads_are_alike_within_half_of_the_cores_or_half_as_much_again(load: float, other: float, alike: bool) -> None:
    assert (differ([load], [other], num_cores=2) == "") is alike


def test_what_was_not_run_has_no_ratio() -> None:
    assert compare([], runs(1.0, 2.0)).show() == "no ratio: one of them was not run"


def test_every_bench_that_prints_a_ratio_of_measured_figures_takes_it_from_here() -> None:
    """Simulated rows are the same on any machine, so they are not among them."""
    printed = re.compile(r"""\{[^{}]*\}\s?x\b""")
    texts = {path.relative_to(BENCH): path.read_text() for path in BENCH.rglob("*.py")}
    found = {path for path, text in texts.items() if path.parts[0] != "papers" and printed.search(text)}
    assert Path("router/run.py") in found, "the search finds those there are"
    named = {path for path in found if "measured.load import" not in texts[path] and path.parts[0] != "measured"}
    assert not named, f"take the ratio from bench/measured/load.py: {sorted(map(str, named))}"


@pytest.mark.parametrize(
    "page", ["README.md", "docs/engines/vllm.md", "docs/engines/llamacpp.md", "docs/observability.md"]
)
def test_a_page_that_says_how_many_times_names_the_load_it_was_so_at(page: str) -> None:
    """A ratio of measured figures without the load of its run is a statement about a machine nobody knows."""
    blocks = re.split(r"\n\n|\n(?=\|)", (BENCH.parent / page).read_text())
    told = [block for block in blocks if re.search(r"\b\d+(\.\d+)?x\b", block)]
    assert [block for block in told if "load" not in block] == []
