"""The docs' commands are marked as the runner of tests/howto expects; worked examples fit the code."""

import re

import pytest

from tests.house.tree import ROOT, files, text
from tests.howto.blocks import parse
from tests.howto.example import FOLDER, applied, content_in, is_example
from tests.howto.sandbox import PageFailed

PAGES = [f for f in files() if f.endswith(".md")]
COMMAND = re.compile(
    r"^(?: {4,}|\t)(?:[A-Z_]+=\S+ )*(?:\$ )?(?:glowplug|make|curl|docker|kubectl|sudo|sh) \S", re.MULTILINE
)


def test_commands_stand_in_fences_that_are_run_or_marked() -> None:
    """No indented blocks, no fences without a language; `parse` raises BadFence for unknown words."""
    for page in PAGES:
        read = parse(page, text(page))
        if page != "CHANGELOG.md":
            prose = re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
            assert COMMAND.findall(prose) == [], page
            assert [block.where for block in read.blocks if not block.language] == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith(FOLDER) and p != f"{FOLDER}README.md"])
def test_a_worked_example_fits_the_code(page: str) -> None:
    """tests/howto runs its commands; all pages: `python -m tests.howto.example`."""
    read = parse(page, text(page))
    assert is_example(read)
    try:
        changed = applied(read, content_in(ROOT))
    except PageFailed as error:
        pytest.fail(str(error))
    named = {block.path or block.words.get("file", "") for block in read.blocks if block.language not in ("sh", "text")}
    assert named == changed.keys() | {name for name in named if "/" not in name}, "a block without a path"
