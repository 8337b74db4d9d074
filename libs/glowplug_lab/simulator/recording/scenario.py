"""A recorded fleet as a scenario: its nodes, its models with costs and starts estimated from the recording, its
arrivals.

A recording does not hold everything: bytes of KV per token come from an engine's reported cache, else from the model's
KV memory over the tokens it admits; step costs and the pace of each request from `costs` (engines that shared cores
slowed each other in the recording, so the replay does not slow them again); times of starts, swaps and replicas from
`starts`; the delay of a command from the facts that it caused. The controllers' other times are the defaults of a live
fleet.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from glowplug.policies.systems import DEFAULT, system
from glowplug_lab.simulator.recording.costs import Costs
from glowplug_lab.simulator.recording.read import Recording, Row
from glowplug_lab.simulator.recording.starts import (
    DRAIN_QUIET_S,
    TICK_S,
    ModelStarts,
    alone,
    drain_quiet_s,
    pooled,
    trees_of,
)
from glowplug_lab.simulator.scenario.tree import Tree, merge, with_system
from glowplug_lab.simulator.setup import ABILITIES

ARRIVALS = "arrivals.csv"
KIND = "recorded"
PCIE_BYTES_PER_S: Final = 32e9  # not recorded, so no bound: engines load as fast as they did
LIVE: Final[Tree] = {
    "agent_tick_s": TICK_S,
    "agent": {"drain_quiet_s": DRAIN_QUIET_S},
    "autoscaler": {"rest_s": 5.0},
    "placer": {"evict_grace_s": 300.0, "sleeper_patience": 1.0},
}
"""Defaults of the services' settings that are others than the simulator's own."""
_KEPT = (
    "engine", "weights_bytes", "kv_bytes", "context_tokens", "max_concurrency", "max_queue", "max_wait_s",
    "keep_alive_s", "min_instances", "max_instances", "on_cold", "pinned", "preload", "priority", "slo", "num_gpus",
    "asleep",
)  # fmt: skip


def scenario_of(recording: Recording) -> Tree:
    """The tree of a scenario that replays a recording; its workload is `arrivals.csv` beside it."""
    emulated = any(row.get("emulated") for row in recording.finished)
    cores, by_model = (0.0, recording.starts.by_model) if emulated else alone(recording.starts.by_model)
    quiet_s = drain_quiet_s({model.get("engine", "") for model in recording.models.values()})
    params: Tree = merge(LIVE, {"share_compute": False, "agent": {"drain_quiet_s": quiet_s}})
    if recording.starts.bus:
        params["bus_s"] = round(max(1e-4, median(recording.starts.bus)), 5)
    tree = {
        "name": "replay",
        "title": f"Replay of {Path(recording.source).name}",
        "seconds": recording.seconds,
        "servers": _servers(recording, cores),
        "models": [_model(recording, key, model, by_model) for key, model in sorted(recording.models.items())],
        "policies": _policies(recording.policy_names()),
        "params": params,
        "workload": {"source": ARRIVALS},
    }
    return with_system(tree)


def _policies(named: Mapping[str, str]) -> str | Mapping[str, str]:
    """The policies that decided, or the default system if they all belong to it, which adds the other kinds."""
    return DEFAULT if named.items() <= system(DEFAULT).policies.items() else named


def write_arrivals(recording: Recording, path: Path) -> None:
    """Write the requests of a recording as a trace in our own format."""
    lines = [f"{at_s:.6f},{key},{prompt},{response}" for at_s, key, prompt, response in recording.arrivals()]
    path.write_text("\n".join(["t_s,model,prompt_tokens,response_tokens", *lines]) + "\n", encoding="utf-8")


def _servers(recording: Recording, start_cores: float) -> list[Row]:
    """The `servers` of the scenario: nodes of one shape are one kind of server. If no weights were fetched during the
    recording, they count as in host memory: emulated engines need none, and others had fetched them before."""
    sizes_of_weights = [_weights(model) for model in recording.models.values()]
    in_host = not recording.rates
    least = sum(sizes_of_weights) if in_host else 2 * max(sizes_of_weights, default=0)
    shapes: dict[tuple[Any, ...], int] = {}
    for node in recording.nodes.values():
        sizes = [gpu["total_bytes"] for gpu in node["gpus"]]
        if not sizes:
            continue
        links = [link for link in node.get("links") or () if link["link_id"].endswith("/nic")]
        reported = max((link["bytes_per_s"] for link in links), default=0.0)
        rate = reported or (float(f"{median(recording.rates):.4g}") if recording.rates else 2e9)
        cache = max(node.get("host_cache_bytes") or 0, least)
        abilities = tuple(sorted(a for a in node.get("abilities") or () if a.rpartition(":")[2] in ABILITIES))
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
            "pcie_bytes_per_s": PCIE_BYTES_PER_S,
            "host_cache_bytes": cache,
            "weights_in_host": in_host,
            "start_cores": start_cores,
            "abilities": list(abilities),
        }
        for number, ((num_gpus, gpu_bytes, rate, cache, abilities), num) in enumerate(shapes.items(), start=1)
    ]


def _weights(model: Row) -> int:
    return int(model.get("weights_bytes") or (model.get("weights") or {}).get("num_bytes") or 1)


def _model(recording: Recording, key: str, model: Row, by_model: Mapping[str, ModelStarts]) -> Row:
    kept = {name: model[name] for name in _KEPT if model.get(name) is not None}
    kept |= {"weights_shared": True} if model.get("weights_shared") else {}
    weights = _weights(model)
    kv_bytes = model.get("kv_bytes") or 1
    tokens = recording.kv_tokens.get(key) or model.get("context_tokens", 2048) * model.get("max_concurrency", 8)
    own = [row for row in recording.finished if row["model_key"] == key]
    costs = Costs(own, recording.typical(key)[0])
    models = recording.models
    alike = {name: one for name, one in by_model.items() if models.get(name, {}).get("engine") == model.get("engine")}
    others = pooled(alike, {name: _weights(other) for name, other in models.items()}, weights)
    found = {
        "name": key,
        "weights_bytes": weights,
        "kv_bytes": kv_bytes,
        "kv_bytes_per_token": max(1, kv_bytes // max(1, tokens)),
        "costs": costs.tree,
        "pace": costs.pace,
    }
    return kept | found | trees_of(by_model.get(key, ModelStarts()), others, weights, costs.first_s)
