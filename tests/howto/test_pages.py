"""Every command in the docs is run, or marked with what it needs and checked against what there is."""

import os
import shutil

import pytest

from tests.house.tree import files
from tests.howto.blocks import read
from tests.howto.sandbox import run_page
from tests.howto.static import problems

PAGES = [f for f in files() if f in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md") or f.startswith("docs/")]
WITH_COMMANDS = [page for f in PAGES if f.endswith(".md") and (page := read(f)).commands]
# HOWTO_NEEDS=gpu runs those blocks too; what a program is enough for runs where it is.
HERE = frozenset(os.environ.get("HOWTO_NEEDS", "").split(",")) - {""} | {w for w in ("nginx",) if shutil.which(w)}


def _marks(path: str) -> list[pytest.MarkDecorator]:
    page = read(path)
    real = page.fleet is None or page.fleet.get("engine") == "llamacpp"
    return [pytest.mark.fleet, *([pytest.mark.llamacpp] if real else [])]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path", [pytest.param(page.path, marks=_marks(page.path)) for page in WITH_COMMANDS if page.runs]
)
def test_the_commands_of_a_page_do_what_it_says(path: str) -> None:
    assert run_page(read(path), HERE) > 0


@pytest.mark.parametrize("path", [page.path for page in WITH_COMMANDS])
def test_what_a_page_cannot_run_here_exists(path: str) -> None:
    assert [line for block in read(path).commands for line in problems(block)] == []
