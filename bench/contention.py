"""Two cold starts with deadlines on links that others use too, with HydraServe's ledger of the links and without it:
`python -m bench.contention [--rounds N]`, live (emulated engines on three nodes, links throttled) and simulated.

Three models are asked for, 0.3 s apart. `tight` needs two links to meet its objective, and leaves them little spare
time; `bulk` has none, and takes the third link; `late` has time enough anywhere. Every link is used once by then, so
that by the fastest share alone `late` goes where `tight` is fetched. The ledger (Eq. 3-4) sees that `tight` would be
late there, and sends it to the link of `bulk`. The names of models end with the round's number: each starts cold.
Figures of the emulated engine are modelled seconds under real processes, real fetches and real links' rates.
"""

import argparse
import math
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.alternating import first_token_s
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.systems import SYSTEMS
from glowplug.simulator.costs import FITTED
from glowplug.simulator.setup import ModelSetup, Params, PolicyNames, ServerSetup, Setup, StartSeconds
from glowplug.simulator.workload.arrival import Arrival
from glowplug.simulator.world import World
from tests.fleet_runner import Fleet

BEGAN_S = 1_700_006_400.0
LINK_BYTES_PER_S = 10_000_000
NUM_NODES = 3
PROFILE = ("qwen2.5-7b", "a100")
KV_BYTES = 2_000_000_000
LAUNCH_S, WARMUP_S = 2.0, 0.5  # the emulated engine's own, which its prior expects
TEXT = """
name: {name}
engine: emulated
weights: {{uri: '{uri}', num_bytes: {num_bytes}}}
weights_bytes: {num_bytes}
kv_bytes: {kv_bytes}
keep_alive_s: 1s
max_wait_s: 120
engine_args: {{profile: "{profile}", launch_s: {launch_s}, warmup_s: {warmup_s}}}
slo: {{ttft_s: {ttft_s}, tpot_s: 0.5}}
"""
LEDGER = {"with the ledger": "hydraserve", "without": "hydraserve:allocation.check_contention=false"}


@dataclass(frozen=True)
class Wanted:
    """One cold start: when it is asked for, what it fetches, and its objective (0: none)."""

    name: str
    at_s: float
    num_bytes: int
    ttft_s: float


STARTS = (
    Wanted("tight", 0.0, 40_000_000, 3.1),
    Wanted("bulk", 0.3, 80_000_000, 0.0),
    Wanted("late", 0.6, 16_000_000, 5.5),
)


def simulated(placement: str) -> dict[str, float]:
    """Seconds to the first token by name."""
    start = StartSeconds(launch_s=LAUNCH_S, warmup_s=WARMUP_S)
    models = tuple(_simulated_model(one, start) for one in STARTS)
    server = ServerSetup(
        num_servers=NUM_NODES,
        num_gpus=1,
        gpu_bytes=40_000_000_000,
        gpu_kind="a100",
        network_bytes_per_s=LINK_BYTES_PER_S,
        abilities=frozenset({"stages"}),
    )
    policies = PolicyNames(**{**SYSTEMS["hydraserve"].policies, "placement": placement})
    stages = StageSeconds(container_s=LAUNCH_S, warmup_s=WARMUP_S)
    placer = PlacerParams(
        settle_s=0.0, node_lease_s=math.inf, network_bytes_per_s=LINK_BYTES_PER_S, start_stages=stages
    )
    params = Params(placer=placer)
    setup = Setup(servers=(server,), models=models, policies=policies, params=params, began_at=BEGAN_S)
    world = World(setup, [Arrival(1.0 + one.at_s, one.name, 40, 8) for one in STARTS])
    results = world.run(60.0)
    return {one.name: results.by_model[one.name].ttft.mean for one in STARTS}


def _simulated_model(one: Wanted, start: StartSeconds) -> ModelSetup:
    model = Model(
        name=one.name,
        key=one.name,
        engine="emulated",
        weights=WeightsRef(uri=f"s3://{one.name}", num_bytes=one.num_bytes),
        weights_bytes=one.num_bytes,
        kv_bytes=KV_BYTES,
        slo=Slo(ttft_s=one.ttft_s, tpot_s=0.5),
    )
    return ModelSetup(model=model, costs={"a100": FITTED[PROFILE]}, kv_bytes_per_token=56 << 10, start=start)


def live(placement: str, num_rounds: int) -> dict[str, list[float]]:
    """Seconds to the first token by name, of each round."""
    with tempfile.TemporaryDirectory(prefix="gp-contention-", ignore_cleanup_errors=True) as folder:
        texts = {f"{one.name}-{n}": _text(Path(folder), one, n) for one in STARTS for n in range(num_rounds)}
        env = {
            "GLOWPLUG_POLICIES": "hydraserve",
            "GLOWPLUG_POLICY_PLACEMENT": placement,
            "GLOWPLUG_LINK_BYTES_PER_S": str(LINK_BYTES_PER_S),
            "GLOWPLUG_GPU_BUDGETS": "40GB",
            "GLOWPLUG_ENGINES": "emulated",
        }
        with Fleet.start(Path(folder) / "fleet", texts, nodes=NUM_NODES, **env) as fleet:
            found: dict[str, list[float]] = defaultdict(list)
            for number in range(num_rounds):
                _ask(fleet.url("data"), number, found)
                _until_idle(fleet)
            return found


def _text(folder: Path, one: Wanted, number: int) -> str:
    path = folder / f"{one.name}-{number}.bin"
    path.write_bytes(os.urandom(one.num_bytes))
    return TEXT.format(
        name=f"{one.name}-{number}",
        uri=path.as_uri(),
        num_bytes=one.num_bytes,
        kv_bytes=KV_BYTES,
        profile="/".join(PROFILE),
        launch_s=LAUNCH_S,
        warmup_s=WARMUP_S,
        ttft_s=one.ttft_s,
    )


def _ask(url: str, number: int, found: dict[str, list[float]]) -> None:
    began = time.monotonic()

    def ask(one: Wanted) -> None:
        time.sleep(max(0.0, began + one.at_s - time.monotonic()))
        with httpx.Client(base_url=url, timeout=120) as client:
            found[one.name].append(first_token_s(client, f"{one.name}-{number}"))

    threads = [threading.Thread(target=ask, args=(one,)) for one in STARTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _until_idle(fleet: Fleet) -> None:
    deadline = time.monotonic() + 60
    while fleet.instances() and time.monotonic() < deadline:
        time.sleep(0.2)


def line(how: str, kind: str, found: Mapping[str, list[float]]) -> str:
    """Medians, the longest where there are several, and how often the objective was met."""
    cells = []
    for one in STARTS:
        values = found[one.name]
        met = sum(value <= one.ttft_s for value in values)
        kept = f", {met} of {len(values)} within {one.ttft_s:g} s" if one.ttft_s else ""
        most = f" (at most {max(values):.2f})" if len(values) > 1 else ""
        cells.append(f"{statistics.median(values):.2f} s{most}{kept}")
    return f"| {how} | {kind} | {' | '.join(cells)} |"


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    num_rounds: int = parser.parse_args().rounds
    before = os.getloadavg()[0]
    table: dict[tuple[str, str], Mapping[str, list[float]]] = {}
    for how, placement in LEDGER.items():
        table[how, "simulated"] = {name: [seconds] for name, seconds in simulated(placement).items()}
        table[how, "live, emulated"] = live(placement, num_rounds)
    after = os.getloadavg()[0]
    print(f"{NUM_NODES} nodes at {LINK_BYTES_PER_S / 1e6:g} MB/s, {num_rounds} rounds, medians of the first token;")
    print(f"{os.cpu_count()} cores, load {before:.1f} before, {after:.1f} after\n")
    print(f"| | | {' | '.join(one.name for one in STARTS)} |\n|---|---|{'---|' * len(STARTS)}")
    for (how, kind), found in table.items():
        print(line(how, kind, found))
    for how in LEDGER:
        pairs = ((table[how, "simulated"][one.name], table[how, "live, emulated"][one.name]) for one in STARTS)
        off = [abs(statistics.median(lived) / told[0] - 1) for told, lived in pairs]
        print(f"\n{how}, live and simulated differ by {max(off):.0%} at most", end="")
    print()


if __name__ == "__main__":
    main()
