"""What the agent keeps in the handle of an engine, so that it knows it again after a restart."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from glowplug.engines.port import EngineHandle, LoadReport

KEY_ID: Final = "key_id"  # in a handle's data, beside the key itself
HOLDS: Final = "holds"  # ... what its load has reported of slots, KV cache and features, as JSON


def with_holds(report: LoadReport, path: str = "") -> LoadReport:
    """The same report, its handle with what the engine holds: a wake, and the agent after a restart, report it anew.
    `path`: of the weights that it has loaded."""
    holds: dict[str, Any] = {"num_slots": report.num_slots, "kv_tokens": report.kv_tokens, "lacks": report.lacks}
    if report.shared_bytes and path:
        holds |= {"shared_bytes": report.shared_bytes, "weights": path, "file": _file(path)}
    data = {**report.handle.data, HOLDS: json.dumps(holds)}
    return replace(report, handle=replace(report.handle, data=data))


def shared_bytes(handle: EngineHandle) -> int:
    """What it reads of its weights in the pages that others read: nothing once the node has fetched them anew, since
    the engine keeps the pages of the file that it has opened."""
    holds = json.loads(handle.data.get(HOLDS, "{}"))
    is_same = bool(holds.get("file")) and _file(holds["weights"]) == holds["file"]
    return int(holds["shared_bytes"]) if is_same else 0


def _file(path: str) -> str:
    """What tells a file or folder from another that has taken its place; "" where there is none."""
    with contextlib.suppress(OSError):
        found = Path(path).stat()
        return f"{found.st_dev}:{found.st_ino}"
    return ""


def key_id_of(handle: EngineHandle) -> str:
    return handle.data.get(KEY_ID, "") if handle.api_key else ""
