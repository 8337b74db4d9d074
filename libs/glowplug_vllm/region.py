"""Safetensors files of a model's directory as tensors: views of the files' pages, which cost no memory of their own."""

import json
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_LENGTH = struct.Struct("<Q")  # of the header, before it


class Region:
    """The weights of one directory. Holding it keeps their pages, even when the files are deleted meanwhile."""

    def __init__(self, directory: Path) -> None:
        self._tensors: dict[str, tuple[mmap.mmap, int, dict[str, Any]]] = {}  # of each name: file, start, facts
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            header_bytes = _LENGTH.unpack_from(pages)[0]
            header = json.loads(pages[_LENGTH.size : _LENGTH.size + header_bytes])
            header.pop("__metadata__", None)
            self._tensors |= {name: (pages, _LENGTH.size + header_bytes, facts) for name, facts in header.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name][2]["dtype"] in _DTYPES

    def read(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """One tensor, or several joined along their first dimension; a view where that is possible. Raises KeyError for
        one that is not there."""
        parts = [self._read(name).to(dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, name: str) -> torch.Tensor:
        pages, base, facts = self._tensors[name]
        dtype, shape = _DTYPES[facts["dtype"]], torch.Size(facts["shape"])
        offset = base + facts["data_offsets"][0]
        return torch.frombuffer(pages, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
