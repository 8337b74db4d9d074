"""A look at the headers of safetensors files before vLLM reads them: what vLLM says of a broken one names no file.

Format: 8 bytes little-endian header length, a JSON object of tensors with data_offsets, then the bytes.
"""

import json
import struct
from pathlib import Path

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class BrokenWeights(ValueError):
    """A weight file that is not whole or not safetensors; the message names it."""


def check(model_dir: Path) -> None:
    """Raises BrokenWeights for the first file that is broken or cut short. Tensor values are not looked at."""
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            expected = _expected_bytes(path)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise BrokenWeights(f"{path.name} is not a safetensors file: {error}") from None
        found = path.stat().st_size
        if found != expected:
            raise BrokenWeights(f"{path.name} has {found} bytes, its header promises {expected}")


def _expected_bytes(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))
