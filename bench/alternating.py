"""A/B/A/B live: `python -m bench.alternating [ENGINE] [SECONDS] [NUM_MODELS] [EVERY_S]`.

A fleet of one node with memory for one of NUM_MODELS models (llamacpp, or emulated); every EVERY_S seconds a request
comes for the next of them, whoever serves then. Printed: what the first token took per model, how often one model took
the memory of another, and the shortest time from READY to being asked to leave, which GLOWPLUG_MIN_RESIDENCY_S (1 s)
bounds. Settings of the environment (`GLOWPLUG_*`) go to the fleet. Nothing may fail: an answer that is none ends the
run with its status. Figures of the emulated engine are modelled; `scenarios/alternating.yaml` is the like, simulated.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.test_systems_llamacpp import CHOSEN, MODEL
from tests.fleet_runner import EMULATED, Fleet

FLEETS = {
    "llamacpp": (MODEL, CHOSEN),
    "emulated": (EMULATED, {"GLOWPLUG_GPU_BUDGETS": "3GiB"}),  # one of 2 GiB at a time
}
KEEP_ALIVE_S, TIMEOUT_S = 600, 120.0


def first_token_s(client: httpx.Client, model: str) -> float:
    """Seconds to the first token of one stream, which is read to its end."""
    body = {"model": model, "max_tokens": 8, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    began, first = time.monotonic(), 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{model}: {answer.status_code} {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {") and '"error"' in line:
                raise SystemExit(f"{model}: {line}")
            if line.startswith("data: {") and not first:
                first = time.monotonic() - began
    return first


def ask(url: str, names: list[str], seconds: float, every_s: float) -> dict[str, list[float]]:
    """Requests for the models in turn, none of which waits for the one before. Seconds to the first token by model."""
    asked: dict[str, list[Future[float]]] = defaultdict(list)
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(200) as pool:
        for number in range(int(seconds / every_s)):
            time.sleep(max(0.0, began + number * every_s - time.monotonic()))
            name = names[number % len(names)]
            asked[name].append(pool.submit(first_token_s, client, name))
    return {name: [one.result() for one in futures] for name, futures in asked.items()}


def residencies(fleet: Fleet, began_at: float) -> list[float]:
    """From READY until it was asked to leave for another, of each instance that was since then."""
    url = fleet.url("placer")
    rows = httpx.get(f"{fleet.process('agent')['url']}/v1/instances", params={"gone": True}).json()["data"]
    ready_at = {row["instance_id"]: row["ready_at"] for row in rows}
    asked = httpx.get(f"{url}/v1/decisions", params={"kind": "evict", "limit": 1000})
    decided: list[dict[str, Any]] = [one for one in asked.json()["data"] if one["made_at"] > began_at]
    left = ((one["made_at"], name) for one in decided for name in one["chosen"].split(", "))
    return [made_at - ready_at[name] for made_at, name in left if ready_at.get(name)]


def main(engine: str, seconds: float, num_models: int, every_s: float) -> None:
    text, chosen = FLEETS[engine]
    models = {f"m{n}": text.format(name=f"m{n}", keep_alive_s=KEEP_ALIVE_S) for n in range(num_models)}
    given = {name: value for name, value in os.environ.items() if name.startswith("GLOWPLUG_")}
    with (
        tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder,
        Fleet.start(Path(folder), models, engine=engine, nodes=1, **(chosen | given)) as fleet,
    ):
        ask(fleet.url("data"), list(models), num_models, 1.0)  # their first starts are from nothing
        began_at, load = time.time(), os.getloadavg()[0]
        waited = ask(fleet.url("data"), list(models), seconds, every_s)
        stayed = residencies(fleet, began_at)
    emulated = " (EMULATED)" if engine == "emulated" else ""
    print(f"{engine}{emulated}, load {load:.1f}")
    print(f"{num_models} models in turn, a request each {every_s:g} s for {seconds:g} s")
    print(f"{'to the first token, s':24} {'p50':>7} {'p99':>7} {'worst':>7} {'requests':>9}")
    for name, took in sorted(waited.items()):
        p99 = statistics.quantiles(took, n=100, method="inclusive")[98]
        print(f"{name:24} {statistics.median(took):7.2f} {p99:7.2f} {max(took):7.2f} {len(took):9}")
    print(f"exchanges a minute: {len(stayed) / seconds * 60:.1f}")
    if stayed:
        print(f"READY until asked to leave, s: shortest {min(stayed):.2f}, median {statistics.median(stayed):.2f}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0] if given else "llamacpp",
        *(float(word) for word in given[1:2] or ["60"]),
        *(int(word) for word in given[2:3] or ["2"]),
        *(float(word) for word in given[3:4] or ["0.5"]),
    )
