"""What an agent keeps in the data of an engine's handle, beside what its driver does, and what it reads there again."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.engines.port import EngineHandle, LoadReport

KEY_ID = "key_id"  # beside the key itself
GPU_KIND, GPU_INDEX = "gpu_kind", "gpu_index"
REPLICA = "replica"  # it was launched to hold weights, not to serve
HOLDS = "holds"  # what its load has reported of slots, KV cache and features, as JSON


def holds_of(handle: EngineHandle) -> dict[str, Any]:
    """What its load has reported; {} before."""
    found: dict[str, Any] = json.loads(handle.data.get(HOLDS, "{}"))
    return found


def with_holds(report: LoadReport, path: str = "") -> LoadReport:
    """The same report, its handle with what the engine holds: a wake, and the agent after a restart, report it anew.
    `path`: of the weights that it has loaded."""
    said = ("num_slots", "kv_tokens", "lacks", "step_s")
    holds: dict[str, Any] = {name: getattr(report, name) for name in said}
    if report.shared_bytes and path:
        holds |= {"shared_bytes": report.shared_bytes, "weights": path, "file": _file(path)}
    data = {**report.handle.data, HOLDS: json.dumps(holds)}
    return replace(report, handle=replace(report.handle, data=data))


def shared_bytes(handle: EngineHandle) -> int:
    """What it reads of its weights in the pages that others read: nothing once the node has fetched them anew, since
    the engine keeps the pages of the file that it has opened."""
    holds = holds_of(handle)
    is_same = bool(holds.get("file")) and _file(holds["weights"]) == holds["file"]
    return int(holds["shared_bytes"]) if is_same else 0


def key_id(handle: EngineHandle) -> str:
    """Of the key that its engine asks for; "": it asks for none."""
    return handle.data.get(KEY_ID, "") if handle.api_key else ""


def _file(path: str) -> str:
    """What tells a file or folder from another that has taken its place; "" where there is none."""
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return f"{found.st_dev}:{found.st_ino}"
    return ""
