"""Ledger, pool and slots of a host GPU match a simple model under any requests and kills."""

import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug_lab.gpu_slots.gpu_memory import GpuError
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.owner_client import OwnerClient, OwnerGone
from tests.contract.gpu_memory_rig import PAGE, RunningOwner
from tests.memory_model import MemoryModel
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_random_operations_end_as_the_model_says(chance: random.Random, num_operations: int) -> None:
    model = MemoryModel()
    for _ in range(num_operations):
        model.step(chance)
    assert model.done.total() > 0
    model.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["m", "x-1", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["m", "n"]), inner, max_size=2),
    max_leaves=4,
)
FIELDS = dict.fromkeys(("num_chunks", "ids", "name", "names", "num_bytes", "at_most"), JSON)
VERBS = st.sampled_from(["take", "give", "publish", "attach", "adopt", "holdings"]) | JSON


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gp-owner-") as folder:
        running = RunningOwner(Path(folder) / "s")
        yield Path(folder) / "s"
        running.stop()


@settings(max_examples=60)
@given(messages=st.lists(st.fixed_dictionaries({"verb": VERBS}, optional=FIELDS), max_size=4))
def test_no_message_ends_an_owner_or_takes_more_than_there_is(path: Path, messages: list[dict[str, Any]]) -> None:
    with OwnerClient(HostMemory(PAGE, PAGE), path, timeout_s=5.0) as bystander:
        with OwnerClient(HostMemory(PAGE, PAGE), path, timeout_s=0.5) as client, contextlib.suppress(OwnerGone):
            for message in messages:
                with contextlib.suppress(GpuError):
                    client._borrow(message) if message["verb"] in ("take", "attach") else client._ask(message)
        wait_until("what it held is free", lambda: bystander.num_free == 16, every_s=0.001)
        assert bystander.holdings()["num_held"] == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_owner_engines_and_agent_are_killed_and_every_chunk_stays_accounted_for(seed: int) -> None:
    """It forks, so it needs its own process."""
    command = [sys.executable, "-m", "tests.memory_processes", str(seed), "600"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = json.loads(ended.stdout)
    assert done["owners killed"] and done["engines killed"] and done["agents killed"] and done["full"] > 10
