"""A recorded fleet as a scenario: its nodes, its models with costs read off its own requests, its arrivals.

What a recording does not tell is taken as follows, and stands in the notes: bytes of KV per token from the model's KV
memory over the tokens it admits; costs of a step from the requests that found a running instance (a line through
prefill seconds over prompt tokens, as low as the fastest tenth, the lower quartile of the time per later token: what is
above that was waiting, which the simulation adds itself); the seconds of a start, and how fast weights move, from its
phases.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from glowplug.policies.systems import DEFAULT, SYSTEMS
from glowplug.simulator.recording import Recording, Row
from glowplug.simulator.scenario_systems import with_system
from glowplug.simulator.scenario_tree import Tree
from glowplug.simulator.setup import ABILITIES

ARRIVALS = "arrivals.csv"
KIND = "recorded"
_KEPT = (
    "weights_bytes", "kv_bytes", "context_tokens", "max_concurrency", "max_queue", "max_wait_s", "keep_alive_s",
    "min_instances", "max_instances", "on_cold", "pinned", "preload", "priority", "slo", "num_gpus",
)  # fmt: skip


def scenario_of(recording: Recording) -> Tree:
    """The tree of a scenario whose workload is `arrivals.csv` beside it."""
    tree = {
        "name": "replay",
        "title": f"Replay of {Path(recording.source).name}",
        "seconds": recording.seconds,
        "servers": _servers(recording),
        "models": [_model(recording, key, model) for key, model in sorted(recording.models.items())],
        "policies": _policies(recording.policy_names()),
        "workload": {"source": ARRIVALS},
    }
    return with_system(tree)


def _policies(named: Mapping[str, str]) -> str | Mapping[str, str]:
    """Those that decided, or the default system where they are its own: rooms that decided nothing are then its too."""
    return DEFAULT if named.items() <= SYSTEMS[DEFAULT].policies.items() else named


def write_arrivals(recording: Recording, path: Path) -> None:
    """The requests as a trace of our own format."""
    lines = [f"{at_s:.6f},{key},{prompt},{response}" for at_s, key, prompt, response in recording.arrivals()]
    path.write_text("\n".join(["t_s,model,prompt_tokens,response_tokens", *lines]) + "\n", encoding="utf-8")


def _servers(recording: Recording) -> list[Row]:
    """Nodes of one shape are one kind of server; how fast weights move is read off the starts."""
    largest = max((_weights(model) for model in recording.models.values()), default=0)
    shapes: dict[tuple[Any, ...], int] = {}
    for node in recording.nodes.values():
        sizes = [gpu["total_bytes"] for gpu in node["gpus"]]
        if not sizes:
            continue
        links = [link for link in node.get("links") or () if link["link_id"].endswith("/nic")]
        rate = max((link["bytes_per_s"] for link in links), default=0.0) or _median(recording.rates, "fetch", 2e9)
        cache = max(node.get("host_cache_bytes") or 0, 2 * largest)  # an emulated node keeps less than it says it loads
        abilities = tuple(sorted(ABILITIES & {a.partition(":")[2] for a in node.get("abilities") or ()}))
        shape = (len(sizes), min(sizes), rate, cache, abilities)
        shapes[shape] = shapes.get(shape, 0) + 1
    return [
        {
            "name": "node" if len(shapes) == 1 else f"node{number}",
            "num_servers": num,
            "num_gpus": num_gpus,
            "gpu_bytes": gpu_bytes,
            "gpu_kind": KIND,
            "network_bytes_per_s": rate,
            "pcie_bytes_per_s": _median(recording.rates, "load", 32e9),
            "host_cache_bytes": cache,
            "abilities": list(abilities),
        }
        for number, ((num_gpus, gpu_bytes, rate, cache, abilities), num) in enumerate(shapes.items(), start=1)
    ]


def _median(values: Mapping[str, Sequence[float]], name: str, without: float) -> float:
    return float(f"{median(values[name]):.4g}") if values.get(name) else without


def _weights(model: Row) -> int:
    return int(model.get("weights_bytes") or (model.get("weights") or {}).get("num_bytes") or 1)


def _model(recording: Recording, key: str, model: Row) -> Row:
    kept = {name: model[name] for name in _KEPT if model.get(name) is not None}
    weights = _weights(model)
    kv_bytes = model.get("kv_bytes") or 1
    tokens = model.get("context_tokens", 2048) * model.get("max_concurrency", 8)
    return kept | {
        "name": key,
        "weights_bytes": weights,
        "kv_bytes": kv_bytes,
        "kv_bytes_per_token": max(1, kv_bytes // max(1, tokens)),
        "costs": costs_of([row for row in recording.finished if row["model_key"] == key]),
        "start": _start(recording),
    }


def _start(recording: Recording) -> Row:
    return {"launch_s": _median(recording.phases, "launch", 0.5), "warmup_s": _median(recording.phases, "warmup", 0.1)}


def costs_of(rows: Sequence[Row]) -> Row:
    """Prefill and decode of one model, milliseconds, read off its answered requests; a small model's when there is no
    request to read. Who does not stream hears nothing before the end: the seconds of a token are then the slope of the
    whole answer's over its tokens."""
    sound = [row for row in rows if not row.get("error_code") and row["ttft_s"] > 0]
    warm = [row for row in sound if not row["cold"]] or sound
    streamed = [row for row in warm if row["e2e_s"] > row["ttft_s"] * 1.01 and row["response_tokens"] > 1]
    tpot_s = _tpot_s(streamed or warm)
    points = [(row["prompt_tokens"], _prefill_s(row, tpot_s, row in streamed)) for row in streamed or warm]
    slope = _slope(points) if points else 0.0001
    rests = sorted(seconds - slope * tokens for tokens, seconds in points)
    base = max(1e-4, rests[len(rests) // 10]) if rests else 0.02
    return {"prefill_ms": [round(base * 1e3, 4), round(slope * 1e3, 6)], "decode_ms": [round(tpot_s * 1e3, 4)]}


def _tpot_s(rows: Sequence[Row]) -> float:
    """The lower quartile of the time per later token, of rows that stream; of others the slope over their tokens, or
    all of their time where they are all as long."""
    later = sorted(
        (row["e2e_s"] - row["ttft_s"]) / (row["response_tokens"] - 1) for row in rows if row["response_tokens"] > 1
    )
    if later and later[len(later) // 4] > 1e-4:
        return float(later[len(later) // 4])
    whole = [(row["response_tokens"], max(1e-4, row["e2e_s"] - row["queue_s"])) for row in rows]
    if not whole:
        return 0.03
    return _slope(whole) or min(seconds / max(1, tokens) for tokens, seconds in whole)


def _prefill_s(row: Row, tpot_s: float, is_streamed: bool) -> float:
    seconds = row["ttft_s"] - row["queue_s"] - (0.0 if is_streamed else tpot_s * (row["response_tokens"] - 1))
    return float(max(1e-4, seconds))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of least squares, from 0 up to the line through 0 and the means."""
    mean_x, mean_y = sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return min(max(0.0, slope), mean_y / mean_x) if mean_x else 0.0
