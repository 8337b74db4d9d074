"""Track the bytes of a model's files while the node fetches them. Standard library only.

    <region>/layout.json    {"generation", "piece_bytes", "num_bytes", "files": [{"path", "num_bytes", "start"}]}
    <region>/landed         one byte per piece of all files end to end: 1 once its bytes may be read
    <region>/complete.json  all is there, and checked
    <region>/stage-S-of-N.json  all is there that stage S of a pipeline of N reads
    <region>/failed.json    it will not come
    <region>/files/         the model's directory; each file has its full size from the start

The other side is glowplug/weights/pieces.py. Bytes read before complete.json may prove wrong: the agent waits for
it, and ends a server that has read dropped bytes."""

import json
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STALLED_S = 600.0
_POLL_S = 0.005
_LOOK_S = 0.05
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".onnx")


class WeightsDropped(RuntimeError):
    """The weights being read will not arrive, or arrive anew."""


class Landing:
    def __init__(self, root: Path, layout: dict[str, Any]) -> None:
        self.root, self._region, self._generation = root, root.parent, str(layout["generation"])
        self._piece_bytes = int(layout["piece_bytes"])
        self._num_pieces = -(-int(layout["num_bytes"]) // self._piece_bytes)
        self._files = {str(f["path"]): (int(f["start"]), int(f["num_bytes"])) for f in layout["files"]}
        self._is_whole, self._looked_at, self._moved_at, self._num_landed = False, 0.0, time.monotonic(), -1
        self._landed, self._inode = self._map()

    @classmethod
    def of(cls, root: Path) -> "Landing | None":
        """Return None if the files at `root` are complete, or in no region. Raises WeightsDropped."""
        region = root.parent
        if (region / "complete.json").exists():
            return None
        try:
            return cls(root, json.loads((region / "layout.json").read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WeightsDropped(f"how the weights lie in {region.name[:12]} cannot be read: {error}") from error

    def has(self, path: Path, first: int, last: int) -> bool:
        """Whether bytes [first, last) may be read; always so for a file that is not fetched."""
        return self._is_there(self.pieces(path, first, last))

    def pieces(self, path: Path, first: int, last: int) -> tuple[int, int]:
        """Return the pieces [first, end) of these bytes; (0, 0) if there is nothing to wait for."""
        name = self._name(path)
        if name is None or last <= first:
            return 0, 0
        start = self._files[name][0]
        return (start + first) // self._piece_bytes, -(-(start + last) // self._piece_bytes)

    def wait(self, path: Path, first: int = 0, last: int | None = None) -> None:
        """Wait for bytes [first, last), or the whole file. Raises WeightsDropped, TimeoutError."""
        name = self._name(path)
        if name is not None:
            end = self._files[name][1] if last is None else last
            self.wait_first([(path, first, end)])

    def wait_first(self, spans: Sequence[tuple[Path, int, int]]) -> int:
        """Return the index of the first readable (file, first, last). Raises WeightsDropped, TimeoutError."""
        return self.wait_pieces([self.pieces(*span) for span in spans])

    def wait_pieces(self, of_spans: Sequence[tuple[int, int]]) -> int:
        """The same for known `pieces`, which makes waiting cheap. Raises WeightsDropped, TimeoutError."""
        while True:
            for index, pieces in enumerate(of_spans):
                if self._is_there(pieces):
                    return index
            self._look()
            time.sleep(_POLL_S)

    def wait_small_files(self) -> None:
        """Wait for all but weights. Raises WeightsDropped, TimeoutError."""
        for name in self._files:
            if not name.endswith(_WEIGHTS):
                self.wait(self.root / name)

    def wait_whole(self, stage: int = 0, num_stages: int = 1) -> None:
        """Raises WeightsDropped, TimeoutError."""
        if num_stages > 1:
            part = self._region / f"stage-{stage}-of-{num_stages}.json"
            while not (self._is_whole or part.exists()):
                self._look()
                time.sleep(_LOOK_S)
            return
        for name in self._files:
            self.wait(self.root / name)

    def _is_there(self, pieces: tuple[int, int]) -> bool:
        return self._is_whole or self._landed.find(b"\0", *pieces) < 0

    def _name(self, path: Path) -> str | None:
        try:
            name = path.relative_to(self.root).as_posix()
        except ValueError:
            return None
        return name if name in self._files else None

    def _map(self) -> tuple[mmap.mmap, int]:
        try:
            with (self._region / "landed").open("rb") as file:
                pages = mmap.mmap(file.fileno(), self._num_pieces, prot=mmap.PROT_READ)
                return pages, os.fstat(file.fileno()).st_ino
        except (OSError, ValueError) as error:
            raise WeightsDropped(f"what has landed of {self._region.name[:12]} cannot be read: {error}") from error

    def _look(self) -> None:
        """Check that the same fetch goes on; a resumed one has another `landed`."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        try:
            generation = json.loads((self._region / "layout.json").read_bytes()).get("generation")
            inode = (self._region / "landed").stat().st_ino
        except (OSError, ValueError, AttributeError):
            generation = inode = None
        if generation != self._generation or (self._region / "failed.json").exists():
            raise WeightsDropped("the weights that were being loaded were dropped")
        if (self._region / "complete.json").exists():
            self._is_whole = True
        elif inode != self._inode:
            self._landed, self._inode = self._map()
        if (num_landed := self._landed[:].count(b"\1")) != self._num_landed:
            self._num_landed, self._moved_at = num_landed, now
        elif now - self._moved_at > STALLED_S and not self._is_whole:
            raise TimeoutError(f"no weights have landed for {STALLED_S:g} s")
