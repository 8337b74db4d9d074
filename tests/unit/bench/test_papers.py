"""The papers' tables: how figures are gathered, judged, kept and drawn. The bench runs the simulations."""

import math

import pytest

from bench.papers import cache, u_union, w4_forecast
from bench.papers.catalogue import EXPERIMENTS, by_id
from bench.papers.experiment import Finding, Runs, Spread, Verdict
from bench.papers.plots import Bars, Lines
from bench.papers.table import show, write

ROWS = ["W1", "W2", "W3", "W4", "W5", "H1", "H2", "H3", "H4", "M1", "M2", "S1", "S2", "P1", "P2", "P3", "P4"]


def test_every_row_of_the_papers_is_there_once() -> None:
    ids = [experiment.id for experiment in EXPERIMENTS]
    assert [name for name in ids if name in ROWS] == ROWS
    assert len(set(ids)) == len(ids)
    with pytest.raises(KeyError, match="no row 'W9'"):
        by_id("W9")


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.id)
def test_what_a_row_reads_exists_and_its_cases_have_names_of_their_own(experiment) -> None:
    assert len(cache.digest(tuple(experiment.reads))) == 16
    for quick in (True, False):
        cases = experiment.cases(quick)
        assert cases and len(set(cases)) == len(cases)


def test_a_ratio_is_taken_seed_by_seed() -> None:
    ratio = Spread((4.0, 9.0)) / Spread((2.0, 3.0))
    assert ratio.values == (2.0, 3.0)
    assert ratio.show(".1f", "x") == "2.5x (2.0x to 3.0x)"
    assert Spread((1.0,)).show() == "1.00"
    assert Spread(()).show() == "none"
    assert math.isinf((Spread((1.0,)) / Spread((0.0,))).mean)


def test_a_figure_that_was_not_measured_is_not_made_up() -> None:
    runs = Runs({"case": {1: {"a": 1.0}}})
    with pytest.raises(KeyError):
        runs.of("case", "b")
    table = show([(by_id("W1"), None)])
    assert "not run" in table


def test_kept_outcomes_are_of_the_code_that_made_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "KEPT", tmp_path)
    reads = ("bench/papers/plots.py",)
    cache.store("X", "a case", 1, False, cache.digest(reads), {"a": 1.0}, 2.0)
    assert cache.load("X", "a case", 1, False, reads, stale=False) == {"a": 1.0}
    assert cache.load("X", "a case", 2, False, reads, stale=False) is None
    cache.store("X", "a case", 1, False, "of another day", {"a": 2.0}, 2.0)
    assert cache.load("X", "a case", 1, False, reads, stale=False) is None
    assert cache.load("X", "a case", 1, False, reads, stale=True) == {"a": 2.0}


def test_pictures_are_the_same_bytes_for_the_same_numbers() -> None:
    lines = Lines(title="a < b", x_label="x", y_label="y", series={"one": [(0.0, 1.0), (10.0, 3.0)]})
    bars = Bars(title="b", x_label="x", y_label="y", groups=["a", "b"], series={"s": [1.0, math.nan]}, log_y=True)
    for picture in (lines, bars):
        assert picture.svg() == picture.svg()
        assert "(simulated)" in picture.svg()
    assert "a &lt; b" in lines.svg()
    assert bars.svg().count('fill="#3b6fb6"') == 2  # one bar and its legend: nothing is drawn for what is not there


def test_errors_of_a_forecast_are_relative_and_begin_on_the_second_day() -> None:
    """WarmServe section 7.4."""
    loads = [10.0] * (2 * w4_forecast.PER_DAY)
    assert set(w4_forecast.errors(loads, w4_forecast.CspParams())) == {0.0}
    assert len(w4_forecast.errors(loads, w4_forecast.CspParams())) == w4_forecast.PER_DAY


def _verdict(ours: str) -> Verdict:
    return Verdict(ours=ours, passed=True, findings=[Finding("a figure", ours)])


def test_a_row_whose_figures_were_put_in_reads_calibrated() -> None:
    """It had to come out so: "inside" would say that something was found."""
    runs = Runs({"case": {1: {}}})
    for name, word in (("S1", "calibrated"), ("S2", "calibrated"), ("H1", "calibrated"), ("W3s", "calibrated")):
        assert f"| {word} | 1 |" in show([(by_id(name), (runs, _verdict("2x")))])
    assert "| inside | 1 |" in show([(by_id("W1"), (runs, _verdict("2x")))])


def test_seeds_that_were_held_out_are_run_beside_the_others_and_counted_by_themselves() -> None:
    union = by_id("U")
    assert union.seeds(10) == [*range(1, 11), 11, 12, 13, 14, 15]
    assert union.seeds(2) == [1, 2, 11] and union.seeds(1) == [1]
    runs = Runs({"case": {seed: {} for seed in union.seeds(4)}})
    assert "| 4 + 2 |" in show([(union, (runs, _verdict("yes")))])


def test_a_row_that_is_not_computed_here_stays_on_the_page_and_is_named(tmp_path) -> None:
    """A page must not lose nine rows because one was run again on another machine."""
    first, second, runs = by_id("S1"), by_id("S2"), Runs({"case": {1: {}}})
    write([(first, (runs, _verdict("18x"))), (second, (runs, _verdict("2x")))], folder=tmp_path)
    before = (tmp_path / "results.md").read_text()
    assert "not computed again" not in before

    write([(first, None), (second, (runs, _verdict("3x")))], folder=tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "not computed again for it: S1." in page
    assert before.partition("## S1")[2].partition("## S2")[0] == page.partition("## S1")[2].partition("## S2")[0]
    assert "| 18x | calibrated |" in page and "| 3x | calibrated |" in page and "2x | calibrated" not in page


def test_the_union_stands_beside_the_best_other_one_with_the_gpu_seconds_of_both() -> None:
    """An answer that is quicker because more was held is another one."""
    given = {"union": (1.0, 500.0), "WarmServe": (2.0, 300.0)}
    systems = u_union.WORKLOADS["WarmServe's"].systems
    outcomes = {
        f"WarmServe's: {system}": {
            seed: {"ttft_p99": given.get(system, (9.0, 1.0))[0], "gpu_s": given.get(system, (9.0, 1.0))[1]}
            for seed in (1, 11)
        }
        for system in systems
    }
    (found,) = u_union.comparisons(Runs(outcomes))
    assert found.best == "WarmServe" and "GPU-seconds 500 against 300" in found.shown
    assert Runs(outcomes).among([11]).seeds == [11]
