"""A trace that is named by its path is served as it stands: nothing inherited draws it anew, and the run says what it
read."""

from pathlib import Path

import pytest

from glowplug.cli.simulate import load_with
from glowplug.simulator.scenario.load import Scenario, ScenarioError, load
from glowplug.simulator.scenario.tree import override
from glowplug.simulator.sweep import cases, variants
from glowplug.simulator.workload.formats import FORMATS
from tests.unit.simulator.scenarios import TINY, workload, write

ROWS = [(0.0, 100, 20), (1.0, 90, 21), (1.5, 80, 22), (2.0, 70, 23), (30.0, 60, 24), (700.0, 50, 25)]
DRAWN = {"cv": 3, "rps": 9, "max_total_tokens": 64, "lengths": {"prompt_mean": 7}}


def trace(folder: Path, name: str = "trace.csv", model: str = "") -> Path:
    """Six requests over 700 s, which only their own file knows."""
    lines = ["t_s,prompt_tokens,response_tokens" + (",model" if model else "")]
    lines += [f"{t},{prompt},{response}" + (f",{model}" if model else "") for t, prompt, response in ROWS]
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def base(folder: Path) -> Path:
    """A scenario that draws arrivals and lengths, of the workload and of every model."""
    defaults = {**TINY["model_defaults"], "lengths": {"prompt_mean": 8}}
    models = [{"name": "chat", "lengths": {"prompt_mean": 9}}, {"name": "code"}]
    return write(folder, name="base.yaml", workload=workload(**DRAWN), model_defaults=defaults, models=models)


def served(scenario: Scenario) -> list[tuple[float, int, int]]:
    return [(one.at_s, one.prompt_tokens, one.response_tokens) for one in scenario.arrivals()]


def test_a_trace_by_path_replaces_what_its_base_draws(tmp_path: Path) -> None:
    base(tmp_path)
    trace(tmp_path)
    scenario = load(write(tmp_path, {"base": "base.yaml", "workload": {"source": "./trace.csv"}}))
    assert served(scenario) == ROWS
    assert scenario.notes == ("6 requests of ./trace.csv",)
    assert scenario.seconds == 701


def test_what_the_same_file_says_of_its_trace_holds_and_is_said(tmp_path: Path) -> None:
    base(tmp_path)
    trace(tmp_path)
    own = {"source": "./trace.csv", "lengths": {"prompt_mean": 3000, "prompt_cv": 0}}
    scenario = load(write(tmp_path, {"base": "base.yaml", "seconds": 60, "workload": own}))
    assert [one[0] for one in served(scenario)] == [0.0, 1.0, 1.5, 2.0, 30.0]
    assert {one[1] for one in served(scenario)} == {3000}
    assert scenario.notes == (
        "5 of 6 requests of ./trace.csv (those from 0 s on, for 60 s); lengths are drawn from workload.lengths",
    )


@pytest.mark.parametrize("settings", [["workload.source=./trace.csv"], ["workload.source=t.csv", "seed=4"]])
def test_a_command_line_that_names_a_trace_means_it_too(tmp_path: Path, settings: list[str]) -> None:
    trace(tmp_path)
    trace(tmp_path, "t.csv")
    assert served(load(base(tmp_path), settings)) == ROWS
    whole = load(base(tmp_path))
    (case,) = cases(dict(whole.tree), tmp_path, variants(["workload.source=./trace.csv"]), (0,))
    assert "cv" not in case.tree["workload"]


def test_settings_beside_a_trace_are_laid_over_it(tmp_path: Path) -> None:
    trace(tmp_path)
    found = load(base(tmp_path), ["workload.squeeze=10", "workload.source=./trace.csv", "seconds=1"])
    assert served(found) == [(0.0, 100, 20), (0.1, 90, 21), (0.15, 80, 22), (0.2, 70, 23)]


def test_a_trace_of_counts_keeps_the_lengths_it_inherits(tmp_path: Path) -> None:
    base(tmp_path)
    (tmp_path / "counts.csv").write_text("t_s,requests\n0,5\n60,7\n", encoding="utf-8")
    scenario = load(write(tmp_path, {"base": "base.yaml", "workload": {"source": "./counts.csv"}}))
    assert len(served(scenario)) == 12
    assert scenario.notes[0].startswith("12 requests of ./counts.csv")
    assert scenario.seconds == 121


def test_a_named_source_inherits_as_before(tmp_path: Path) -> None:
    tree = override({"workload": {"cv": 3, "lengths": {}}, "seconds": 5}, ["workload.source=gamma"], tmp_path)
    assert tree == {"workload": {"cv": 3, "lengths": {}, "source": "gamma"}, "seconds": 5}


def test_a_trace_needs_no_scenario(tmp_path: Path) -> None:
    path = trace(tmp_path, model="Org/Chat 7B")
    scenario = load_with(None, path, ())
    assert [one.model.key for one in scenario.setup.models] == ["org-chat-7b"]
    assert served(scenario) == ROWS
    assert scenario.name == "trace"
    assert scenario.notes == (
        f"6 requests of {path}",
        f"models that {path} names are served: Org/Chat 7B by org-chat-7b",
    )
    assert served(load_with(base(tmp_path), path, ["workload.squeeze=2"]))[1:2] == [(0.5, 90, 21)]


def test_columns_that_mean_nothing_are_refused_with_those_that_do(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("when,input,output\n0,1,2\n", encoding="utf-8")
    with pytest.raises(ScenarioError) as error:
        load_with(None, path, ())
    line = str(error.value)
    assert "t.csv, line 1: header: no known format has the columns when, input, output (read are: t_s, " in line
    for one in FORMATS:
        assert one.columns == ("{",) or all(column in line for column in one.columns)
    with pytest.raises(ScenarioError, match=r"^workload.source: .*columns when, input, output \(read are: t_s"):
        load(base(tmp_path), ["workload.source=./t.csv"])
