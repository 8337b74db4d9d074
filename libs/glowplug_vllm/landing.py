"""An engine's view of weights that still arrive.

    <region>/layout.json    {"generation", "piece_bytes", "num_bytes", "files": [{"path", "num_bytes", "start"}]}
    <region>/landed         one byte per piece of all files end to end: 1 once its bytes may be read
    <region>/complete.json  all bytes landed and checked; stage-S-of-N.json: those of one pipeline stage
    <region>/failed.json    it will not come
    <region>/blob | files/  the bytes, in full size from the start

The other side is glowplug/weights/pieces.py. Bytes read before complete.json exists may turn out wrong: the agent waits
for it, and ends an engine that has read dropped bytes. Standard library only: glowplug/engines links to this file.
"""

import json
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

STALLED_S = 600.0
_POLL_S = 0.002
_LOOK_S = 0.05
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".onnx")


class WeightsDropped(RuntimeError):
    """The weights will not arrive, or arrive again from the start."""


def is_arriving(root: Path) -> bool:
    """Whether the weights at `root` (a region's file or directory) are incomplete; False outside a region."""
    region = root.parent
    return (region / "layout.json").exists() and not (region / "complete.json").exists()


def generation_of(root: Path) -> str:
    """Empty if the weights are complete, or outside a region."""
    return _generation(root.parent) if is_arriving(root) else ""


def are_dropped(root: Path, generation: str) -> bool:
    return (root.parent / "failed.json").exists() or _generation(root.parent) != generation


def _generation(region: Path) -> str:
    try:
        return str(json.loads((region / "layout.json").read_bytes())["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class Landing:
    """One region while it fills. Its waits raise WeightsDropped, and TimeoutError: after `timeout_s`, else once nothing
    has landed for STALLED_S."""

    def __init__(self, root: Path) -> None:
        self.root, self._region = root, root.parent
        try:
            layout = json.loads((self._region / "layout.json").read_bytes())
            self._generation, self._piece_bytes = str(layout["generation"]), int(layout["piece_bytes"])
            self.num_bytes = int(layout["num_bytes"])
            self._files = {str(f["path"]): (int(f["start"]), int(f["num_bytes"])) for f in layout["files"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsDropped(f"the layout of {self._region.name[:12]} cannot be read: {error}") from error
        self._num_pieces = self._end(self.num_bytes)
        self._is_whole, self._looked_at, self._moved_at, self._num_landed = False, 0.0, time.monotonic(), -1
        self._landed, self._inode = self._map()

    @classmethod
    def of(cls, root: Path) -> "Landing | None":
        """Return None where the weights at `root` are complete, or in no region."""
        return cls(root) if is_arriving(root) else None

    def pieces(self, path: Path, first: int, last: int) -> tuple[int, int]:
        """Return the pieces [first, end) of these bytes of a file; (0, 0) if there is nothing to wait for."""
        file = self._files.get(path.relative_to(self.root).as_posix()) if path.is_relative_to(self.root) else None
        if file is None or last <= first:
            return 0, 0
        return (file[0] + first) // self._piece_bytes, self._end(file[0] + last)

    def has(self, pieces: tuple[int, int]) -> bool:
        return self._is_whole or self._landed.find(b"\0", *pieces) < 0

    def wait(self, path: Path, first: int, last: int) -> None:
        self.wait_pieces([self.pieces(path, first, last)])

    def wait_pieces(self, spans: Sequence[tuple[int, int]], timeout_s: float | None = None) -> int:
        """Return the index of the first readable span of pieces."""
        began = time.monotonic()
        while True:
            for index, pieces in enumerate(spans):
                if self.has(pieces):
                    return index
            self._pause(began, timeout_s)

    def wait_beginning(self, num_bytes: int, timeout_s: float) -> None:
        """Wait for the region's first bytes."""
        self.wait_pieces([(0, self._end(min(num_bytes, self.num_bytes)))], timeout_s)

    def wait_small_files(self) -> None:
        """Wait for all but weights."""
        for name, (_, num_bytes) in self._files.items():
            if not name.endswith(_WEIGHTS):
                self.wait(self.root / name, 0, num_bytes)

    def wait_whole(self, stage: int = 0, num_stages: int = 1) -> None:
        """Wait for all bytes, or until that stage's are checked."""
        if num_stages > 1:
            self.wait_complete(stage=stage, num_stages=num_stages)
        else:
            self.wait_pieces([(0, self._num_pieces)])

    def wait_complete(self, timeout_s: float | None = None, *, stage: int = 0, num_stages: int = 1) -> None:
        """Wait until the region is checked, or that stage's part."""
        part, began = self._region / f"stage-{stage}-of-{num_stages}.json", time.monotonic()
        while not (self._is_whole or (num_stages > 1 and part.exists())):
            self._pause(began, timeout_s)

    def _pause(self, began: float, timeout_s: float | None) -> None:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._look(now)
        if self._is_whole:
            return
        if timeout_s is None and now - self._moved_at > STALLED_S:
            raise TimeoutError(f"no weights have landed for {STALLED_S:g} s")
        if timeout_s is not None and now - began > timeout_s:
            raise TimeoutError("the weights have not arrived in time")
        time.sleep(_POLL_S)

    def _look(self, now: float) -> None:
        """Check that the same fetch continues; a resumed one has another `landed`."""
        if are_dropped(self.root, self._generation):
            raise WeightsDropped("the weights that were being loaded were dropped")
        if (self._region / "complete.json").exists():
            self._is_whole = True
            return
        try:
            is_another = (self._region / "landed").stat().st_ino != self._inode
        except OSError as error:
            raise WeightsDropped(f"what has landed cannot be read: {error}") from error
        if is_another:
            self._landed, self._inode = self._map()
        if (num_landed := self._landed[:].count(b"\1")) != self._num_landed:
            self._num_landed, self._moved_at = num_landed, now

    def _end(self, num_bytes: int) -> int:
        return -(-num_bytes // self._piece_bytes)

    def _map(self) -> tuple[mmap.mmap, int]:
        try:
            with (self._region / "landed").open("rb") as file:
                pages = mmap.mmap(file.fileno(), self._num_pieces, prot=mmap.PROT_READ)
                return pages, os.fstat(file.fileno()).st_ino
        except (OSError, ValueError) as error:
            raise WeightsDropped(f"what has landed cannot be read: {error}") from error
