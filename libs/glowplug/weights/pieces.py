"""Landed bytes of a region, piece by piece: the part that is readable while the rest arrives.

    layout.json   {"generation": "9f..", "piece_bytes": n, "num_bytes": n, "files": [{"path", "num_bytes", "start"}]}
    landed        one byte per piece: 1 once all bytes of the piece are in the files, else 0
    pieces.json   {"algorithm": "crc32", "piece_bytes": n, "digests": ["<hex>", ..]}

Its reader is glowplug_vllm/landing.py. Offsets are the region's: all files end to end in the
layout's order; piece i starts at i * piece_bytes, and the last one may be shorter. The path "" is `blob`, any other is
below `files/`. Standard library only, so that a process without this package can follow the same rules:

  - layout.json appears after `landed` and the files, which have their full size from then on.
  - Map `landed`, and wait until the pieces of a range are 1; their bytes do not change. A fetch resumed after a kill
    has another file `landed`: check its inode now and then, and map the new one.
  - The bytes are proven right once complete.json exists *and* layout.json still names the reader's first generation.
    Another generation, or failed.json, voids the read.
"""

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 20
LEAST_PIECE_BYTES = 4096
ALGORITHM = "crc32"  # detects corruption by disk, network or memory; sha256 proves the bytes' identity
EARLIER_ALGORITHM = "blake2b-128"  # of an earlier version's regions and copies: read only
_HEX_DIGITS = {8: ALGORITHM, 32: EARLIER_ALGORITHM}
_FEW_PIECES = 64


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """`path` "" is the region's single file."""

    path: str
    num_bytes: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`generation` changes whenever landed bytes are fetched again."""

    piece_bytes: int
    num_bytes: int
    files: tuple[LayoutFile, ...]
    generation: str = ""

    @classmethod
    def of(cls, files: Sequence[tuple[str, int]]) -> "Layout":
        """Lay these (path, bytes) end to end."""
        starts, position = [], 0
        for path, num_bytes in files:
            starts.append(LayoutFile(path, num_bytes, position))
            position += num_bytes
        return cls(
            piece_bytes=piece_bytes_for(position), num_bytes=position, files=tuple(starts), generation=uuid.uuid4().hex
        )

    @property
    def num_pieces(self) -> int:
        return -(-self.num_bytes // self.piece_bytes)

    @property
    def is_directory(self) -> bool:
        return any(file.path for file in self.files)

    def piece(self, index: int) -> tuple[int, int]:
        """[first, last) of a piece."""
        first = index * self.piece_bytes
        return first, min(first + self.piece_bytes, self.num_bytes)

    def touched(self, first: int, last: int) -> range:
        """The pieces that hold bytes of [first, last)."""
        return range(
            first // self.piece_bytes, -(-last // self.piece_bytes) if last > first else first // self.piece_bytes
        )

    def rounded(self, first: int, last: int) -> tuple[int, int]:
        """[first, last) grown to whole pieces."""
        pieces = self.touched(first, last)
        return pieces.start * self.piece_bytes, min(pieces.stop * self.piece_bytes, self.num_bytes)

    def to_json(self) -> dict[str, Any]:
        files = [{"path": f.path, "num_bytes": f.num_bytes, "start": f.start} for f in self.files]
        sizes = {"piece_bytes": self.piece_bytes, "num_bytes": self.num_bytes}
        return {"generation": self.generation, **sizes, "files": files}

    @classmethod
    def from_json(cls, value: Any) -> "Layout | None":
        """Return None for an invalid layout."""
        try:
            files = tuple(LayoutFile(str(f["path"]), int(f["num_bytes"]), int(f["start"])) for f in value["files"])
            piece_bytes, num_bytes, generation = int(value["piece_bytes"]), int(value["num_bytes"]), value["generation"]
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if piece_bytes <= 0 or num_bytes != sum(f.num_bytes for f in files) or not isinstance(generation, str):
            return None
        position = 0
        for file in files:
            if file.start != position or file.num_bytes < 0:
                return None
            position += file.num_bytes
        return cls(piece_bytes=piece_bytes, num_bytes=num_bytes, files=files, generation=generation)


def piece_bytes_for(num_bytes: int) -> int:
    """1 MiB; less for weights of less than 64 MiB, in powers of two down to 4096."""
    wanted = 1 << max(0, num_bytes // _FEW_PIECES - 1).bit_length()
    return min(PIECE_BYTES, max(LEAST_PIECE_BYTES, wanted))


def read_layout(directory: Path) -> Layout | None:
    """Return None if absent or unreadable."""
    try:
        return Layout.from_json(json.loads((directory / "layout.json").read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


def read_landed(directory: Path, layout: Layout) -> bytes:
    """One byte per piece, 0 or 1; all 0 where the file is unreadable."""
    try:
        landed = (directory / "landed").read_bytes()
    except OSError:
        landed = b""
    return landed if len(landed) == layout.num_pieces else bytes(layout.num_pieces)


def piece_digest(content: bytes | bytearray | memoryview, before: int = 0) -> str:
    """Return the checksum as in pieces.json; `before` is the CRC-32 of the piece's earlier bytes."""
    return f"{zlib.crc32(content, before):08x}"


def is_current(digest: str) -> bool:
    return _HEX_DIGITS.get(len(digest)) == ALGORITHM


def is_piece(content: bytes | bytearray | memoryview, digest: str) -> bool:
    """Accept checksums of either version."""
    if _HEX_DIGITS.get(len(digest)) == EARLIER_ALGORITHM:
        return hashlib.blake2b(content, digest_size=16).hexdigest() == digest
    return piece_digest(content) == digest


def read_piece_digests(directory: Path, layout: Layout) -> tuple[str, ...]:
    """Return () without digests that fit the layout."""
    try:
        return piece_digests_of(json.loads((directory / "pieces.json").read_bytes()), layout)
    except (OSError, ValueError, RecursionError):
        return ()


def piece_digests_of(value: Any, layout: Layout) -> tuple[str, ...]:
    """Do the same for the content of a pieces.json."""
    if not isinstance(value, dict) or value.get("algorithm") not in _HEX_DIGITS.values():
        return ()
    digests = value.get("digests")
    if value.get("piece_bytes") != layout.piece_bytes or not isinstance(digests, list):
        return ()
    if len(digests) != layout.num_pieces or not all(isinstance(one, str) for one in digests):
        return ()
    is_of_algorithm = all(_HEX_DIGITS.get(len(one)) == value["algorithm"] for one in digests)
    return tuple(digests) if is_of_algorithm else ()


def piece_digests_json(layout: Layout, digests: Sequence[str]) -> dict[str, Any]:
    """`digests` are all of one version."""
    algorithm = _HEX_DIGITS[len(digests[0])] if digests else ALGORITHM
    return {"algorithm": algorithm, "piece_bytes": layout.piece_bytes, "digests": list(digests)}


class LandingMap:
    def __init__(self, directory: Path, layout: Layout) -> None:
        self._path, self._layout = directory / "landed", layout
        self._fd = -1

    def open(self, pieces: Sequence[int]) -> None:
        """Replace the file by one with these pieces landed. Raises OSError."""
        marks = bytearray(self._layout.num_pieces)
        for index in pieces:
            marks[index] = 1
        self.close()
        scratch = self._path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_bytes(marks)
        scratch.replace(self._path)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)

    def mark(self, index: int, *, landed: bool = True) -> None:
        os.pwrite(self._fd, b"\1" if landed else b"\0", index)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
