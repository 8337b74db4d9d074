"""Bytes of one instance on each of its GPUs."""

from collections.abc import Mapping, Sequence

from glowplug.domain.hardware import Gpu
from glowplug.domain.model import Model


def bytes_per_gpu(model: Model, num_stages: int = 1) -> int:
    """Return bytes of weights and KV cache per GPU; of an even part for `num_stages` > 1."""
    return -(-model.memory_bytes // (model.num_gpus * num_stages))


def weights_per_gpu(model: Model, num_stages: int = 1) -> int:
    return -(-model.weights_bytes // (model.num_gpus * num_stages))


def stage_bytes(model: Model, stage: int, num_stages: int) -> tuple[int, int]:
    """Return the range [first, last) of weights fetched by a stage, an even part; last 0 is the end."""
    first, last = (model.fetch_bytes * number // num_stages for number in (stage, stage + 1))
    return first, 0 if stage == num_stages - 1 else last


def parts_of(stage_bytes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return bytes fetched by each of `num_stages` stages, by `CachedWeights.stage_bytes`; () if unknown."""
    first = num_stages * (num_stages - 1) // 2 - 1
    parts = tuple(stage_bytes[first : first + num_stages]) if num_stages > 1 else ()
    return parts if len(parts) == num_stages and all(part > 0 for part in parts) else ()


def free_bytes(gpu: Gpu, reserved: Mapping[str, int]) -> int:
    return gpu.free_bytes - reserved.get(gpu.gpu_id, 0)
