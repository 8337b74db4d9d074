"""Golden scripts of the fleet (fleet.py) and of one controller (one.py)."""

from pathlib import Path

import pytest

from tests.golden.fleet import Fleet
from tests.golden.form import SCRIPTS, played
from tests.golden.one import begin_of


def name_of(path: Path) -> str:
    return path.relative_to(SCRIPTS).with_suffix("").as_posix()


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*/*.txt")), ids=name_of)
def test_a_controllers_script_gives_its_trace(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert "----" in script
    again = "read the diff; if it is right: python -m tests.golden.one"
    assert played(script, begin_of(path.parent.name)) == script, again


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=name_of)
def test_the_fleets_script_gives_its_trace(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert "----" in script
    assert played(script, Fleet) == script, "read the diff; if it is right: python -m tests.golden.fleet"
