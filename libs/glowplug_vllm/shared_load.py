"""Load a vLLM model so that it ends in its files' pages.

Each parameter becomes a view of the files once read and found equal, so that at most one is in memory twice.
Parameters that vLLM has changed, or not yet taken, stay; `CpuWeights.share` finds them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from glowplug_vllm.cpu_weights import sources
from glowplug_vllm.landing import Landing
from glowplug_vllm.region import Region

_PACK = "dispatch_cpu_unquantized_gemm"  # of vllm.model_executor.layers.utils: each layer imports it when it packs


@contextlib.contextmanager
def in_place(directory: Path) -> Iterator[tuple[Region, set[str]]]:
    """Load without packing. Yield the files, and the names of parameters that are views."""
    region, settled = Region(directory, Landing.of(directory)), set[str]()
    pack, read = getattr(utils, _PACK), DefaultModelLoader.get_all_weights

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = linear
        else:
            pack(layer, remove_weight)

    def get_all_weights(_: Any, __: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return _settling(region, model, settled)

    setattr(utils, _PACK, keep)
    DefaultModelLoader.get_all_weights = get_all_weights
    try:
        yield region, settled
    finally:
        setattr(utils, _PACK, pack)
        DefaultModelLoader.get_all_weights = read


def _settling(region: Region, model: Any, settled: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the files' tensors; make a parameter a view after its last one."""
    parameters = dict(model.named_parameters())
    missing = {name: set(sources(model, name)) for name in parameters}
    of_source = {source: name for name, of_one in missing.items() for source in of_one}
    for source, tensor in region.items():
        yield source, tensor
        name = of_source.get(source, "")
        if not name:
            continue
        missing[name].discard(source)
        if not missing[name] and _settle(parameters[name], region.views(sources(model, name))):
            settled.add(name)


def _settle(parameter: torch.nn.Parameter, parts: list[torch.Tensor]) -> bool:
    """Return whether the parameter is now a view. One of several parts has no rows until they are multiplied one by
    one."""
    if len(parts) > 1 and parameter.ndim != 2:
        return False
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if whole.dtype != parameter.dtype or whole.shape != parameter.shape or not torch.equal(parameter, whole):
        return False
    parameter.data = parts[0] if len(parts) == 1 else parts[0][:0]
    return True
