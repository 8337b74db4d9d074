"""Bytes that one instance takes on each of its GPUs."""

from collections.abc import Mapping, Sequence

from glowplug.domain.hardware import Gpu
from glowplug.domain.model import Model


def bytes_per_gpu(model: Model, num_stages: int = 1) -> int:
    """Bytes of weights and KV cache on each of the model's `num_gpus` GPUs; for `num_stages` > 1, of an even part of
    it."""
    return -(-model.memory_bytes // (model.num_gpus * num_stages))


def weights_per_gpu(model: Model, num_stages: int = 1) -> int:
    """Bytes of weights on each GPU, which is all that a replica holds."""
    return -(-model.weights_bytes // (model.num_gpus * num_stages))


def stage_bytes(model: Model, stage: int, num_stages: int) -> tuple[int, int]:
    """The range [first, last) of the weights that a stage fetches, an even part; last 0 is the end, wherever it proves
    to be."""
    first, last = (model.fetch_bytes * number // num_stages for number in (stage, stage + 1))
    return first, 0 if stage == num_stages - 1 else last


def parts_of(stage_bytes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Bytes that each stage of a pipeline of `num_stages` fetches, by `CachedWeights.stage_bytes`; () where unknown."""
    first = num_stages * (num_stages - 1) // 2 - 1  # after the entries of 2, 3, ... stages
    parts = tuple(stage_bytes[first : first + num_stages]) if num_stages > 1 else ()
    return parts if len(parts) == num_stages and all(part > 0 for part in parts) else ()


def free_bytes(gpu: Gpu, reserved: Mapping[str, int]) -> int:
    """Bytes of a GPU that are neither granted nor promised."""
    return gpu.free_bytes - reserved.get(gpu.gpu_id, 0)
