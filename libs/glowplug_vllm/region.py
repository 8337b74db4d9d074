"""Safetensors files of a model's directory as tensors: views of the files' pages, without memory of their own."""

import json
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glowplug_vllm import layout
from glowplug_vllm.landing import Landing

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_OTHERS = {
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
_LENGTH = struct.Struct("<Q")  # of the header, before it


class Region:
    """Weights of one directory, or of some files. It keeps their pages even if the files are deleted. For arriving
    weights (`landing`), each method waits for its bytes."""

    def __init__(self, directory: Path, landing: Landing | None = None, files: Iterable[Path] | None = None) -> None:
        self._landing = landing
        self._tensors: dict[str, tuple[mmap.mmap, int, dict[str, Any]]] = {}  # name -> file, start, facts
        self._paths: dict[int, Path] = {}
        for path in sorted(directory.glob("*.safetensors") if files is None else files):
            with path.open("rb") as file:
                pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._wait(path, 0, _LENGTH.size)
            header_bytes = _LENGTH.unpack_from(pages)[0]
            self._wait(path, _LENGTH.size, _LENGTH.size + header_bytes)
            header = json.loads(pages[_LENGTH.size : _LENGTH.size + header_bytes])
            header.pop("__metadata__", None)
            self._paths[id(pages)] = path
            self._tensors |= {name: (pages, _LENGTH.size + header_bytes, facts) for name, facts in header.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors and self._tensors[name][2]["dtype"] in _DTYPES

    @property
    def is_readable(self) -> bool:
        """Whether there are tensors, all of supported types."""
        return bool(self._tensors) and all(name in self for name in self._tensors)

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def span(self, name: str) -> tuple[Path, int, int]:
        """Return a tensor's file, first byte and end. Raises KeyError."""
        pages, base, facts = self._tensors[name]
        start, end = facts["data_offsets"]
        return self._paths[id(pages)], base + start, base + end

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of any type. Raises KeyError if missing or of an unknown type."""
        return self._read(name, _DTYPES | _OTHERS)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises KeyError for an unsupported type."""
        return ((name, self._read(name)) for name in self._tensors)

    def read_as_is(self, name: str) -> torch.Tensor:
        """Return a view. Raises KeyError if missing or of an unsupported type."""
        return self._read(name)

    def read(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Return one tensor, or several joined along their first dimension; a view if possible. Raises KeyError."""
        parts = [part.to(dtype) for part in self.views(names)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def views(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return one view of tensors adjacent in a file, else a view of each. Raises KeyError."""
        held = [self._tensors[name] for name in names]
        spans = [(facts["data_offsets"][0], facts["data_offsets"][1]) for _, _, facts in held]
        like = {(id(pages), facts["dtype"], tuple(facts["shape"][1:])) for pages, _, facts in held}
        parts = [self._read(name) for name in names]
        if len(parts) == 1 or len(like) > 1 or not layout.is_one_run(spans):
            return parts
        shape = torch.Size([sum(part.shape[0] for part in parts), *parts[0].shape[1:]])
        pages, base, _ = held[0]
        return [
            torch.frombuffer(pages, dtype=parts[0].dtype, count=shape.numel(), offset=base + spans[0][0]).view(shape)
        ]

    def num_bytes(self, names: Sequence[str]) -> int:
        """In the files. Raises KeyError."""
        ends = [self._tensors[name][2]["data_offsets"] for name in names]
        return sum(end - start for start, end in ends)

    def _wait(self, path: Path, first: int, last: int) -> None:
        if self._landing is not None:
            self._landing.wait(path, first, last)

    def _read(self, name: str, dtypes: Mapping[str, torch.dtype] = _DTYPES) -> torch.Tensor:
        pages, base, facts = self._tensors[name]
        self._wait(*self.span(name))
        dtype, shape = dtypes[facts["dtype"]], torch.Size(facts["shape"])
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        offset = base + facts["data_offsets"][0]
        return torch.frombuffer(pages, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
