"""Sleeping engines of a node: how many of a model are of use there, and the host memory that one takes.

Ours: SwapServeLLM (section 3.2) has one engine of each model, and host memory for all. Here a model's instances come
and go, from prewarmed replicas too, and each that leaves a GPU may sleep: without a bound, every replica that grew
beside a sleeper would leave one more of them.
"""

from typing import Final

from glowplug.domain.model import Model
from glowplug.policies.placement.shape import bytes_per_gpu, weights_per_gpu

SNAPSHOT_RATIO: Final = 1.4  # host bytes of a sleeping engine per byte of its weights, before one was measured


def host_bytes(model: Model, shared_bytes: int) -> int:
    """Estimate the host memory of a sleeping engine; weights that it shares are the node's."""
    return int((model.weights_bytes - shared_bytes) * SNAPSHOT_RATIO)


def num_useful(model: Model, gpu_bytes: int, *, shares: bool) -> int:
    """Return how many engines of a model can be awake at once on GPUs of that size, at least one: a further sleeper
    waits for nothing. `shares`: their weights may count once."""
    whole = bytes_per_gpu(model)
    each = whole - weights_per_gpu(model) if shares else whole
    fitting = 1 + max(0, gpu_bytes - whole) // each if each else model.max_instances
    return max(1, min(fitting, model.max_instances))
