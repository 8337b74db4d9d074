"""Pages print generated figures only. Their age is checked before a release."""

import os
import re

import pytest

from bench.figures.__main__ import PAGES, age, problems
from bench.figures.declared import BENCHMARKS
from bench.figures.page import named
from bench.figures.results import git, saved
from tests.house.tree import ROOT, text

# Joined commits: figures measured at them are renewed before a release, and their row here is removed.
JOINED = {"60e9f1c340f4", "04147aff81d2", "a44ab588fecc", "ca453db80483", "285e67dbd54b", "4d958a68af68"}


def test_pages_are_what_their_results_give() -> None:
    assert problems(release=os.environ.get("GLOWPLUG_RELEASE") == "1") == []


def test_every_declared_source_and_page_exists() -> None:
    paths = {path for one in BENCHMARKS for path in (*one.sources, *one.pages)}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_results_pages_and_declarations_name_the_same_benchmarks() -> None:
    declared = sorted(one.name for one in BENCHMARKS)
    assert declared == sorted(saved())
    assert declared == sorted({name for page in PAGES for name in named(text(page))})


@pytest.mark.parametrize("page", ["README.md", "docs/figures.md"])
def test_every_row_of_a_table_of_figures_has_a_figure(page: str) -> None:
    table = text(page).partition("\n| what | bound |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| [^\n]+", table, re.MULTILINE)
    assert rows and [row for row in rows if "<!-- figure: " not in row] == []


def test_a_row_says_the_command_that_measures_its_figures() -> None:
    rows = re.findall(r"^\|.*<!-- figure: ([\w-]+)\.\w+ -->.*\| `([^|]*)` \|$", text("docs/figures.md"), re.MULTILINE)
    declared = {one.name: "python " + " ".join(one.command) for one in BENCHMARKS if one.read is not None}
    wanted = {name: command.removesuffix(" --json {json}") for name, command in declared.items()}
    assert {name: command for name, command in rows if name in wanted} == wanted


def test_every_commit_of_a_result_is_known_where_the_whole_history_is() -> None:
    results = saved()
    unknown = [name for name, changed in age().items() if changed is None and results[name].commit not in JOINED]
    if unknown and git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip(f"git does not know the commits of {', '.join(unknown)} here: their age is not checked")
    assert unknown == []
