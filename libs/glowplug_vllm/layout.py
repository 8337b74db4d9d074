"""Which of a model's weights come first, and which lie side by side in a file. Standard library only."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

_LAYER = re.compile(r"^.*?\.\d+\.")  # "model.layers.3." of "model.layers.3.mlp.up_proj.weight"


def leading(bytes_of: Mapping[str, int], num_bytes: int) -> frozenset[str]:
    """Names of the first layers that fit into `num_bytes` together. `bytes_of` has each weight's bytes by its name, in
    the model's own order; a layer is held whole or not at all, and so is what stands before and after the layers."""
    kept: list[str] = []
    for _, group in groupby(bytes_of, key=_layer):
        names = list(group)
        num_bytes -= sum(bytes_of[name] for name in names)
        if num_bytes < 0:
            break
        kept += names
    return frozenset(kept)


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else ""


def is_one_run(spans: Sequence[tuple[int, int]]) -> bool:
    """Whether each [start, end) begins where the one before it ends."""
    return all(before[1] == after[0] for before, after in pairwise(spans))
