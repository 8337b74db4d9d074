"""A scenario's requests, drawn or read from a named trace."""

import random
from collections import Counter
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest

from glowplug_lab.commands.simulate import load_with
from glowplug_lab.simulator.scenario.load import Scenario, ScenarioError, highest, load
from glowplug_lab.simulator.scenario.sources import Clients
from glowplug_lab.simulator.scenario.tree import override
from glowplug_lab.simulator.sweep import cases, variants
from glowplug_lab.simulator.workload.formats import FORMATS
from tests.unit.simulator.scenarios import TINY, workload, write

DAY_S = 86_400


def scenario(folder: Path, seconds: float = 600, models: int = 2, **fields: Any) -> Scenario:
    named = [{"name": f"m{number}"} for number in range(models)]
    return load(write(folder, seconds=seconds, models=named, workload=fields))


def counted(folder: Path, rows: list[tuple[float, int]]) -> None:
    text = "t_s,requests\n" + "".join(f"{t_s},{num}\n" for t_s, num in rows)
    (folder / "counts.csv").write_text(text, encoding="utf-8")


def test_gamma_arrivals_have_their_rate_and_are_shared_by_a_power_law(tmp_path: Path) -> None:
    """WarmServe section 7.1."""
    arrivals = list(scenario(tmp_path, 2000, 3, **workload(rps=10, alpha=2)).arrivals(7))
    assert len(arrivals) == pytest.approx(20_000, rel=0.05)
    counts = Counter(arrival.model for arrival in arrivals)
    assert counts["m0"] / counts["m1"] == pytest.approx(4, rel=0.15)


def test_a_higher_cv_makes_bursts_of_each_model(tmp_path: Path) -> None:
    def spread(cv: float) -> float:
        arrivals = scenario(tmp_path, 4000, 1, **workload(rps=5, cv=cv)).arrivals(3)
        bins = Counter(int(arrival.at_s // 10) for arrival in arrivals)
        counts = [bins[n] for n in range(400)]
        return pvariance(counts) / fmean(counts)

    assert spread(4) > 3 * spread(1)


def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    one = scenario(tmp_path, **workload())
    assert list(one.arrivals(1)) == list(one.arrivals(1)) != list(one.arrivals(2))


def test_each_model_follows_its_own_day_scaled_to_its_share(tmp_path: Path) -> None:
    """WarmServe section 7.1."""
    counted(
        tmp_path, [(day * DAY_S + n * 10, 20 if (n < 30) == (day == 0) else 2) for day in (0, 1) for n in range(60)]
    )
    one = scenario(tmp_path, source="counts.csv", days=[0, 1], rps=4, lengths={"prompt_mean": 100})
    arrivals = list(one.arrivals(5))
    assert len(arrivals) == pytest.approx(2400, rel=0.1)
    early = Counter(arrival.model for arrival in arrivals if arrival.at_s < 300)
    late = Counter(arrival.model for arrival in arrivals if arrival.at_s >= 300)
    assert early["m0"] > 5 * late["m0"]
    assert late["m1"] > 5 * early["m1"]


def test_scaling_up_repeats_requests_at_one_moment(tmp_path: Path) -> None:
    """WarmServe section 7.1."""
    counted(tmp_path, [(n * 10, 1) for n in range(60)])
    times = Counter(a.at_s for a in scenario(tmp_path, models=1, source="counts.csv", rps=1, lengths={}).arrivals(5))
    assert max(times.values()) == 10
    assert sum(times.values()) == pytest.approx(600, rel=0.05)


def test_a_day_past_the_end_of_the_trace_is_refused(tmp_path: Path) -> None:
    counted(tmp_path, [(0, 5), (10, 5)])
    with pytest.raises(ScenarioError, match=r"workload.days: day 3 lies past the end"):
        scenario(tmp_path, source="counts.csv", days=[3], rps=1, lengths={})


def test_a_trace_of_requests_is_cut_squeezed_and_bounded(tmp_path: Path) -> None:
    rows = "".join(f"{n},5000,{n + 1}\n" for n in range(100))
    (tmp_path / "t.csv").write_text("t_s,prompt_tokens,response_tokens\n" + rows, encoding="utf-8")
    one = scenario(
        tmp_path, 20, 1, source="t.csv", start_s=10, squeeze=2, max_prompt_tokens=1024, min_response_tokens=20
    )
    arrivals = list(one.arrivals(0))
    assert [arrival.at_s for arrival in arrivals] == [n / 2 for n in range(40)]
    assert {arrival.prompt_tokens for arrival in arrivals} == {1024}
    assert [arrival.response_tokens for arrival in arrivals[:12]] == [20] * 10 + [21, 22]


def test_a_trace_that_names_the_models_keeps_them(tmp_path: Path) -> None:
    text = "t_s,model,prompt_tokens,response_tokens\n0,m1,5,5\n1,m0,6,6\n2,other,7,7\n"
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    arrivals = list(scenario(tmp_path, 20, 2, source="t.csv").arrivals(0))
    assert [arrival.model for arrival in arrivals] == ["m1", "m0", "m0"]


def clients(folder: Path) -> None:
    head = "model,client,t_s,requests,cv,dist,shape\n"
    rows = [
        f"s,{client},{window * 600},{num},{cv},G,{1 / cv**2:.4f}"
        for window in range(4)
        for client, num, cv in (("a", 900, 1), ("b", 400, 5), ("c", 300, 1), ("d", 10, 1), ("e", 4, 1), ("f", 1, 1))
    ]
    (folder / "servegen_clients_10min.csv").write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def test_clients_stand_in_for_models_by_their_sort(tmp_path: Path) -> None:
    clients(tmp_path)
    groups = [{"pick": p, "num": 1, "rps": r} for p, r in (("popular", 3.0), ("bursty", 1.0), ("tail", 0.05))]
    one = scenario(tmp_path, 1200, 3, source="servegen_clients_10min.csv", clients=groups, lengths={}, start_s=1200)
    assert isinstance(one.traffic.streams, Clients)
    names = [client.name for client in one.traffic.streams._by_key.values()]
    assert names[:2] == ["s-a", "s-b"]
    assert names[2] in ("s-d", "s-e", "s-f")
    counts = Counter(arrival.model for arrival in one.arrivals(1))
    assert counts["m0"] == pytest.approx(3600, rel=0.02)
    assert counts["m1"] == pytest.approx(1200, rel=0.02)
    assert one.traffic.past("m0", 1200)[0][:2] == (-1200.0, 600.0)


def test_as_many_clients_as_models_are_asked_for(tmp_path: Path) -> None:
    clients(tmp_path)
    groups = [{"pick": "popular", "num": 2, "rps": 1}]
    with pytest.raises(ScenarioError, match=r"workload.clients: 2 clients for 3 models"):
        scenario(tmp_path, 1200, 3, source="servegen_clients_10min.csv", clients=groups, lengths={})


def test_the_past_lies_on_the_grid_of_the_predictors_windows_without_a_gap(tmp_path: Path) -> None:
    counted(tmp_path, [(n * 10, 30 if n < 360 else 60) for n in range(1080)])
    fields = {"source": "counts.csv", "start_s": 7200, "lengths": {"prompt_mean": 100, "response_mean": 50}}
    path = write(
        tmp_path, seconds=600, models=[{"name": "m0"}], workload=fields, history={"seconds": 7200, "window_s": 300}
    )
    setup = load(path).setup
    windows = setup.history["m0"]
    starts = [window.started_at for window in windows]
    assert starts == [setup.began_at - 7200 + 300 * n for n in range(24)]
    assert starts[-1] == setup.began_at - 300
    assert windows[0].num_requests == pytest.approx(900)
    assert windows[-1].num_requests == pytest.approx(1800)
    assert windows[-1].concurrency_mean == pytest.approx(2 * windows[0].concurrency_mean)
    assert windows[-1].concurrency_peak > windows[-1].concurrency_mean


def test_the_peak_of_a_past_window_is_the_highest_of_its_gamma_numbers() -> None:
    """Against the mean maximum of 40 gamma draws of mean 9 and variance 2.5^2 x 9, within 10 %."""
    draw = random.Random(1)
    shape, scale = 9 / 6.25, 6.25
    drawn = fmean(max(draw.gammavariate(shape, scale) for _ in range(40)) for _ in range(2000))
    assert highest(9.0, 2.5, 40) == pytest.approx(drawn, rel=0.1)
    assert highest(9.0, 1.0, 40) < 0.7 * drawn
    assert highest(0.01, 2.5, 2) >= 0.01


def test_models_rarer_than_the_run_is_long_still_come_at_their_rate(tmp_path: Path) -> None:
    counts = [len(list(scenario(tmp_path, 900, 200, **workload(rps=1, cv=8)).arrivals(seed))) for seed in range(4)]
    assert fmean(counts) == pytest.approx(900, rel=0.25)


def test_functions_dealt_onto_models_leave_none_without_and_one_with_most(tmp_path: Path) -> None:
    """HydraServe section 8.3."""
    arrivals = list(scenario(tmp_path, 4000, 20, **workload(rps=10, shares="functions")).arrivals(7))
    counts = Counter(arrival.model for arrival in arrivals)
    assert len(counts) == 20
    assert max(counts.values()) > 3 * len(arrivals) / 20


ROWS = [(0.0, 100, 20), (1.0, 90, 21), (1.5, 80, 22), (2.0, 70, 23), (30.0, 60, 24), (700.0, 50, 25)]
DRAWN = {"cv": 3, "rps": 9, "max_total_tokens": 64, "lengths": {"prompt_mean": 7}}


def trace(folder: Path, name: str = "trace.csv", model: str = "") -> Path:
    lines = ["t_s,prompt_tokens,response_tokens" + (",model" if model else "")]
    lines += [f"{t},{prompt},{response}" + (f",{model}" if model else "") for t, prompt, response in ROWS]
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def base(folder: Path) -> Path:
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
