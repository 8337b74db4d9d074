"""Ledger, pool and slots of a host GPU do what a model of a few dictionaries says, whatever is asked and whoever dies.

`python -m bench.memory` does a million of the same operations.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_model import MemoryModel

ROOT = Path(__file__).parents[2]


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_random_operations_end_as_the_model_says(chance: random.Random, num_operations: int) -> None:
    model = MemoryModel()
    for _ in range(num_operations):
        model.step(chance)
    assert model.done.total() > 0
    model.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_owner_engines_and_agent_are_killed_and_every_chunk_stays_accounted_for(seed: int) -> None:
    """In a process of its own, which forks."""
    command = [sys.executable, "-m", "tests.memory_processes", str(seed), "600"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = json.loads(ended.stdout)
    assert done["owners killed"] and done["engines killed"] and done["agents killed"] and done["full"] > 10
