"""What starts were predicted to take over what they took, on a fleet of processes with mixed traffic.

`python -m bench.predictions [ENGINE] [SECONDS]` starts a fleet of its own with more models than fit its memory, sends
short requests to them by a power law for so long, and compares every start with its prediction: the whole start
(command to READY), and the time to the first token of the request that waited for it, both counted by the fleet's own
clock. A ratio below 1 was too short a prediction. "First" is the first start of its kind that a model had in this
fleet. Figures of the emulated engine are modelled times under real processes.
"""

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fleet_runner import Fleet

SEED = 12
RATE_PER_S = {"emulated": 0.8, "llamacpp": 0.3}
NODES = 2
GPU_BYTES = {"emulated": "48GB", "llamacpp": "512MiB"}  # of each node: half of what the models want
EMULATED = """
name: {name}
engine: emulated
weights_bytes: {weights_bytes}
kv_bytes: 4GiB
max_concurrency: 16
keep_alive_s: 4s
max_wait_s: 120
engine_args: {{profile: "{profile}"}}
"""
FILE_BYTES = 256 << 20
WITH_FILE = "weights: {{uri: '{uri}', num_bytes: {num_bytes}}}\n"  # a smaller file than the weights, really fetched
LLAMACPP = """
name: {name}
engine: llamacpp
weights: sample:smollm2
kv_bytes: {kv_bytes}
context_tokens: 2048
max_concurrency: 4
keep_alive_s: 4s
max_wait_s: 120
"""


@dataclass
class Seen:
    """What was sent and what has been there, by id."""

    first_tokens: list[tuple[str, float, float]] = field(default_factory=list)  # model, sent at, first token at
    instances: dict[str, dict[str, Any]] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)


def emulated_models(folder: Path) -> dict[str, str]:
    """Six models of three sizes, two of them with a file to fetch."""
    sizes = {"a": "6GB", "b": "7GB", "c": "13GB", "d": "15GB", "e": "16GB", "f": "26GB"}
    models = {}
    for name, size in sizes.items():
        text = EMULATED.format(name=name, weights_bytes=size, profile="llama-2-7b/a100")
        if name in "bd":
            path = folder / f"{name}.bin"
            path.write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
            text += WITH_FILE.format(uri=path.as_uri(), num_bytes=FILE_BYTES)
        models[name] = text
    return models


def llamacpp_models(_: Path) -> dict[str, str]:
    return {f"s{n}": LLAMACPP.format(name=f"s{n}", kv_bytes=f"{180 + 40 * n}MiB") for n in range(5)}


MODELS: dict[str, Callable[[Path], dict[str, str]]] = {"emulated": emulated_models, "llamacpp": llamacpp_models}


def stream_one(url: str, model: str, seen: Seen) -> None:
    """One short chat; when its first token came."""
    body = {"model": model, "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    sent_at, has_begun = time.time(), False
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=180) as answer:
        for line in answer.iter_lines():
            if has_begun or not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:]).get("choices")
            if choices and choices[0].get("delta", {}).get("content"):
                seen.first_tokens.append((model, sent_at, time.time()))
                has_begun = True


def look(fleet: Fleet, seen: Seen) -> None:
    """Rows of instances that are gone are kept for minutes, decisions for longer."""
    rows = httpx.get(f"{fleet.url('placer')}/v1/instances", params={"gone": "true"}, timeout=30).json()["data"]
    seen.instances |= {row["instance_id"]: row for row in rows if row["ready_at"]}
    made = httpx.get(f"{fleet.url('placer')}/v1/decisions", params={"kind": "place", "limit": 500}, timeout=30).json()
    seen.decisions |= {row["decision_id"]: row for row in made["data"]}


def drive(fleet: Fleet, models: list[str], rate_per_s: float, seconds: float) -> Seen:
    chance, seen, threads = random.Random(SEED), Seen(), []
    ends_at, looked_at = time.time() + seconds, 0.0
    weights = [1 / (rank + 1) for rank in range(len(models))]
    order = list(models)
    while time.time() < ends_at:
        if chance.random() < 0.02:
            chance.shuffle(order)  # the favourites change
        (model,) = chance.choices(order, weights)
        threads.append(threading.Thread(target=stream_one, args=(fleet.url("data"), model, seen), daemon=True))
        threads[-1].start()
        if time.time() - looked_at > 20:
            look(fleet, seen)
            looked_at = time.time()
        time.sleep(chance.expovariate(rate_per_s))
    for thread in threads:
        thread.join(120)
    time.sleep(1.0)
    look(fleet, seen)
    return seen


@dataclass
class Start:
    """One start: what it was, and predicted over actual of the whole and of the first token (0: nobody waited)."""

    model: str
    kind: str
    is_first: bool
    whole: float
    ttft: float
    whole_s: float  # as they were
    ttft_s: float


def starts_of(seen: Seen) -> list[Start]:
    found, known = [], set[tuple[str, str]]()
    for row in sorted(seen.instances.values(), key=lambda row: row["ready_at"]):
        took_s, decision = row["ready_at"] - row["created_at"], seen.decisions.get(row["decision_id"])
        if not row["predicted_s"] or took_s <= 0 or decision is None:
            continue
        waited = [
            first_at
            for model, sent_at, first_at in seen.first_tokens
            if model == row["model_key"] and sent_at < row["ready_at"] <= first_at < row["ready_at"] + 5.0
        ]
        ttft_s = min(waited) - decision["made_at"] if waited else 0.0
        key = (row["model_key"], row["start_kind"])
        found.append(
            Start(
                row["model_key"],
                row["start_kind"],
                key not in known,
                row["predicted_s"] / took_s,
                decision["inputs"]["predicted_ttft_s"] / ttft_s if ttft_s > 0 else 0.0,
                took_s,
                ttft_s,
            )
        )
        known.add(key)
    return found


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def line(name: str, found: Iterable[tuple[float, float]]) -> str:
    """Of ratios and seconds the medians, then how far off: the median and the 90th of 100, as a part of the actual."""
    pairs = [(ratio, seconds) for ratio, seconds in found if ratio > 0]
    values = [ratio for ratio, _ in pairs]
    if not values:
        return f"| {name} | 0 | | | | | |"
    median_s = quantile([seconds for _, seconds in pairs], 0.5)
    off = [abs(ratio - 1) for ratio in values]
    spread = f"{min(values):.2f} to {max(values):.2f}"
    cells = [
        name,
        str(len(values)),
        f"{median_s:.2f} s",
        f"{quantile(values, 0.5):.2f}",
        f"{quantile(off, 0.5):.0%}",
        f"{quantile(off, 0.9):.0%}",
        spread,
    ]
    return f"| {' | '.join(cells)} |"


def print_table(starts: list[Start]) -> None:
    groups: dict[str, list[Start]] = defaultdict(list)
    for start in starts:
        groups[f"{start.kind}, {'first' if start.is_first else 'later'}"].append(start)
    groups["all, first"] = [start for start in starts if start.is_first]
    groups["all, later"] = [start for start in starts if not start.is_first]
    for what in ("whole", "ttft"):
        title = "start, command to READY" if what == "whole" else "first token, decision to token"
        print(f"\n| {title} | starts | took, median | predicted / actual | off by, median | off by, p90 | range |")
        print("|---|---|---|---|---|---|---|")
        for name in sorted(groups):
            print(line(name, [(getattr(start, what), getattr(start, f"{what}_s")) for start in groups[name]]))


def print_stages(seen: Seen) -> None:
    """Medians of what the stages took: what an engine's prior is set by."""
    took: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in seen.instances.values():
        for phase in row["phases"]:
            took[row["start_kind"], phase["name"]].append(phase["ended_at"] - phase["started_at"])
        took[row["start_kind"], "whole"].append(row["ready_at"] - row["created_at"])
    print("\n| kind | stage | starts | took, median | range |\n|---|---|---|---|---|")
    for (kind, name), values in sorted(took.items()):
        if kind and name != "decide":
            spread = f"{min(values):.3f} to {max(values):.3f} s"
            print(f"| {kind} | {name} | {len(values)} | {quantile(values, 0.5):.3f} s | {spread} |")


def main(engine: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="gp-predictions-") as folder:
        models = MODELS[engine](Path(folder))
        fleet = Fleet.start(
            Path(folder) / "fleet", models, engine=engine, nodes=NODES, GLOWPLUG_GPU_BUDGETS=GPU_BYTES[engine]
        )
        before = os.getloadavg()[0]
        try:
            seen = drive(fleet, sorted(models), RATE_PER_S[engine], seconds)
        finally:
            fleet.stop()
    kind = "live, emulated" if engine == "emulated" else f"live, {engine}"
    after = os.getloadavg()[0]
    print(f"{kind}; {NODES} nodes, {seconds:g} s; {os.cpu_count()} cores, load {before:.1f} before, {after:.1f} after")
    print_table(starts_of(seen))
    print_stages(seen)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "emulated", float(sys.argv[2]) if len(sys.argv) > 2 else 180.0)
