"""The simulations of tests/simulation print the command of the seed that failed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

FAILS = """
import os
import pytest

@pytest.mark.parametrize("seed", range(int(os.environ.get("GLOWPLUG_SIM_SEEDS", "2"))))
def test_it(seed):
    assert seed != 3, "three"
"""


def test_a_seed_beyond_the_usual_ones_is_run_again_by_what_is_printed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/simulation/conftest.py", tmp_path)
    (tmp_path / "test_fails.py").write_text(FAILS, encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if k != "GLOWPLUG_SIM_SEEDS"}
    python = {"PATH": f"{Path(sys.executable).parent}:{clean['PATH']}"}

    def run(line: str) -> str:
        ended = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env={**clean, **python}, text=True, capture_output=True
        )
        assert ended.returncode == 1, ended.stdout + ended.stderr
        return ended.stdout

    said = run("GLOWPLUG_SIM_SEEDS=5 python -m pytest -p no:cacheprovider .")
    assert "1 failed, 4 passed" in said
    [again] = [line for line in said.splitlines() if line.startswith("GLOWPLUG_SIM_SEEDS=")]
    assert again == "GLOWPLUG_SIM_SEEDS=5 python -m pytest 'test_fails.py::test_it[3]'"
    alone = run(again)
    assert "1 failed" in alone and "passed" not in alone
    assert again in alone
