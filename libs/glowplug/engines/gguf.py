"""The few facts of a GGUF file that a start needs: its chat template and what a token costs in the KV cache.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

import math
import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32  # of the tensors, unless general.alignment says otherwise
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)}
_BLOCKS |= {10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 30: (1, 2)}
_KV_ELEMENT_BYTES = 2  # f16, llama.cpp's default for both halves of the cache

Scalar = int | float | bool | str


class InvalidGguf(ValueError):
    """The file is not a GGUF file that we can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFacts:
    architecture: str
    context_tokens: int  # the longest context the model was trained for
    kv_bytes_per_token: int  # 0 when the architecture does not say
    chat_template: str
    header_bytes: int = 0  # of the file, before its tensors
    tensor_types: frozenset[int] = frozenset()  # GGML's numbers
    tensors: tuple[tuple[int, int], ...] = ()  # (first byte, end) of each; a type of numbers that is unknown has none


def read_facts(path: Path) -> GgufFacts:
    """Read the metadata. Raises InvalidGguf, for a file that was cut short too, or OSError when it cannot be opened."""
    if path.is_dir():
        raise InvalidGguf("they are a directory, and llama.cpp reads one GGUF file")
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise InvalidGguf(f"{path.name} is empty")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            try:
                values, at, num_tensors = _read_values(data)
                alignment = int(values.get("general.alignment") or _ALIGNMENT)
                header_bytes, spans, types = _tensors(data, at, num_tensors, alignment)
            except (InvalidGguf, struct.error, KeyError, UnicodeDecodeError, OverflowError) as error:
                raise InvalidGguf(f"{path.name}: metadata cannot be read: {error}") from error
            num_bytes = max((end for _, end in spans), default=header_bytes)  # at least: see _tensors
            if num_bytes > len(data):
                raise InvalidGguf(f"{path.name} is cut short: {len(data)} bytes of {num_bytes}")
    architecture = str(values.get("general.architecture", ""))

    def number(key: str) -> int:
        value = values.get(f"{architecture}.{key}", 0)
        return 0 if isinstance(value, str) else int(value)

    num_heads = number("attention.head_count") or 1
    default_head = number("embedding_length") // num_heads
    key_size, value_size = (number(f"attention.{half}_length") or default_head for half in ("key", "value"))
    kv_heads = number("attention.head_count_kv") or num_heads
    return GgufFacts(
        architecture=architecture,
        context_tokens=number("context_length"),
        kv_bytes_per_token=number("block_count") * kv_heads * (key_size + value_size) * _KV_ELEMENT_BYTES,
        chat_template=str(values.get("tokenizer.chat_template", "")),
        header_bytes=header_bytes,
        tensor_types=types,
        tensors=tuple(spans),
    )


def _read_values(data: mmap) -> tuple[dict[str, Scalar], int, int]:
    """All scalar and string values (arrays are stepped over), where they end, and how many tensors follow."""
    if data[:4] != b"GGUF":
        raise InvalidGguf("not a GGUF file")
    version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise InvalidGguf(f"GGUF version {version} is not supported")
    values: dict[str, Scalar] = {}
    at = 24
    for _ in range(num_values):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        if kind == _STRING:
            values[key], at = _string(data, at)
        elif kind == _ARRAY:
            at = _skip_array(data, at)
        else:
            (values[key],) = struct.unpack_from("<" + _SCALARS[kind], data, at)
            at += struct.calcsize(_SCALARS[kind])
    return values, at, num_tensors


def _tensors(
    data: mmap, at: int, num_tensors: int, alignment: int
) -> tuple[int, list[tuple[int, int]], frozenset[int]]:
    """Where the tensors begin; (first byte, end) of each, no length where the type of numbers is unknown; their
    types."""
    spans, types = [], set()
    for _ in range(num_tensors):
        _, at = _string(data, at)
        (num_dimensions,) = struct.unpack_from("<I", data, at)
        *shape, kind, offset = struct.unpack_from(f"<{num_dimensions}QIQ", data, at + 4)
        at += 4 + 8 * num_dimensions + 12
        types.add(kind)
        block, block_bytes = _BLOCKS.get(kind, (1, 0))
        spans.append((offset, offset + math.prod(shape) // block * block_bytes))
    begin = -(-at // alignment) * alignment if num_tensors else at
    return begin, [(begin + first, begin + end) for first, end in spans], frozenset(types)


def _string(data: mmap, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    end = at + 8 + length
    if end > len(data):
        raise InvalidGguf("a string runs past the end of the file")
    return data[at + 8 : end].decode("utf-8"), end


def _skip_array(data: mmap, at: int) -> int:
    kind: int
    count: int
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind != _STRING:
        return at + count * struct.calcsize(_SCALARS[kind])
    unpack = struct.Struct("<Q").unpack_from
    for _ in range(count):
        length: int = unpack(data, at)[0]
        at += 8 + length
    return at
