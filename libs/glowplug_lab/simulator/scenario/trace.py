"""A trace given by path: its contents, inheritable fields, and a fleet for it alone.

It is served unchanged: a scenario or command line that names one inherits no duration and no field that draws anew
(`DRAWS`).
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from glowplug.domain.model import model_key
from glowplug_lab.simulator.scenario.errors import ScenarioError
from glowplug_lab.simulator.workload.arrival import Count, TraceError
from glowplug_lab.simulator.workload.formats import Reading, counts, has_lengths, is_counted, read
from glowplug_lab.simulator.workload.sampling import Lengths
from glowplug_lab.simulator.workload.tables import read_once

Tree = dict[str, Any]
DRAWS: Final = (
    "rps", "cv", "cv_of", "keep", "squeeze", "start_s", "days", "clients", "length_errors",
    "max_prompt_tokens", "min_response_tokens", "max_total_tokens",
)  # fmt: skip
"""Fields of a workload that make other requests of a trace than those it holds."""
LAST_S: Final = 1.0  # after the trace's last request
MAX_MODELS: Final = 32
_ENDINGS: Final = (".csv", ".gz", ".jsonl")
_FLEET: Final[Tree] = {
    "servers": [
        {
            "name": "node", "num_servers": 2, "num_gpus": 2, "gpu_bytes": "24GB", "gpu_kind": "a10",
            "network_bytes_per_s": "16Gbps", "host_cache_bytes": "64GB",
        }
    ],
    "model_defaults": {"weights_bytes": "12.5GB", "kv_bytes": "5GB", "costs": "llama-2-7b"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contents:
    """`last_s`: last request, or end of the last count, since the first."""

    times: Sequence[float]  # seconds since the first
    upto: Sequence[int]  # cumulative
    last_s: float
    models: tuple[str, ...]  # in order of appearance

    @property
    def num_requests(self) -> int:
        return self.upto[-1] if self.upto else 0

    def num_within(self, from_s: float, seconds: float) -> int:
        return self._before(from_s + seconds) - self._before(from_s)

    def _before(self, at_s: float) -> int:
        number = bisect_left(self.times, at_s)
        return self.upto[number - 1] if number else 0


def is_path(source: object) -> bool:
    return isinstance(source, str) and (source.endswith(_ENDINGS) or "/" in source)


def trace_file(source: str, beside: Path, field: str) -> Path:
    """Raises ScenarioError if there is no file."""
    path = Path(source) if Path(source).is_absolute() else beside / source
    if not path.is_file():
        raise ScenarioError(field, f"{source!r} is not a file beside the scenario")
    return path


def contents(path: Path) -> Contents:
    """Raises TraceError and OSError."""
    found: Contents = read_once(_contents, path)
    return found


def _contents(path: Path) -> Contents:
    models: dict[str, None] = {}
    times, upto, last_s, num = array("d"), array("q"), 0.0, 0
    for at_s, width_s, model, num_here in _times(path):
        num += num_here
        times.append(at_s)
        upto.append(num)
        last_s = max(last_s, at_s + width_s)
        if model:
            models[model] = None
    return Contents(times, upto, last_s, tuple(models))


def _times(path: Path) -> Iterator[Count]:
    if is_counted(path):
        for group in counts(path, Reading(model="")):
            yield from group
    else:
        for one in read(path, Reading(model="", lengths=Lengths([(1, 1)]))):
            yield Count(one.at_s, 0.0, one.model, 1)


def under_trace(under: Tree, over: Tree, beside: Path) -> Tree:
    """Drop inherited fields that draw anew, if `over` names a trace by path; keep lengths for a trace without any."""
    source = _named(over)
    if not source:
        return under
    inherited = under.get("workload")
    inherited = dict(inherited) if isinstance(inherited, dict) else {}
    dropped = {*DRAWS, "lengths"} if _has_lengths(beside / source) else set(DRAWS)
    rest = {name: value for name, value in under.items() if name != "seconds"}
    rest["workload"] = {name: value for name, value in inherited.items() if name not in dropped}
    if "lengths" in dropped:
        for field in ("models", "model_defaults"):
            if field in rest:
                rest[field] = _without_lengths(rest[field])
    return rest


def _named(tree: Tree) -> str:
    workload = tree.get("workload")
    source = workload.get("source") if isinstance(workload, dict) else None
    return str(source) if is_path(source) else ""


def _has_lengths(path: Path) -> bool:
    try:
        return has_lengths(path)
    except (TraceError, OSError):
        return True  # a later read reports it


def _without_lengths(entries: Any) -> Any:
    if isinstance(entries, list):
        return [_without_lengths(entry) for entry in entries]
    return {k: v for k, v in entries.items() if k != "lengths"} if isinstance(entries, dict) else entries


def seconds_of(tree: Tree, beside: Path) -> float | None:
    """Last until the last request of a trace given by path; None with `seconds` or without such a trace. Raises
    ScenarioError, TraceError and OSError."""
    source = _named(tree)
    if "seconds" in tree or not source:
        return None
    path, workload = trace_file(source, beside, "workload.source"), tree["workload"]
    start_s, squeeze = workload.get("start_s", 0.0), workload.get("squeeze", 1.0)
    if not isinstance(start_s, int | float) or not isinstance(squeeze, int | float) or squeeze <= 0:
        return None  # refused later
    return max(0.0, contents(path).last_s - start_s) / squeeze + LAST_S


def served_by(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Map a trace's models to the scenario's: by name, else the next in turn."""
    by_name = {key: key for key in keys}
    for name in names:
        own = _key(name)
        by_name.setdefault(name, own if own in keys else keys[len(by_name) % len(keys)])
    return by_name


def fleet_for(path: Path, source: str) -> Tree:
    """Two servers of two GPUs, and a 7B model per model in the trace. Raises ScenarioError."""
    try:
        keys = dict.fromkeys(_key(name) for name in contents(path).models)
    except (TraceError, OSError) as error:
        raise ScenarioError("--trace", str(error)) from error
    names = [key for key in keys if key][:MAX_MODELS] or ["model-7b"]
    return {
        "name": path.name.partition(".")[0] or "trace",
        "title": f"{path.name} on four GPUs of 24 GB",
        **_FLEET,
        "models": [{"name": name} for name in names],
        "workload": {"source": source},
    }


def _key(name: str) -> str:
    try:
        return model_key(name)
    except ValueError:
        return ""
