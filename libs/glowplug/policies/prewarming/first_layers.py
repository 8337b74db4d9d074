"""How many layers a replica needs so that a start from it waits for none: the first k, the rest is streamed.

Paper: WarmServe section 4: an instance "can directly begin inference on the available layers while asynchronously
loading the remaining parameters", and only the first k layers are prewarmed, k by profile. The published code loads
them all (erratum E7); the rule, which the paper does not print, is read as: the smallest k such that for every later
layer the time to load what is still missing up to it is at most the compute time before it,

    (j - k) W / (L b) <= t_0 + (j - 1) c      for j = k + 1 .. L

Where layers load slower than they compute, the last one decides; else the first missing one does. Departures: at
least one layer lies there, for a replica of none would be no place of its own. `lead_s` (t_0, 0 in E7) is an extension:
the seconds a growth takes before its first layer computes, while the rest is on its way already.
"""

import math
from dataclasses import dataclass

from glowplug.domain.bounds import check_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One model on one of its GPUs. Bytes, bytes a second, seconds. Raises OutOfBounds for a model without layers or a
    link without a rate."""

    num_layers: int  # L, all alike
    weights_bytes: int  # W, of all layers on that GPU
    load_bytes_per_s: float  # b, host memory to GPU
    prefill_s_per_layer: float  # c, of the shortest prefill: any longer one waits for less
    lead_s: float = 0.0  # t_0

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("num_layers", "load_bytes_per_s"))

    @property
    def load_s_per_layer(self) -> float:
        return self.weights_bytes / self.num_layers / self.load_bytes_per_s


def first_layers(profile: LayerProfile) -> int:
    """k: layers that must lie on the GPU before the start, from 1 to `num_layers`. Both sides of the rule are linear in
    the layer, so the first and the last of those that are missing decide."""
    load_s, compute_s, last = profile.load_s_per_layer, profile.prefill_s_per_layer, profile.num_layers
    for k in range(1, last):
        if all((layer - k) * load_s <= profile.lead_s + (layer - 1) * compute_s for layer in (k + 1, last)):
            return k
    return last


def first_layers_bytes(profile: LayerProfile) -> int:
    """Bytes of the first k layers on one GPU, rounded up; never more than all of them."""
    return min(profile.weights_bytes, math.ceil(profile.weights_bytes * first_layers(profile) / profile.num_layers))
