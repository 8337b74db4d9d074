"""Join a GGUF in several parts into the one file it was split from. Pure.

llama.cpp's gguf-split writes `NAME-00001-of-00003.gguf` and so on: the first part has all metadata, each part its own
tensors. The joined file has the metadata without `split.no`, `split.count` and `split.tensors.count`, all tensor infos,
then the parts' tensors in order: a new header, and unchanged bytes. Offsets are bytes, ends exclusive.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from urllib.parse import urlsplit, urlunsplit

from glowplug.domain.gguf import GgufReader, InvalidGguf, padded

MAX_PARTS = 1000  # the largest models have below fifty
_NAME = re.compile(r"(?P<stem>[^?#]*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)
_KEYS = ("split.no", "split.count", "split.tensors.count")


class NotJoinable(Exception):
    """The parts belong to no common file, or some are missing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """[first, last) of the joined file, from byte `part_byte` of part `part` (counted from 0)."""

    first: int
    last: int
    part: int
    part_byte: int


@dataclass(frozen=True, slots=True)
class JoinedGguf:
    """Gaps between header and pieces are zeros."""

    header: bytes
    pieces: tuple[Piece, ...]
    num_bytes: int

    def stretches(self, first: int, last: int) -> list[bytes | Piece]:
        """Return literal bytes and pieces of parts, in order."""
        found: list[bytes | Piece] = []
        at = first
        if at < len(self.header):
            found.append(self.header[at:last])
            at = min(last, len(self.header))
        for piece in self.pieces:
            if piece.last <= at or at >= last:
                continue
            if at < piece.first:
                found.append(bytes(min(piece.first, last) - at))
                at = min(piece.first, last)
            if at < last:
                end = min(piece.last, last)
                found.append(Piece(at, end, piece.part, piece.part_byte + at - piece.first))
                at = end
        if at < last:
            found.append(bytes(last - at))
        return found


def is_later_part(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and int(found["number"]) > 1


def part_names(uri: str) -> tuple[str, ...]:
    """Return all parts' addresses, if `uri` (an address or file name) names the first one; () for a file in one
    piece. Raises NotJoinable."""
    parts = urlsplit(uri) if "://" in uri else None
    found = _NAME.fullmatch(parts.path if parts else uri)
    if found is None or int(found["count"]) == 1:
        return ()
    number, count = int(found["number"]), int(found["count"])
    if not 1 < count <= MAX_PARTS:
        raise NotJoinable(f"{count} parts; from 2 to {MAX_PARTS} are read")
    paths = [f"{found['stem']}-{one:05}-of-{count:05}{found['ending']}" for one in range(1, count + 1)]
    if number != 1:
        raise NotJoinable(f"it is part {number} of {count}; name the first one, {paths[0].rpartition('/')[2]}")
    return tuple(urlunsplit(parts._replace(path=path)) if parts else path for path in paths)


@dataclass(frozen=True, slots=True)
class GgufPart:
    """`values`: raw metadata without the split's; `infos` of its tensors, each up to its offset; `offsets` from
    `data_first` on."""

    version: int
    split: dict[str, int]
    num_values: int
    values: bytes
    infos: tuple[bytes, ...]
    offsets: tuple[int, ...]
    alignment: int
    data_first: int


def read_part(content: "bytes | mmap") -> GgufPart:
    """Raises NeedMore where the head exceeds `content`; NotJoinable."""
    try:
        reader = GgufReader(content)
        values = list(reader.values())
        tensors = list(reader.tensors())
    except InvalidGguf as error:
        raise NotJoinable(str(error)) from error
    kept = [content[one.first : one.end] for one in values if one.key not in _KEYS]
    return GgufPart(
        version=reader.version,
        split={one.key: one.value for one in values if one.key in _KEYS and type(one.value) is int},
        num_values=len(kept),
        values=b"".join(kept),
        infos=tuple(content[one.first : one.end] for one in tensors),
        offsets=tuple(one.offset for one in tensors),
        alignment=reader.alignment,
        data_first=reader.data_first,
    )


def join(parts: Sequence[GgufPart], sizes: Sequence[int]) -> JoinedGguf:
    """`sizes` in bytes, in the order of the parts' numbers. Raises NotJoinable."""
    first = parts[0]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        named = part.split.get("split.no", -1), part.split.get("split.count", -1)
        if named != (number, len(parts)):
            raise NotJoinable(f"part {number + 1} of {len(parts)} says that it is {named[0] + 1} of {named[1]}")
        if part.infos and size <= part.data_first:
            raise NotJoinable(f"part {number + 1} of {len(parts)} is cut short")
        if part.version != first.version or part.alignment % first.alignment:
            raise NotJoinable(f"part {number + 1} of {len(parts)} has another layout than the first part")
    num_tensors = sum(len(part.infos) for part in parts)
    if first.split.get("split.tensors.count", num_tensors) != num_tensors:
        stated = first.split["split.tensors.count"]
        raise NotJoinable(f"the parts hold {num_tensors} tensors of {stated}")
    header_bytes = 24 + len(first.values) + sum(len(info) + 8 for part in parts for info in part.infos)
    begin = at = padded(header_bytes, first.alignment)
    header, pieces = bytearray(struct.pack("<4sIQQ", b"GGUF", first.version, num_tensors, first.num_values)), []
    header += first.values
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if not part.infos:
            continue
        for info, offset in zip(part.infos, part.offsets, strict=True):
            header += info + struct.pack("<Q", at - begin + offset)
        end = at + size - part.data_first
        pieces.append(Piece(at, end, number, part.data_first))
        at = padded(end, first.alignment)
    return JoinedGguf(bytes(header.ljust(begin, b"\0")), tuple(pieces), pieces[-1].last if pieces else begin)
