"""Read a live fleet's recorded events for simulation: requests, models, nodes, starts, decisions.

A recording comes from `glowplug record`, or `glowplug tap -o json -p evt -p cmd -p tel`: one event a line.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from glowplug.domain.model import Slo
from glowplug.events.envelope import wrong_with
from glowplug.events.subjects import is_telemetry
from glowplug.policies.registry import is_known
from glowplug_lab.simulator.recording.starts import Starts
from glowplug_lab.simulator.results import Results, summary
from glowplug_lab.simulator.run_files import read_rows
from glowplug_lab.simulator.scenario.errors import ScenarioError

Row = dict[str, Any]
READ: Final = frozenset({"request.finished", "request.rejected", "model.deployed", "node.beat", "node.joined",
                         "weights.fetched", "decision.made", "agent.start", "agent.stop", "instance.starting",
                         "instance.loading", "instance.ready", "instance.draining", "instance.prewarmed",
                         "instance.swapped_out"})  # fmt: skip
TYPICAL: Final = (256, 64)  # prompt and response tokens, without reports
MOST: Final = 1e12  # seconds or tokens; more is an error
_MEASURED: Final = ("arrived_at", "queue_s", "ttft_s", "e2e_s", "prompt_tokens", "response_tokens")
_KIND_OF = {("autoscaler", "scale"): "scaling", ("placer", "place"): "placement", ("placer", "evict"): "eviction"}

_RECORDED = frozenset({"bytes_fetched", "gpu_seconds", "num_starts", "seconds", "starts"})
"""Figures of a fleet that events hold; the others are unknown, not 0."""


@dataclass(slots=True)
class Recording:
    """Times are epoch seconds."""

    source: str
    finished: list[Row] = field(default_factory=list)
    rejected: list[tuple[float, Row]] = field(default_factory=list)  # (answered at, fact)
    models: dict[str, Row] = field(default_factory=dict)
    nodes: dict[str, Row] = field(default_factory=dict)
    starts: Starts = field(default_factory=Starts)
    rates: list[float] = field(default_factory=list)  # bytes a second
    kv_tokens: dict[str, int] = field(default_factory=dict)  # by model_key
    has_telemetry: bool = False
    num_starts: int = 0
    bytes_fetched: float = 0.0
    gpu_seconds: float = 0.0
    policies: dict[str, Counter[str]] = field(default_factory=dict)
    _used: dict[str, tuple[float, int]] = field(default_factory=dict)
    _first: dict[str, tuple[int, int]] = field(default_factory=dict)  # by node: GPUs in use at first, all GPUs

    @property
    def began_at(self) -> float:
        return min(self._times())

    @property
    def seconds(self) -> float:
        times = self._times()
        return max(1.0, max(times) - min(times) + 1.0)

    @property
    def held_at_first(self) -> tuple[int, int]:
        """(GPUs in use when first seen, all GPUs). A replay begins with empty GPUs."""
        return sum(held for held, _ in self._first.values()), sum(num for _, num in self._first.values())

    def _times(self) -> list[float]:
        return [float(row["arrived_at"]) for row in self.finished] + [at_s for at_s, _ in self.rejected]

    def policy_names(self) -> dict[str, str]:
        found = {kind: counts.most_common(1)[0][0] for kind, counts in self.policies.items()}
        return {kind: name for kind, name in sorted(found.items()) if is_known(kind, name)}

    def arrivals(self) -> list[tuple[float, str, int, int]]:
        """(seconds from the first arrival, model key, prompt tokens, response tokens); medians for refused requests."""
        began = self.began_at
        typical = {key: self.typical(key) for key in {row["model_key"] for row in self.finished}}
        rows = [
            (
                row["arrived_at"] - began,
                row["model_key"],
                row["prompt_tokens"] or typical[row["model_key"]][0],
                max(1, row["response_tokens"]),
            )
            for row in self.finished
        ]
        for at_s, row in self.rejected:
            if row["model_key"] in self.models:
                rows.append((at_s - began, row["model_key"], *self.typical(row["model_key"])))
        return sorted(rows)

    def typical(self, key: str) -> tuple[int, int]:
        """Median prompt and response tokens; TYPICAL if unknown."""
        mine = [row for row in self.finished if row["model_key"] == key]
        known = ([row[name] for row in mine if row[name]] for name in ("prompt_tokens", "response_tokens"))
        prompt, response = (int(median(some)) if some else usual for some, usual in zip(known, TYPICAL, strict=True))
        return prompt, response

    def _slo(self, key: str) -> Slo:
        own = self.models.get(key, {}).get("slo") or {}
        return Slo(ttft_s=own.get("ttft_s", 0.0), tpot_s=own.get("tpot_s", 0.0))

    def numbers(self) -> Row:
        results = Results(
            bytes_fetched=self.bytes_fetched, gpu_seconds=self.gpu_seconds, starts=Counter(recorded=self.num_starts)
        )
        results.seconds = self.seconds
        for row in self.finished:
            one, slo = results.by_model[row["model_key"]], self._slo(row["model_key"])
            one.arrived(slo)
            if row.get("error_code"):
                one.num_refused[row["error_code"]] += 1
                continue
            tokens, decode_s = (row["prompt_tokens"], row["response_tokens"]), row["e2e_s"] - row["ttft_s"]
            one.answered(
                slo, tokens, cold=bool(row["cold"]), ttft_s=row["ttft_s"], decode_s=decode_s, e2e_s=row["e2e_s"]
            )
        for _, row in self.rejected:
            one = results.by_model[row["model_key"]]
            one.arrived(self._slo(row["model_key"]))
            one.num_refused[row["code"]] += 1
        numbers = summary(results)
        numbers["fleet"] = {name: value if name in _RECORDED else None for name, value in numbers["fleet"].items()}
        return numbers


def read_recording(path: Path) -> Recording:
    """Raises ScenarioError for a file without a request, model or node."""
    recording = Recording(str(path))
    for number, row in enumerate(read_rows(path), start=1):
        problem = _wrong_with(row)
        if problem:
            raise ScenarioError("", f"{path}, line {number}: {problem}")
        _take(recording, row)
    if not recording.finished and not recording.rejected:
        why = (
            "none ended while it was recorded"
            if recording.has_telemetry
            else "request.finished is telemetry: tap it with -p tel"
        )
        raise ScenarioError("", f"{path}: holds no request ({why})")
    if not recording.models:
        raise ScenarioError("", f"{path}: holds no model.deployed, so nothing is known of the models")
    if not recording.nodes:
        raise ScenarioError("", f"{path}: holds no node.beat, so nothing is known of the GPUs")
    return recording


def _wrong_with(row: Row) -> str:
    if not isinstance(row.get("type"), str):
        return "is not an event of ours: type: is missing" if "type" not in row else "type: is not text"
    if row["type"] not in READ:
        return ""
    wrong = wrong_with(row["type"], row.get("data"))
    if wrong:
        return wrong
    data = row["data"]
    numbers = [("occurred_at", row.get("occurred_at"))]
    if row["type"] == "request.finished":
        numbers += [(f"data.{name}", data[name]) for name in _MEASURED]
    for phase in (data["instance"].get("phases") or ()) if row["type"] == "instance.ready" else ():
        numbers += [
            (f"data.instance.phases.{phase['name']}.{name}", phase[name]) for name in ("started_at", "ended_at")
        ]
    for field_name, number in numbers:
        if not isinstance(number, int | float) or not 0 <= number <= MOST:
            return f"{field_name}: {str(number)[:40]!r} is not a number from 0 to {MOST:g}"
    return ""


def _take(recording: Recording, row: Mapping[str, Any]) -> None:
    kind, data = row["type"], row.get("data") or {}
    recording.has_telemetry = recording.has_telemetry or is_telemetry(kind)
    if kind == "request.finished":
        recording.finished.append(data)
        recording.starts.finished(data)
    elif kind == "request.rejected":
        recording.rejected.append((row["occurred_at"], data))
    elif kind == "model.deployed":
        recording.models[data["model"]["key"]] = data["model"]
    elif kind in ("node.beat", "node.joined"):
        _node(recording, data["node"], row["occurred_at"])
    elif kind in ("agent.start", "agent.stop"):
        recording.starts.commanded(row)
    elif kind.startswith("instance."):
        recording.starts.changed(kind, row)
        if kind == "instance.ready":
            recording.num_starts += 1
            recording.kv_tokens[data["instance"]["model_key"]] = data["instance"].get("kv_tokens") or 0
    elif kind == "weights.fetched" and data.get("source") not in ("cache", "disk"):
        recording.bytes_fetched += data["num_bytes"]
        recording.rates.append(data["num_bytes"] / max(data["seconds"], 1e-3))
    elif kind == "decision.made":
        decision = data["decision"]
        kind = _KIND_OF.get((decision["service"].partition("-")[0], decision["kind"]))
        if kind is not None:
            recording.policies.setdefault(kind, Counter())[decision["policy"]] += 1


def _node(recording: Recording, node: Row, at_s: float) -> None:
    recording.nodes[node["node_id"]] = node
    since_s, used = recording._used.get(node["node_id"], (at_s, 0))
    recording.gpu_seconds += used * max(0.0, at_s - since_s)
    used = sum(bool(gpu.get("grants")) for gpu in node["gpus"])
    recording._used[node["node_id"]] = (at_s, used)
    recording._first.setdefault(node["node_id"], (used, len(node["gpus"])))
