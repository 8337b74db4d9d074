"""Figures in pages: rendering, and when code counts as changed."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.figures.__main__ import BY_HAND, measure
from bench.figures.declared import BENCHMARKS, Benchmark
from bench.figures.page import CHANGED, UNKNOWN, named, note, render, without_age
from bench.figures.results import NOT_RECORDED, Result, git, has_changed, read, save

RESULT = Result(
    name="router",
    commit="abc123",
    date="2026-01-02 03:04:05",
    machine="2 cores",
    load="0.1 to 0.2",
    command="python x",
    figures={"ratio": "5.2x"},
)
PAGE = "a <!-- figure: router.ratio -->9x<!-- /figure --> b\n<!-- figure notes -->\nold\n<!-- /figure notes -->\n"


def page(changed: bool | None) -> str:
    return render(PAGE, {"router": RESULT}, lambda _: changed)


def test_a_figure_typed_by_hand_is_replaced_and_nothing_else_is() -> None:
    made = page(False)
    assert made.startswith(
        "a <!-- figure: router.ratio -->5.2x<!-- /figure --> b\n<!-- figure notes -->\n- router: of abc123;"
    )
    assert "old" not in made and render(made, {"router": RESULT}, lambda _: False) == made
    assert named(PAGE) == ["router"]


@pytest.mark.parametrize("name", ["router.other", "nobody.ratio"])
def test_a_figure_that_no_result_has_is_refused(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        render(PAGE.replace("router.ratio", name), {"router": RESULT}, lambda _: False)


def test_a_note_says_whether_the_code_has_changed_and_the_fast_check_looks_past_that() -> None:
    assert CHANGED in note(RESULT, True) and UNKNOWN in note(RESULT, None)
    assert CHANGED not in note(RESULT, False) and UNKNOWN not in note(RESULT, False)
    assert page(True) != page(False)
    assert without_age(page(True)) == without_age(page(None)) == page(False)


def test_a_result_is_read_as_it_was_saved_and_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = save(RESULT, tmp_path)
    assert read(path) == RESULT
    path.write_text(path.read_text().replace('"load"', '"laod"'))
    with pytest.raises(ValueError, match="laod, load"):
        read(path)


def test_code_has_changed_when_a_source_differs_from_the_commit_even_before_it_is_committed(tmp_path: Path) -> None:
    def run_git(*arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    run_git("init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    run_git("add", ".")
    run_git("commit", "-qm", "one")
    commit = run_git("rev-parse", "HEAD").strip()
    (tmp_path / "other.py").write_text("1\n")
    assert has_changed(commit, ["code.py"], tmp_path) is False
    assert has_changed(f"{commit}-dirty", ["code.py"], tmp_path) is True
    (tmp_path / "code.py").write_text("2\n")
    assert has_changed(commit, ["code.py"], tmp_path) is True
    assert has_changed("0" * 40, ["code.py"], tmp_path) is None


def test_an_unpacked_archive_has_no_age(tmp_path: Path) -> None:
    assert has_changed("abc123", ["code.py"], tmp_path) is None


def test_a_note_says_what_a_person_measured_and_of_what_was_taken_over_the_load_where_it_is_known() -> None:
    assert "measured by hand (python x), load 0.1 to 0.2" in note(RESULT, False, by_hand=True)
    by_hand = render(PAGE, {"router": RESULT}, lambda _: False, {"router"})
    assert "measured by hand" in by_hand and "measured by hand" not in page(False)
    taken_over = replace(RESULT, taken_over=True)
    assert note(taken_over, False).endswith("taken over from this page, load 0.1 to 0.2")
    assert note(replace(taken_over, load=NOT_RECORDED), False).endswith("taken over from this page")


def benchmark(name: str, code: str, read: Callable[[Any], Mapping[str, str]]) -> Benchmark:
    return Benchmark(name=name, command=("-c", code, "{json}"), sources=("README.md",), read=read)


IN_HISTORY = pytest.mark.skipif(
    git("rev-parse", "HEAD") is None, reason="a result names its commit, and git knows none"
)
WRITES = 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\'{"a": 1, "b": 2}\')'


@IN_HISTORY
def test_benchmarks_of_one_command_are_measured_by_one_run_which_is_kept_when_it_misses_its_bound() -> None:
    code = f"{WRITES}; sys.exit(1)"
    first, second = (benchmark(key, code, lambda data, key=key: {"measured": str(data[key])}) for key in "ab")
    results = measure([first, second])
    assert [(one.name, one.figures) for one in results] == [("a", {"measured": "1"}), ("b", {"measured": "2"})]
    assert {one.command for one in results} == {f"python -c {code} FILE"}


@IN_HISTORY
def test_a_benchmark_that_writes_nothing_has_failed() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        measure([benchmark("a", "", lambda data: {"measured": str(data)})])


def test_every_benchmark_that_is_read_is_told_where_to_write_and_only_one_is_measured_by_hand() -> None:
    assert frozenset({"clean-clone"}) == BY_HAND
    assert all("{json}" in one.command for one in BENCHMARKS if one.name not in BY_HAND)
