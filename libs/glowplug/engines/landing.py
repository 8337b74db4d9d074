"""The engine's view of weights that still arrive. Standard library only, since engine processes import it.

    <region>/layout.json    {"generation", "piece_bytes", "num_bytes", "files": [...]}
    <region>/landed         one byte per piece of all files end to end: 1 once its bytes may be read
    <region>/complete.json  all bytes landed and checked; stage-S-of-N.json: those of one pipeline stage
    <region>/failed.json    it will not come
    <region>/blob | files/  the bytes, in full size from the start

The other side is weights/pieces.py. Bytes read before complete.json exists may turn out wrong: the agent waits for it,
and ends an engine that has read dropped bytes.
"""

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.002
_LOOK_S = 0.05


class WeightsDropped(RuntimeError):
    """The weights will not come, or come anew from the start."""


def is_arriving(path: Path) -> bool:
    """Whether the weights at `path` (a region's file or directory) are incomplete; False outside a region."""
    region = path.parent
    return (region / "layout.json").exists() and not (region / "complete.json").exists()


def generation_of(path: Path) -> str:
    """Empty if the weights are complete, or outside a region."""
    return _generation(path.parent) if is_arriving(path) else ""


def are_dropped(path: Path, generation: str) -> bool:
    """Whether that generation's bytes were dropped."""
    return (path.parent / "failed.json").exists() or _generation(path.parent) != generation


def _generation(region: Path) -> str:
    try:
        return str(json.loads((region / "layout.json").read_bytes())["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class Landing:
    """One region while it fills. Its waits raise WeightsDropped and TimeoutError."""

    def __init__(self, path: Path) -> None:
        self._region = path.parent
        layout = self._layout()
        try:
            self._generation = layout["generation"]
            self._piece_bytes, self.num_bytes = int(layout["piece_bytes"]), int(layout["num_bytes"])
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsDropped(f"how the weights lie cannot be read: {error!r}") from error
        self._landed, self._inode = self._map()
        self._looked_at = 0.0

    @classmethod
    def of(cls, path: Path) -> "Landing | None":
        """Return None where the weights at `path` are complete."""
        return cls(path) if is_arriving(path) else None

    def wait(self, num_bytes: int, timeout_s: float) -> None:
        """Return once the region's first bytes are readable."""
        last, until = -(-min(num_bytes, self.num_bytes) // self._piece_bytes), time.monotonic() + timeout_s
        while self._landed.find(b"\0", 0, last) >= 0:
            if self._look():
                return
            _pause(until)

    def wait_complete(self, timeout_s: float, *, stage: int = 0, num_stages: int = 1) -> None:
        """Return once the region is complete, or that stage's part."""
        own, until = self._region / f"stage-{stage}-of-{num_stages}.json", time.monotonic() + timeout_s
        while not (self._look() or (num_stages > 1 and own.exists())):
            _pause(until)

    def _look(self) -> bool:
        """Whether the region is complete. A resumed fetch has another `landed`."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        layout = self._layout()
        if (
            not isinstance(layout, dict)
            or layout.get("generation") != self._generation
            or (self._region / "failed.json").exists()
        ):
            raise WeightsDropped("the weights that were being loaded were dropped")
        if (self._region / "complete.json").exists():
            return True
        try:
            is_another = (self._region / "landed").stat().st_ino != self._inode
        except OSError as error:
            raise WeightsDropped(f"what has landed cannot be read: {error}") from error
        if is_another:
            self._landed, self._inode = self._map()
        return False

    def _layout(self) -> Any:
        try:
            return json.loads((self._region / "layout.json").read_bytes())
        except (OSError, ValueError) as error:
            raise WeightsDropped(f"how the weights lie cannot be read: {error}") from error

    def _map(self) -> tuple[mmap.mmap, int]:
        num_pieces = -(-self.num_bytes // self._piece_bytes)
        try:
            with (self._region / "landed").open("rb") as file:
                return mmap.mmap(file.fileno(), num_pieces, prot=mmap.PROT_READ), os.fstat(file.fileno()).st_ino
        except (OSError, ValueError) as error:
            raise WeightsDropped(f"what has landed cannot be read: {error}") from error


def _pause(until: float) -> None:
    if time.monotonic() > until:
        raise TimeoutError("the weights have not arrived in time")
    time.sleep(_POLL_S)
