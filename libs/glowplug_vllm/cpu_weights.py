"""The weights of a running vLLM model on a CPU: given up, and taken again from the files they came from.

vLLM packs each linear layer's weight into a copy of oneDNN's own, held by the closure `layer.cpu_linear`, and leaves
`layer.weight` empty. Names that vLLM keeps private are used here and in worker.py alone, and `check` asks for them
before the first sleep.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from glowplug_vllm.region import Region

_ROUNDING = 0.05  # of the largest output: bfloat16 adds in another order


class CannotSleep(RuntimeError):
    """This model cannot be taken again from its files as they are, so it does not give its weights up."""


class CpuWeights:
    """Of one model, as loaded."""

    def __init__(self, model: Any, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._linears = {name: module for name, module in model.named_modules() if hasattr(module, "cpu_linear")}
        self._keeps = {name for name, module in self._linears.items() if module.weight.numel()}  # looked up besides
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._is_checked = False
        self._region: Region | None = None  # while it sleeps: its pages stay readable, whoever deletes the files

    def drop(self) -> None:
        """Give up every weight. Raises CannotSleep before anything has changed."""
        if self._region is not None:
            return
        region = Region(self._directory)
        if not self._is_checked:
            with torch.no_grad():
                self._check(region)
        self._region, self._is_checked = region, True
        for layer in self._linears.values():
            layer.cpu_linear = None
        for _, parameter in self._model.named_parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        ctypes.CDLL(None).malloc_trim(0)

    def restore(self) -> None:
        """Take every weight again. Nothing, where none has been given up."""
        if self._region is None:
            return
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                weight = self._region.read(self._sources(name), self._dtypes[name])
                layer = name.rpartition(".")[0]
                is_packed = layer in self._linears and layer not in self._keeps and name.endswith(".weight")
                parameter.data = weight if is_packed else weight.clone()
            for name, layer in self._linears.items():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=name not in self._keeps)
        self._region = None

    def _check(self, region: Region) -> None:
        for name, parameter in self._model.named_parameters():
            missing = [source for source in self._sources(name) if source not in region]
            if missing:
                raise CannotSleep(f"{name} is not in its files as it is in memory ({missing[0]} is not there)")
            if not self._is_same(name, parameter, region.read(self._sources(name), self._dtypes[name])):
                raise CannotSleep(f"{name} is not in its files as it is in memory")

    def _is_same(self, name: str, parameter: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the weight of the files is the one in memory. A packed one is asked for what it makes of noise."""
        if parameter.numel():
            return parameter.shape == weight.shape and bool(torch.equal(parameter, weight))
        layer = self._linears[name.rpartition(".")[0]]
        noise = torch.randn(1, weight.shape[1], dtype=weight.dtype)
        expected = torch.nn.functional.linear(noise, weight).float()
        found = layer.cpu_linear(noise, layer.weight, None).float()
        if found.shape != expected.shape:
            return False
        return float((found - expected).abs().max()) <= _ROUNDING * float(expected.abs().max())

    def _sources(self, name: str) -> list[str]:
        """The names in the files of one parameter: vLLM joins some, by the model's own mapping."""
        mapping: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        for fused, parts in mapping.items():
            if f".{fused}." in name:
                return [name.replace(f".{fused}.", f".{part}.") for part in parts]
        return [name]
