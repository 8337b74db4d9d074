"""Weights of one type of number as those of another: a GGUF file whose Q4_1 tensors become Q8_0, the others stay.

    Q4_1   32 weights: scale d and minimum m (half precision), 32 numbers q of 4 bits;   w = d q + m
    Q8_0   32 weights: scale d (half precision), 32 signed bytes q;                      w = d q,  d = max |w| / 127

The header stays as long: types and offsets of tensors have fixed sizes there.
"""

import os
import struct
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from glowplug.domain.gguf import GgufReader, InvalidGguf, NeedMore, padded
from glowplug.engines.gguf import bytes_of

Q4_1, Q8_0 = 3, 8  # GGML's numbers of these types
MOSTLY_Q8_0: Final = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
_FILE_TYPE: Final = b"general.file_type" + struct.pack("<I", 4)  # a value of 32 bits
_KIND_BYTES: Final = 4  # of a tensor's type, which precedes its offset
_FOUR_BITS: Final = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
_EIGHT_BITS: Final = np.dtype([("d", "<f2"), ("q", "i1", 32)])


def to_q8_0(source: Path, target: Path) -> None:
    """Write `target`, which appears once it is complete. Takes some 3 s for 100 MB, and memory of the largest tensor.
    Raises InvalidGguf, and OSError."""
    made = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with source.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data, made.open("wb") as out:
            reader = GgufReader(data)
            for _ in reader.values():
                pass  # the tensors follow them
            tensors = list(reader.tensors())
            begin = reader.data_first
            head = bytearray(data[:begin])
            out.seek(begin)
            for tensor in tensors:
                numbers = data[begin + tensor.offset : begin + tensor.offset + bytes_of(tensor)]
                offset = padded(out.tell(), reader.alignment)
                out.seek(offset)
                out.write(eight_bits(numbers) if tensor.kind == Q4_1 else numbers)
                kind = Q8_0 if tensor.kind == Q4_1 else tensor.kind
                struct.pack_into("<IQ", head, tensor.end - _KIND_BYTES, kind, offset - begin)
            if (at := head.find(_FILE_TYPE)) < 0:
                raise InvalidGguf(f"{source.name} does not declare its file type")
            struct.pack_into("<I", head, at + len(_FILE_TYPE), MOSTLY_Q8_0)
            out.seek(0)
            out.write(head)
        made.replace(target)
    except NeedMore as error:
        raise InvalidGguf(f"{source.name} is cut short: {error}") from error
    finally:
        made.unlink(missing_ok=True)


def eight_bits(four_bits: bytes) -> bytes:
    blocks: NDArray[np.void] = np.frombuffer(four_bits, _FOUR_BITS)
    weights = np.empty((len(blocks), 32), np.float32)
    weights[:, :16], weights[:, 16:] = blocks["q"] & 15, blocks["q"] >> 4
    weights *= blocks["d"].astype(np.float32)[:, None]
    weights += blocks["m"].astype(np.float32)[:, None]
    made = np.empty(len(blocks), _EIGHT_BITS)
    scale = np.maximum(weights.max(axis=1), -weights.min(axis=1)) / 127
    made["d"] = scale
    weights *= np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)[:, None]
    made["q"] = np.rint(weights, out=weights)
    return made.tobytes()
