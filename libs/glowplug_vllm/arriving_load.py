"""Load a model in vLLM while its weights arrive: `install()`, in every process of such a server.

vLLM's loader gets each tensor as it lands, in the order of the fetch. A layer is packed after its last tensor, while
the next one arrives. Layers of other pipeline stages are not awaited. A vLLM without the private names used here
fails the start."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glowplug_vllm import arriving
from glowplug_vllm.landing import Landing
from glowplug_vllm.region import Region
from glowplug_vllm.replaced import replaced

_READ = "safetensors_weights_iterator"  # of vllm.model_executor.model_loader.default_loader
_PACK = "dispatch_cpu_unquantized_gemm"  # of vllm.model_executor.layers.utils: each layer imports it when it packs
_AHEAD = 64  # tensors among which the first landed is next: parts of a fetch overtake one another
_LAYER = re.compile(r"\.(\d+)\.")


def install() -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    if hasattr(DefaultModelLoader, "glowplug_reads"):
        return
    load, read = BaseModelLoader.load_model, DefaultModelLoader.get_all_weights

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        landing = Landing.of(Path(model_config.model))
        if landing is not None and type(self) is not DefaultModelLoader:
            parallel = vllm_config.parallel_config
            landing.wait_whole(parallel.node_rank, parallel.nnodes)
        with _packing_once():
            model = load(self, vllm_config, model_config, prefix)
        arriving.mark()
        return model

    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        landing = Landing.of(Path(model_config.model))
        if landing is None:
            return iter(read(self, model_config, model))
        return _arriving(partial(read, self, model_config, model), landing, model)

    BaseModelLoader.load_model, DefaultModelLoader.get_all_weights = load_model, get_all_weights
    DefaultModelLoader.glowplug_reads = True


def _arriving(
    read: Callable[[], Iterable[tuple[str, torch.Tensor]]], landing: Landing, model: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    from vllm.model_executor.model_loader import default_loader
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    def is_elsewhere(name: str) -> bool:
        return bool(is_pp_missing_parameter(name, model))

    with replaced(default_loader, _READ, partial(in_order, landing, is_elsewhere)):
        yield from _packing(read(), model)


def in_order(
    landing: Landing, is_elsewhere: Callable[[str], bool], files: list[str], *_: Any, **options: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace vLLM's iterator over safetensors files."""
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    experts = options.get("local_expert_ids")
    region = Region(landing.root, landing, map(Path, files))
    left = [name for name in region.names if not is_elsewhere(name) and not should_skip_weight(name, experts)]
    left.sort(key=reading_order)
    pieces = {name: landing.pieces(*region.span(name)) for name in left}
    while left:
        name = left.pop(landing.wait_pieces([pieces[name] for name in left[:_AHEAD]]))
        yield name, region.tensor(name)


def reading_order(name: str) -> tuple[int, str]:
    """Sort tensors about as they are fetched: those of no layer, then by layer."""
    found = _LAYER.search(name)
    return (int(found[1]) if found is not None else -1), name


def _packing(tensors: Iterable[tuple[str, torch.Tensor]], model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on; pack a layer after the last tensor of its parameters."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from glowplug_vllm.cpu_weights import sources

    packable = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of tied ones the first
    missing: dict[torch.nn.Module, set[str]] = {}
    layers_of: dict[str, list[torch.nn.Module]] = {}
    for layer in model.modules():
        if type(getattr(layer, "quant_method", None)) in packable:
            own = [names[id(parameter)] for parameter in layer.parameters(recurse=False)]
            missing[layer] = {source for name in own for source in sources(model, name)}
            for source in missing[layer]:
                layers_of.setdefault(source, []).append(layer)
    for source, tensor in tensors:
        yield source, tensor  # vLLM has taken it when it asks for the next
        for layer in layers_of.get(source, ()):
            missing[layer].discard(source)
            if not missing[layer]:
                layer.quant_method.process_weights_after_loading(layer)


@contextlib.contextmanager
def _packing_once() -> Iterator[None]:
    """Pack no layer twice: its weight is empty after packing."""
    from vllm.model_executor.layers import utils

    pack, packed = getattr(utils, _PACK), set[torch.nn.Module]()

    def once(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer not in packed:
            packed.add(layer)
            pack(layer, remove_weight)

    with replaced(utils, _PACK, once):
        yield
