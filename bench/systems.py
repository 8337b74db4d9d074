"""Compare the union and each paper alone on live fleets of real llama.cpp: `python -m bench.systems --out DIR`.

One machine is three nodes of one "GPU" each, a budget of host memory. Eight models with weights of their own (copies of
the sample model that differ in their last bytes) share them; a node serves one at a time and has memory for one replica
beside it, and its cache in host memory holds five of the eight. The load comes in bursts: a model is quiet, then asked
some four times within seconds; popularity follows a power law. Systems take turns: in each round every system gets a
fresh fleet and the same load, the next round another load. The table pools the rounds of a system.

    python -m bench.systems --seconds 600                        (two rounds of five minutes each: 80 minutes)
    python -m bench.systems --systems union serverless_vllm      (23 minutes)
    python -m bench.systems --systems union+asleep ...           (models deployed asleep: each is started once before)
    python -m bench.systems --again DIR                          (kept recordings)

TTFT is the router's figure for each answered request. With `--replay` each recording also runs through the simulator,
and the table has the simulated TTFT too.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Final

from bench.measured.data import data_option, markdown, markdown_row, write_data
from bench.measured.fleet import GLOWPLUG, WAIT_S, Ask, at, drive, fleet, recorded, rows_of, write_weights
from bench.measured.load import load_now
from glowplug.fleet.start_times import FROM_NOTHING

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
ASLEEP: Final = "+asleep"  # suffix of a system's name
SKEW: Final = 0.7  # model i is asked in proportion to 1 / (i + 1) ** SKEW
BURSTS_PER_S: Final = 0.3
BURST_REQUESTS: Final = 4.0  # on average, geometric
GAP_S: Final = 1.2  # between the requests of a burst, on average
PROMPT_WORDS, ANSWER_TOKENS = (6, 16), (2, 8)
WORDS: Final = "river stone lamp garden winter paper bridge music salt window horse copper island letter"
TAIL_S: Final = 15.0


@dataclass(slots=True)
class Seen:
    """The figures from the recordings of one system. Seconds, bytes."""

    ttft: list[float] = field(default_factory=list)
    num_failed: int = 0
    starts: Counter[str] = field(default_factory=Counter)  # by kind
    first: dict[str, list[float]] = field(default_factory=dict)  # kind of start -> TTFT of the request it was for
    held: list[int] = field(default_factory=list)  # samples of the bytes granted on all GPUs
    loads: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)  # TTFT in the replays

    def first_of(self, *kinds: str) -> list[float]:
        """TTFT of the requests for which starts of these kinds were made."""
        return [seconds for kind in kinds for seconds in self.first.get(kind, [])]


def load_of(seed: int, seconds: float) -> list[Ask]:
    """The requests of all models over `seconds`, in bursts, in order of time."""
    chance, words = random.Random(seed), WORDS.split()
    weights = [1 / (number + 1) ** SKEW for number in range(NUM_MODELS)]
    asks, at_s = [], 0.0
    while (at_s := at_s + chance.expovariate(BURSTS_PER_S)) < seconds:
        (number,) = chance.choices(range(NUM_MODELS), weights)
        moment = at_s
        while moment < seconds:
            prompt = " ".join(chance.choices(words, k=chance.randint(*PROMPT_WORDS)))
            asks.append(Ask(moment, f"model-{number}", prompt, chance.randint(*ANSWER_TOKENS)))
            moment += chance.expovariate(1 / GAP_S)
            if chance.random() < 1 / BURST_REQUESTS:
                break
    return sorted(asks, key=lambda ask: ask.at_s)


def write_models(folder: Path) -> None:
    """Write distinct weights and a model file for each model."""
    for name in ("models", f"models{ASLEEP}"):
        (folder / name).mkdir(parents=True)
    for number in range(NUM_MODELS):
        name, path = f"model-{number}", folder / f"model-{number}.gguf"
        text = MODEL.format(name=name, path=path, sha256=write_weights(path, number))
        (folder / "models" / f"{name}.yaml").write_text(text, encoding="utf-8")
        (folder / f"models{ASLEEP}" / f"{name}.yaml").write_text(text + "asleep: true\n", encoding="utf-8")


def wait_until_asleep(env: Mapping[str, str]) -> None:
    """Wait until each model has been started once and sleeps. Raises SystemExit if that takes longer than WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        done = subprocess.run([*GLOWPLUG, "ps", "-o", "json"], env=dict(env), check=True, capture_output=True)
        asleep = {row["model_key"] for row in json.loads(done.stdout) if row["state"] == "swapped_out"}
        if len(asleep) == NUM_MODELS:
            return
        time.sleep(1.0)
    raise SystemExit(f"only {sorted(asleep)} sleep after {WAIT_S:g} s")


def run(system: str, seed: int, seconds: float, folder: Path, out: Path, port_base: int) -> None:
    """Run one live fleet under one system and one load: records it to `out`, and writes loads and samples beside it."""
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
    """Add one recording, and the file beside it, to `seen`."""
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
                known = firsts.get(data["instance_id"], 0.0)
                firsts[data["instance_id"]] = max(known, data["ttft_s"])  # the request that waited longest
        elif kind_of_row == "instance.ready" and data["instance"]["instance_id"] not in kinds:
            instance = data["instance"]
            kinds[instance["instance_id"]] = kind = instance["start_kind"] or "unknown"
            seen.starts[kind] += 1
    for instance_id, ttft_s in firsts.items():
        seen.first.setdefault(kinds.get(instance_id, "unknown"), []).append(ttft_s)


def replayed(recording: Path) -> Iterator[float]:
    """TTFT of the same requests in the simulator, which knows only the recording."""
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-systems-") as scratch:
        command = [*GLOWPLUG, "replay", str(recording), "--out", f"{scratch}/run", "-o", "json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for line in (Path(scratch) / "run" / "requests.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("status") == 200 and not row.get("error_code"):
                yield row["ttft_s"]


def shown(name: str, seen: Seen, simulated: bool) -> str:
    fresh = sum(seen.starts[kind] for kind in FROM_NOTHING)
    num = max(1, seen.starts.total())
    wakes, grown, fresh_s = seen.first_of("wake"), seen.first_of("growth"), seen.first_of(*FROM_NOTHING)
    cells = [
        name,
        f"{len(seen.ttft)} ({seen.num_failed})",
        " / ".join(f"{at(seen.ttft, share):.3f}" for share in (0.5, 0.95, 0.99)),
        f"{fmean(seen.ttft):.3f}" if seen.ttft else "",
        f"{fresh} / {seen.starts['wake']} / {seen.starts['growth']}",
        f"{(num - fresh) / num:.0%}",
        " / ".join(f"{median(some):.2f}" if some else "-" for some in (fresh_s, wakes, grown)),
        f"{fmean(seen.held) / MIB:.0f} MiB" if seen.held else "",
        f"{min(seen.loads):.1f}-{max(seen.loads):.1f}" if seen.loads else "",
    ]
    if simulated:
        cells.append(" / ".join(f"{at(seen.simulated, share):.3f}" for share in (0.5, 0.95, 0.99)))
    return markdown_row(*cells)


def as_data(seen: Mapping[str, Seen]) -> dict[str, object]:
    """The figures that `shown` prints, as numbers by system; null without requests or without starts of a kind."""
    return {
        "systems": {
            name: {
                "num_answered": len(one.ttft),
                "num_failed": one.num_failed,
                "ttft_s": _percentiles(one.ttft),
                "simulated_ttft_s": _percentiles(one.simulated),
                "num_starts": dict(one.starts),
                "first_token_s_p50": {
                    "fresh": median(fresh) if (fresh := one.first_of(*FROM_NOTHING)) else None,
                    "wake": median(wakes) if (wakes := one.first_of("wake")) else None,
                    "growth": median(grown) if (grown := one.first_of("growth")) else None,
                },
                "held_bytes_mean": fmean(one.held) if one.held else None,
                "load": [min(one.loads), max(one.loads)] if one.loads else None,
            }
            for name, one in seen.items()
        }
    }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    return {f"p{share:.0%}".rstrip("%"): at(values, share) for share in (0.5, 0.95, 0.99)} if values else None


def main() -> None:
    """Run the systems, or read kept recordings, print the table, and write the data to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--seconds", type=float, default=600.0, help="of load for each system, over all rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=9300)
    parser.add_argument("--out", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--again", type=Path, help="read the recordings of this folder; nothing is run")
    parser.add_argument("--replay", action="store_true", help="simulate each recording too")
    data_option(parser)
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
    print(markdown(head))
    seen = {system: Seen() for system in args.systems}
    for system, one in seen.items():
        for number in rounds:
            recording = out / f"{system}.{number}.jsonl"
            read(recording, one)
            one.simulated += replayed(recording) if args.replay else ()
        print(shown(system, one, args.replay), flush=True)
    write_data(args.json, as_data(seen))


if __name__ == "__main__":
    main()
