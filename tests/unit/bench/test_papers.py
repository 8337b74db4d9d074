"""The papers' tables: how figures are gathered, judged, kept and drawn, and the small models behind some rows."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.measured.load import Timed, compare, differ
from bench.papers import cache, u_union, w4_forecast, w_layers, w_mux, w_stages, w_warm
from bench.papers.catalogue import EXPERIMENTS, by_id
from bench.papers.experiment import Finding, Runs, Spread, Verdict
from bench.papers.plots import Bars, Lines
from bench.papers.table import show, write
from bench.papers.w_stages import MODELS, PCIE, RANGES, STAGES, STEPS, StartStages, expected_s
from glowplug.domain.instance import InstanceState
from glowplug.policies.systems import SYSTEMS
from tests.fleet_builder import MIB, an_instance

ROWS = ["W1", "W2", "W3", "W4", "W5", "H1", "H2", "H3", "H4", "M1", "M2", "S1", "S2", "P1", "P2", "P3", "P4"]
BENCH = Path(__file__).parents[3] / "bench"


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


def test_every_file_that_only_the_union_runs_is_in_the_digest_of_its_row() -> None:
    policies = cache.ROOT / "libs/glowplug/policies"
    left_out = {str(file.relative_to(cache.ROOT)) for file in policies.rglob("*.py") if file.name in cache.UNION_FILES}
    assert left_out == set(u_union.UNION_CODE)


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
    stated = [block for block in blocks if re.search(r"\b\d+(\.\d+)?x\b", block)]
    assert [block for block in stated if "load" not in block] == []


def test_a_ratio_of_p99s_is_that_of_the_means_and_its_range_goes_by_seed() -> None:
    """Section 7.3: a seed whose own P99 happens to be small must not decide."""
    waited = {"WarmServe @25": (1.0, 9.0), "no proactive @25": (6.0, 4.0)}
    runs = Runs({case: {seed: {"ttft_p99": v} for seed, v in enumerate(p99s)} for case, p99s in waited.items()})

    assert w_warm.over(runs, "no proactive", "25") == pytest.approx(1.0)
    assert w_warm._ranges(runs, "no proactive") == "0.44x to 6.00x at 25"


def test_muxserve_fills_two_servers_of_eight_as_section_7_3_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 7.3: "MuxServe collocates the 7B-0 and 70B models on 8 GPUs"; the others share with nobody."""
    monkeypatch.setattr(w_mux, "lengths", lambda name: ((500, 10), (1500, 10)))
    assert w_mux.GROUPS["7b-0"] == w_mux.GROUPS["70b"] == w_mux.GROUPS["7b-1"] + w_mux.GROUPS["13b"] == 8
    given = w_mux.settings(w_warm.STEPS_MS)
    assert given[0].partition("=")[2] in SYSTEMS
    assert {f"models.{model}.num_gpus={num}" for model, num in w_mux.GROUPS.items()} < set(given)


def test_a_wider_group_shortens_what_it_divides_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix A: "enlarges the parallelism degree". 7B on 8 GPUs instead of one: 12.55 GB at 3.35 TB/s are read in
    3.7 ms by one, in 0.5 ms by eight."""
    monkeypatch.setattr(w_mux, "lengths", lambda name: ((500, 10), (5000, 10)))
    prefill, decode = w_mux.widened("7b-0", 35, 15)
    assert decode == pytest.approx(15 - 12.55 / 3.35 * 7 / 8)
    assert prefill == pytest.approx(35 - 2 * 6.7e9 * 762 / 0.5e12 * 7 / 8), "prompts are cut to 1024"


def misfit(stages: StartStages) -> float:
    """Squares of the logarithms by which the eight printed ends are missed (section 7.2)."""
    total = 0.0
    for (before, after), printed in RANGES.items():
        ratios = [expected_s(m, before, stages) / expected_s(m, after, stages) for m in MODELS]
        total += sum(math.log(o / p) ** 2 for o, p in zip((min(ratios), max(ratios)), printed, strict=True))
    return total


def test_the_constants_of_the_stages_are_those_that_miss_the_printed_ranges_least() -> None:
    least = misfit(STAGES)
    free = [field.name for field in fields(STAGES) if field.name != "first_token_70b_s"]
    assert len(free) == 6
    for name in free:
        for factor in (0.97, 1.03):
            assert misfit(replace(STAGES, **{name: getattr(STAGES, name) * factor})) > least, name


def test_a_first_token_of_70b_with_all_prewarmed_is_the_printed_one() -> None:
    """Section 7.2: "the first token in ~665 ms"."""
    assert expected_s("70b", "+CommGroup") == pytest.approx(0.665)


def test_every_step_leaves_one_stage_less_and_one_gpu_has_no_group() -> None:
    for model in MODELS:
        seconds = [expected_s(model, step) for step in STEPS]
        assert seconds == sorted(seconds, reverse=True)
    assert expected_s("7b-0", "+Weights") == expected_s("7b-0", "+CommGroup")


@pytest.mark.parametrize(("step", "hits"), [("+Device", 0), ("+Weights", 1)])
def test_the_simulator_takes_the_stages_and_little_besides(step: str, hits: int) -> None:
    out = w_stages.run(f"13b {step}", 1, True)
    assert out["hits"] == hits and out["starts"] == 2
    assert out["ttft"] == pytest.approx(expected_s("13b", step), abs=0.02)


def test_over_pcie_only_the_weights_come_faster() -> None:
    rates = [[s for s in w_stages.settings("70b", step) if "pcie" in s] for step in ("+Engine", PCIE)]
    assert rates == [["servers.server.pcie_bytes_per_s=8700000000"], ["servers.server.pcie_bytes_per_s=32000000000"]]
    assert [s for s in w_stages.settings("70b", "+Engine") if "pcie" not in s] == [
        s for s in w_stages.settings("70b", PCIE) if "pcie" not in s
    ]


def test_what_replicas_hold_is_counted_from_ready_to_gone() -> None:
    world = SimpleNamespace(began_s=100.0, control=SimpleNamespace(on_save=[]))
    held = w_layers.Held(world)  # type: ignore[arg-type]
    (saved,) = world.control.on_save
    for at_s, state in (
        (105.0, InstanceState.LOADING),
        (110.0, InstanceState.PREWARMED),
        (130.0, InstanceState.STOPPED),
    ):
        saved("instances", an_instance("r", state=state, mib=60, replica=True), at_s)
    saved("instances", an_instance("i", mib=60), 120.0)
    assert held.num.total == 20.0 and held.num_bytes.total == 20.0 * 60 * MIB
