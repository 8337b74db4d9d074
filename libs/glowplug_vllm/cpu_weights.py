"""Drop and restore the weights of a running vLLM model on a CPU.

Packed, as in vLLM: the closure `layer.cpu_linear` holds oneDNN's copy of each linear weight, and `layer.weight` is
empty. Shared: every weight is a view of the files' pages, common to all engines of a model on a node; a weight that
vLLM joins (q, k and v), but whose parts are apart in the file, is multiplied part by part. A vLLM without the
private names used here, in shared_load.py and worker.py fails a start or the first sleep."""

import ctypes
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from glowplug_vllm import layout
from glowplug_vllm.region import Region

_ROUNDING = 0.05  # of the largest output: bfloat16 adds in another order


class CannotSleep(RuntimeError):
    """The model cannot be restored from its files, so it keeps its weights."""


class SharingError(RuntimeError):
    """The model differs from its files, so its weights cannot be their pages."""


class CpuWeights:
    def __init__(self, model: Any, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._linears = {name: module for name, module in model.named_modules() if hasattr(module, "cpu_linear")}
        self._keeps = {name for name, module in self._linears.items() if module.weight.numel()}  # embeddings, too
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._is_checked = self._is_shared = False
        self._away: frozenset[str] = frozenset()
        self._region: Region | None = None  # open while in use: its files may be deleted

    def share(self, region: Region, settled: Collection[str]) -> None:
        """Make each weight a view of the files; `settled` ones are known to be equal. Raises SharingError for one that
        differs."""
        for name, parameter in self._model.named_parameters():
            of_files = self._sources(name)
            missing = [source for source in of_files if source not in region]
            if missing or any(part.dtype != parameter.dtype for part in region.views(of_files)):
                raise SharingError(f"weights_shared: {name} differs between its files and memory; see dtype")
        self._check(region, SharingError, settled)
        self._is_checked = self._is_shared = True
        self._away, self._region = frozenset(self._dtypes), region
        self.restore()
        _trim()

    def drop(self) -> None:
        """Raises CannotSleep before any change."""
        self._drop(frozenset(self._dtypes))

    def keep_first(self, num_bytes: int) -> None:
        """Drop all but the first layers that fit `num_bytes`. Raises CannotSleep before any change."""
        kept = layout.leading(self._bytes(self._checked()), num_bytes)
        self._drop(frozenset(self._dtypes) - kept)

    def _drop(self, names: frozenset[str]) -> None:
        names -= self._away
        if not names:
            return
        self._region = self._checked()
        self._away |= names
        for name in self._linears_of(names):
            self._linears[name].cpu_linear = None
        for name, parameter in self._model.named_parameters():
            if name in names:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
        _trim()

    def _checked(self) -> Region:
        """Return the files, verified against memory. Raises CannotSleep."""
        region = self._region or Region(self._directory)
        if not self._is_checked:
            with torch.no_grad():
                self._check(region, CannotSleep)
            self._is_checked = True
        return region

    def restore(self) -> None:
        if not self._away or self._region is None:
            return
        take = self._take_shared if self._is_shared else self._take_packed
        with torch.no_grad():
            take(self._region)
        self._away = frozenset()
        if not self._is_shared and not self._keeps:
            self._region = None

    def _take_shared(self, region: Region) -> None:
        joined: dict[str, Callable[..., torch.Tensor]] = {}
        for name, parameter in self._model.named_parameters():
            layer = name.rpartition(".")[0]
            parts = region.views(self._sources(name))
            if len(parts) == 1:
                parameter.data = parts[0]
            elif layer in self._linears and name.endswith(".weight"):
                parameter.data = torch.empty(0, dtype=parameter.dtype)  # as vLLM leaves a packed weight
                joined[layer] = _part_by_part(parts)
            else:
                parameter.data = torch.cat(parts)
        for name in self._linears_of(self._away):
            self._linears[name].cpu_linear = joined.get(name, linear)

    def _take_packed(self, region: Region) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self._away:
                weight = region.read(self._sources(name), self._dtypes[name])
                parameter.data = weight if self._is_of_linear(name) else weight.clone()
        for name in self._linears_of(self._away):
            dispatch_cpu_unquantized_gemm(self._linears[name], remove_weight=name not in self._keeps)

    def _is_of_linear(self, name: str) -> bool:
        """Return whether the weight is packed. Embeddings stay views: few rows are read, and engines share the
        pages."""
        return name.endswith(".weight") and name.rpartition(".")[0] in self._linears

    def _linears_of(self, names: frozenset[str]) -> list[str]:
        """Return linear layers with a weight among `names`; tied ones each."""
        weights = {id(parameter) for name, parameter in self._model.named_parameters() if name in names}
        return [name for name, layer in self._linears.items() if id(layer.weight) in weights]

    def _bytes(self, region: Region) -> dict[str, int]:
        """Return bytes in memory: a weight both looked up and multiplied with counts twice."""
        twice = set() if self._is_shared else {f"{name}.weight" for name in self._keeps}
        return {name: region.num_bytes(self._sources(name)) * (1 + (name in twice)) for name in self._dtypes}

    def _check(self, region: Region, refusal: type[RuntimeError], known: Collection[str] = ()) -> None:
        for name, parameter in self._model.named_parameters():
            if name in known:
                continue
            missing = [source for source in self._sources(name) if source not in region]
            if missing:
                raise refusal(f"{name} differs between its files and memory ({missing[0]} is not there)")
            if not self._is_same(name, parameter, region.read(self._sources(name), self._dtypes[name])):
                raise refusal(f"{name} differs between its files and memory")

    def _is_same(self, name: str, parameter: torch.Tensor, weight: torch.Tensor) -> bool:
        """Compare a weight with its file; a packed one by its output for noise."""
        if parameter.numel():
            return parameter.shape == weight.shape and bool(torch.equal(parameter, weight))
        layer = self._linears[name.rpartition(".")[0]]
        noise = torch.randn(1, weight.shape[1], dtype=weight.dtype)
        expected = linear(noise, weight).float()
        found = layer.cpu_linear(noise, layer.weight, None).float()
        if found.shape != expected.shape:
            return False
        return float((found - expected).abs().max()) <= _ROUNDING * float(expected.abs().max())

    def _sources(self, name: str) -> list[str]:
        return sources(self._model, name)


def sources(model: Any, name: str) -> list[str]:
    mapping: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for fused, parts in mapping.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _part_by_part(parts: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor]:
    rows = [part.shape[0] for part in parts]

    def joined(x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        biases = bias.split(rows) if bias is not None else [None] * len(rows)
        return torch.cat([linear(x, part, of_part) for part, of_part in zip(parts, biases, strict=True)], dim=-1)

    return joined


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)
