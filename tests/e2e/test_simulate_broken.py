"""A broken invariant prints the command that breaks it again: the failing seed is the bug report."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.simulator.scenarios import write

BREAKS = """
from glowplug.simulator.checkers import Checker
from glowplug.simulator.kernel import Kernel

first = Checker.look

def look(self):
    first(self)
    chat = self._run.models["chat"].model
    if self._run.label.endswith("seed 4") and chat.max_concurrency == 3:
        self.demand(self._traffic.num_arrived < 5, "the fifth request is one too many")

step = Kernel.step

def bare(self):
    assert self.now_s < {until_s}
    step(self)

Checker.look, Kernel.step = look, bare
"""
"""Every Python that starts with this beside it has one more invariant, workers of --jobs too."""


def glowplug(folder: Path, line: str, code: int, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GLOWPLUG_")}
    command = line.replace("glowplug ", f"{shlex.quote(sys.executable)} -m glowplug.cli.main ", 1)
    found = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": str(folder / "broken"), **env},
        cwd=folder,
        timeout=110,
    )
    assert found.returncode == code, found.stdout + found.stderr
    return found


def breaking(folder: Path, until_s: str = "float('inf')") -> None:
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "sitecustomize.py").write_text(BREAKS.replace("{until_s}", until_s), encoding="utf-8")


def again_of(said: str) -> str:
    [line] = [line for line in said.splitlines() if line.startswith("again: ")]
    return line.removeprefix("again: ")


@pytest.mark.parametrize("jobs", [1, 2])
def test_simulate_prints_the_command_of_the_seed_that_failed(tmp_path: Path, jobs: int) -> None:
    breaking(tmp_path)
    write(tmp_path, name="two words.yaml")
    many = (
        "glowplug simulate 'two words.yaml' --set seconds=40 -s 'title=a; b' --seeds 3..4 --check"
        f" --compare models.chat.max_concurrency=2,3 --jobs {jobs}"
    )
    broken = glowplug(tmp_path, many, 1, GLOWPLUG_DATA=str(tmp_path / "no data"))
    assert "two words, 3, seed 4, at" in broken.stderr
    assert "the fifth request is one too many" in broken.stderr
    again = again_of(broken.stderr)
    assert again == (
        f"GLOWPLUG_DATA='{tmp_path}/no data' glowplug simulate 'two words.yaml' --set seconds=40 --set 'title=a; b'"
        " --set models.chat.max_concurrency=3 --seed 4 --check"
    )
    alone = glowplug(tmp_path, again, 1)
    assert what(alone.stderr) == what(broken.stderr)
    assert again_of(alone.stderr) == again
    assert not (tmp_path / "runs").exists()


def what(said: str) -> str:
    """When it broke, and what."""
    return said.partition(" at ")[2].splitlines()[0]


def test_plan_prints_the_number_of_gpus_and_the_seed_that_failed(tmp_path: Path) -> None:
    breaking(tmp_path)
    write(tmp_path)
    tried = "glowplug plan tiny.yaml --slo 'ttft_p95=9s' --slo refused=0.5 --gpus 1..3 --server node --seeds 3,4 -j 2"
    broken = glowplug(tmp_path, f"{tried} --check --set models.chat.max_concurrency=3", 1)
    again = again_of(broken.stderr)
    [gpus] = [word for word in shlex.split(again) if ".." in word]
    assert gpus in ("1..1", "3..3")
    assert again == (
        "glowplug plan tiny.yaml --set models.chat.max_concurrency=3 --slo ttft_p95=9s --slo refused=0.5"
        f" --server node --gpus {gpus} --seeds 4 --check"
    )
    assert what(glowplug(tmp_path, again, 1).stderr) == what(broken.stderr)


def test_replay_prints_its_command_and_a_bare_assertion_says_where_it_stands(tmp_path: Path) -> None:
    """An assertion inside the simulator's own code has no words: it is told with the run all the same."""
    write(tmp_path)
    glowplug(tmp_path, "glowplug simulate tiny.yaml --seed 2 --out a", 0)
    breaking(tmp_path, until_s="1_699_920_000.0")
    broken = glowplug(
        tmp_path, "glowplug replay a --check --set models.chat.max_concurrency=1 --compare seconds=30,40", 1
    )
    assert "tiny, 30, seed 2: sitecustomize.py, line" in broken.stderr
    assert "assert self.now_s < 1_699_920_000.0" in broken.stderr
    again = again_of(broken.stderr)
    assert again == "glowplug replay a --set models.chat.max_concurrency=1 --set seconds=30 --check"
    assert "assert self.now_s < 1_699_920_000.0" in glowplug(tmp_path, again, 1).stderr
