"""The union and each paper alone on live fleets of real llama.cpp: `python -m bench.systems --out DIR`.

One machine is three nodes of one "GPU" each, a budget of host memory. Eight models with weights of their own (copies of
the sample model that differ in their last bytes) share them; a node serves one at a time and has memory for one replica
beside it, and its cache in host memory holds five of the eight. The load comes in bursts: a model is quiet, then asked
some four times within seconds; how often by a power law. Systems take turns: in each round every system gets a fresh
fleet and the same load, the next round another load. What is printed pools the rounds of a system.

    python -m bench.systems --seconds 600                        (two rounds of five minutes each: 80 minutes)
    python -m bench.systems --systems union serverless_vllm      (23 minutes)
    python -m bench.systems --systems union+asleep ...           (models deployed asleep: each is started once before)
    python -m bench.systems --again DIR                          (recordings that were kept)

TTFT is what the router reports of each request that was answered; a start's seconds go from its first phase to READY.
With `--replay` each recording runs through the simulator, and its TTFT stands beside (a simulated figure).
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Final

from bench.measured.fleet import GLOWPLUG, WAIT_S, Ask, at, drive, fleet, recorded, rows_of, write_weights
from bench.measured.load import load_now
from glowplug.policies.start_times import FROM_NOTHING

SYSTEMS: Final = ("union", "serverless_vllm", "hydraserve", "preserve", "warmserve", "swapserve", "mcache")
NUM_MODELS, NUM_NODES = 8, 3
MIB: Final = 1 << 20
GPU_BUDGET: Final = 350 * MIB  # a model takes 234 MiB, a replica of it 94
HOST_CACHE: Final = 500 * MIB  # five files of 94 MiB
MODEL: Final = """
name: {name}
engine: llamacpp
weights: {{uri: "file://{path}", sha256: {sha256}}}
kv_bytes: 140MiB
context_tokens: 2048
max_concurrency: 4
keep_alive_s: 30s
slo: {{ttft_s: 5, tpot_s: 0.2}}
"""
ASLEEP: Final = "+asleep"  # behind the name of a system
SKEW: Final = 0.7  # model i is asked in proportion to 1 / (i + 1) ** SKEW
BURSTS_PER_S: Final = 0.3
BURST_REQUESTS: Final = 4.0  # on average, geometric
GAP_S: Final = 1.2  # between the requests of a burst, on average
PROMPT_WORDS, ANSWER_TOKENS = (6, 16), (2, 8)
WORDS: Final = [
    "river",
    "stone",
    "lamp",
    "garden",
    "winter",
    "paper",
    "bridge",
    "music",
    "salt",
    "window",
    "horse",
    "copper",
    "island",
    "letter",
]
TAIL_S: Final = 15.0


@dataclass(slots=True)
class Seen:
    """What the recordings of one system say. Seconds, bytes."""

    ttft: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)  # TTFT of those that waited for a start
    num_failed: int = 0
    starts: dict[str, list[float]] = field(default_factory=dict)  # by kind: from the first phase to READY
    first: dict[str, list[float]] = field(default_factory=dict)  # by kind: TTFT of the request that a start was for
    held: list[int] = field(default_factory=list)  # granted on all GPUs, in samples
    loads: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)  # TTFT in the replays

    def of(self, *kinds: str) -> list[float]:
        return [seconds for kind in kinds for seconds in self.starts.get(kind, [])]


def load_of(seed: int, seconds: float) -> list[Ask]:
    """Bursts of the models over so many seconds, in order of time."""
    chance = random.Random(seed)
    weights = [1 / (number + 1) ** SKEW for number in range(NUM_MODELS)]
    asks, at_s = [], 0.0
    while (at_s := at_s + chance.expovariate(BURSTS_PER_S)) < seconds:
        (number,) = chance.choices(range(NUM_MODELS), weights)
        moment = at_s
        while moment < seconds:
            prompt = " ".join(chance.choices(WORDS, k=chance.randint(*PROMPT_WORDS)))
            asks.append(Ask(moment, f"model-{number}", prompt, chance.randint(*ANSWER_TOKENS)))
            moment += chance.expovariate(1 / GAP_S)
            if chance.random() < 1 / BURST_REQUESTS:
                break
    return sorted(asks, key=lambda ask: ask.at_s)


def write_models(folder: Path) -> None:
    """Weights and a model file of each model."""
    for name in ("models", f"models{ASLEEP}"):
        (folder / name).mkdir(parents=True)
    for number in range(NUM_MODELS):
        name, path = f"model-{number}", folder / f"model-{number}.gguf"
        text = MODEL.format(name=name, path=path, sha256=write_weights(path, number))
        (folder / "models" / f"{name}.yaml").write_text(text, encoding="utf-8")
        (folder / f"models{ASLEEP}" / f"{name}.yaml").write_text(text + "asleep: true\n", encoding="utf-8")


def wait_until_asleep(env: Mapping[str, str]) -> None:
    """Until each model has been started once. Raises SystemExit when that takes longer than WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done = subprocess.run([*GLOWPLUG, "ps", "-o", "json"], env=dict(env), check=True, capture_output=True)
        asleep = {row["model_key"] for row in json.loads(done.stdout) if row["state"] == "swapped_out"}
        if len(asleep) == NUM_MODELS:
            return
        time.sleep(1.0)
    raise SystemExit(f"only {sorted(asleep)} sleep after {WAIT_S:g} s")


def run(system: str, seed: int, seconds: float, folder: Path, out: Path, port_base: int) -> None:
    """One live fleet under one system and one load: `out` is its recording, beside it what else was seen."""
    settings = {
        "GLOWPLUG_POLICIES": system.removesuffix(ASLEEP),
        "GLOWPLUG_MODELS_DIR": str(folder / (f"models{ASLEEP}" if system.endswith(ASLEEP) else "models")),
        "GLOWPLUG_GPU_BUDGETS": str(GPU_BUDGET),
        "GLOWPLUG_HOST_CACHE_BYTES": str(HOST_CACHE),
    }
    up = ("--engine", "llamacpp", "--nodes", str(NUM_NODES), "--port-base", str(port_base))
    with fleet(*up, settings=settings) as live:
        if system.endswith(ASLEEP):
            wait_until_asleep(live.env)
        before = load_now()
        with recorded(live, out, seconds + TAIL_S):
            ends, held = asyncio.run(drive(load_of(seed, seconds), live))
        beside = {"load": [before, load_now()], "held": held, "ends": dict(ends)}
        out.with_suffix(".beside.json").write_text(json.dumps(beside), encoding="utf-8")


def read(recording: Path, seen: Seen) -> None:
    """Add one recording."""
    beside = json.loads(recording.with_suffix(".beside.json").read_text())
    seen.held += beside["held"]
    seen.loads += beside["load"]
    seen.num_failed += sum(num for status, num in beside["ends"].items() if status != "200")
    kinds: dict[str, str] = {}
    firsts: dict[str, float] = {}
    for kind_of_row, data in rows_of(recording):
        if kind_of_row == "request.finished" and data["status"] == 200 and not data["error_code"]:
            seen.ttft.append(data["ttft_s"])
            if data["cold"]:
                seen.cold.append(data["ttft_s"])
                known = firsts.get(data["instance_id"], 0.0)
                firsts[data["instance_id"]] = max(known, data["ttft_s"])  # the one that waited for it first
        elif kind_of_row == "instance.ready" and data["instance"]["instance_id"] not in kinds:
            instance = data["instance"]
            kinds[instance["instance_id"]] = kind = instance["start_kind"] or "unknown"
            phases = instance["phases"]
            began = min((p["started_at"] for p in phases if p["started_at"]), default=instance["created_at"])
            seen.starts.setdefault(kind, []).append(instance["ready_at"] - began)
    for instance_id, ttft_s in firsts.items():
        seen.first.setdefault(kinds.get(instance_id, "unknown"), []).append(ttft_s)


def replayed(recording: Path) -> Iterator[float]:
    """TTFT of the same requests in the simulator, which reads nothing but the recording."""
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-systems-") as scratch:
        command = [*GLOWPLUG, "replay", str(recording), "--out", f"{scratch}/run", "-o", "json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for line in (Path(scratch) / "run" / "requests.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("status") == 200 and not row.get("error_code"):
                yield row["ttft_s"]


def shown(name: str, seen: Seen, simulated: bool) -> str:
    """One row of the table."""
    starts = {kind: len(some) for kind, some in seen.starts.items()}
    fresh = sum(starts.get(kind, 0) for kind in FROM_NOTHING)
    num = max(1, sum(starts.values()))
    wakes, grown = seen.first.get("wake", []), seen.first.get("growth", [])
    fresh_s = [s for kind in FROM_NOTHING for s in seen.first.get(kind, [])]
    cells = [
        name,
        f"{len(seen.ttft)} ({seen.num_failed})",
        " / ".join(f"{at(seen.ttft, share):.3f}" for share in (0.5, 0.95, 0.99)),
        f"{fmean(seen.ttft):.3f}" if seen.ttft else "",
        f"{fresh} / {starts.get('wake', 0)} / {starts.get('growth', 0)}",
        f"{(num - fresh) / num:.0%}",
        " / ".join(f"{median(some):.2f}" if some else "-" for some in (fresh_s, wakes, grown)),
        f"{fmean(seen.held) / MIB:.0f} MiB" if seen.held else "",
        f"{min(seen.loads):.1f}-{max(seen.loads):.1f}" if seen.loads else "",
    ]
    if simulated:
        cells.append(" / ".join(f"{at(seen.simulated, share):.3f}" for share in (0.5, 0.95, 0.99)))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run, or read again what was kept, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load for each system, over all rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=9300)
    parser.add_argument("--out", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--again", type=Path, help="read the recordings of this folder; nothing is run")
    parser.add_argument("--replay", action="store_true", help="simulate each recording too")
    args = parser.parse_args()
    out = args.again or args.out or Path(tempfile.mkdtemp(prefix="glowplug-bench-systems-out-"))
    out.mkdir(parents=True, exist_ok=True)
    rounds = range(args.seed, args.seed + args.rounds)
    if not args.again:
        with tempfile.TemporaryDirectory(prefix="glowplug-bench-systems-models-") as folder:
            write_models(Path(folder))
            for number in rounds:
                for system in args.systems[:: 1 if number % 2 else -1]:
                    recording = out / f"{system}.{number}.jsonl"
                    run(system, number, args.seconds / args.rounds, Path(folder), recording, args.port_base)
                    print(f"{system}, round {number}: recorded", file=sys.stderr, flush=True)
    head = [
        "system",
        "answered (failed)",
        "TTFT p50 / p95 / p99",
        "mean",
        "starts: fresh / from sleep / from a replica",
    ]
    head += ["starts that were warm", "their TTFT (median)", "GPU bytes granted (mean)", "load average"]
    head += ["simulated TTFT p50 / p95 / p99"] if args.replay else []
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for system in args.systems:
        seen = Seen()
        for number in rounds:
            recording = out / f"{system}.{number}.jsonl"
            read(recording, seen)
            seen.simulated += replayed(recording) if args.replay else ()
        print(shown(system, seen, args.replay), flush=True)


if __name__ == "__main__":
    main()
