"""Every command in the docs is run, or marked with its needs and checked statically.

Lane: system; long (pages whose commands another page of the system lane runs as well).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.house.tree import files
from tests.howto.blocks import read
from tests.howto.example import is_example, made_by, run_example
from tests.howto.sandbox import Sandbox, run_page, sandbox, start_fleet
from tests.howto.static import problems

PAGES = [f for f in files() if f in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md") or f.startswith("docs/")]
WITH_COMMANDS = [page for f in PAGES if f.endswith(".md") and (page := read(f)).commands]
# HOWTO_NEEDS=gpu runs those blocks too; installed programs count.
HERE = frozenset(os.environ.get("HOWTO_NEEDS", "").split(",")) - {""} | {w for w in ("nginx",) if shutil.which(w)}
# They share a fleet and leave it unchanged, in this order: the first needs a cold model, the last restores the fleet.
ON_ONE_FLEET = {
    "an emulated fleet": (
        *("docs/howto/cold-start.md", "docs/howto/clients.md", "docs/howto/python.md", "docs/observability.md"),
        *("docs/howto/nodes.md", "docs/howto/backup.md"),
    ),
    "a fleet of llama.cpp": ("docs/howto/models.md", "docs/runbooks.md"),
}
LONG = {
    "docs/howto/upgrade.md",  # docs/howto/backup.md does the same on one version
    "docs/howto/policies.md",  # tests/e2e/test_policies_by_setting.py
}


def _marks(path: str) -> list[pytest.MarkDecorator]:
    page = read(path)
    if is_example(page):
        return []
    real = page.fleet is None or page.fleet.get("engine") == "llamacpp"
    return [pytest.mark.fleet, *([pytest.mark.llamacpp] if real else []), *([pytest.mark.long] if path in LONG else [])]


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[str], Sandbox]]:
    with ExitStack() as running:

        @cache
        def start(fleet: str) -> Sandbox:
            box = running.enter_context(sandbox())
            start_fleet(box, read(ON_ONE_FLEET[fleet][0]))
            return box

        yield start


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fleet", "path"),
    [
        pytest.param(fleet, path, marks=[*_marks(path), pytest.mark.xdist_group(fleet)], id=path)
        for fleet, paths in ON_ONE_FLEET.items()
        for path in paths
    ],
)
def test_the_commands_of_a_page_do_what_it_says_on_a_fleet_of_several(
    shared: Callable[[str], Sandbox], fleet: str, path: str
) -> None:
    assert run_page(read(path), HERE, shared(fleet)) > 0


def test_pages_on_one_fleet_ask_for_the_same() -> None:
    for paths in ON_ONE_FLEET.values():
        asked = [read(path).fleet for path in paths]
        assert asked[0] and asked == asked[:1] * len(paths)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(page.path, marks=_marks(page.path))
        for page in WITH_COMMANDS
        if page.runs and not any(page.path in paths for paths in ON_ONE_FLEET.values())
    ],
)
def test_the_commands_of_a_page_do_what_it_says(path: str) -> None:
    page = read(path)
    assert (run_example if is_example(page) else run_page)(page, HERE) > 0


@pytest.mark.parametrize("path", [page.path for page in WITH_COMMANDS])
def test_what_a_page_cannot_run_here_exists(path: str) -> None:
    page = read(path)
    there = made_by(page) | {block.words["file"] for block in page.blocks if "file" in block.words}
    assert [line for block in page.commands for line in problems(block, there)] == []
