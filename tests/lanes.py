"""Which lane a test runs in, and what it may not run beside.

`make test` runs the fast lane: what needs no more than the environment. `make test-system` runs the system lane: fleets
of processes, containers, namespaces, a real vLLM. Both run several files at a time (pytest-xdist). The tests of one
file stay together, in order, in one process; files that use something the machine has once run one after the other.
`make test-long` runs what is marked `long`: further cases of what the system lane has one case of.
"""

import re
from collections.abc import Iterator
from pathlib import PurePath

FAST, SYSTEM, LONG = "fast", "system", "long"  # the last one: tests marked `long`, of files of the system lane

# A test's lane is that of the nearest row; without one it is the fast lane.
LANES: dict[str, str] = {
    "tests/chaos": SYSTEM,
    "tests/compose/test_images.py": SYSTEM,
    "tests/compose/test_lane.py": SYSTEM,
    "tests/e2e": SYSTEM,
    "tests/e2e/test_smoke.py": FAST,  # one fleet of llama.cpp, as the README starts it
    "tests/e2e/test_simulate_command.py": FAST,
    "tests/e2e/console": FAST,
    "tests/e2e/console/test_fleet_live.py": SYSTEM,  # a browser and a fleet
    "tests/integration/test_agent_faults.py": SYSTEM,
    "tests/integration/test_pipelines.py": SYSTEM,
    "tests/integration/test_vllm_parked.py": SYSTEM,
    "tests/howto": SYSTEM,
    "tests/k8s/test_fleet_in_namespaces.py": SYSTEM,
    "tests/k8s/test_namespaces.py": SYSTEM,
    "tests/observability/test_live.py": SYSTEM,
}
# Of these files the tests marked `vllm` are in the system lane, the others in the fast one.
BOTH = frozenset({"tests/contract/test_engine_address.py", "tests/contract/test_engine_contract.py"})

# What a machine has once, and who uses it.
SHARED: dict[str, str] = {
    "tests/compose/test_images.py": "containers",
    "tests/compose/test_lane.py": "containers",
    "tests/k8s/test_fleet_in_namespaces.py": "namespaces",
    "tests/k8s/test_namespaces.py": "namespaces",
}
VLLM = "vllm"  # one engine takes both cores of a small machine

# Every test of these files starts what it needs itself, and takes long: each runs wherever a worker is free.
SPREAD = frozenset(
    {
        "tests/e2e/test_simulate_command.py",
        "tests/e2e/test_systems_emulated.py",
        "tests/howto/test_pages.py",
        "tests/observability/test_alerts.py",
    }
)

# What takes longest (docs/test_times.md) starts first, so that nothing is left alone at the end.
FIRST: tuple[str, ...] = (
    "tests/compose/test_lane.py",
    "tests/compose/test_images.py",
    VLLM,
    "tests/chaos/test_kill_services.py",
    "tests/howto/test_pages.py",
    "tests/e2e/test_smoke.py",
    "tests/e2e/test_simulate_command.py",
    "tests/e2e/console/test_reasons.py",
    "tests/e2e/console/test_access.py",
)


_IN_A_GROUP = str.maketrans({":": "/", "[": "(", "]": ")"})  # a name is split at the others


def nearest(path: str, table: dict[str, str]) -> str:
    """The row of `path`, else of the nearest folder above it, else "". Paths count from the checkout, with slashes."""
    return next((table[place] for place in _upwards(path) if place in table), "")


def _upwards(path: str) -> Iterator[str]:
    yield path
    yield from (str(folder) for folder in PurePath(path).parents)


def lane(path: str, *, is_vllm: bool = False) -> str:
    """FAST or SYSTEM."""
    return SYSTEM if is_vllm else nearest(path, LANES) or FAST


def group(path: str, nodeid: str, *, is_vllm: bool = False) -> str:
    """Tests of one group run one after the other, in one process."""
    if is_vllm:
        return VLLM
    alone = nodeid.translate(_IN_A_GROUP)
    return alone if path in SPREAD else nearest(path, SHARED) or path


def without_group(name: str) -> str:
    """A test's name as pytest has it: pytest-xdist writes the group behind it."""
    return re.sub(r"@[^\]]*$", "", name)


def rank(path: str, *, is_vllm: bool = False) -> int:
    """The order in which groups start."""
    name = VLLM if is_vllm else path
    return FIRST.index(name) if name in FIRST else len(FIRST)
