"""Variants, seeds and fleet sizes."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug_lab.simulator.jobs import run_cases
from glowplug_lab.simulator.scenario.load import ScenarioError, load
from glowplug_lab.simulator.sweep import (
    Search,
    all_met,
    cases,
    check_objectives,
    parse_objective,
    parse_range,
    parse_seeds,
    variants,
    with_gpus,
)
from tests.unit.simulator.scenarios import TINY, write
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("compared", "found"),
    [
        pytest.param([], {"as written": ()}, id="nothing to compare"),
        pytest.param(["x.a=1,2"], {"1": ("x.a=1",), "2": ("x.a=2",)}, id="values are variants"),
        pytest.param(
            ["x.a=1,2", "y=3,4"],
            {f"a={a}, y={y}": (f"x.a={a}", f"y={y}") for a in (1, 2) for y in (3, 4)},
            id="keys multiply",
        ),
        pytest.param(["y=[0, 1],[2]"], {"[0, 1]": ("y=[0, 1]",), "[2]": ("y=[2]",)}, id="a comma inside a list"),
    ],
)
def test_variants_are_what_is_compared(compared: list[str], found: dict[str, tuple[str, ...]]) -> None:
    assert [(one.label, one.settings) for one in variants(compared)] == list(found.items())


@pytest.mark.parametrize(
    ("text", "seeds"), [("0..3", (0, 1, 2, 3)), ("5", (5,)), ("1,4,2", (1, 4, 2)), ("0..2,1..3", (0, 1, 2, 3))]
)
def test_seeds_are_read(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("read", "option", "texts"),
    [
        (lambda text: variants([text]), "--compare", ["routing", "=a,b", "policies.routing=", "policies.routing=a,a"]),
        (parse_seeds, "--seeds", ["", "a", "3..1", "-1", "0..99999999", "1.5"]),
        (parse_objective, "--slo",
         ["ttft_p99", "ttft_p98=1", "ttft_p99=fast", "ttft_p99=-1", "ttft_attainment=1.5", "ttft_p99=inf"]),
        (parse_range, "--gpus", ["4", "0..4", "9..2", "a..b", "1..999999999"]),
    ],
)  # fmt: skip
def test_what_is_none_is_refused_with_its_option(read: Callable[[str], Any], option: str, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ScenarioError, match=option):
            read(text)


def test_a_case_is_the_whole_scenario_with_its_seed(tmp_path: Path) -> None:
    found = cases(dict(load(write(tmp_path)).tree), tmp_path, variants(["workload.rps=1,2"]), (3, 4))
    assert [(case.variant, case.seed, case.tree["workload"]["rps"], case.tree["seed"]) for case in found] == [
        ("1", 3, 1, 3), ("1", 4, 1, 4), ("2", 3, 2, 3), ("2", 4, 2, 4),
    ]  # fmt: skip


def test_gpus_are_whole_servers_and_one_with_the_rest() -> None:
    tree = {"servers": [{"name": "a", "num_gpus": 4, "num_servers": 9}, {"name": "b"}]}
    assert with_gpus(tree, 10)["servers"] == [
        {"name": "a", "num_gpus": 4, "num_servers": 2},
        {"name": "a-part", "num_gpus": 2, "num_servers": 1},
        {"name": "b"},
    ]
    assert with_gpus(tree, 3)["servers"][0] == {"name": "a", "num_gpus": 3, "num_servers": 1}
    assert with_gpus(tree, 8, "b")["servers"][1] == {"name": "b", "num_servers": 1}
    with pytest.raises(ScenarioError, match="--server: there is no 'c'"):
        with_gpus(tree, 8, "c")


def test_a_fleet_of_another_size_is_a_sound_scenario(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, **with_gpus(TINY, 5)))
    assert sum(server.num_servers * server.num_gpus for server in scenario.setup.servers) == 5


def total(**fields: Any) -> dict[str, Any]:
    counts = {"num_arrived": 10, "num_refused": 0, "num_unfinished": 0}
    return counts | {"ttft_s_p99": 0.5, "ttft_attainment": 0.9} | fields


def test_a_time_is_met_only_when_everybody_was_answered() -> None:
    objective = parse_objective("ttft_p99=0.5s")
    assert objective.met(total())
    assert not objective.met(total(num_refused=1))
    assert not objective.met(total(ttft_s_p99=0.51))
    assert not objective.met(total(ttft_s_p99=None))


def test_shares_are_at_least_and_refusals_at_most() -> None:
    assert parse_objective("ttft_attainment=0.9").met(total())
    assert not parse_objective("ttft_attainment=0.91").met(total())
    assert parse_objective("refused=0.1").met(total(num_unfinished=1))
    assert not parse_objective("refused=0.1").met(total(num_unfinished=2))


def test_who_says_how_many_may_be_refused_gets_the_times_of_the_others() -> None:
    time, some = parse_objective("ttft_p99=0.5s"), parse_objective("refused=0.1")
    assert all_met([time, some], total(num_refused=1))
    assert not all_met([time, some], total(num_refused=2))
    assert not all_met([time, some], total(num_refused=1, ttft_s_p99=0.51))
    assert not all_met([time], total(num_refused=1))


def test_an_attainment_of_no_objective_is_refused(tmp_path: Path) -> None:
    setup = load(write(tmp_path)).setup
    check_objectives([parse_objective("ttft_attainment=1"), parse_objective("tpot_attainment=1")], setup)
    bare = load(write(tmp_path, slo={})).setup  # one model limits its later tokens
    check_objectives([parse_objective("tpot_attainment=1"), parse_objective("warm_ratio=1")], bare)
    with pytest.raises(ScenarioError, match=r"^--slo: ttft_attainment: no model of the scenario has slo.ttft_s$"):
        check_objectives([parse_objective("ttft_attainment=1")], bare)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 50))
def test_the_least_number_is_found_wherever_it_lies(low: int, width: int, least: int) -> None:
    tried: list[int] = []

    def try_all(numbers: Sequence[int]) -> Mapping[int, bool]:
        tried.extend(numbers)
        return {number: number >= least for number in numbers}

    answer, notes = Search(low, low + width).run(try_all)
    assert answer == (max(low, least) if least <= low + width else None)
    at_the_edge = answer == low and low > 1
    assert notes == ([f"{low} is the least of this range: fewer may do, too"] if at_the_edge else [])
    assert len(tried) == len(set(tried))
    assert all(low <= number <= low + width for number in tried)


def test_a_fleet_that_does_worse_with_more_is_said() -> None:
    answer, notes = Search(1, 16).run(lambda numbers: {n: n in (5, 6, 8) or n > 9 for n in numbers})
    assert answer is not None
    assert answer <= 10
    none, said = Search(1, 9).run(lambda numbers: {n: n < 9 for n in numbers})
    assert none is None
    assert said == ["9 GPUs do not meet it, and 1 do: more of them do not always help"]
    assert isinstance(notes, list)


def test_a_checked_run_gives_the_same_figures(tmp_path: Path) -> None:
    scenario = load(write(tmp_path), ["seconds=20"])
    plain = cases(dict(scenario.tree), tmp_path, variants(()), (0,))
    checked = [replace(case, check=True) for case in plain]
    shares: list[float] = []
    outcomes = [
        run_cases(todo, [None], 1, lambda done: shares.append(sum(done)))[0].numbers for todo in (plain, checked)
    ]
    assert outcomes[0] == outcomes[1]
    assert shares[-1] == 1.0


class _Interrupted(list[Any]):
    """Ctrl-C, noticed after the first case is handed out."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        raise KeyboardInterrupt


def test_a_ctrl_c_among_the_first_cases_ends_them_all(tmp_path: Path) -> None:
    scenario = load(write(tmp_path), ["seconds=30000000"])  # hours of work
    todo = _Interrupted(cases(dict(scenario.tree), tmp_path, variants(()), (0, 1)))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt):
        run_cases(todo, [None, None], 2)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    for worker in multiprocessing.active_children():  # its executor waits for it too, and one of both is told
        wait_until("it ends", lambda worker=worker: not worker.is_alive(), every_s=0.01)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trace_that_breaks_off_in_the_middle_is_one_line_in_one_process_and_in_two(tmp_path: Path, jobs: int) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("t_s,prompt_tokens,response_tokens\n0,5,5\n1,5,5\n2,1,5\n", encoding="utf-8")
    scenario = load(write(tmp_path, workload={"source": "t.csv", "lengths": {"prompt_mean": 9}}))
    todo = cases(dict(scenario.tree), tmp_path, variants(()), (0, 1))
    trace.write_text("t_s,prompt_tokens,response_tokens\n0,5,5\n1,5,5\n2,-1,5\n", encoding="utf-8")
    with pytest.raises(ScenarioError, match=r"^workload.source: .*t.csv, line 4: prompt_tokens: '-1' is not a whole"):
        run_cases(todo, [None, None], jobs)
