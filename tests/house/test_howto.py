"""Commands in the docs stand where the runner of tests/howto finds them, marked with words it knows."""

import re

import pytest

from tests.house.tree import files, text
from tests.howto.blocks import BadFence, parse

PAGES = [f for f in files() if f.endswith(".md")]
COMMAND = re.compile(
    r"^(?: {4,}|\t)(?:[A-Z_]+=\S+ )*(?:\$ )?(?:glowplug|make|curl|docker|kubectl|sudo|sh) \S", re.MULTILINE
)


@pytest.mark.parametrize("page", PAGES)
def test_fences_say_only_what_the_runner_knows(page: str) -> None:
    try:
        parse(page, text(page))
    except BadFence as error:
        pytest.fail(str(error))
    else:
        assert parse(page, text(page)).path == page


@pytest.mark.parametrize("page", [p for p in PAGES if p != "CHANGELOG.md"])
def test_commands_stand_in_fences_that_are_run_or_marked(page: str) -> None:
    """Not in indented blocks, and not in a fence without a language."""
    read = parse(page, text(page))
    prose = re.sub(r"^ *```.*?^ *```$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    assert COMMAND.findall(prose) == []
    assert [block.where for block in read.blocks if not block.language] == []
