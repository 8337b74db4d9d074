"""The lane of each test, and the tests that must not run at the same time.

`make test` runs the fast lane, `make test-system` the system lane: fleets of processes, containers, namespaces, a real
vLLM. Both run several files at a time (pytest-xdist). The tests of one file stay together, in order, in one process;
files that share a resource of the machine run one after the other. `make test-long` runs tests marked `long`, and every
property again with many examples.
"""

import re
from functools import cache
from pathlib import PurePath

FAST, SYSTEM, LONG = "fast", "system", "long"
EXAMPLES = {FAST: 15, SYSTEM: 15, LONG: 400}  # of each property without a number of its own
PROPERTIES = "tests/properties"  # both fast and long

# The nearest row applies, else the fast lane.
LANES: dict[str, str] = {
    "tests/chaos": SYSTEM,
    "tests/clients": SYSTEM,  # all marked long
    "tests/compose/test_images.py": SYSTEM,
    "tests/compose/test_lane.py": SYSTEM,
    "tests/e2e": SYSTEM,
    "tests/e2e/test_smoke.py": FAST,  # one fleet of llama.cpp, as in the README
    "tests/e2e/test_simulate_command.py": FAST,
    "tests/e2e/console": FAST,  # whole: containers that start and stop break off chromium's loads
    "tests/integration/test_agent_faults.py": SYSTEM,
    "tests/integration/test_clocks_apart.py": SYSTEM,
    "tests/integration/test_odd_bytes.py": SYSTEM,
    "tests/integration/test_operator.py": SYSTEM,
    "tests/integration/test_pipelines.py": SYSTEM,
    "tests/integration/test_router_rollout.py": SYSTEM,
    "tests/integration/test_three_routers.py": SYSTEM,
    "tests/integration/test_vllm_parked.py": SYSTEM,
    "tests/howto": SYSTEM,
    "tests/k8s/test_fleet_in_namespaces.py": SYSTEM,
    "tests/k8s/test_namespaces.py": SYSTEM,
    "tests/observability/test_live.py": SYSTEM,
    "tests/simulation/test_recorded_fleets.py": SYSTEM,
    "tests/simulation/test_paper_rows.py": SYSTEM,  # a minute of simulation; needs the public traces
}
# Only tests of these files marked `vllm` or `system` are in the system lane.
BOTH = frozenset(
    {
        "tests/contract/test_engine_address.py",
        "tests/contract/test_engine_contract.py",
        "tests/contract/test_engine_sleep.py",
        "tests/contract/test_fields.py",
        "tests/integration/test_batches.py",
    }
)

# Single resources of a machine, by the tests that use them; and work that a process does once for all of them.
SHARED: dict[str, str] = {
    "tests/house": "tree",  # parsed
    "tests/compose/test_images.py": "containers",
    "tests/compose/test_lane.py": "containers",
    "tests/k8s/test_fleet_in_namespaces.py": "namespaces",
    "tests/k8s/test_namespaces.py": "namespaces",
    "tests/k8s/test_chart.py": "manifests",  # rendered
    "tests/k8s/test_pods.py": "manifests",
    "tests/k8s/test_render.py": "manifests",
}
VLLM = "vllm"  # one engine takes both cores of a small machine

# Files of long, independent tests: each runs on any free worker.
SPREAD = frozenset(
    {
        "tests/e2e/test_simulate_command.py",
        "tests/e2e/test_systems_emulated.py",
        "tests/howto/test_pages.py",
        "tests/properties/test_node_index.py",
        "tests/properties/test_placer.py",
        "tests/simulation/test_chaos.py",
        "tests/simulation/test_papers.py",
    }
)

# The longest tests (`make test-times`) start first, so that none runs alone at the end.
FIRST: tuple[str, ...] = (
    "tests/compose/test_lane.py",
    "tests/compose/test_images.py",
    VLLM,
    "tests/chaos/test_failover.py",
    "tests/e2e/test_fleet_command.py",
    "tests/e2e/test_doctor.py",
    "tests/e2e/test_systems_llamacpp.py",
    "tests/chaos/test_kill_services.py",
    "tests/howto/test_pages.py",
    "tests/integration/test_pipelines.py",
    "tests/observability/test_live.py",
    "tests/chaos/test_full_disk.py",
    "tests/e2e/test_mixed_versions.py",
    "tests/e2e/test_warm_starts.py",
    "tests/e2e/console/test_access.py",
    "tests/e2e/console/test_fleet_live.py",
    "tests/e2e/test_smoke.py",
    "tests/integration/test_openapi.py",
    "tests/integration/test_prefetcher.py",
    "tests/integration/test_agent_process.py",
    "tests/e2e/test_simulate_command.py",
    "tests/contract/test_engine_contract.py",
    "tests/contract/test_llamacpp.py",
    "tests/contract/test_engine_sleep.py",
    "tests/contract/test_adapters.py",
    "tests/simulation/test_overload.py",
    "tests/e2e/console/test_charts.py",
    "tests/e2e/console/test_reasons.py",
)


_IN_A_GROUP = str.maketrans({":": "/", "[": "(", "]": ")"})  # pytest-xdist splits names at these


def nearest(path: str, table: dict[str, str]) -> str:
    """The value of `path`, else of the nearest folder above it, else "". Paths are relative to the checkout."""
    return next((table[place] for place in _upwards(path) if place in table), "")


@cache
def _upwards(path: str) -> tuple[str, ...]:
    return path, *(str(folder) for folder in PurePath(path).parents)


def lane(path: str, *, is_marked: bool = False) -> str:
    """`is_marked`: marked `vllm` or `system`."""
    return SYSTEM if is_marked else nearest(path, LANES) or FAST


def is_property(path: str) -> bool:
    return path.startswith(f"{PROPERTIES}/")


def group(path: str, nodeid: str, *, is_vllm: bool = False) -> str:
    if is_vllm:
        return VLLM
    alone = nodeid.translate(_IN_A_GROUP)
    return alone if path in SPREAD else nearest(path, SHARED) or path


def without_group(name: str) -> str:
    return re.sub(r"@[^\]]*$", "", name)


def rank(path: str, *, is_vllm: bool = False) -> int:
    name = VLLM if is_vllm else path
    return FIRST.index(name) if name in FIRST else len(FIRST)
