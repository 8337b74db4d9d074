"""Simulate 1,000 adapters over 4 bases, served in three ways: `python -m bench.adapters.run [--seconds S]`.

All three ways get the same requests (scenarios/adapters.yaml, one seed) on the same servers under the default policies:

- `adapters`: as Glowplug serves them. An adapter is loaded into an engine of its base when it is asked for.
- `merged`: one instance per adapter. Each is a model of its own with merged weights, of its base's bytes.
- `everywhere`: every engine of a base holds all of its adapters from its start. Their bytes are fetched and loaded with
  the base's and lie on the GPU beside them, with the same KV cache; each step takes as much longer as in `adapters`.

TTFT counts from a request's arrival. GPU-seconds count GPUs that hold anything. Refused and timed-out requests have no
TTFT and are counted in a column of their own.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from glowplug_lab.simulator.hardware.node import STEP_S
from glowplug_lab.simulator.scenario.load import Scenario, load
from glowplug_lab.simulator.setup import ModelSetup, Setup
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

SCENARIO: Final = Path(__file__).parents[2] / "scenarios" / "adapters.yaml"
WAYS: Final = ("adapters", "merged", "everywhere")


def merged(scenario: Scenario) -> Setup:
    """Turn each adapter into a model of its base's bytes, with weights of its own."""
    bases = {one.model.key: one for one in scenario.setup.models}

    def whole(one: ModelSetup) -> ModelSetup:
        if not one.model.base:
            return one
        base = bases[one.model.base].model
        weights = replace(one.model.weights, num_bytes=base.weights_bytes)
        model = replace(one.model, base="", weights=weights, weights_bytes=base.weights_bytes, kv_bytes=base.kv_bytes)
        return replace(one, model=model)

    return replace(scenario.setup, models=tuple(map(whole, scenario.setup.models)))


def everywhere(scenario: Scenario) -> Setup:
    """Leave the bases alone, each with the bytes of all of its adapters."""
    models = scenario.setup.models

    def laden(one: ModelSetup) -> ModelSetup:
        num_bytes = sum(other.model.weights_bytes for other in models if other.model.base == one.model.key)
        model = one.model
        weights = replace(model.weights, num_bytes=model.weights.num_bytes + num_bytes)
        model = replace(model, weights=weights, weights_bytes=model.weights_bytes + num_bytes)
        costs = {
            kind: replace(c, prefill_base_s=c.prefill_base_s + STEP_S, decode_base_s=c.decode_base_s + STEP_S)
            for kind, c in one.costs.items()
        }
        return replace(one, model=model, costs=costs)

    return replace(scenario.setup, models=tuple(laden(one) for one in models if not one.model.base))


def arrivals_of(scenario: Scenario, seed: int, way: str) -> Iterator[Arrival]:
    base_of = {one.model.key: one.model.base or one.model.key for one in scenario.setup.models}
    for arrival in scenario.arrivals(seed):
        yield arrival._replace(model=base_of[arrival.model]) if way == "everywhere" else arrival


def run(way: str, seconds: float, seed: int) -> dict[str, Any]:
    """Simulate one way. Returns its figures."""
    scenario = load(SCENARIO, [f"seconds={seconds:g}"])
    setup = {"adapters": lambda s: s.setup, "merged": merged, "everywhere": everywhere}[way](scenario)
    world = World(setup, arrivals_of(scenario, seed, way), label=way)
    results = world.run(seconds, drain_s=120.0)
    total = results.total()
    return {
        "num_requests": total.num_arrived,
        "num_answered": total.num_finished,
        "num_refused": sum(total.num_refused.values()),
        "ttft_s_p50": round(total.ttft.at(0.5), 3),
        "ttft_s_p95": round(total.ttft.at(0.95), 3),
        "ttft_s_p99": round(total.ttft.at(0.99), 3),
        "gpu_seconds": round(results.gpu_seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {}
    print("| way | requests | answered | refused | TTFT p50 s | p95 | p99 | GPU-seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for way in args.ways:
        found[way] = run(way, args.seconds, args.seed)
        print(f"| {way} | " + " | ".join(str(value) for value in found[way].values()) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
