"""Facts of a GGUF file (domain/gguf.py) for a start, such as its chat template and KV cache cost per token."""

import math
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

from glowplug.domain.gguf import GgufReader, InvalidGguf, NeedMore, Scalar, Tensor

_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36)}
_BLOCKS |= {10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 30: (1, 2)}
_KV_ELEMENT_BYTES = 2
MAX_NUMBER: Final = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFacts:
    architecture: str
    context_tokens: int  # trained limit
    kv_bytes_per_token: int  # at 16 bits a number; 0: unknown
    chat_template: str
    kv_numbers: tuple[int, int] = (0, 0)  # per token in the KV cache: keys, values
    header_bytes: int = 0
    tensor_types: frozenset[int] = frozenset()
    matrix: tuple[str, int, int] | None = None  # its layers' first matrix: name, inputs, outputs
    tensors: tuple[tuple[int, int], ...] = ()  # (first byte, end), empty for unknown types


def read_facts(path: Path) -> GgufFacts:
    """Raises InvalidGguf, also for a truncated file, or OSError."""
    if path.is_dir():
        raise InvalidGguf("they are a directory, and llama.cpp reads one GGUF file")
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise InvalidGguf(f"{path.name} is empty")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            try:
                reader = GgufReader(data)
                values = {one.key: one.value for one in reader.values() if one.value is not None}
                matrix: tuple[str, int, int] | None = None
                types, spans = set(), []
                for tensor in reader.tensors():
                    types.add(tensor.kind)
                    if matrix is None and tensor.name.startswith("blk.") and len(tensor.shape) == 2:
                        matrix = tensor.name, *tensor.shape
                    spans.append((tensor.offset, tensor.offset + bytes_of(tensor)))
            except NeedMore as error:
                raise InvalidGguf(f"{path.name} is cut short: {len(data)} bytes, and {error}") from error
            except InvalidGguf as error:
                raise InvalidGguf(f"{path.name}: metadata cannot be read: {error}") from error
            begin = reader.data_first
            num_bytes = begin + max((end for _, end in spans), default=0)  # at least: a type may be unknown
            if num_bytes > len(data):
                raise InvalidGguf(f"{path.name} is cut short: {len(data)} bytes of {num_bytes}")
    architecture = _text(values, "general.architecture")

    def number(key: str) -> int:
        return _number(path, values, f"{architecture}.{key}")

    num_heads = number("attention.head_count") or 1
    default_head = number("embedding_length") // num_heads
    key_size, value_size = (number(f"attention.{half}_length") or default_head for half in ("key", "value"))
    kv_heads = number("attention.head_count_kv") or num_heads
    per_size = number("block_count") * kv_heads
    kv_numbers = per_size * key_size, per_size * value_size
    return GgufFacts(
        architecture=architecture,
        context_tokens=number("context_length"),
        kv_bytes_per_token=sum(kv_numbers) * _KV_ELEMENT_BYTES,
        kv_numbers=kv_numbers,
        chat_template=_text(values, "tokenizer.chat_template"),
        header_bytes=begin,
        tensor_types=frozenset(types),
        matrix=matrix,
        tensors=tuple((begin + first, begin + end) for first, end in spans),
    )


def bytes_of(tensor: Tensor) -> int:
    """Return 0 for an unknown type."""
    return bytes_as(tensor.kind, math.prod(tensor.shape))


def bytes_as(kind: int, numbers: int) -> int:
    """Return 0 for an unknown type."""
    block, block_bytes = _BLOCKS.get(kind, (1, 0))
    return numbers // block * block_bytes


def _text(values: dict[str, Scalar], key: str) -> str:
    value = values.get(key, "")
    return value if isinstance(value, str) else ""


def _number(path: Path, values: dict[str, Scalar], key: str) -> int:
    """Return 0 where absent, or listed per layer."""
    value = values.get(key, 0)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise InvalidGguf(f"{path.name}: {key} is {value!r:.40}, not a whole number from 0 to {MAX_NUMBER}")
    return value
