"""Golden scripts of the fleet (see fleet.py)."""

from pathlib import Path

import pytest

from tests.golden.fleet import SCRIPTS, played


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_script_gives_its_trace(path: Path) -> None:
    script = path.read_text(encoding="utf-8")
    assert "----" in script
    assert played(script) == script, "read the diff; if it is right: python -m tests.golden.fleet"
