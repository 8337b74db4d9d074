"""Split a GGUF as llama.cpp's gguf-split does: metadata in the first part, tensors and three keys in each."""

import itertools
import struct
from pathlib import Path

from glowplug.weights.split_gguf import read_part

ALIGNMENT = 32
U16, I32 = 2, 5


def split(content: bytes, num_parts: int) -> list[bytes]:
    """Tensors are distributed in order and evenly."""
    whole = read_part(content)
    ends = [*(whole.data_first + offset for offset in whole.offsets[1:]), len(content)]
    tensors = [content[whole.data_first + first : end] for first, end in zip(whole.offsets, ends, strict=True)]
    cuts = [round(len(tensors) * number / num_parts) for number in range(num_parts + 1)]
    parts = []
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        values = whole.values if number == 0 else b""
        values += _value("split.no", U16, "<H", number) + _value("split.count", U16, "<H", num_parts)
        values += _value("split.tensors.count", I32, "<i", len(tensors))
        num_values = 3 + (whole.num_values if number == 0 else 0)
        head = struct.pack("<4sIQQ", b"GGUF", whole.version, last - first, num_values) + values
        data = bytearray()
        for info, tensor in zip(whole.infos[first:last], tensors[first:last], strict=True):
            head += info + struct.pack("<Q", len(data))
            data += tensor + bytes(-len(tensor) % ALIGNMENT)
        parts.append(head + bytes(-len(head) % ALIGNMENT) + data)
    return parts


def write_split(content: bytes, folder: Path, num_parts: int, stem: str = "w") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}-{number:05}-of-{num_parts:05}.gguf" for number in range(1, num_parts + 1)]
    for path, part in zip(paths, split(content, num_parts), strict=True):
        path.write_bytes(part)
    return paths


def _value(key: str, kind: int, form: str, number: int) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + struct.pack(form, number)
