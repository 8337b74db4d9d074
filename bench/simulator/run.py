"""Measure the speed and memory of the simulator: simulated requests per second of CPU on one core.

    python bench/simulator/run.py [--seconds 1200] [--only NAME] [--json FILE]

 warmserve    scenarios/warmserve.yaml at RPS 25, every mechanism on, against the mode that visits each engine step
 length       the same fleet over a trace four times as long: peak memory, requests a second
 hydraserve   384 models on 24 GPUs, one hour
 scale        200 servers of 8 GPUs, 500 models: that it completes, and the time of its decisions, forecasts included
Every case runs in a process of its own. CPU is the process's own (user and system); memory is the peak of its resident
set. A decision's time is the CPU time of one `handle` that gave any effect, over the decisions it recorded (a tick of
the autoscaler settles every model that has something to settle); placements are those of the placer that recorded one.
All figures are of the machine this ran on; simulated requests are simulated.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.measured.data import data_option, markdown, markdown_row, write_data
from glowplug.controllers.effects import Record
from glowplug_lab.simulator.scenario.load import load
from glowplug_lab.simulator.world import World

SCENARIOS = Path(__file__).parents[2] / "scenarios"
WARM = ("params.agent.reservation=paper", "workload.rps=25")
CASES: dict[str, tuple[str, tuple[str, ...], float]] = {  # name -> scenario, settings, length in times of --seconds
    "warmserve": ("warmserve", WARM, 1.0),
    "warmserve, every step": ("warmserve", (*WARM, "params.stepping=true"), 0.25),
    "warmserve, four times as long": ("warmserve", WARM, 4.0),
    "hydraserve, an hour": ("hydraserve", (), 0.0),
    "scale, a minute, baselines": ("scale", ("seconds=60", "policies=serverless_vllm"), 0.0),
    "scale, 15 minutes, union": ("scale", ("seconds=15m", "policies=union"), 0.0),
}


class Watch:
    """Times every `handle` of the controllers that decide."""

    def __init__(self, world: World) -> None:
        self.seconds: dict[str, list[float]] = {}
        for name in ("router", "autoscaler", "placer", "predictor"):
            self._wrap(world, name)

    def _wrap(self, world: World, name: str) -> None:
        service = world.control.services[name]
        handle, taken = service.handle, self.seconds.setdefault(name, [])
        placed = self.seconds.setdefault("placements", [])

        def timed(stimulus: Any, now_s: float) -> Any:
            began = time.thread_time()
            effects = handle(stimulus, now_s)
            if effects:
                num_decided = sum(type(effect) is Record for effect in effects)
                took = (time.thread_time() - began) / max(1, num_decided)
                taken.append(took)
                if name == "placer" and num_decided:
                    placed.append(took)
            return effects

        world.control.services[name] = _Timed(service, timed)

    def table(self) -> dict[str, dict[str, float]]:
        return {
            name: {"num": len(taken), "p50_ms": 1e3 * statistics.median(taken), "max_ms": 1e3 * max(taken)}
            for name, taken in self.seconds.items()
            if taken
        }


class _Timed:
    """A controller whose `handle` is watched."""

    def __init__(self, service: Any, handle: Any) -> None:
        self._service, self.handle = service, handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


def measure(name: str, seconds: float) -> dict[str, Any]:
    """One case in this process."""
    scenario_name, settings, times = CASES[name]
    length = (f"seconds={seconds * times:g}",) if times else ()
    scenario = load(SCENARIOS / f"{scenario_name}.yaml", (*settings, *length))
    world = World(scenario.setup, scenario.arrivals())
    watch = Watch(world) if name.startswith("scale") else None
    began = time.process_time()
    results = world.run(scenario.seconds)
    cpu_s = time.process_time() - began
    total = results.total()
    return {
        "simulated_s": round(results.seconds),
        "requests": total.num_arrived,
        "ended": total.num_finished + sum(total.num_refused.values()),
        "response_tokens": total.response_tokens,
        "events": world.kernel.num_done,
        "cpu_s": cpu_s,
        "requests_per_cpu_s": total.num_arrived / cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "decisions": watch.table() if watch else {},
    }


def main() -> None:
    """Each case in its own process; a table on stdout, and the rows where `--json` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1200.0, help="of the WarmServe trace")
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    data_option(parser)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.seconds)))
        return
    head = ("case", "simulated s", "requests", "CPU s", "requests per CPU s", "events", "peak MiB")
    print(markdown(head), flush=True)
    details: list[tuple[str, ...]] = []
    rows: dict[str, dict[str, Any]] = {}
    for name in (case for case in CASES if case.startswith(args.only)):
        command = [sys.executable, __file__, "--case", name, "--seconds", str(args.seconds)]
        row = rows[name] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        cells = (row["simulated_s"], f"{row['requests']:,}", f"{row['cpu_s']:.1f}", f"{row['requests_per_cpu_s']:,.0f}")
        print(markdown_row(name, *cells, f"{row['events']:,}", f"{row['peak_mib']:.0f}"), flush=True)
        for service, times in row["decisions"].items():
            ms = f"{times['p50_ms']:.3f}", f"{times['max_ms']:.1f}"
            details.append((name, service, f"{times['num']:,}", *ms))
    if details:
        print("\n" + markdown(("case", "decides", "times", "p50 ms", "most ms"), details))
    write_data(args.json, {"cases": rows})


if __name__ == "__main__":
    main()
