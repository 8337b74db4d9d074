"""A cold start passes the controllers, policies and tables that ARCHITECTURE.md names."""

from glowplug_lab.simulator.setup import GB, QUIET_AGENT, Params, PolicyNames, ServerSetup, Setup
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World
from glowplug_lab.systems import SYSTEMS
from tests.simulation.fleets import BEGAN_S, H800, a_model
from tests.walks import ROOT, entered, named

LIBRARY = ROOT / "libs/glowplug"
PURE = ("controllers/", "policies/", "fleet/")
WALK = "A cold start"


def test_the_walk_names_at_most_25_files_that_exist_each_once() -> None:
    walk = named(WALK)
    assert 20 < len(walk) <= 25 and len(set(walk)) == len(walk)
    assert [path for path in walk if not ((LIBRARY / path).exists() or (ROOT / path).exists())] == []


def test_a_cold_start_that_needs_the_memory_of_another_passes_each_of_them() -> None:
    models = tuple(a_model(key, 16, 32, {"h800": H800}, max_instances=1) for key in ("first", "second"))
    server = ServerSetup(num_gpus=1, gpu_bytes=80 * GB, pcie_bytes_per_s=16e9, host_cache_bytes=100 * GB)
    policies, params = PolicyNames(**SYSTEMS["union"].policies), Params(agent=QUIET_AGENT)
    setup = Setup(servers=(server,), models=models, policies=policies, params=params, began_at=BEGAN_S)
    world = World(setup, [Arrival(1.0, "first", 10, 5), Arrival(25.33, "second", 10, 5)])
    with entered("libs/glowplug") as files:
        world.kernel.at(BEGAN_S + 25.329, files.clear)
        world.run(60.0)
    walk = [path for path in named(WALK) if path.startswith(PURE)]
    assert [path for path in walk if path not in files] == []
    controllers = [path for path in walk if path.endswith("/controller.py")]
    assert sorted(controllers[:3], key=list(files).index) == controllers[:3], "router, autoscaler, placer"
