"""Requests without an adapter in a batch with others, on CPUs.

vLLM marks them with the index -1, and its functions for CPUs (lora/ops/torch_ops) read that as the last adapter: the
base answers as that one. What an adapter adds is linear in what `bgmv_shrink` makes of a row, so nothing is added where
that is 0.
"""

from typing import Any

import torch


def install() -> None:
    """Set the base's rows to 0, in this process and for good."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink
    if getattr(shrink, "leaves_base", False):
        return

    def bgmv_shrink(
        inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, *args: Any, **kw: Any
    ) -> None:
        shrink(inputs, weights, output, indices, *args, **kw)
        output[: indices.shape[0]].masked_fill_((indices < 0).unsqueeze(1), 0)

    bgmv_shrink.leaves_base = True  # type: ignore[attr-defined]
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
