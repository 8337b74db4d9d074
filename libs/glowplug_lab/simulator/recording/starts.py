"""Times of starts, swaps and replicas, from facts of recorded instances.

Swapping out takes from the end of the last answer to the fact of sleeping.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

Row = dict[str, Any]
TICK_S: Final = 0.05  # a live agent's; it notices the end of a drain half of it later on average
DRAIN_QUIET_S: Final = 0.05  # a live agent's, before it counts requests
REFUSING: Final = frozenset({"emulated", "llamacpp"})  # asked to sleep at once (engines/port.py)
LEAST_S: Final = 1e-3
STREAMED_S: Final = 0.05  # a load that began this long before its fetch ended was streaming
STAGES: Final = ("launch", "load", "warmup")
CORES: Final = (1.0, 1.5, 2.0, 3.0, 4.0)  # tried by `alone`
MIN_BESIDE: Final = 3  # concurrent starts needed
CLEARER: Final = 0.9  # largest remaining spread that rules out chance
MOST_BUS_S: Final = 0.25  # beyond: the agent was busy


@dataclass(slots=True)
class ModelStarts:
    """In recorded order, in seconds."""

    cold: list[dict[str, float]] = field(default_factory=list)  # by stage
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # node, begin, end
    cold_ids: list[str] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)  # swaps in
    wake_ids: list[str] = field(default_factory=list)
    outs: list[float] = field(default_factory=list)  # swaps out
    growths: list[float] = field(default_factory=list)  # replica to engine
    replicas: list[float] = field(default_factory=list)  # until loaded


def drain_quiet_s(engines: Set[str]) -> float:
    return 0.0 if engines <= REFUSING else DRAIN_QUIET_S


class Starts:
    def __init__(self) -> None:
        self.by_model: dict[str, ModelStarts] = {}
        self.bus: list[float] = []  # seconds from command to fact
        self._asked: dict[str, float] = {}  # by event_id
        self._dormant: dict[str, str] = {}  # "swapped_out" or "prewarmed"
        self._free_at: dict[str, float] = {}  # when its drain may have ended
        self._ended_at: dict[str, float] = {}

    def commanded(self, row: Mapping[str, Any]) -> None:
        self._asked[str(row.get("event_id", ""))] = row["occurred_at"]

    def finished(self, data: Row) -> None:
        name = data["instance_id"]
        self._ended_at[name] = max(self._ended_at.get(name, 0.0), data["finished_at"])

    def changed(self, kind: str, row: Mapping[str, Any]) -> None:
        instance, at_s = row["data"]["instance"], row["occurred_at"]
        name = instance["instance_id"]
        mine = self.by_model.setdefault(instance["model_key"], ModelStarts())
        asked_at = self._asked.pop(str(row.get("cause_id", "")), None)
        if asked_at is not None and 0 <= at_s - asked_at <= MOST_BUS_S:
            self.bus.append(at_s - asked_at)
        if kind == "instance.draining":
            self._free_at[name] = at_s + drain_quiet_s({instance.get("engine", "")})
        elif kind == "instance.swapped_out":
            self._dormant[name] = "swapped_out"
            if name in self._free_at:
                began_at = max(self._free_at.pop(name), self._ended_at.get(name, 0.0)) + TICK_S / 2
                mine.outs.append(max(0.0, at_s - began_at))
        elif kind == "instance.prewarmed":
            self._dormant[name] = "prewarmed"
            if name not in self._free_at and instance.get("created_at"):
                mine.replicas.append(max(0.0, at_s - instance["created_at"]))
            self._free_at.pop(name, None)
        elif kind == "instance.ready":
            self._ready(mine, instance)

    def _ready(self, mine: ModelStarts, instance: Row) -> None:
        node = instance["workers"][0]["node_id"] if instance.get("workers") else ""
        took = {one["name"]: one["ended_at"] - one["started_at"] for one in instance.get("phases") or ()
                if 0 < one["started_at"] <= one["ended_at"]}  # fmt: skip
        source = instance.get("source") or ""
        if not source:
            if "load" in took:
                ends = [one["ended_at"] for one in instance["phases"] if one["name"] in STAGES]
                mine.spans.append((node, max(ends) - sum(took.get(name, 0.0) for name in STAGES), max(ends)))
                at = {one["name"]: one for one in instance["phases"]}
                if "fetch" in took and at["load"]["started_at"] < at["fetch"]["ended_at"] - STREAMED_S:
                    del took["load"]  # slowed by the fetch, but for its tail
                    took["tail"] = max(0.0, at["load"]["ended_at"] - at["fetch"]["ended_at"])
                mine.cold.append(took)
                mine.cold_ids.append(instance["instance_id"])
        elif "load" in took:
            if self._dormant.get(source, "swapped_out") == "swapped_out":
                mine.wakes.append(took["load"])
                mine.wake_ids.append(instance["instance_id"])
            else:
                mine.growths.append(took["load"])


def alone(by_model: Mapping[str, ModelStarts]) -> tuple[float, dict[str, ModelStarts]]:
    """(start cores per node, start times as if alone); 0 cores without evidence of slowdown."""
    beside = {key: [_beside(span, by_model) for span in one.spans] for key, one in by_model.items()}
    if sum(num > 1.2 for some in beside.values() for num in some) < MIN_BESIDE:
        return 0.0, dict(by_model)
    spread = {cores: _spread(by_model, beside, cores) for cores in (*CORES, math.inf)}
    best = min(CORES, key=lambda cores: spread[cores])
    if spread[best] > CLEARER * spread[math.inf]:
        return 0.0, dict(by_model)
    return best, {
        key: replace(one, cold=[
            {name: took / max(1.0, num / best) if name in STAGES else took for name, took in cold.items()}
            for cold, num in zip(one.cold, beside[key], strict=True)
        ])
        for key, one in by_model.items()
    }  # fmt: skip


def _beside(span: tuple[str, float, float], by_model: Mapping[str, ModelStarts]) -> float:
    node, begin, end = span
    together = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for one in by_model.values()
        for other_node, other_begin, other_end in one.spans
        if other_node == node
    )
    return together / max(LEAST_S, end - begin)


def _spread(by_model: Mapping[str, ModelStarts], beside: Mapping[str, list[float]], cores: float) -> float:
    total = 0.0
    for key, one in by_model.items():
        whole = [
            sum(cold.get(name, 0.0) for name in STAGES) / max(1.0, num / cores)
            for cold, num in zip(one.cold, beside[key], strict=True)
        ]
        mean = sum(whole) / len(whole) if whole else 0.0
        total += sum((seconds / mean - 1) ** 2 for seconds in whole) if mean else 0.0
    return total


def pooled(by_model: Mapping[str, ModelStarts], bytes_of: Mapping[str, int], weights_bytes: int) -> ModelStarts:
    """Pool start times, scaling weight moves to `weights_bytes`."""
    found = ModelStarts()
    for key, one in by_model.items():
        share = weights_bytes / max(1, bytes_of.get(key, weights_bytes))
        found.cold += [
            {name: took * share if name == "load" else took for name, took in cold.items()} for cold in one.cold
        ]
        for name in ("wakes", "outs", "growths", "replicas"):
            getattr(found, name).extend(took * share for took in getattr(one, name))
    return found


def trees_of(
    mine: ModelStarts, others: ModelStarts, weights_bytes: int, first_s: Callable[[str], float] = lambda _: 0.0
) -> Row:
    """Missing times come from `others`. `first_s`: extra time of a first prefill."""
    starts = [_cold(one, weights_bytes) for one in mine.cold or others.cold]
    for one, name in zip(starts, mine.cold_ids, strict=False):
        one["first_s"] = round(first_s(name), 4)
    base: Row = {"chunk_bytes": max(1, weights_bytes), "stream_layers": False}
    for name in sorted({name for one in starts for name in one} - {"chunk_bytes"}):
        base[name] = float(f"{median(one[name] for one in starts if name in one):.4g}")
    load_s = weights_bytes / base["load_bytes_per_s"] if "load_bytes_per_s" in base else 0.0
    if replicas := mine.replicas or others.replicas:
        base["replica_s"] = round(max(0.0, median(replicas) - load_s), 4)
    if growths := mine.growths or others.growths:
        base["activate_s"] = round(median(growths), 4)
    wakes = _wakes(mine, others, weights_bytes)
    for one, name in zip(wakes, mine.wake_ids, strict=False):
        one["first_s"] = round(first_s(name), 4)
    base |= {name: value for name, value in wakes[0].items() if name != "first_s"} if wakes else {}
    return {"start": base, "starts": [base | one for one in starts], "wakes": [base | one for one in wakes]}


def _cold(took: Mapping[str, float], weights_bytes: int) -> dict[str, float]:
    stages = {"launch_s": round(took.get("launch", 0.0), 4), "warmup_s": round(took.get("warmup", 0.0), 4)}
    if "load" not in took:
        return stages | {"chunk_bytes": 1, "tail_s": round(took.get("tail", 0.0), 4)}
    return stages | {"load_bytes_per_s": float(f"{weights_bytes / max(LEAST_S, took['load']):.6g}")}


def _wakes(mine: ModelStarts, others: ModelStarts, weights_bytes: int) -> list[dict[str, float]]:
    """One rate, that of swapping in; the excess of swapping out is fixed."""
    ins = mine.wakes or mine.outs or others.wakes or others.outs
    outs = mine.outs or others.outs or ins
    return [
        {
            "swap_base_s": 0.0,
            "swap_bytes_per_s": float(f"{weights_bytes / max(LEAST_S, took):.6g}"),
            "sleep_s": round(max(0.0, outs[number % len(outs)] - took), 4),
        }
        for number, took in enumerate(ins)
    ]
