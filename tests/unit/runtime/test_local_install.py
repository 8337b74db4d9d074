"""Output of deploy/local/install with a Python that installs nothing."""

import subprocess
from pathlib import Path

import pytest

from tests.house.tree import ROOT

PYTHON = """#!/bin/sh
case "$*" in
    -V) echo Python 3.12.1 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"$BROKEN"*) echo "ERROR: no such package"; exit 1 ;;
    "-m pip "*) echo "Collecting $*" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def install(python: Path, *arguments: str, broken: str = "nothing") -> subprocess.CompletedProcess[str]:
    script = ROOT / "deploy" / "local" / "install"
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python), "BROKEN": broken}
    return subprocess.run(
        ["sh", script, *arguments], cwd=python.parent, env=environment, capture_output=True, text=True, timeout=60
    )


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if not line.startswith("    done in ")]


def test_each_step_is_said_before_it_begins(python: Path) -> None:
    done = install(python, ".venv", "local", "llm-sample")
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(done) == [
        "1/3 creating the environment .venv with Python 3.12.1",
        "2/3 installing glowplug[local] and the packages it needs (once; about a minute; log: .venv/install.log)",
        "3/3 fetching the sample weights (once; 93 MB)",
    ]
    assert done.stdout.count("    done in ") == 3 and "\x1b" not in done.stdout
    assert steps(install(python, ".venv", "local"))[0] == "1/2 using the environment .venv that is there"


def test_a_step_that_fails_is_the_last_and_says_why(python: Path) -> None:
    done = install(python, ".venv", "local", "llm-sample", broken="llm-sample")
    assert done.returncode == 1 and steps(done)[-1].startswith("3/3 ")
    (line,) = done.stderr.splitlines()
    assert line.startswith("glowplug: installing failed: ERROR: no such package (all of it: .venv/install.log;")
