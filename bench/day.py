"""A day of two services on live llama.cpp, the union beside reactive scaling: `python -m bench.day [--seconds 1080]`.

One machine is one node with host memory for three instances of two models. The models get the Azure traces of
conversations and of code of the same Monday, squeezed into `--seconds`, with the lengths of 2023 divided by 16
(prompts) and 8 (answers); gaps are Poisson's within ten seconds of the day. An engine has one thread, so that two busy
ones have a core each on a machine with two. The day is cut into `--parts`; systems take turns part by part, each with a
fresh fleet and the same requests, and what is printed pools the parts of a system.

    python -m bench.day                              (a day in 18 minutes, two parts: under 40 minutes for both)
    python -m bench.day --seconds 40 --parts 1 --rps 0.3    (to see that it runs)
    python -m bench.day --systems union preserve serverless_vllm ...
    python -m bench.day --again DIR                  (recordings that were kept)

`serverless_vllm` is the baseline: reactive scaling, least-request routing. The windows of forecasts and the season
are squeezed as the day is; starts and answers are not, so each lasts 80 times as long as in a
real day. A request misses when it fails, or when its first token or its tokens come later than the models' objectives
say. An instance counts from the grant of its memory until that is free or holds a replica. Needs the traces
(`GLOWPLUG_DATA`).
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

from bench.measured.fleet import Ask, at, drive, fleet, recorded, rows_of, write_weights
from bench.measured.load import load_now
from bench.papers.data import bin_counts, lengths

ROOT: Final = Path(__file__).parents[1]
DAY_S: Final = 86_400.0
BIN_S: Final = 10.0
MIB: Final = 1 << 20
NODE_BYTES: Final = 3 * 240 * MIB  # an instance is granted 94 MiB of weights and 140 of KV cache
TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.2
WINDOW_S: Final = 600.0  # of a day as long as a day
PROMPTS_BY, ANSWERS_BY = 16, 8
TAIL_S: Final = 15.0
MODEL: Final = """
name: {name}
engine: llamacpp
weights: {{uri: "file://{path}", sha256: {sha256}}}
kv_bytes: 140MiB
context_tokens: 1024
max_concurrency: 4
max_instances: 2
keep_alive_s: 15s
slo: {{ttft_s: {ttft_s}, tpot_s: {tpot_s}}}
engine_args: {{n_threads: 1}}
"""
WORDS: Final = ("river", "stone", "lamp", "garden", "winter", "paper", "bridge", "music", "salt", "window", "horse")


@dataclass(frozen=True, slots=True)
class Service:
    """One model's traces: counts by 10 s, of which Monday is day `monday`, and lengths."""

    model: str
    counts: str
    monday: int
    lengths: str


SERVICES: Final = (
    Service("conversation", "azure_2024_conv_10s", 1, "azure_2023_conv"),
    Service("code", "azure_2024_code_10s", 3, "azure_2023_code"),
)


@dataclass(slots=True)
class Seen:
    """What the recordings of one system say. Seconds, bytes."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_missed: int = 0
    num_failed: int = 0
    num_late: int = 0  # that ended after the recording; each has missed
    num_cold: int = 0
    num_starts: int = 0
    instance_s: float = 0.0
    held: list[int] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


def times_of(counts: Sequence[float], seconds: float, rps: float, chance: Random) -> Iterator[float]:
    """Arrivals over `seconds` of a day with these counts by bin, `rps` on average over the day: Poisson's."""
    whole, bin_s = sum(counts), seconds / len(counts)
    due, wanted = chance.expovariate(1.0), rps * seconds / whole if whole else 0.0
    for number, upto in enumerate(accumulate(count * wanted for count in counts)):
        before = upto - counts[number] * wanted
        while due < upto:
            yield (number + (due - before) / (upto - before)) * bin_s
            due += chance.expovariate(1.0)


def day_of(
    service: Service, counts: Sequence[float], pairs: Sequence[tuple[int, int]], seconds: float, rps: float, seed: int
) -> list[Ask]:
    """The requests of one model over the squeezed day, in order of time."""
    chance = Random(f"{service.model}/{seed}")
    asks = []
    for at_s in times_of(counts, seconds, rps, chance):
        prompt, answer = pairs[chance.randrange(len(pairs))]
        text = " ".join(chance.choices(WORDS, k=max(1, prompt // PROMPTS_BY)))
        asks.append(Ask(at_s, service.model, text, max(2, answer // ANSWERS_BY)))
    return asks


def load_of(seconds: float, rps: float, seed: int) -> list[Ask]:
    """Both services' Monday, in order of time."""
    asks = []
    for service in SERVICES:
        first = round(service.monday * DAY_S / BIN_S)
        counts = bin_counts(service.counts)[first : first + round(DAY_S / BIN_S)]
        asks += day_of(service, counts, lengths(service.lengths), seconds, rps, seed)
    return sorted(asks, key=lambda one: one.at_s)


def part_of(asks: Iterable[Ask], number: int, part_s: float) -> list[Ask]:
    """The requests of one part of the day, from its beginning on."""
    first = number * part_s
    return [
        Ask(one.at_s - first, one.model, one.prompt, one.max_tokens)
        for one in asks
        if first <= one.at_s < first + part_s
    ]


def write_models(folder: Path) -> None:
    """A model file and weights of its own for each service."""
    (folder / "models").mkdir()
    for number, service in enumerate(SERVICES):
        path = folder / f"{service.model}.gguf"
        given = {"path": path, "sha256": write_weights(path, number), "ttft_s": TTFT_SLO_S, "tpot_s": TPOT_SLO_S}
        (folder / "models" / f"{service.model}.yaml").write_text(MODEL.format(name=service.model, **given))


def settings_of(system: str, seconds: float, folder: Path) -> dict[str, str]:
    """What the fleet of a system is told, its windows squeezed as the day is."""
    squeeze = DAY_S / seconds
    return {
        "GLOWPLUG_POLICIES": system,
        "GLOWPLUG_MODELS_DIR": str(folder / "models"),
        "GLOWPLUG_GPU_BUDGETS": str(NODE_BYTES),
        "GLOWPLUG_WINDOW_S": str(WINDOW_S / squeeze),
        "GLOWPLUG_SEASON_S": str(seconds),
    }


def run(system: str, asks: Sequence[Ask], part_s: float, settings: dict[str, str], out: Path, port_base: int) -> None:
    """One part of the day on a fresh fleet: `out` is its recording, beside it what else was seen."""
    with fleet("--engine", "llamacpp", "--nodes", "1", "--port-base", str(port_base), settings=settings) as live:
        before = load_now()
        with recorded(live, out, part_s + TAIL_S):
            ends, held = asyncio.run(drive(asks, live))
        beside = {"load": [before, load_now()], "held": held, "ends": dict(ends)}
        out.with_suffix(".beside.json").write_text(json.dumps(beside), encoding="utf-8")


def take(rows: Iterable[tuple[str, dict[str, Any]]], seen: Seen) -> None:
    """Add the events of one recording. Instances count from the first request's arrival to the last one's end."""
    spans: dict[str, tuple[float, float]] = {}  # instance_id -> from the grant of its memory to its end
    first, last = float("inf"), 0.0
    for kind, data in rows:
        if kind == "request.finished":
            first, last = min(first, data["arrived_at"]), max(last, data["finished_at"])
            _take_request(data, seen)
        elif kind.startswith("instance."):
            _take_instance(kind, data["instance"], spans)
            seen.num_starts += kind == "instance.ready" and not data["instance"]["replica"]
    seen.instance_s += sum(max(0.0, min(end, last) - max(began, first)) for began, end in spans.values())


def _take_instance(kind: str, instance: dict[str, Any], spans: dict[str, tuple[float, float]]) -> None:
    """What an event says of an instance's span. An instance that becomes a replica ends; a replica begins none."""
    instance_id, is_replica = instance["instance_id"], instance["replica"]
    if is_replica and instance_id not in spans:
        return
    began, end = spans.get(instance_id, (instance["created_at"], float("inf")))
    if is_replica or kind in ("instance.stopped", "instance.failed", "instance.swapped_out"):
        end = min(end, instance["changed_at"])
    spans[instance_id] = began, end


def _take_request(data: dict[str, Any], seen: Seen) -> None:
    seen.num_requests += 1
    if data["status"] != 200 or data["error_code"]:
        seen.num_failed += 1
        seen.num_missed += 1
        return
    seen.ttft.append(data["ttft_s"])
    seen.num_cold += data["cold"]
    has_missed = data["ttft_s"] > TTFT_SLO_S
    if data["response_tokens"] > 1:
        seen.tpot.append((data["e2e_s"] - data["ttft_s"]) / (data["response_tokens"] - 1))
        has_missed |= seen.tpot[-1] > TPOT_SLO_S
    seen.num_missed += has_missed


def read(recording: Path, seen: Seen) -> None:
    """Add one recording and what lies beside it."""
    beside = json.loads(recording.with_suffix(".beside.json").read_text())
    seen.held += beside["held"]
    seen.loads += beside["load"]
    before = seen.num_requests
    take(rows_of(recording), seen)
    num_late = max(0, sum(beside["ends"].values()) - (seen.num_requests - before))
    seen.num_late += num_late
    seen.num_missed += num_late
    seen.num_requests += num_late


def shown(name: str, seen: Seen) -> str:
    """One row of the table."""
    ttft, tpot = (" / ".join(f"{at(v, share):.3f}" for share in (0.5, 0.95, 0.99)) for v in (seen.ttft, seen.tpot))
    missed = seen.num_missed / max(1, seen.num_requests)
    cells = [
        name,
        f"{len(seen.ttft)} ({seen.num_failed}, {seen.num_late})",
        f"{seen.num_missed} ({missed:.1%})",
        ttft,
        tpot,
        f"{seen.instance_s:.0f}",
        f"{seen.num_starts} ({seen.num_cold})",
        f"{fmean(seen.held) / MIB:.0f} MiB" if seen.held else "",
        f"{min(seen.loads):.1f}-{max(seen.loads):.1f}" if seen.loads else "",
    ]
    return f"| {' | '.join(cells)} |"


def compared(name: str, seen: Seen, other: str, base: Seen) -> str:
    """What differs between two systems, as a sentence. A share of nothing is left out."""
    missed, of_base = (100 * one.num_missed / max(1, one.num_requests) for one in (seen, base))
    said = [f"{missed:.1f} % of the requests missed an objective under {name}, {of_base:.1f} % under {other}"]
    for what, ours, theirs in (
        ("instance-seconds", seen.instance_s, base.instance_s),
        ("GPU bytes granted", fmean(seen.held or [0]), fmean(base.held or [0])),
        ("first token, P95", at(seen.ttft, 0.95), at(base.ttft, 0.95)),
        ("first token, P99", at(seen.ttft, 0.99), at(base.ttft, 0.99)),
    ):
        if theirs > 0 and ours == ours:
            said.append(f"{what} {ours / theirs - 1:+.0%}")
    return f"{'; '.join(said)}."


HEAD: Final = (
    "system", "answered (failed, ended after the recording)", "missed an objective", "TTFT p50 / p95 / p99 s",
    "TPOT p50 / p95 / p99 s", "instance-seconds", "starts (requests that waited for one)",
    "GPU bytes granted (mean)", "load average",
)  # fmt: skip


def provenance(seconds: float, parts: int, rps: float, seed: int) -> str:
    """What was measured, where and of which code."""
    made = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return (
        f"{time.strftime('%Y-%m-%d')}, commit {made.stdout.strip() or 'unknown'}, {os.cpu_count()} cores "
        f"({platform.machine()}), xllamacpp {version('xllamacpp')}, one thread an engine; Azure 2024, Monday 13 May, "
        f"{seconds:g} s for the day, parts: {parts}, {rps:g} requests/s a model on average, seed {seed}"
    )


def main() -> None:
    """Run, or read again what was kept, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=["union", "serverless_vllm"])
    parser.add_argument("--seconds", type=float, default=1080.0, help="that the day takes")
    parser.add_argument("--parts", type=int, default=2, help="of the day, after each of which systems take turns")
    parser.add_argument("--rps", type=float, default=0.6, help="requests a second to each model, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=9300)
    parser.add_argument("--out", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--again", type=Path, help="read the recordings of this folder; nothing is run")
    args = parser.parse_args()
    out = args.again or args.out or Path(tempfile.mkdtemp(prefix="glowplug-bench-day-"))
    out.mkdir(parents=True, exist_ok=True)
    said = out / "provenance.txt"
    if not args.again:
        asks, part_s = load_of(args.seconds, args.rps, args.seed), args.seconds / args.parts
        with tempfile.TemporaryDirectory(prefix="glowplug-bench-day-models-") as folder:
            write_models(Path(folder))
            for number in range(args.parts):
                some = part_of(asks, number, part_s)
                for system in args.systems[:: -1 if number % 2 else 1]:
                    settings = settings_of(system, args.seconds, Path(folder))
                    run(system, some, part_s, settings, out / f"{system}.{number}.jsonl", args.port_base)
                    print(f"{system}, part {number + 1}: {len(some)} requests", file=sys.stderr, flush=True)
        said.write_text(provenance(args.seconds, args.parts, args.rps, args.seed) + "\n", encoding="utf-8")
    print(said.read_text(encoding="utf-8"))
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    found = {system: Seen() for system in args.systems}
    for system, seen in found.items():
        for recording in sorted(out.glob(f"{system}.*.jsonl")):
            read(recording, seen)
        print(shown(system, seen), flush=True)
    first = args.systems[0]
    for other in args.systems[1:]:
        print(f"\n{compared(first, found[first], other, found[other])}")


if __name__ == "__main__":
    main()
