"""The gate (.ci/gate.sh) over a lane of planted tests: one that passes, and one of each way to go wrong. Costs 40 s,
most of it waiting."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUND_S = 400
PLANTED = {
    "tests/unit/test_sound.py": """
def test_passes(): assert True
def test_dies(): __import__("os")._exit(3)
def test_after_it(): assert True
""",
    "tests/unit/test_unsteady.py": """
from pathlib import Path
def test_fails_once():
    seen = Path(__file__).with_name("seen")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen, "too slow by chance"
""",
    "tests/unit/test_wrong.py": """
def test_fails(): assert 1 == 2
""",
    "tests/unit/test_hanging.py": """
import signal, time
import pytest
def stand_still():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # as in C code: no limit inside the interpreter helps
    time.sleep(1000)
@pytest.fixture
def slow_to_end():
    yield
    stand_still()
@pytest.mark.timeout(2)
def test_hangs_in_its_fixture_after_a_failure(slow_to_end): assert 1 == 3
@pytest.mark.timeout(2)
def test_hangs(): stand_still()
""",
}
pytestmark = pytest.mark.timeout(BOUND_S + 60)


@dataclass(frozen=True, slots=True)
class Gate:
    """A run that has ended."""

    code: int
    said: str
    unsteady: list[dict[str, str]]

    @property
    def last(self) -> str:
        return self.said.splitlines()[-1]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """The gate's word on PLANTED, in a checkout that has nothing else."""
    work = tmp_path_factory.mktemp("gate")
    for name in (".ci", "pyproject.toml", "tests/conftest.py", *(f"tests/{p.name}" for p in ROOT.glob("tests/*.py"))):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile)(ROOT / name, work / name)  # type: ignore[operator]
    (work / ".venv").symlink_to(ROOT / ".venv")
    for name, content in PLANTED.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(content)
    done = subprocess.run(
        ["sh", ".ci/gate.sh", "fast"],
        cwd=work,
        env={**os.environ, "WORKERS": "2", "GATE_GRACE_S": "2", "GATE_S": str(BOUND_S)},
        capture_output=True,
        text=True,
        timeout=BOUND_S + 30,
        check=False,
    )
    rows = (work / "build/gate/unsteady.jsonl").read_text().splitlines()
    yield Gate(done.returncode, done.stdout + done.stderr, [json.loads(row) for row in rows])


def test_it_is_red(gate: Gate) -> None:
    assert gate.code == 1 and gate.last.startswith("4 failed, 3 passed, 5 rerun in "), gate.said


def test_what_passes_the_second_time_is_unsteady(gate: Gate) -> None:
    assert [row["test"] for row in gate.unsteady] == ["tests/unit/test_unsteady.py::test_fails_once"], gate.said
    assert "too slow by chance" in gate.unsteady[0]["first"]


@pytest.mark.parametrize(
    "name", ["wrong.py::test_fails", "sound.py::test_dies", "hanging.py::test_hangs\n", "hanging.py::test_hangs_in_its"]
)
def test_what_always_fails_is_named(gate: Gate, name: str) -> None:
    assert f"\nFAILED tests/unit/test_{name}" in gate.said, gate.said


def test_a_hang_is_told_with_its_line(gate: Gate) -> None:
    assert "in stand_still" in gate.said and "in test_hangs\n" in gate.said, gate.said


def test_what_a_dead_process_left_undone_is_run(gate: Gate) -> None:
    assert "tests are still to be run" in gate.said and "have no outcome" not in gate.said, gate.said
